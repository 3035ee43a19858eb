"""What only the Kafka carrier meets: strangers' messages, topics made anew, retention, another log, stuck clients."""

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from types import SimpleNamespace

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from schemas.envelope import Sequence as LogSequence
from schemas.events.worker import RoomFreed
from schemas.vocabulary import ServiceName, Topic
from shared.bus.brokers import Brokers
from shared.bus.cloudevents import to_message
from shared.bus.kafka import KafkaLog
from shared.bus.log import BEGINNING, Partition, Position, Record, positions_after, to_event
from shared.bus.partitions import partition_of
from shared.bus.positions import advance_positions, load_positions
from shared.bus.topics import ensure_topics
from shared.errors import Poison, Unavailable
from shared.outbox.relay import send_again
from shared.runtime.context import Equipment
from shared.testing.carriers import Carrier
from shared.testing.clock import FakeClock
from shared.testing.harness import draft, equipped, publish, settle
from shared.testing.kafka import EmbeddedKafka
from shared.testing.postgres import FreshDatabase
from tests.integration.kafka_bed import fresh_brokers

HOME = Partition(Topic.WORKER, partition_of("j1"))


def freed(number: int, key: str = "j1"):
    return draft(RoomFreed(epoch=number, held=(), capacity_revision=0), key)


@pytest.fixture
async def brokers(kafka: EmbeddedKafka) -> Brokers:
    return await fresh_brokers(kafka)


@pytest.fixture
async def reader(database: FreshDatabase, brokers: Brokers, clock: FakeClock) -> AsyncIterator[Equipment]:
    async with equipped(database, ServiceName.SCALING, clock=clock, brokers=brokers) as equipment:
        yield equipment


@pytest.fixture
def carrier(database: FreshDatabase, brokers: Brokers, reader: Equipment) -> Carrier:
    return Carrier(log=reader.log, database=database, reader=reader, brokers=brokers)


async def send(brokers: Brokers, value, *, key=b"j1", headers=(), partition=HOME.number) -> int:
    """A message of anybody's; gives its offset."""
    producer = AIOKafkaProducer(**brokers.options())
    await producer.start()
    try:
        name = brokers.name_of(Topic.WORKER)
        sent = await producer.send_and_wait(name, value, key=key, headers=list(headers), partition=partition)
        return sent.offset
    finally:
        await producer.stop()


async def read_all(carrier: Carrier, positions=None) -> tuple[list[Record], dict[Partition, Position]]:
    positions = positions or carrier.beginning(Topic.WORKER)
    found: list[Record] = []
    while True:
        page = await carrier.read(positions, limit=100)
        positions = dict(page.positions)
        if not page.records:
            return found, positions
        found += page.records


def epochs(records) -> list[int]:
    return [to_event(record).data.epoch for record in records]


@pytest.mark.parametrize(
    ("value", "headers", "reason"),
    [
        (None, (), "the value is null"),
        (b"\xff\x00garbage", (), "the attribute sequence is missing"),
        (b"{}", (("ce_sequence", b"soon"),), "not a position in the log"),
        (b"{}", (("ce_sequence", b"0-5"),), "not a place in a log"),
        (b"{}", (("ce_sequence", b"9-9"), ("ce_type", b"\xff")), "not UTF-8"),
        (b"{}", (("ce_sequence", b"9-9"), ("ce_type", b"a\x00b")), "zero byte"),
        (b"[1]", (("content-type", b"application/cloudevents+json"),), "no object"),
        (b"{", (("content-type", b"application/cloudevents+json; charset=utf-8"),), "not JSON"),
        (b"{}", (("content-type", None),), "the attribute sequence is missing"),
        (
            b'{"sequence": "9-9", "type": "\\ud800", "tenant": "t", "source": "s"}',
            (("content-type", b"application/cloudevents+json"),),
            "the type is no Unicode",
        ),
        (b'{"sequence": 5}', (("content-type", b"application/cloudevents+json"),), "sequence is missing"),
    ],
)
async def test_a_strangers_message_is_a_record_without_a_place_and_moves_the_offset_alone(
    carrier: Carrier, brokers: Brokers, value, headers, reason: str
) -> None:
    await publish(carrier.database, ServiceName.EXECUTION, freed(1))
    await carrier.settle()
    offset = await send(brokers, value, headers=headers)
    await publish(carrier.database, ServiceName.EXECUTION, freed(2))
    records, positions = await read_all(carrier)
    good = [record for record in records if not record.is_stray]
    (stray,) = (record for record in records if record.is_stray)
    assert epochs(good) == [1, 2]
    assert (stray.sequence, stray.offset, stray.parks_its_key) == (LogSequence(0, offset), offset, False)
    with pytest.raises(Poison, match=reason):
        to_event(stray)
    assert positions[HOME] == Position(good[1].sequence, good[1].offset)
    middle = positions_after(records[: records.index(stray) + 1], carrier.beginning(Topic.WORKER))
    assert middle[HOME] == Position(good[0].sequence, offset)
    assert epochs((await read_all(carrier, middle))[0]) == [2]


async def test_a_structured_event_is_read_like_a_binary_one(carrier: Carrier, brokers: Brokers) -> None:
    await publish(carrier.database, ServiceName.EXECUTION, freed(1))
    (binary,) = (await read_all(carrier))[0]
    attributes = {name[3:]: value.decode() for name, value in to_message(binary).headers if name.startswith("ce_")}
    after = f"{binary.sequence.xid + 1}-1"
    event = {**attributes, "sequence": after, "id": after, "data": json.loads(binary.payload)}
    await send(brokers, json.dumps(event).encode(), headers=[("content-type", b"application/cloudevents+json")])
    records, _ = await read_all(carrier)
    one, two = (to_event(record) for record in records)
    assert (one.data, one.tenant, one.source, one.time) == (two.data, two.tenant, two.source, two.time)


async def test_events_of_another_log_are_skipped(carrier: Carrier, brokers: Brokers) -> None:
    await publish(carrier.database, ServiceName.EXECUTION, freed(1))
    (own,) = (await read_all(carrier))[0]
    key, value, headers = to_message(own)
    other = [(n, b"tidewright/execution/another" if n == "ce_source" else v) for n, v in headers]
    other = [(n, b"999999999-1" if n == "ce_sequence" else v) for n, v in other]
    await send(brokers, value, key=key, headers=other)
    await publish(carrier.database, ServiceName.EXECUTION, freed(2))
    records, _ = await read_all(carrier)
    assert epochs(records) == [1, 2], "a higher sequence of another log does not hide ours"


async def test_a_topic_that_was_made_anew_is_read_from_its_beginning_and_what_was_unread_comes_again(
    carrier: Carrier, brokers: Brokers, database: FreshDatabase, reader: Equipment
) -> None:
    """One reader was through, one stood in the middle: neither loses anything, whatever offsets they remember.

    Those offsets name other records now, since what all had read is gone from the outbox.
    """
    await publish(database, ServiceName.EXECUTION, *(freed(n) for n in range(5)))
    records, through = await read_all(carrier)
    middle = positions_after(records[:3], carrier.beginning(Topic.WORKER))
    async with reader.context.transaction() as tx:
        for name, reached in (("scaling", through), ("metrics", middle)):
            stored = await load_positions(tx, name, carrier.log.partitions([Topic.WORKER]), counts={Topic.WORKER: 12})
            await advance_positions(tx, name, stored=stored, reached=reached)
    await carrier.log.close()
    await publish(database, ServiceName.EXECUTION, *(freed(n) for n in range(5, 15)))
    await carrier.settle()
    await delete_topic(brokers, Topic.WORKER)
    database.psql(
        f"delete from log.outbox where (xid, id) <= ('{records[2].sequence.xid}', {records[2].sequence.id})"
    )
    async with asyncio.timeout(20):
        while True:  # deletion takes its time
            try:
                await ensure_topics(brokers, before_making=partial(send_again, reader.engine))
                await send(brokers, b"x", partition=0)
                break
            except (KafkaError, Unavailable):
                await asyncio.sleep(0.2)
    for positions, first in ((through, 5), (middle, 3)):
        found, _ = await read_all(carrier, {p: at for p, at in positions.items() if p == HOME})
        assert epochs(r for r in found if not r.is_stray) == list(range(first, 15))


async def delete_topic(brokers: Brokers, topic: Topic) -> None:
    admin = AIOKafkaAdminClient(**brokers.options())
    await admin.start()
    await admin.delete_topics([brokers.name_of(topic)])
    await admin.close()


async def test_what_retention_removed_behind_a_reader_does_not_stop_it(
    carrier: Carrier, brokers: Brokers, database: FreshDatabase
) -> None:
    await publish(database, ServiceName.EXECUTION, *(freed(n) for n in range(5)))
    records, _ = await read_all(carrier)
    stands = positions_after(records[:2], carrier.beginning(Topic.WORKER))
    await carrier.log.close()
    from aiokafka import TopicPartition
    from aiokafka.admin import RecordsToDelete

    admin = AIOKafkaAdminClient(**brokers.options())
    await admin.start()
    part = TopicPartition(brokers.name_of(Topic.WORKER), HOME.number)
    await admin.delete_records({part: RecordsToDelete(before_offset=4)})
    await admin.close()
    assert epochs((await read_all(carrier, stands))[0]) == [4]


async def test_a_client_that_gets_nothing_is_replaced(
    carrier: Carrier, monkeypatch: pytest.MonkeyPatch, reader: Equipment
) -> None:
    log = carrier.log
    assert isinstance(log, KafkaLog)
    await publish(carrier.database, ServiceName.EXECUTION, freed(1))
    _, positions = await read_all(carrier)
    stuck = log._consumer

    async def nothing(**_):
        await asyncio.sleep(0.01)
        return {}

    monkeypatch.setattr(stuck, "getmany", nothing)
    await publish(carrier.database, ServiceName.EXECUTION, freed(2))
    await settle(reader)
    assert (await log.read(positions, limit=10)).records == ()
    with monkeypatch.context() as soon:
        soon.setattr("shared.bus.kafka._STUCK_SECONDS", 0.0)
        assert (await log.backlog(positions, limit=10)).rows >= 1
    assert epochs((await read_all(carrier, positions))[0]) == [2]
    assert log._consumer is not stuck
    assert log._restarts.labels("stuck")._value.get() == 1


async def test_a_first_event_after_a_long_silence_is_no_sign_of_being_stuck(
    carrier: Carrier, monkeypatch: pytest.MonkeyPatch, reader: Equipment
) -> None:
    log, now = carrier.log, 1_000.0
    assert isinstance(log, KafkaLog)
    monkeypatch.setattr("shared.bus.kafka.time", SimpleNamespace(monotonic=lambda: now))
    await publish(carrier.database, ServiceName.EXECUTION, freed(1))
    _, positions = await read_all(carrier)
    first = log._consumer
    now += 3_600
    assert (await log.backlog(positions, limit=10)).rows == 0
    await publish(carrier.database, ServiceName.EXECUTION, freed(2))
    await settle(reader)
    now += 5
    assert (await log.backlog(positions, limit=10)).rows == 1
    assert epochs((await read_all(carrier, positions))[0]) == [2]
    assert log._consumer is first, "it was about to get it"
    await publish(carrier.database, ServiceName.EXECUTION, freed(3))
    await settle(reader)
    now += 11
    await log.backlog(positions, limit=10)
    assert epochs((await read_all(carrier, positions))[0]) == [2, 3]
    assert log._consumer is not first, "it had its time"


async def test_how_much_waits_is_unknown_while_kafka_is_away_not_zero(
    database: FreshDatabase, clock: FakeClock
) -> None:
    nobody = Brokers(servers="127.0.0.1:1")
    async with equipped(database, ServiceName.METRICS, clock=clock, brokers=nobody) as away:
        with pytest.raises(Unavailable, match="not answered yet"):
            await away.log.backlog({HOME: BEGINNING}, limit=10)
        with pytest.raises(Unavailable, match="does not answer"):
            await away.log.read({HOME: BEGINNING}, limit=10)
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1\b.* does not answer"):
            await away.log.backlog({HOME: BEGINNING}, limit=10)


async def test_a_broker_that_is_away_is_said_and_comes_back(carrier: Carrier, kafka: EmbeddedKafka) -> None:
    await publish(carrier.database, ServiceName.EXECUTION, freed(1))
    _, positions = await read_all(carrier)
    kafka.kill()
    try:
        with pytest.raises(Unavailable, match="does not answer"):
            await carrier.log.backlog(positions, limit=10)
        assert carrier.log.trouble is not None
    finally:
        kafka.start()
    await publish(carrier.database, ServiceName.EXECUTION, freed(2))
    async with asyncio.timeout(30):
        while True:
            try:
                records, _ = await read_all(carrier, positions)
                break
            except Unavailable:
                await asyncio.sleep(0.2)
    assert epochs(records) == [2]
    assert carrier.log.trouble is None


async def test_monitors_are_told_the_saved_offsets(carrier: Carrier, brokers: Brokers) -> None:
    await publish(carrier.database, ServiceName.EXECUTION, *(freed(n) for n in range(3)))
    _, positions = await read_all(carrier)
    carrier.log.committed(positions)
    await carrier.log.backlog(positions, limit=10)
    admin = AIOKafkaAdminClient(**brokers.options())
    await admin.start()
    told = await admin.list_consumer_group_offsets(f"{brokers.prefix}tide.scaling")
    await admin.close()
    assert {part.partition: at.offset for part, at in told.items()} == {HOME.number: 3}


async def test_an_installation_that_was_on_kafka_does_not_go_back_by_a_forgotten_setting(
    carrier: Carrier, database: FreshDatabase, clock: FakeClock
) -> None:
    from shared.settings import SettingsError

    async with equipped(database, ServiceName.METRICS, clock=clock) as other:
        with pytest.raises(SettingsError, match="TIDE_KAFKA_SERVERS"):
            await other.log.read({Partition(Topic.WORKER): Position(LogSequence(5, 5), 7)}, limit=1)
