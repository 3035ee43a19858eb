"""A running reader while the broker dies or hangs: it says so, nothing waits without bound, and nothing is lost."""

import asyncio
import time
from collections.abc import Sequence
from datetime import datetime

import pytest

from schemas.envelope import Event
from schemas.events.worker import RoomFreed
from schemas.registry import EventData
from schemas.vocabulary import ServiceName, Topic
from shared.clock import SystemClock
from shared.errors import Unavailable
from shared.runtime.consumer import Consumer, ConsumerLimits
from shared.runtime.service import Transaction
from shared.testing.harness import draft, publish
from shared.testing.kafka import EmbeddedKafka
from shared.testing.postgres import FreshDatabase
from tests.integration.kafka_bed import fresh_brokers, relaying


def freed(number: int, key: str):
    return draft(RoomFreed(epoch=number, held=(), capacity_revision=0), key)


class Collecting:
    """Keeps what was committed."""

    def __init__(self) -> None:
        self.committed: list[tuple[str, int]] = []
        self._batch: list[tuple[str, int]] = []

    async def load(self, tx: Transaction) -> None:
        self._batch = []

    async def on_events(self, batch: Sequence[Event[EventData]], *, tx: Transaction, now: datetime) -> None:
        self._batch = [(event.key, event.data.epoch) for event in batch if isinstance(event.data, RoomFreed)]

    def on_committed(self) -> None:
        self.committed += self._batch

    def due_seconds(self) -> float | None:
        return None

    async def until(self, count: int, *, seconds: float) -> None:
        async with asyncio.timeout(seconds):
            while len(self.committed) < count:
                await asyncio.sleep(0.02)


@pytest.mark.parametrize("outage", ["killed", "frozen"])
async def test_a_running_reader_says_that_the_broker_is_away_and_goes_on_when_it_is_back(
    database: FreshDatabase, kafka: EmbeddedKafka, outage: str
) -> None:
    brokers, handler, stopping = await fresh_brokers(kafka), Collecting(), asyncio.Event()
    async with relaying(database, brokers) as equipment:
        assert await equipment.lease.try_acquire(url=None)
        consumer = Consumer(
            ServiceName.SCALING,
            handler,
            [Topic.WORKER],
            lease=equipment.lease,
            log=equipment.log,
            clock=SystemClock(),
            instruments=equipment.context.instruments,
            limits=ConsumerLimits(backoff_seconds_max=0.5),
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(equipment.lease.run_renewal(stopping))
            reading = group.create_task(_until_stopped(consumer, stopping))
            await publish(database, ServiceName.EXECUTION, *(freed(n, f"j{n % 4}") for n in range(100)))
            await handler.until(100, seconds=20)
            (kafka.kill if outage == "killed" else kafka.freeze)()
            try:
                await publish(database, ServiceName.EXECUTION, *(freed(n, f"j{n % 4}") for n in range(100, 200)))
                began = time.monotonic()
                with pytest.raises(Unavailable):
                    await equipment.log.backlog(dict.fromkeys(equipment.log.partitions([Topic.WORKER])), limit=10)
                assert time.monotonic() - began < 7, "nobody waits without bound"
                assert equipment.log.trouble is not None
                assert "does not answer" in equipment.log.trouble
                assert len(handler.committed) == 100
            finally:
                kafka.start() if outage == "killed" else kafka.thaw()
            await handler.until(200, seconds=30)
            async with asyncio.timeout(15):
                while equipment.log.trouble is not None:
                    await asyncio.sleep(0.1)
            began = time.monotonic()
            stopping.set()
            await reading
            assert time.monotonic() - began < 5, "a stop waits for no broker"
    assert sorted(number for _, number in handler.committed) == list(range(200))
    for key in ("j0", "j1", "j2", "j3"):
        own = [number for k, number in handler.committed if k == key]
        assert own == sorted(own)


async def _until_stopped(consumer: Consumer, stopping: asyncio.Event) -> None:
    """As the runtime does it: what is away only makes the loop begin again."""
    async with asyncio.TaskGroup() as group:
        group.create_task(consumer.run_lag(stopping))
        while not stopping.is_set():
            try:
                await consumer.run(stopping)
            except Unavailable:
                await asyncio.sleep(0.1)
