"""A database, a broker, and what a subscriber outside reads: for tests of the Kafka form."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition

from schemas.vocabulary import ServiceName, Topic
from shared.bus.brokers import Brokers
from shared.bus.cloudevents import to_record
from shared.bus.log import Record
from shared.bus.partitions import partitions_of
from shared.bus.topics import ensure_topics
from shared.bus.wakeups import Wakeups
from shared.clock import Clock, SystemClock
from shared.outbox.relay import Relay
from shared.runtime.context import Equipment, equip
from shared.settings import ServiceSettings
from shared.testing.harness import TEST_KEY
from shared.testing.kafka import EmbeddedKafka
from shared.testing.postgres import FreshDatabase

_numbers = itertools.count()


async def fresh_brokers(kafka: EmbeddedKafka, **more: Any) -> Brokers:
    """Topics of their own on the broker of the session."""
    brokers = Brokers(servers=kafka.servers, prefix=f"t{next(_numbers)}-{id(more):x}.", **more)
    await ensure_topics(brokers)
    return brokers


@asynccontextmanager
async def relaying(
    database: FreshDatabase,
    brokers: Brokers,
    service: ServiceName = ServiceName.SCALING,
    *,
    clock: Clock | None = None,
    settings: Mapping[str, Any] | None = None,
) -> AsyncIterator[Equipment]:
    """A service's equipment whose relay runs inside the block."""
    own = ServiceSettings.of(service).model_copy(update=dict(settings or {}))
    wakeups = Wakeups(database.url)
    equipment = equip(
        service,
        database_url=database.url,
        state_directory=None,  # type: ignore[arg-type]
        signing_key=TEST_KEY,
        clock=clock or SystemClock(),
        wakeups=wakeups,
        settings=own,
        brokers=brokers,
    )
    relay = relay_of(equipment)
    stopping = asyncio.Event()
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(wakeups.run(stopping))
            group.create_task(relay.run(stopping))
            try:
                yield equipment
            finally:
                stopping.set()
    finally:
        await equipment.close()


def relay_of(equipment: Equipment) -> Relay:
    assert equipment.relay is not None
    return equipment.relay


async def read_topics(brokers: Brokers, *, seconds: float = 20.0) -> list[Record]:
    """Everything that the topics hold, partition after partition, repeats included."""
    consumer = AIOKafkaConsumer(**brokers.options(), enable_auto_commit=False, auto_offset_reset="earliest")
    await consumer.start()
    try:
        parts = [
            TopicPartition(brokers.name_of(topic), number)
            for topic in Topic
            for number in range(partitions_of(topic))
        ]
        consumer.assign(parts)
        ends = await consumer.end_offsets(parts)
        await consumer.seek_to_beginning(*parts)
        found: list[Record] = []
        async with asyncio.timeout(seconds):
            while any([await consumer.position(part) < ends[part] for part in parts]):
                for part, messages in (await consumer.getmany(timeout_ms=200)).items():
                    found += [
                        to_record(
                            topic=brokers.topic_of(part.topic),
                            partition=part.partition,
                            offset=message.offset,
                            key=message.key,
                            value=message.value,
                            headers=message.headers,
                            time_ms=message.timestamp,
                        )
                        for message in messages
                    ]
        return sorted(found, key=lambda record: record.partition)
    finally:
        await consumer.stop()
