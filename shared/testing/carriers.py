"""A carrier of the log under test, for the conformance suite."""

from collections.abc import Mapping
from dataclasses import dataclass

from schemas.vocabulary import Topic
from shared.bus.brokers import Brokers
from shared.bus.log import BEGINNING, Log, Page, Partition, Position
from shared.runtime.context import Equipment
from shared.testing.harness import settle
from shared.testing.postgres import FreshDatabase


@dataclass(frozen=True, slots=True, kw_only=True)
class Carrier:
    """Events enter through the outbox of ``database``; ``settle`` returns once the carrier has them."""

    log: Log
    database: FreshDatabase
    reader: Equipment
    brokers: Brokers | None

    async def settle(self) -> None:
        await settle(self.reader)

    def beginning(self, *topics: Topic) -> dict[Partition, Position]:
        """Of every partition of these topics."""
        return dict.fromkeys(self.log.partitions(topics), BEGINNING)

    async def read(self, positions: Mapping[Partition, Position], *, limit: int) -> Page:
        """Settled, and with whatever is on its way waited for: an empty page means that nothing is there."""
        await self.settle()
        while True:
            page = await self.log.read(positions, limit=limit)
            if page.records or self.brokers is None:
                return page
            if (await self.log.backlog(page.positions, limit=1)).rows == 0:
                return page
            await self.log.wait(seen=await self.log.wait(seen=-1, seconds=0), seconds=0.1)
