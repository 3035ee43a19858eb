"""The carriers of the log that the suite runs on."""

from collections.abc import AsyncIterator

import pytest

from schemas.vocabulary import ServiceName
from shared.testing.carriers import Carrier
from shared.testing.clock import FakeClock
from shared.testing.harness import equipped
from shared.testing.postgres import FreshDatabase


@pytest.fixture(params=["postgres"])
async def carrier(database: FreshDatabase, clock: FakeClock) -> AsyncIterator[Carrier]:
    """Add a carrier: a name above and its log here."""
    async with equipped(database, ServiceName.SCALING, clock=clock) as equipment:
        yield Carrier(log=equipment.log, database=database, reader=equipment)
