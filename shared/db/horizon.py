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

    It counts from the first look at which that transaction held others back, so it is late by up to the time
    between two looks. A transaction after which nobody has committed holds nothing back: 0.
    """

    def __init__(self, clock: Clock, instruments: Instruments) -> None:
        self._clock = clock
        self._oldest: int | None = None
        self._since = 0.0
        self._seconds = instruments.gauge(
            "oldest_transaction_seconds",
            "Age of the open writing transaction that holds readers of the log back; 0 if there is none.",
        )

    async def look(self, connection: AsyncConnection) -> None:
        """Costs one statement without a transaction of its own. Raises what the driver raises."""
        row = (await connection.execute(_SNAPSHOT)).one()
        now = self._clock.monotonic()
        oldest = row.oldest if row.oldest < row.next else None
        if oldest != self._oldest:
            self._oldest, self._since = oldest, now
        self._seconds.set(0.0 if oldest is None else now - self._since)
