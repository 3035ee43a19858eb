"""Execution's handler and store on real Postgres: nothing is lost between a commit and the next process."""

from dataclasses import replace
from pathlib import Path

import pytest
from integration.execution_bed import roles
from properties.execution_world import submitted
from unit.execution_builders import NOON, make_generation, make_job, make_member, make_spec, name

from schemas.events.allocation import (
    AllocationClosed,
    AllocationEvicted,
    AllocationGranted,
    AllocationResized,
    Reason,
)
from schemas.events.job import JobEnded
from schemas.events.worker import LostMember
from schemas.vocabulary import (
    DEFAULT_FLAVOR,
    AttemptOutcome,
    Attribution,
    DecisionCode,
    JobId,
    Outcome,
    ServiceName,
    Topic,
)
from services.execution.core.recent import RECENT
from services.execution.core.state import Checkpoint, Desired, Ending, MemberState, Verdict
from services.execution.handlers import ExecutionHandler
from services.execution.memory import Memory
from services.execution.store import (
    StoredJob,
    delete_jobs,
    load_all_members,
    load_ended,
    load_jobs,
    save_checkpoints,
    save_jobs,
    token_hash,
)
from shared.testing.clock import FakeClock
from shared.testing.harness import TEST_KEY, draft, harness, read_rows
from shared.testing.postgres import FreshDatabase

WHY = Reason(code=DecisionCode.ADMITTED_IDLE, detail="for a test")
TOPICS = (Topic.JOB, Topic.ALLOCATION)


def granted(epoch: int = 1, attempt: int = 1, workers: int = 2) -> AllocationGranted:
    return AllocationGranted(epoch=epoch, attempt=attempt, roles=roles(workers), flavor=DEFAULT_FLAVOR, reason=WHY)


class Bench:
    """A handler with its memory; a second one after it is what a restart leaves."""

    def __init__(self) -> None:
        self.memory: Memory | None = None

    def make(self, _: object) -> ExecutionHandler:
        self.memory = Memory()
        return ExecutionHandler(self.memory, token_hash=lambda job_id: token_hash(TEST_KEY, job_id))


async def test_grant_and_spec_meet_in_either_order(database: FreshDatabase, clock: FakeClock) -> None:
    bench = Bench()
    async with harness(database, ServiceName.EXECUTION, bench.make, TOPICS, clock=clock) as service:
        await service.publish(ServiceName.QUEUEING, draft(granted(), "j1"))
        await service.drain()
        await service.publish(ServiceName.INTAKE, draft(submitted(), "j1"), draft(submitted(), "j2"))
        await service.drain()
        view = bench.memory.jobs[JobId("j1")]
        assert view.job.spec == submitted().spec
        assert (view.job.epoch, view.job.desired) == (1, Desired.GRANTED)
        assert JobId("j2") not in bench.memory.jobs  # it waits: a row is enough
    again = Bench()
    async with harness(database, ServiceName.EXECUTION, again.make, TOPICS, clock=clock) as service:
        await service.drain()
        assert again.memory.jobs[JobId("j1")].stored == view.stored
        await service.publish(ServiceName.QUEUEING, draft(granted(), "j2"))
        await service.drain()
        assert again.memory.jobs[JobId("j2")].job.spec == submitted().spec


async def test_closed_jobs_leave_memory_and_end_later(database: FreshDatabase, clock: FakeClock) -> None:
    bench = Bench()
    closed = AllocationClosed(
        epoch=3, attempt=1, outcome=Outcome.CANCELLED, exit_code=None, attributed_to=None, reason=WHY
    )
    ended = JobEnded(
        outcome=Outcome.CANCELLED,
        exit_code=None,
        attributed_to=None,
        reason="",
        image_digest=None,
        accelerator_seconds=0.0,
    )
    evicted = AllocationEvicted(epoch=2, attempt=1, grace_seconds=1.0, reason=WHY, requeue=False)
    async with harness(database, ServiceName.EXECUTION, bench.make, TOPICS, clock=clock) as service:
        await service.publish(ServiceName.INTAKE, draft(submitted(), "j1"))
        await service.publish(ServiceName.QUEUEING, draft(granted(), "j1"), draft(evicted, "j1"), draft(closed, "j1"))
        await service.drain()
        assert not bench.memory.jobs
        await service.publish(ServiceName.INTAKE, draft(ended, "j1"))
        await service.drain()
        rows = await read_rows(database, "select desired, is_active, ended_at, epoch from execution.jobs")
        assert rows == [{"desired": "closed", "is_active": False, "ended_at": clock.now(), "epoch": 3}]
        # A late word changes nothing.
        await service.publish(ServiceName.QUEUEING, draft(granted(epoch=9, attempt=2), "j1"))
        await service.drain()
        assert not bench.memory.jobs


async def test_failed_commit_leaves_the_memory_as_it_was(
    database: FreshDatabase, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench()
    async with harness(database, ServiceName.EXECUTION, bench.make, TOPICS, clock=clock) as service:
        await service.publish(ServiceName.QUEUEING, draft(granted(), "j1"))
        await service.drain()
        resized = AllocationResized(
            epoch=2,
            attempt=1,
            workers_from=2,
            workers_to=1,
            roles=roles(1),
            grace_seconds=1.0,
            reason=WHY,
        )
        await service.publish(ServiceName.QUEUEING, draft(resized, "j1"))
        handler = service.handler
        assert isinstance(handler, ExecutionHandler)
        async with service.context.lease.transaction() as tx:
            await handler.load(tx)
        assert not handler.has_uncommitted()
        assert bench.memory.jobs[JobId("j1")].job.epoch == 1
        await service.drain()
        assert bench.memory.jobs[JobId("j1")].job.unanswered == (2,)


async def test_everything_of_a_job_comes_back(database: FreshDatabase, clock: FakeClock) -> None:
    """Whatever the core can know of a job stands in its rows."""
    job = make_job(
        2,
        spec=make_spec(args=("--a", "\u0000b"), labels=(("a", "b"),)),
        members=(
            make_member(0, state=MemberState.WRITTEN_OFF, attempt=0),
            make_member(1, ending=Ending.LEAVER, ending_reason="why", devices=(1, 2)),
            make_member(2, state=MemberState.GONE, exit_code=-9, attributed_to=Attribution.PLATFORM, finished=True),
        ),
        generations=(make_generation(3, (name(1),), leavers=(name(2),), from_step=7, ports=(1, 2)),),
        unanswered=(4, 5),
        verdict=Verdict(outcome=AttemptOutcome.FAILED, exit_code=1, attributed_to=Attribution.JOB, reason="x\u0000y"),
        losses=(LostMember(member=name(2), exit_code=-9, attributed_to=Attribution.PLATFORM, reason="gone"),),
        checkpoint=Checkpoint(generation=3, step=9, location="/there"),
        finished_step=11,
        run_seconds=1.5,
    )
    stored = StoredJob(job=job, token_hash=token_hash(TEST_KEY, job.job_id))
    async with harness(database, ServiceName.EXECUTION, Bench().make, TOPICS, clock=clock) as service:
        async with service.context.lease.transaction() as tx:
            await save_jobs(tx, [(None, stored)])
        async with service.context.lease.transaction() as tx:
            (loaded,) = (await load_jobs(tx.connection)).values()
        clean = replace(
            job,
            spec=replace(job.spec, args=("--a", "\ufffdb")),
            verdict=replace(job.verdict, reason="x\ufffdy"),
        )
        assert loaded == replace(stored, job=clean)
        # A second save of the same writes nothing, and a difference is all that is written.
        changed = replace(loaded, job=replace(loaded.job, step=99))
        async with service.context.lease.transaction() as tx:
            await save_jobs(tx, [(loaded, changed)])
        async with service.context.lease.transaction() as tx:
            assert (await load_jobs(tx.connection, [job.job_id]))[job.job_id] == changed
            assert [m.ordinal for m in await load_all_members(tx.connection, job.job_id)] == [1, 2, 3]


async def test_of_a_long_attempt_what_is_recent_comes_back(database: FreshDatabase, clock: FakeClock) -> None:
    """And whoever is still there, however long ago he was started."""
    gone = [make_member(1, incarnation=n, ordinal=n + 1, state=MemberState.GONE) for n in range(1, RECENT + 50)]
    job = make_job(1, members=(make_member(0), *gone))
    stored = StoredJob(job=job, token_hash=token_hash(TEST_KEY, job.job_id))
    async with harness(database, ServiceName.EXECUTION, Bench().make, TOPICS, clock=clock) as service:
        async with service.context.lease.transaction() as tx:
            await save_jobs(tx, [(None, stored)])
        async with service.context.lease.transaction() as tx:
            (loaded,) = (await load_jobs(tx.connection)).values()
            assert len(await load_all_members(tx.connection, job.job_id)) == RECENT + 50
        assert [m.ordinal for m in loaded.job.members] == [1, *range(51, RECENT + 51)]


async def test_retention_takes_only_what_is_over(database: FreshDatabase, clock: FakeClock) -> None:
    over = make_job(1, desired=Desired.CLOSED, ended_at=NOON, attempt_ended=1)
    over = replace(over, members=(make_member(0, state=MemberState.GONE),))
    hanging = replace(over, job_id=JobId("j2"), members=(make_member(0, job_id="j2", state=MemberState.WRITTEN_OFF),))
    running = make_job(1, job_id=JobId("j3"), members=(make_member(0, job_id="j3"),))
    async with harness(database, ServiceName.EXECUTION, Bench().make, TOPICS, clock=clock) as service:
        async with service.context.lease.transaction() as tx:
            await save_jobs(tx, [(None, StoredJob(job=j, token_hash=b"x")) for j in (over, hanging, running)])
            await save_checkpoints(
                tx, [(over.job_id, Checkpoint(generation=1, step=1, location="/x"))], now=clock.now()
            )
        async with service.context.lease.transaction() as tx:
            assert await load_ended(tx.connection, before=NOON, with_members=True, limit=9) == []
            before = clock.now()
            clock.advance(60)
            assert before < clock.now()
            ended = await load_ended(tx.connection, before=clock.now(), with_members=True, limit=9)
            assert ended == [over.job_id]
            await delete_jobs(tx, ended, keep_jobs=True)
        async with service.context.lease.transaction() as tx:
            assert await load_ended(tx.connection, before=clock.now(), with_members=True, limit=9) == []
            ended = await load_ended(tx.connection, before=clock.now(), with_members=False, limit=9)
            await delete_jobs(tx, ended, keep_jobs=False)
            assert sorted(await load_jobs(tx.connection, [over.job_id, JobId("j2"), JobId("j3")])) == ["j2", "j3"]


def test_paths_of_two_members_never_meet(tmp_path: Path) -> None:
    from services.execution.local.folders import Folders

    folders = Folders(state=tmp_path)
    paths = {folders.of_member(name(i, n)) for i in range(3) for n in range(1, 4)}
    assert len(paths) == 9
