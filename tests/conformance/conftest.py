"""The carriers of the log that the suite runs on."""

from collections.abc import AsyncIterator

import pytest

from schemas.vocabulary import ServiceName
from shared.bus.brokers import Brokers
from shared.testing.carriers import Carrier
from shared.testing.clock import FakeClock
from shared.testing.harness import equipped
from shared.testing.postgres import FreshDatabase
from tests.integration.kafka_bed import fresh_brokers


@pytest.fixture(params=["postgres", "kafka"])
async def brokers(request: pytest.FixtureRequest) -> Brokers | None:
    """None: the Postgres carrier."""
    return await fresh_brokers(request.getfixturevalue("kafka")) if request.param == "kafka" else None


@pytest.fixture
async def carrier(database: FreshDatabase, clock: FakeClock, brokers: Brokers | None) -> AsyncIterator[Carrier]:
    """Add a carrier: a name above and its brokers."""
    async with equipped(database, ServiceName.SCALING, clock=clock, brokers=brokers) as equipment:
        yield Carrier(log=equipment.log, database=database, reader=equipment, brokers=brokers)
