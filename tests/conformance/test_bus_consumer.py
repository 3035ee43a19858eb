"""What a reader does with any carrier: exactly once, takeover, quarantine, parked keys, positions."""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from typing import Any

import pytest
from sqlalchemy import text

from schemas.envelope import Draft, Event
from schemas.events.capacity import CapacityObserved
from schemas.events.worker import RoomFreed
from schemas.registry import EventData
from schemas.vocabulary import ServiceName, Topic
from shared.bus import quarantine
from shared.bus.brokers import Brokers
from shared.errors import Conflict, LeaseLost, Poison
from shared.runtime.consumer import Consumer, ConsumerLimits, HandlerBroken
from shared.runtime.context import Equipment
from shared.runtime.service import Transaction
from shared.settings import ServiceSettings
from shared.testing.carriers import Carrier
from shared.testing.clock import FakeClock
from shared.testing.harness import ServiceHarness, draft, drain, equipped, harness, publish, read_rows
from shared.testing.postgres import FreshDatabase

TOPICS = (Topic.WORKER, Topic.CAPACITY)
READER = ServiceName.SCALING
LIMITS = ConsumerLimits(backoff_seconds_max=0.001)


def freed(number: int, key: str = "j1") -> Draft[EventData]:
    return draft(RoomFreed(epoch=number, held=(), capacity_revision=0), key)


def observed(number: int) -> Draft[EventData]:
    return draft(CapacityObserved(revision=number, nodes=()), "cluster")


def number_of(event: Event[EventData]) -> int:
    return event.data.epoch if isinstance(event.data, RoomFreed) else event.data.revision  # type: ignore[union-attr]


class Recorder:
    """A handler that writes what it gets into a table of its own, and fails where it is told to."""

    def __init__(self, fails_on: Callable[[int], Exception | None] = lambda _: None) -> None:
        self.fails_on = fails_on
        self.handled: list[tuple[str, int]] = []
        self.draft_batch: list[tuple[str, int]] = []
        self.loads = 0
        self.calls = 0
        self.due: float | None = None
        self.answers: tuple[Draft[EventData], ...] = ()
        self.fails_after_commit = False

    async def load(self, tx: Transaction) -> None:
        self.loads += 1
        rows = await tx.execute(SELECT)
        self.handled = [(row.key, row.number) for row in rows]

    async def on_events(self, batch: Sequence[Event[EventData]], *, tx: Transaction, now: datetime) -> None:
        self.calls += 1
        for event in batch:
            failure = self.fails_on(number_of(event))
            if failure is not None:
                raise failure
            await tx.execute(INSERT, {"key": event.key, "number": number_of(event)})
        self.draft_batch = [(event.key, number_of(event)) for event in batch]
        tx.publish(*self.answers)

    def on_committed(self) -> None:
        if self.fails_after_commit:
            raise ZeroDivisionError
        self.handled += self.draft_batch
        self.answers = ()  # it reads them itself
        self.due = None

    def due_seconds(self) -> float | None:
        return self.due


SELECT = text("select s.key, s.number from scaling.seen s order by s.n")
INSERT = text("insert into scaling.seen (key, number) values (:key, :number)")


@pytest.fixture
def seen(database: FreshDatabase) -> FreshDatabase:
    database.psql("create table scaling.seen (n bigint generated always as identity, key text, number int)")
    return database


async def stored(database: FreshDatabase) -> list[tuple[str, int]]:
    rows = await read_rows(database, "select key, number from scaling.seen order by n")
    return [(row["key"], row["number"]) for row in rows]


def running(
    database: FreshDatabase, brokers: Brokers | None, clock: FakeClock, handler: Recorder, **settings: Any
) -> AbstractAsyncContextManager[ServiceHarness]:
    own = ServiceSettings.of(READER).model_copy(update=settings)
    return harness(database, READER, lambda _: handler, TOPICS, clock=clock, settings=own, brokers=brokers)


def consumer_of(equipment: Equipment, handler: Recorder, clock: FakeClock) -> Consumer:
    return Consumer(
        READER,
        handler,
        TOPICS,
        lease=equipment.lease,
        log=equipment.log,
        clock=clock,
        instruments=equipment.context.instruments,
        limits=LIMITS,
    )


async def test_every_event_takes_effect_once_and_in_order_per_key(
    seen: FreshDatabase, carrier: Carrier, clock: FakeClock
) -> None:
    assert await carrier.reader.lease.try_acquire(url=None)
    handler = Recorder()
    consumer = consumer_of(carrier.reader, handler, clock)
    for start in (0, 40, 80):
        await publish(seen, ServiceName.EXECUTION, *[freed(n, f"j{n % 7}") for n in range(start, start + 40)])
        await drain(carrier.reader, consumer)
    for key in {key for key, _ in handler.handled}:
        own = [number for k, number in handler.handled if k == key]
        assert own == sorted(own)
    assert sorted(number for _, number in handler.handled) == list(range(120))
    assert await stored(seen) == handler.handled


async def test_a_restart_goes_on_where_the_commit_left_off(
    seen: FreshDatabase, brokers: Brokers | None, clock: FakeClock
) -> None:
    await publish(seen, ServiceName.EXECUTION, *[freed(n) for n in range(5)])
    async with running(seen, brokers, clock, Recorder()) as service:
        await service.drain()
    await publish(seen, ServiceName.EXECUTION, freed(5))
    second = Recorder()
    async with running(seen, brokers, clock, second) as service:
        assert await service.drain() == 1
    assert [number for _, number in second.handled] == list(range(6))
    assert second.loads == 1


async def test_a_commit_that_fails_drops_the_memory_and_repeats_nothing(
    seen: FreshDatabase, brokers: Brokers | None, clock: FakeClock
) -> None:
    failures = iter([Conflict("lost a race")])
    handler = Recorder(lambda _: next(failures, None))
    async with running(seen, brokers, clock, handler) as service:
        await service.publish(ServiceName.EXECUTION, freed(1), freed(2))
        with pytest.raises(Conflict):
            await service.drain()
        assert not service.consumer.is_loaded
        await service.drain()
        assert handler.loads == 2
    assert await stored(seen) == [("j1", 1), ("j1", 2)]


async def test_takeover_there_and_back_fences_the_former_holder(
    seen: FreshDatabase, brokers: Brokers | None, clock: FakeClock
) -> None:
    """A holds, B takes over, A takes back: each one's late commit is refused, and nothing is handled twice."""
    a_handler, b_handler = Recorder(), Recorder()
    async with (
        equipped(seen, READER, clock=clock, brokers=brokers) as a,
        equipped(seen, READER, clock=clock, brokers=brokers) as b,
    ):
        assert await a.lease.try_acquire(url=None)
        consumer_a = consumer_of(a, a_handler, clock)
        consumer_b = consumer_of(b, b_handler, clock)
        await publish(seen, ServiceName.EXECUTION, freed(1))
        await drain(a, consumer_a)
        assert not await b.lease.try_acquire(url=None), "a living holder keeps it"

        await publish(seen, ServiceName.EXECUTION, freed(2))
        seen.psql("update log.lease set expires_at = now() - interval '1 second'")
        assert await b.lease.try_acquire(url=None)
        assert b.lease.term == 2
        with pytest.raises(LeaseLost):
            await drain(a, consumer_a)
        assert not a.lease.is_held
        await drain(b, consumer_b)
        assert b_handler.handled == [("j1", 1), ("j1", 2)]

        await publish(seen, ServiceName.EXECUTION, freed(3))
        seen.psql("update log.lease set expires_at = now() - interval '1 second'")
        assert await a.lease.try_acquire(url=None)
        assert a.lease.term == 3
        with pytest.raises(LeaseLost):
            await drain(b, consumer_b)
        await drain(a, consumer_a)
    assert await stored(seen) == [("j1", 1), ("j1", 2), ("j1", 3)]


async def test_a_commit_under_way_holds_up_the_taker_and_counts(
    seen: FreshDatabase, brokers: Brokers | None, clock: FakeClock
) -> None:
    """The guard's row lock: a takeover waits for the commit instead of overlapping it."""
    async with equipped(seen, READER, clock=clock) as a:
        assert await a.lease.try_acquire(url=None)
        async with a.lease.transaction() as tx:
            await a.lease._guard(tx)  # type: ignore[arg-type]
            takeover = "set lock_timeout = '100ms'; update log.lease set owner = 'b', term = term + 1"
            with pytest.raises(Exception, match="lock timeout"):
                seen.psql(takeover)
        seen.psql(takeover)
        with pytest.raises(LeaseLost):
            async with a.lease.transaction() as tx:
                await tx.execute(INSERT, {"key": "late", "number": 1})
    assert await stored(seen) == []
    assert a.context.instruments.fenced_writes._value.get() == 1


async def test_a_position_moved_by_another_is_noticed(
    seen: FreshDatabase, brokers: Brokers | None, clock: FakeClock
) -> None:
    async with running(seen, brokers, clock, Recorder()) as service:
        await service.publish(ServiceName.EXECUTION, freed(1))
        await service.consumer.load()
        seen.psql("update log.position set id = 7 where topic = 'tide.worker.v1'")
        with pytest.raises(LeaseLost, match="position"):
            await service.drain()
    assert await stored(seen) == []


# -- quarantine -----------------------------------------------------------------------------------------------


async def quarantined(database: FreshDatabase) -> list[tuple[str | None, str, str]]:
    rows = await read_rows(database, "select key, cause, reason from log.quarantine order by xid, id")
    return [(row["key"], row["cause"], row["reason"]) for row in rows]


async def test_a_record_that_fails_alone_is_set_aside_and_its_key_follows_in_order(
    seen: FreshDatabase, brokers: Brokers | None, clock: FakeClock
) -> None:
    handler = Recorder(lambda number: ValueError("cannot bear 13") if number == 13 else None)
    async with running(seen, brokers, clock, handler) as service:
        batch = [freed(1, "a"), freed(13, "b"), freed(2, "a"), freed(14, "b"), freed(3, "c")]
        await service.publish(ServiceName.EXECUTION, *batch)
        await service.drain()
        await service.publish(ServiceName.EXECUTION, freed(15, "b"), freed(4, "a"))
        await service.drain()
        causes = service.context.instruments.quarantined_records
        assert causes.labels("failed")._value.get() == 1
        assert causes.labels("parked")._value.get() == 2
    assert await stored(seen) == [("a", 1), ("a", 2), ("c", 3), ("a", 4)]
    assert await quarantined(seen) == [
        ("b", "failed", "ValueError: cannot bear 13"),
        ("b", "parked", "follows an earlier record of its key"),
        ("b", "parked", "follows an earlier record of its key"),
    ]
    assert await read_rows(seen, "select * from log.failure") == []


async def test_it_is_tried_five_times_alone_and_the_count_survives_a_restart(
    seen: FreshDatabase, brokers: Brokers | None, clock: FakeClock
) -> None:
    attempts = 0

    def fails(number: int) -> Exception | None:
        nonlocal attempts
        attempts += number == 13
        return SystemExit("the process dies") if attempts == 3 else ValueError() if number == 13 else None  # type: ignore[return-value]

    await publish(seen, ServiceName.EXECUTION, freed(13))
    with pytest.raises(SystemExit):
        async with running(seen, brokers, clock, Recorder(fails)) as service:
            await service.drain()
    assert await read_rows(seen, "select attempts from log.failure") == [{"attempts": 2}]
    async with running(seen, brokers, clock, Recorder(fails)) as service:
        await service.drain()
    assert attempts == 6, "five that were counted, and the one that took the process along"
    assert [cause for _, cause, _ in await quarantined(seen)] == ["failed"]


async def test_a_handler_that_fails_on_everything_does_not_fill_the_quarantine(
    seen: FreshDatabase, brokers: Brokers | None, clock: FakeClock
) -> None:
    async with running(seen, brokers, clock, Recorder(lambda _: ValueError("broken"))) as service:
        await service.publish(ServiceName.EXECUTION, *[freed(n, f"j{n}") for n in range(20)])
        with pytest.raises(HandlerBroken, match="broken"):
            await service.drain()
    assert len(await quarantined(seen)) == 3


async def test_poison_is_set_aside_at_once(seen: FreshDatabase, brokers: Brokers | None, clock: FakeClock) -> None:
    calls: list[int] = []

    def fails(number: int) -> Exception | None:
        calls.append(number)
        return Poison("never") if number == 13 else None

    async with running(seen, brokers, clock, Recorder(fails)) as service:
        await service.publish(ServiceName.EXECUTION, freed(13), freed(1, "other"))
        await service.drain()
    assert calls.count(13) == 2, "once in the batch, once alone"
    assert await stored(seen) == [("other", 1)]


async def test_what_cannot_be_decoded_is_set_aside_without_a_call_and_parks_its_key(
    seen: FreshDatabase, brokers: Brokers | None, clock: FakeClock
) -> None:
    handler = Recorder()
    async with running(seen, brokers, clock, handler) as service:
        await service.publish(ServiceName.EXECUTION, freed(1, "a"), freed(2, "b"), freed(3, "a"), freed(4, "b"))
        seen.psql('update log.outbox set payload = \'{"epoch": "x"}\' where id = (select min(id) from log.outbox)')
        await service.drain()
        assert handler.calls == 1
    assert await stored(seen) == [("b", 2), ("b", 4)]
    found = await quarantined(seen)
    assert [(key, cause) for key, cause, _ in found] == [("a", "undecodable"), ("a", "parked")]
    assert found[0][2].startswith("epoch: ")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("type = 'tide.worker.unheard_of.v1'", "unknown event type tide.worker.unheard_of.v1"),
        ("headers = 'x'", "the headers cannot be read"),
        ('headers = \'{"tenant": 1, "source": "s"}\'', "the headers cannot be read"),
        ("topic = 'tide.capacity.v1'", "tide.worker.room_freed.v1 does not belong into tide.capacity.v1"),
    ],
)
async def test_other_ways_not_to_be_decodable(
    seen: FreshDatabase, brokers: Brokers | None, clock: FakeClock, change: str, reason: str
) -> None:
    async with running(seen, brokers, clock, Recorder()) as service:
        await service.publish(ServiceName.EXECUTION, freed(1))
        seen.psql(f"update log.outbox set {change}")
        await service.drain()
    refused_by_relay = brokers is not None and change.startswith("headers")
    cause = "failed" if refused_by_relay else "undecodable"  # without headers it cannot even be sent
    assert await quarantined(seen) == [("j1", cause, reason)]


async def test_a_record_without_a_key_parks_nothing(
    seen: FreshDatabase, brokers: Brokers | None, clock: FakeClock
) -> None:
    async with running(seen, brokers, clock, Recorder()) as service:
        await service.publish(ServiceName.EXECUTION, freed(1), freed(2), freed(3))
        seen.psql("update log.outbox set key = null where id < (select max(id) from log.outbox)")
        await service.drain()
    assert await quarantined(seen) == [(None, "undecodable", "the record has no key")] * 2
    assert await stored(seen) == [("j1", 3)]


async def test_keys_of_snapshots_are_never_parked(
    seen: FreshDatabase, brokers: Brokers | None, clock: FakeClock
) -> None:
    handler = Recorder(lambda number: ValueError() if number == 13 else None)
    async with running(seen, brokers, clock, handler) as service:
        await service.publish(ServiceName.EXECUTION, observed(13), observed(14))
        await service.drain()
    assert [cause for _, cause, _ in await quarantined(seen)] == ["failed"]
    assert await stored(seen) == [("cluster", 14)]


async def test_a_retried_key_is_handled_in_order_and_goes_on(
    seen: FreshDatabase, brokers: Brokers | None, clock: FakeClock
) -> None:
    broken = True
    handler = Recorder(lambda number: ValueError() if broken and number == 13 else None)
    async with running(seen, brokers, clock, handler) as service:
        await service.publish(ServiceName.EXECUTION, freed(13, "b"), freed(14, "b"), freed(1, "a"))
        await service.drain()
        for expected in ([("a", 1)], [("a", 1), ("b", 13), ("b", 14)]):
            async with service.context.lease.transaction() as tx:
                assert await quarantine.retry_key(tx, READER, "b") == 2
            clock.advance(10)
            await service.drain()
            assert await stored(seen) == expected
            broken = False
        assert await quarantined(seen) == []
        await service.publish(ServiceName.EXECUTION, freed(15, "b"))
        await service.drain()
    assert (await stored(seen))[-1] == ("b", 15)


async def test_a_dropped_key_goes_on_without_what_was_set_aside(
    seen: FreshDatabase, brokers: Brokers | None, clock: FakeClock
) -> None:
    handler = Recorder(lambda number: ValueError() if number == 13 else None)
    async with running(seen, brokers, clock, handler) as service:
        await service.publish(ServiceName.EXECUTION, freed(13, "b"), freed(14, "b"))
        await service.drain()
        async with service.context.lease.transaction() as tx:
            assert await quarantine.drop_key(tx, READER, "b") == 2
        clock.advance(10)
        await service.publish(ServiceName.EXECUTION, freed(15, "b"))
        await service.drain()
    assert await stored(seen) == [("b", 15)]


# -- calls ----------------------------------------------------------------------------------------------------


async def test_a_handler_that_is_due_is_called_without_events(
    seen: FreshDatabase, brokers: Brokers | None, clock: FakeClock
) -> None:
    handler = Recorder()
    async with running(seen, brokers, clock, handler) as service:
        await service.drain()
        assert handler.calls == 0
        handler.due = 0.0
        await service.drain()
        assert handler.calls == 1


async def test_a_failure_without_events_is_the_services_own(
    seen: FreshDatabase, brokers: Brokers | None, clock: FakeClock
) -> None:
    class Failing(Recorder):
        async def on_events(self, batch: Sequence[Event[EventData]], *, tx: Transaction, now: datetime) -> None:
            raise ValueError("nobody's fault but mine")

    handler = Failing()
    handler.due = 0.0
    async with running(seen, brokers, clock, handler) as service:
        with pytest.raises(ValueError, match="nobody's fault"):
            await service.drain()


async def test_a_failure_after_the_commit_is_not_blamed_on_the_records(
    seen: FreshDatabase, brokers: Brokers | None, clock: FakeClock
) -> None:
    handler = Recorder()
    async with running(seen, brokers, clock, handler) as service:
        handler.fails_after_commit = True
        await service.publish(ServiceName.EXECUTION, freed(1), freed(2))
        with pytest.raises(ZeroDivisionError):
            await service.drain()
    assert await stored(seen) == [("j1", 1), ("j1", 2)]
    assert await read_rows(seen, "select * from log.failure") == []


async def test_what_is_published_continues_the_trace_of_its_cause(
    seen: FreshDatabase, brokers: Brokers | None, clock: FakeClock
) -> None:
    from shared.telemetry.trace import new_trace, parse_traceparent, use_trace

    handler = Recorder()
    handler.answers = (freed(100, "a"), freed(101, "b"))
    async with running(seen, brokers, clock, handler) as service:
        traces = {}
        for key in ("a", "b"):
            with use_trace(new_trace()) as _:
                await service.publish(ServiceName.EXECUTION, freed(1, key))
        for event in await service.log():
            traces[event.key] = parse_traceparent(event.traceparent)
        await service.drain()
        answers = (await service.log())[2:4]
    for event in answers:
        cause, own = traces[event.key], parse_traceparent(event.traceparent)
        assert cause is not None
        assert own is not None
        assert (own.trace_id, own.span_id != cause.span_id) == (cause.trace_id, True)


async def test_an_idle_reader_still_stores_how_far_it_has_looked(
    seen: FreshDatabase, brokers: Brokers | None, clock: FakeClock
) -> None:
    async with running(seen, brokers, clock, Recorder()) as service:
        await service.drain()
        before = seen.psql("select min(xid::text::bigint) from log.position")
        clock.advance(120)
        await service.drain()
        after = seen.psql("select min(xid::text::bigint) from log.position")
        assert (int(after) > int(before)) is (brokers is None), "on Kafka nothing is between two records"
