"""What every carrier of the log promises: order, no loss, no repeat, whatever writers overlap."""

import random
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from schemas.envelope import Draft
from schemas.events.capacity import CapacityObserved
from schemas.events.worker import RoomFreed
from schemas.registry import EventData
from schemas.vocabulary import ServiceName, Topic
from shared.bus.log import Partition, Position, Record, positions_after, to_event
from shared.bus.wakeups import Wakeups
from shared.db.transaction import PostgresTransaction, begin
from shared.outbox.outbox import Outbox
from shared.telemetry.instruments import Instruments
from shared.telemetry.trace import new_trace, use_trace
from shared.testing.carriers import Carrier
from shared.testing.clock import FakeClock
from shared.testing.harness import draft, publish

TOPICS = (Topic.WORKER, Topic.CAPACITY)
CAPACITY = Partition(Topic.CAPACITY)


def freed(number: int, key: str = "j1") -> Draft[EventData]:
    return draft(RoomFreed(epoch=number, held=(), capacity_revision=0), key)


def observed(number: int) -> Draft[EventData]:
    return draft(CapacityObserved(revision=number, nodes=()), "cluster")


def numbers(records: tuple[Record, ...] | list[Record]) -> list[int]:
    data = [to_event(record).data for record in records]
    return [
        d.epoch if isinstance(d, RoomFreed) else d.revision
        for d in data
        if isinstance(d, RoomFreed | CapacityObserved)
    ]


@asynccontextmanager
async def writer(carrier: Carrier) -> AsyncIterator[PostgresTransaction]:
    """An open transaction of execution's that has its transaction id already."""
    outbox = Outbox(ServiceName.EXECUTION, FakeClock(), Instruments("test"))
    wakeups = Wakeups(carrier.database.url)
    async with (
        carrier.database.engine(ServiceName.EXECUTION) as engine,
        begin(engine, outbox, published=wakeups.published) as tx,
    ):
        await outbox.insert(tx.connection, [observed(0)], {})
        yield tx


async def read_all(carrier: Carrier, positions: Mapping[Partition, Position], limit: int = 3) -> list[Record]:
    found: list[Record] = []
    while True:
        page = await carrier.read(positions, limit=limit)
        positions = page.positions
        found += page.records
        if not page.records:
            return found


def assert_in_order(records: list[Record], carrier: Carrier) -> None:
    """Each once; within a partition in the order of the log, which is the whole order where there is one alone."""
    assert len({record.sequence for record in records}) == len(records)
    for partition in {record.partition for record in records}:
        own = [record.sequence for record in records if record.partition == partition]
        assert own == sorted(own)
    if carrier.brokers is None:
        assert [record.sequence for record in records] == sorted(record.sequence for record in records)


async def test_one_transaction_is_read_in_the_order_of_publishing(carrier: Carrier) -> None:
    drafts = [freed(n, key=f"j{n % 3}") if n % 4 else observed(n) for n in range(200)]
    await publish(carrier.database, ServiceName.EXECUTION, *drafts)
    records = await read_all(carrier, carrier.beginning(*TOPICS))
    assert sorted(numbers(records)) == list(range(200))
    assert_in_order(records, carrier)


async def test_a_reader_gets_only_the_topics_it_asks_for_and_is_not_held_up_by_others(carrier: Carrier) -> None:
    await publish(carrier.database, ServiceName.EXECUTION, *[freed(n) for n in range(50)], observed(1), freed(51))
    page = await carrier.read(carrier.beginning(Topic.CAPACITY), limit=3)
    assert numbers(page.records) == [1]
    again = await carrier.read(page.positions, limit=3)
    assert again.records == ()
    reached = page.positions[CAPACITY].sequence
    assert again.positions[CAPACITY].sequence >= reached >= page.records[0].sequence


async def test_positions_of_topics_may_differ(carrier: Carrier) -> None:
    await publish(carrier.database, ServiceName.EXECUTION, observed(1), freed(2), observed(3), freed(4))
    everything = await read_all(carrier, carrier.beginning(*TOPICS))
    (third,) = (record for record in everything if numbers([record]) == [3])
    ahead = positions_after([third], carrier.beginning(*TOPICS))
    assert sorted(numbers(await read_all(carrier, ahead, limit=1))) == [2, 4]


async def test_a_transaction_that_began_earlier_and_commits_later_is_neither_lost_nor_repeated(
    carrier: Carrier,
) -> None:
    async with writer(carrier) as slow:
        await publish(carrier.database, ServiceName.EXECUTION, freed(2))
        early = await carrier.read(carrier.beginning(*TOPICS), limit=10)
        assert early.records == (), "behind an open writer nothing may be read: it may still come before"
        slow.publish(freed(1))
    late = await read_all(carrier, early.positions)
    assert sorted(numbers(late)) == [0, 1, 2]
    assert_in_order(late, carrier)
    assert await read_all(carrier, positions_after(late, carrier.beginning(*TOPICS))) == []


async def test_a_rolled_back_transaction_leaves_no_hole_and_no_row(carrier: Carrier) -> None:
    async def fails() -> None:
        async with writer(carrier) as tx:
            tx.publish(freed(1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fails()
    await publish(carrier.database, ServiceName.EXECUTION, freed(2))
    assert numbers(await read_all(carrier, carrier.beginning(*TOPICS))) == [2]


@pytest.mark.parametrize("seed", range(4))
async def test_overlapping_writers_lose_and_repeat_nothing_for_a_reader_that_reads_all_the_time(
    carrier: Carrier, seed: int
) -> None:
    """Transactions open and commit in random order while a reader follows with a small limit."""
    rng = random.Random(seed)
    found: list[Record] = []
    positions: Mapping[Partition, Position] = carrier.beginning(*TOPICS)
    published: list[int] = []
    async with AsyncExitStack() as engines:
        outbox = Outbox(ServiceName.EXECUTION, FakeClock(), Instruments("test"))
        engine = await engines.enter_async_context(carrier.database.engine(ServiceName.EXECUTION))
        opened: list[tuple[AsyncExitStack, PostgresTransaction]] = []
        for number in range(1, 60):
            if len(opened) < 6 and (not opened or rng.random() < 0.5):
                stack = AsyncExitStack()
                tx = await stack.enter_async_context(begin(engine, outbox, published=lambda: None))
                await outbox.insert(tx.connection, [freed(1000 + number, f"j{number % 3}")], {})
                published.append(1000 + number)
                opened.append((stack, tx))
            else:
                stack, tx = opened.pop(rng.randrange(len(opened)))
                tx.publish(freed(2000 + number))
                published.append(2000 + number)
                await stack.aclose()
            await carrier.settle()
            page = await carrier.log.read(positions, limit=rng.randint(1, 5))
            positions, found = page.positions, [*found, *page.records]
        while opened:
            await opened.pop(rng.randrange(len(opened)))[0].aclose()
    found += await read_all(carrier, positions)
    assert sorted(numbers(found)) == sorted(published)
    assert_in_order(found, carrier)


async def test_the_envelope_survives(carrier: Carrier) -> None:
    with use_trace(new_trace()) as _:
        await publish(carrier.database, ServiceName.EXECUTION, freed(7, "j77"))
    (record,) = await read_all(carrier, carrier.beginning(*TOPICS))
    event = to_event(record)
    assert (event.key, event.tenant, event.topic, event.time) == ("j77", "default", Topic.WORKER, FakeClock().now())
    assert event.source.startswith("tidewright/execution/")
    assert event.traceparent is not None
    assert event.data == freed(7).data


async def test_backlog_counts_what_is_unread(carrier: Carrier) -> None:
    await publish(carrier.database, ServiceName.EXECUTION, *[freed(n) for n in range(5)], observed(1))
    beginning = carrier.beginning(Topic.WORKER)
    await carrier.settle()
    if carrier.brokers is not None:
        await carrier.log.read(beginning, limit=0)  # from then on it knows its partitions
    backlog = await carrier.log.backlog(beginning, limit=4)
    assert backlog.rows == 4
    assert backlog.oldest is not None
    if carrier.brokers is None:
        assert backlog.oldest == FakeClock().now()
    page = await carrier.read(beginning, limit=10)
    assert (await carrier.log.backlog(page.positions, limit=4)).rows == 0
