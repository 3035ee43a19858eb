"""A carrier of the log under test, for the conformance suite."""

from dataclasses import dataclass

from shared.bus.log import Log
from shared.runtime.context import Equipment
from shared.testing.postgres import FreshDatabase


@dataclass(frozen=True, slots=True, kw_only=True)
class Carrier:
    """Events enter through the outbox of ``database``; ``settle`` returns once ``log`` has them."""

    log: Log
    database: FreshDatabase
    reader: Equipment

    async def settle(self) -> None:
        """The Postgres carrier reads the outbox itself: nothing to wait for."""
