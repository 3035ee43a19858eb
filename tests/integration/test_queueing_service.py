"""Queueing's handler on a real Postgres: what it decides is in the log, and a restart anywhere changes nothing."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime

import pytest

from schemas.envelope import Draft, Event
from schemas.events.allocation import (
    AllocationClosed,
    AllocationEvicted,
    AllocationGranted,
    AllocationResized,
    AllocationWaiting,
    QueueObserved,
)
from schemas.events.job import JobChanged, JobSubmitted, RequestRegister
from schemas.events.worker import GroupEnded, GroupStarted, RoleCount, RoomFreed, StartFailed
from schemas.registry import EventData
from schemas.vocabulary import (
    CLUSTER_KEY,
    DEFAULT_TENANT,
    DEFAULT_USER,
    WORKER_ROLE,
    AttemptOutcome,
    Attribution,
    DecisionCode,
    Outcome,
    PriorityClass,
    ServiceName,
    StartFailure,
    Topic,
    WaitCode,
)
from services.queueing.core.book import Changes
from services.queueing.handlers import QueueingHandler
from services.queueing.settings import QueueingSettings
from services.queueing.store import load_book, save_changes
from services.queueing.wiring import build
from shared.errors import Unavailable
from shared.runtime.service import Transaction
from shared.testing.clock import FakeClock
from shared.testing.harness import ServiceHarness, harness, publish, read_data, read_rows
from shared.testing.postgres import FreshDatabase
from tests.simulation.builders import job_id, make_capacity, make_submitted, make_workload

CONSUMES = frozenset({Topic.JOB, Topic.WORKER, Topic.SCALING, Topic.CAPACITY})
SETTINGS = QueueingSettings(explain_seconds=0.0)


class Bed:
    """Queueing that is restarted before every batch."""

    def __init__(self, database: FreshDatabase, clock: FakeClock) -> None:
        self.database = database
        self.clock = clock

    @asynccontextmanager
    async def running(self, kind: type[QueueingHandler] = QueueingHandler) -> AsyncIterator[ServiceHarness]:
        async with harness(
            self.database,
            ServiceName.QUEUEING,
            lambda context: kind(SETTINGS, context.clock, context.instruments),
            CONSUMES,
            clock=self.clock,
        ) as running:
            yield running

    async def hear(self, number: int, *data: EventData, service: ServiceName = ServiceName.EXECUTION) -> None:
        """Publish about one job, and let a new process of queueing handle it."""
        await self.tell(number, *data, service=service)
        async with self.running() as queueing:
            await queueing.drain()

    async def tell(self, number: int, *data: EventData, service: ServiceName = ServiceName.EXECUTION) -> None:
        drafts = [Draft(key=job_id(number), tenant=DEFAULT_TENANT, data=one) for one in data]
        await publish(self.database, service, *drafts, clock=self.clock)

    async def submit(self, number: int, data: JobSubmitted) -> None:
        await self.hear(number, data, service=ServiceName.INTAKE)

    async def report(self, *counts: int, revision: int = 1) -> None:
        draft = Draft(key=CLUSTER_KEY, tenant=DEFAULT_TENANT, data=make_capacity(*counts, revision=revision))
        await publish(self.database, ServiceName.EXECUTION, draft, clock=self.clock)
        async with self.running() as queueing:
            await queueing.drain()


@pytest.fixture
def bed(database: FreshDatabase, clock: FakeClock) -> Bed:
    return Bed(database, clock)


def group_ended(attempt: int, outcome: AttemptOutcome, *, revision: int = 1, reason: str = "over") -> GroupEnded:
    blame = Attribution.JOB if outcome is AttemptOutcome.FAILED else None
    return GroupEnded(
        attempt=attempt,
        outcome=outcome,
        exit_code=0 if outcome is AttemptOutcome.SUCCEEDED else 1,
        attributed_to=blame,
        reason=reason,
        step=7,
        capacity_revision=revision,
    )


def room_freed(epoch: int, workers: int, *, revision: int = 1) -> RoomFreed:
    return RoomFreed(epoch=epoch, held=(RoleCount(role=WORKER_ROLE, members=workers),), capacity_revision=revision)


def started(epoch: int, attempt: int) -> GroupStarted:
    return GroupStarted(epoch=epoch, attempt=attempt, generation=1, workers=1, resumed_from=None, steps_dropped=0)


async def test_critical_job_takes_room_and_it_is_given_back(bed: Bed) -> None:
    await bed.submit(1, make_submitted(priority=PriorityClass.LOW, workers_min=1, workers_max=4, workers=4))
    await bed.report(4)
    await bed.hear(1, started(1, 1))
    await bed.submit(2, make_submitted(priority=PriorityClass.CRITICAL, workers_min=2))
    await bed.hear(1, room_freed(2, 2))
    await bed.hear(2, group_ended(1, AttemptOutcome.SUCCEEDED))

    first = await read_data(bed.database, AllocationGranted, job_id(1))
    assert [(g.epoch, g.attempt, g.roles[0].members, g.roles[0].minimum) for g in first] == [(1, 1, 4, 1)]
    resizes = await read_data(bed.database, AllocationResized, job_id(1))
    assert [(r.epoch, r.workers_from, r.workers_to, r.reason.code) for r in resizes] == [
        (2, 4, 2, DecisionCode.SHRANK_FOR_CLAIMANT),
        (3, 2, 4, DecisionCode.GAVE_BACK),
    ]
    second = await read_data(bed.database, AllocationGranted, job_id(2))
    assert [(g.roles[0].members, g.reason.code) for g in second] == [(2, DecisionCode.ADMITTED_PROMISE)]
    waits = await read_data(bed.database, AllocationWaiting, job_id(2))
    assert [w.code for w in waits] == [WaitCode.ROOM_COMING]
    assert waits[0].estimate is not None
    closed = await read_data(bed.database, AllocationClosed)
    assert [(c.outcome, c.epoch) for c in closed] == [(Outcome.SUCCEEDED, 2)]


async def test_ledger_rows_show_who_is_charged(bed: Bed) -> None:
    await bed.submit(1, make_submitted(priority=PriorityClass.LOW, workers_min=2, servers=1))
    await bed.report(3)
    await bed.submit(2, make_submitted(priority=PriorityClass.HIGH, workers_min=3))
    charges = "select role, granted, held from queueing.charges order by role"
    assert await read_rows(bed.database, charges) == [
        {"role": "server", "granted": 0, "held": 1},
        {"role": "worker", "granted": 0, "held": 2},
    ]
    promises = await read_rows(bed.database, "select job_id, members, origins from queueing.promises")
    assert promises == [{"job_id": job_id(2), "members": [3], "origins": [job_id(1)]}]

    await bed.hear(1, group_ended(1, AttemptOutcome.EVICTED))
    assert await read_rows(bed.database, charges) == [{"role": "worker", "granted": 3, "held": 0}]
    assert await read_rows(bed.database, "select * from queueing.promises") == []


async def test_late_words_about_a_closed_job_change_nothing(bed: Bed) -> None:
    submitted = make_submitted()
    await bed.report(2)
    await bed.submit(1, submitted)
    await bed.hear(1, group_ended(1, AttemptOutcome.SUCCEEDED))
    await bed.hear(1, submitted, room_freed(1, 0), group_ended(1, AttemptOutcome.FAILED))
    register = RequestRegister(
        version=9, priority=PriorityClass.LOW, workers_min=1, workers_max=1, workers=1, cancelled=True
    )
    await bed.hear(1, JobChanged(request=register, by=DEFAULT_USER), submitted, service=ServiceName.INTAKE)

    assert len(await read_data(bed.database, AllocationGranted)) == 1
    assert [c.outcome for c in await read_data(bed.database, AllocationClosed)] == [Outcome.SUCCEEDED]
    assert await read_rows(bed.database, "select job_id from queueing.workloads") == []
    assert await read_rows(bed.database, "select job_id from queueing.tombstones") == [{"job_id": job_id(1)}]


async def test_a_job_that_ends_and_comes_again_in_one_batch_stays_closed(bed: Bed) -> None:
    submitted = make_submitted()
    await bed.report(1)
    await bed.submit(1, submitted)
    await bed.hear(1, group_ended(1, AttemptOutcome.SUCCEEDED), submitted)
    assert len(await read_data(bed.database, AllocationGranted)) == 1


async def test_a_word_waits_for_its_capacity_revision_as_a_row(bed: Bed) -> None:
    await bed.submit(1, make_submitted())
    await bed.report(2)
    await bed.hear(1, group_ended(1, AttemptOutcome.SUCCEEDED, revision=2))
    assert await read_data(bed.database, AllocationClosed) == []
    assert len(await read_rows(bed.database, "select ordinal from queueing.parked")) == 1

    await bed.report(1, revision=2)
    assert [c.outcome for c in await read_data(bed.database, AllocationClosed)] == [Outcome.SUCCEEDED]
    assert await read_rows(bed.database, "select ordinal from queueing.parked") == []


async def test_cancel_before_the_grant_closes_at_once(bed: Bed) -> None:
    submitted = make_submitted(workers_min=9)
    await bed.report(1)
    await bed.submit(1, submitted)
    request = RequestRegister(
        version=2, priority=PriorityClass.LOW, workers_min=9, workers_max=9, workers=9, cancelled=True
    )
    await bed.hear(1, JobChanged(request=request, by=DEFAULT_USER), service=ServiceName.INTAKE)
    assert [c.outcome for c in await read_data(bed.database, AllocationClosed)] == [Outcome.CANCELLED]
    waits = await read_data(bed.database, AllocationWaiting, job_id(1))
    assert [w.code for w in waits] == [WaitCode.NEVER_FITS]


async def test_back_off_ends_by_time_alone_and_begins_anew_after_a_restart(bed: Bed) -> None:
    await bed.report(1)
    await bed.submit(1, make_submitted())
    failed = StartFailed(
        epoch=1,
        missing=(RoleCount(role=WORKER_ROLE, members=1),),
        failure=StartFailure.UNSCHEDULABLE,
        detail="no\x00room",
    )
    await bed.hear(1, failed)
    assert len(await read_data(bed.database, AllocationEvicted)) == 1
    await bed.hear(1, group_ended(1, AttemptOutcome.EVICTED))
    waits = await read_data(bed.database, AllocationWaiting, job_id(1))
    assert [w.code for w in waits] == [WaitCode.BACK_OFF]

    async with bed.running() as queueing:
        await queueing.drain()
        bed.clock.advance(4.9)
        await queueing.drain()
        assert len(await read_data(bed.database, AllocationGranted)) == 1
        bed.clock.advance(0.2)
        assert queueing.handler.due_seconds() == 0.0
        await queueing.drain()
    grants = await read_data(bed.database, AllocationGranted)
    assert [(g.epoch, g.attempt) for g in grants] == [(1, 1), (3, 2)]


class LosesItsFirstCommit(QueueingHandler):
    """Everything is decided and written, then the transaction fails."""

    commits_to_lose = 1

    async def on_events(self, batch: Sequence[Event[EventData]], *, tx: Transaction, now: datetime) -> None:
        await super().on_events(batch, tx=tx, now=now)
        if batch and self.commits_to_lose:
            self.commits_to_lose -= 1
            raise Unavailable("the server is gone")


async def test_a_turn_that_is_not_committed_leaves_nothing_behind(bed: Bed) -> None:
    await bed.report(2)
    await bed.tell(1, make_submitted(), service=ServiceName.INTAKE)
    async with bed.running(LosesItsFirstCommit) as queueing:
        await queueing.consumer.load()
        with pytest.raises(Unavailable):
            await queueing.consumer.step()
        assert await read_data(bed.database, AllocationGranted) == []
        await queueing.drain()
    assert [(g.epoch, g.attempt) for g in await read_data(bed.database, AllocationGranted)] == [(1, 1)]


async def test_queues_are_observed_when_they_changed_and_not_too_often(bed: Bed) -> None:
    async with bed.running() as queueing:
        await bed.tell(1, make_submitted(workers_min=2), service=ServiceName.INTAKE)
        await queueing.drain()
        await bed.tell(2, make_submitted(workers_min=3), service=ServiceName.INTAKE)
        await queueing.drain()
        seen = await read_data(bed.database, QueueObserved)
        assert [sum(p.jobs for p in s.pending) for s in seen] == [1]
        bed.clock.advance(5.0)
        await queueing.drain()
        seen = await read_data(bed.database, QueueObserved)
    assert [sum(p.jobs for p in s.pending) for s in seen] == [1, 2]
    assert (seen[-1].head, seen[-1].head_code) == (job_id(1), WaitCode.NO_CAPACITY_REPORT)


async def test_wiring_gives_the_runtime_what_it_needs(bed: Bed) -> None:
    async with bed.running() as queueing:
        parts = build(queueing.context)
    assert parts.consumes == CONSUMES
    assert {"/livez", "/readyz", "/metrics"} <= {getattr(route, "path", "") for route in parts.app.routes}


async def test_a_restart_loads_thousands_of_jobs_page_by_page(bed: Bed) -> None:
    count = 4_500
    waiting = tuple(make_workload(number, make_submitted(workers_min=2)) for number in range(count))
    async with bed.running() as queueing:
        async with queueing.equipment.lease.transaction() as tx:
            await save_changes(tx, Changes(workloads=waiting), now=bed.clock.now())
        async with queueing.equipment.lease.transaction() as tx:
            book = await load_book(tx, now=0.0)
    assert tuple(book.workloads.values()) == waiting
    assert [len(line) for _, line in book.lines()] == [count]
