"""The relay on a real broker: everything in commit order, repeats only under their own sequence."""

import asyncio

from schemas.events.worker import RoomFreed
from schemas.vocabulary import ServiceName, Topic
from shared.bus.log import to_event
from shared.outbox.relay import READER
from shared.testing.harness import draft, publish, read_log, read_rows
from shared.testing.kafka import EmbeddedKafka
from shared.testing.postgres import FreshDatabase
from tests.integration.kafka_bed import fresh_brokers, read_topics, relaying


def freed(number: int, key: str = "j1"):
    return draft(RoomFreed(epoch=number, held=(), capacity_revision=0), key)


async def until_relayed(database: FreshDatabase, count: int, brokers, seconds: float = 15.0):
    """The topics' records once so many different ones are there."""
    async with asyncio.timeout(seconds):
        while True:
            records = await read_topics(brokers)
            if len({r.sequence for r in records}) >= count:
                return records
            await asyncio.sleep(0.05)


async def test_events_arrive_as_they_were_published(database: FreshDatabase, kafka: EmbeddedKafka) -> None:
    brokers = await fresh_brokers(kafka)
    await publish(database, ServiceName.EXECUTION, *(freed(n, f"j{n % 5}") for n in range(100)))
    async with relaying(database, brokers):
        records = await until_relayed(database, 100, brokers)
    assert {to_event(r).sequence for r in records} == {e.sequence for e in await read_log(database)}
    by_sequence = {r.sequence: to_event(r) for r in records}
    for event in await read_log(database):
        assert by_sequence[event.sequence] == event
    for key in {r.key for r in records}:
        own = [r for r in records if r.key == key]
        assert len({r.partition for r in own}) == 1
        assert [r.sequence for r in own] == sorted(r.sequence for r in own)
    assert {r.partition.topic for r in records} == {Topic.WORKER}


async def test_what_was_sent_and_not_saved_is_sent_again_under_its_own_sequence(
    database: FreshDatabase, kafka: EmbeddedKafka
) -> None:
    brokers = await fresh_brokers(kafka)
    await publish(database, ServiceName.EXECUTION, *(freed(n) for n in range(10)))
    async with relaying(database, brokers):
        await until_relayed(database, 10, brokers)
    database.psql(f"update log.position set xid = '0', id = 0 where reader = '{READER}'")
    async with relaying(database, brokers):
        await publish(database, ServiceName.EXECUTION, freed(10))
        records = await until_relayed(database, 11, brokers)
    sequences = [r.sequence for r in records]
    assert len(sequences) > 11
    assert sorted(set(sequences)) == [e.sequence for e in await read_log(database)]


async def test_the_broker_may_be_killed(database: FreshDatabase, kafka: EmbeddedKafka) -> None:
    brokers = await fresh_brokers(kafka)
    async with relaying(database, brokers):
        await publish(database, ServiceName.EXECUTION, *(freed(n) for n in range(10)))
        await until_relayed(database, 10, brokers)
        kafka.kill()
        try:
            await publish(database, ServiceName.EXECUTION, *(freed(n) for n in range(10, 20)))
        finally:
            kafka.start()
        records = await until_relayed(database, 20, brokers, seconds=30)
    epochs = [to_event(r).data.epoch for r in records]
    assert sorted(set(epochs)) == list(range(20))
    assert (await read_rows(database, "select count(*) as n from log.quarantine"))[0]["n"] == 0
