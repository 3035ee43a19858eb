"""How long the server's oldest open writing transaction has been open: every reader of the log waits for it."""

from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from shared.clock import Clock
from shared.telemetry.instruments import Instruments

_SNAPSHOT: Final = text(
    "select pg_snapshot_xmin(s)::text::bigint as oldest, pg_snapshot_xmax(s)::text::bigint as next"
    " from pg_current_snapshot() s"
)


class Horizon:
    """Looks from outside, with no more rights than any role has: the oldest number in progress does not change.

    It counts from the first look that found that transaction, so it is late by up to the time between two looks;
    0 as long as nobody has committed after it, for then nothing is held back.
    """

    def __init__(self, clock: Clock, instruments: Instruments) -> None:
        self._clock = clock
        self._oldest = -1
        self._since = 0.0
        self._seconds = instruments.gauge(
            "oldest_transaction_seconds",
            "Age of the open writing transaction that holds readers of the log back; 0 if there is none.",
        )

    async def look(self, connection: AsyncConnection) -> None:
        """Costs one statement without a transaction of its own. Raises what the driver raises."""
        row = (await connection.execute(_SNAPSHOT)).one()
        now = self._clock.monotonic()
        if row.oldest != self._oldest:
            self._oldest, self._since = row.oldest, now
        self._seconds.set(now - self._since if row.oldest < row.next else 0.0)
