"""What every carrier of the log promises: order, no loss, no repeat, whatever writers overlap."""

import random
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from schemas.envelope import START, Draft
from schemas.envelope import Sequence as LogSequence
from schemas.events.capacity import CapacityObserved
from schemas.events.worker import RoomFreed
from schemas.registry import EventData
from schemas.vocabulary import ServiceName, Topic
from shared.bus.log import Partition, Record, to_event
from shared.bus.wakeups import Wakeups
from shared.db.transaction import PostgresTransaction, begin
from shared.outbox.outbox import Outbox
from shared.telemetry.instruments import Instruments
from shared.telemetry.trace import new_trace, use_trace
from shared.testing.carriers import Carrier
from shared.testing.clock import FakeClock
from shared.testing.harness import draft, publish

WORKER = Partition(Topic.WORKER)
CAPACITY = Partition(Topic.CAPACITY)
BEGINNING = {WORKER: START, CAPACITY: START}


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


async def read_all(carrier: Carrier, positions: Mapping[Partition, LogSequence], limit: int = 3) -> list[Record]:
    await carrier.settle()
    found: list[Record] = []
    while True:
        page = await carrier.log.read(positions, limit=limit)
        positions = page.positions
        found += page.records
        if not page.records:
            return found


async def test_one_transaction_is_read_in_the_order_of_publishing(carrier: Carrier) -> None:
    drafts = [freed(n, key=f"j{n % 3}") if n % 4 else observed(n) for n in range(200)]
    await publish(carrier.database, ServiceName.EXECUTION, *drafts)
    records = await read_all(carrier, BEGINNING)
    assert numbers(records) == list(range(200))
    assert [r.sequence for r in records] == sorted({r.sequence for r in records})


async def test_a_reader_gets_only_the_topics_it_asks_for_and_is_not_held_up_by_others(carrier: Carrier) -> None:
    await publish(carrier.database, ServiceName.EXECUTION, *[freed(n) for n in range(50)], observed(1), freed(51))
    page = await carrier.log.read({CAPACITY: START}, limit=3)
    assert numbers(page.records) == [1]
    again = await carrier.log.read(page.positions, limit=3)
    assert again.records == ()
    assert again.positions[CAPACITY] >= page.positions[CAPACITY] > page.records[0].sequence


async def test_positions_of_topics_may_differ(carrier: Carrier) -> None:
    await publish(carrier.database, ServiceName.EXECUTION, observed(1), freed(2), observed(3), freed(4))
    everything = await read_all(carrier, BEGINNING)
    ahead = {WORKER: START, CAPACITY: everything[2].sequence}
    assert numbers(await read_all(carrier, ahead, limit=1)) == [2, 4]


async def test_a_transaction_that_began_earlier_and_commits_later_is_neither_lost_nor_repeated(
    carrier: Carrier,
) -> None:
    async with writer(carrier) as slow:
        await publish(carrier.database, ServiceName.EXECUTION, freed(2))
        early = await carrier.log.read(BEGINNING, limit=10)
        assert early.records == (), "behind an open writer nothing may be read: it may still come before"
        slow.publish(freed(1))
    late = await read_all(carrier, early.positions)
    assert numbers(late) == [0, 1, 2]
    assert await read_all(carrier, {r.partition: r.sequence for r in late}) == []


async def test_a_rolled_back_transaction_leaves_no_hole_and_no_row(carrier: Carrier) -> None:
    async def fails() -> None:
        async with writer(carrier) as tx:
            tx.publish(freed(1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fails()
    await publish(carrier.database, ServiceName.EXECUTION, freed(2))
    assert numbers(await read_all(carrier, BEGINNING)) == [2]


@pytest.mark.parametrize("seed", range(4))
async def test_overlapping_writers_lose_and_repeat_nothing_for_a_reader_that_reads_all_the_time(
    carrier: Carrier, seed: int
) -> None:
    """Transactions open and commit in random order while a reader follows with a small limit."""
    rng = random.Random(seed)
    found: list[Record] = []
    positions: Mapping[Partition, LogSequence] = BEGINNING
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
            page = await carrier.log.read(positions, limit=rng.randint(1, 5))
            positions, found = page.positions, [*found, *page.records]
        while opened:
            await opened.pop(rng.randrange(len(opened)))[0].aclose()
    found += await read_all(carrier, positions)
    assert sorted(numbers(found)) == sorted(published)
    assert [r.sequence for r in found] == sorted(r.sequence for r in found)


async def test_the_envelope_survives(carrier: Carrier) -> None:
    with use_trace(new_trace()) as _:
        await publish(carrier.database, ServiceName.EXECUTION, freed(7, "j77"))
    (record,) = await read_all(carrier, BEGINNING)
    event = to_event(record)
    assert (event.key, event.tenant, event.topic, event.time) == ("j77", "default", Topic.WORKER, FakeClock().now())
    assert event.source.startswith("tidewright/execution/")
    assert event.traceparent is not None
    assert event.data == freed(7).data


async def test_backlog_counts_what_is_unread(carrier: Carrier) -> None:
    await publish(carrier.database, ServiceName.EXECUTION, *[freed(n) for n in range(5)], observed(1))
    backlog = await carrier.log.backlog({WORKER: START}, limit=4)
    assert (backlog.rows, backlog.oldest) == (4, FakeClock().now())
    page = await carrier.log.read({WORKER: START}, limit=10)
    assert (await carrier.log.backlog(page.positions, limit=4)).rows == 0
