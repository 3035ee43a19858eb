"""Processes of restart and fixed mode: starts, exits, resizes, evictions, adoption. Real zygote, shim, Postgres."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from integration.elastic_bed import is_alive
from integration.execution_bed import NAMES, ExecutionBed, running_bed

from schemas.events.capacity import CapacityObserved
from schemas.events.worker import GroupChanged, GroupEnded, GroupStarted, RoomFreed, StartFailed
from schemas.vocabulary import AttemptOutcome, Attribution, Mode
from shared.testing.postgres import DatabaseServer


@pytest.fixture(scope="module")
def bed(postgres: DatabaseServer) -> Iterator[ExecutionBed]:
    """One installation for all tests of this file; each has a job of its own."""
    with running_bed(postgres) as bed:
        yield bed


@pytest.fixture
def job() -> str:
    return next(NAMES)


async def test_command_succeeds_and_its_log_stays(bed: ExecutionBed, job: str) -> None:
    await bed.grant(job, 2)  # a grant may arrive before its spec
    await bed.submit(job, command=("/bin/sh", "-c", "echo rank $PADDLE_TRAINER_ID of $PADDLE_TRAINERS_NUM"))
    started = await bed.event(GroupStarted, job)
    ended = await bed.event(GroupEnded, job)
    assert (started.epoch, started.attempt, started.generation, started.workers) == (1, 1, 1, 2)
    assert (ended.outcome, ended.exit_code, ended.attempt) == (AttemptOutcome.SUCCEEDED, 0, 1)
    lines = await bed.log_lines(job)
    assert {line["line"] for line in lines} == {"rank 0 of 2", "rank 1 of 2"}
    assert (await bed.members(job))[0]["exit_code"] == 0
    capacity = await bed.events(CapacityObserved)
    assert [node.members for node in capacity[-1].nodes] == [()]
    assert any(node.members[0].members == 2 for report in capacity for node in report.nodes if node.members)


async def test_exit_code_is_the_jobs_failure(bed: ExecutionBed, job: str) -> None:
    await bed.submit(job, command=("/bin/sh", "-c", "exit 3"))
    await bed.grant(job, 1)
    ended = await bed.event(GroupEnded, job)
    assert (ended.outcome, ended.exit_code, ended.attributed_to) == (AttemptOutcome.FAILED, 3, Attribution.JOB)


async def test_kill_from_outside_is_the_platforms_and_ends_the_others(bed: ExecutionBed, job: str) -> None:
    await bed.submit(job, command=("/bin/sleep", "60"))
    await bed.grant(job, 2)
    await bed.event(GroupStarted, job)
    os.kill(await bed.worker_pid(job, 1), signal.SIGKILL)
    ended = await bed.event(GroupEnded, job)
    assert (ended.outcome, ended.attributed_to) == (AttemptOutcome.FAILED, Attribution.PLATFORM)
    assert "SIGKILL" in ended.reason
    assert [m["state"] for m in await bed.members(job)] == ["gone", "gone"]
    # Queueing tries again in place: another attempt, other incarnations.
    await bed.grant(job, 2, attempt=2)
    again = await bed.event(GroupStarted, job, number=2)
    assert again.attempt == 2
    assert again.generation > 1
    assert [m["incarnation"] for m in await bed.members(job)] == [1, 1, 2, 2]


async def test_eviction_gives_grace_and_leaves_nothing(bed: ExecutionBed, job: str) -> None:
    script = (
        "setsid sleep 300 & (setsid sleep 300 &) ; trap 'echo saved; exit 0' TERM; echo ready;"
        " while :; do sleep 0.1; done"
    )
    await bed.submit(job, command=("/bin/sh", "-c", script))
    await bed.grant(job, 1)
    await bed.event(GroupStarted, job)

    async def ready() -> bool:
        return "ready" in (bed.directory(job) / "log").read_text()

    await bed.until(ready)
    tree = tree_below(bed.record(job)["shim_pid"])
    assert len(tree) >= 3
    await bed.evict(job, grace=20)
    ended = await bed.event(GroupEnded, job)
    assert ended.outcome is AttemptOutcome.EVICTED
    assert ended.exit_code is None
    assert [line["line"] for line in await bed.log_lines(job)] == ["ready", "saved"]
    assert not [pid for pid in tree if is_alive(pid)]


async def test_eviction_kills_when_the_grace_is_over(bed: ExecutionBed, job: str) -> None:
    await bed.submit(job, command=("/bin/sh", "-c", "trap '' TERM; while :; do sleep 0.1; done"))
    await bed.grant(job, 1)
    await bed.event(GroupStarted, job)
    await bed.evict(job, grace=0.5)
    await bed.event(GroupEnded, job)
    assert (await bed.members(job))[0]["exit_code"] == -signal.SIGKILL


async def test_restart_mode_starts_anew_at_the_new_size(bed: ExecutionBed, job: str) -> None:
    await bed.submit(
        job, mode=Mode.RESTART, command=("/bin/sh", "-c", "echo $PADDLE_TRAINER_ENDPOINTS; exec sleep 60")
    )
    await bed.grant(job, 1)
    await bed.event(GroupStarted, job)
    epoch = await bed.resize(job, 1, 3)
    changed = await bed.event(GroupChanged, job)
    assert (changed.workers, changed.generation, changed.epoch) == (3, 2, epoch)
    assert [freed.epoch for freed in await bed.events(RoomFreed, job)] == [epoch]
    members = await bed.members(job)
    assert [(m["index"], m["incarnation"], m["state"]) for m in members] == [
        (0, 1, "gone"),
        (0, 2, "admitted"),
        (1, 1, "admitted"),
        (2, 1, "admitted"),
    ]

    async def told() -> bool:
        return len(await bed.log_lines(job)) == 4

    await bed.until(told)
    endpoints = {line["line"] for line in await bed.log_lines(job) if "/0/1" not in line["member"]}
    assert len(endpoints) == 1
    assert len(set(endpoints.pop().split(","))) == 3
    await bed.evict(job, grace=5)
    await bed.event(GroupEnded, job)


COLLECTIVE = """
import paddle
import paddle.distributed as dist
dist.init_parallel_env()
value = paddle.to_tensor([float(dist.get_rank() + 1)])
dist.all_reduce(value)
print("sum", value.item(), "of", dist.get_world_size(), flush=True)
"""


async def test_paddles_own_group_forms_from_what_execution_sets(bed: ExecutionBed, job: str) -> None:
    """A script that knows nothing of Tidewright, as ``paddle.distributed.launch`` would start it."""
    script = bed.state / "collective.py"
    script.write_text(COLLECTIVE)
    await bed.submit(job, script=str(script), interpreter=sys.executable)
    await bed.grant(job, 2)
    ended = await bed.event(GroupEnded, job, seconds=60)
    assert ended.exit_code == 0, await bed.log_lines(job)
    sums = [line["line"] for line in await bed.log_lines(job) if line["line"].startswith("sum")]
    assert sums == ["sum 3.0 of 2", "sum 3.0 of 2"]


async def test_killed_execution_adopts_what_runs(bed: ExecutionBed, job: str) -> None:
    """One member ends while nobody looks: its code is known afterwards. The other is the same process as before."""
    other = next(NAMES)
    script = "trap 'exit 7' USR1; echo up; while :; do sleep 0.05; done"
    for each in (job, other):
        await bed.submit(each, command=("/bin/sh", "-c", script))
        await bed.grant(each, 1)
        await bed.event(GroupStarted, each)
    pids = [await bed.worker_pid(each) for each in (job, other)]
    bed.kill()
    os.kill(pids[0], signal.SIGUSR1)
    await asyncio.sleep(0.3)
    bed.start()
    ended = await bed.event(GroupEnded, job)
    assert (ended.exit_code, ended.attributed_to) == (7, Attribution.JOB)
    assert is_alive(pids[1])
    assert len(await bed.members(other)) == 1
    assert len(await bed.events(GroupStarted, other)) == 1
    await bed.evict(other, grace=0.2)
    await bed.event(GroupEnded, other)
    assert not is_alive(pids[1])
    revisions = [report.revision for report in await bed.events(CapacityObserved)]
    assert revisions == sorted(set(revisions))


async def test_end_that_nobody_saw_is_the_platforms(bed: ExecutionBed, job: str) -> None:
    await bed.submit(job, command=("/bin/sleep", "60"))
    await bed.grant(job, 1)
    await bed.event(GroupStarted, job)
    record = bed.record(job)
    os.kill(record["shim_pid"], signal.SIGSTOP)
    bed.kill()
    os.kill(record["worker_pid"], signal.SIGKILL)
    os.kill(record["shim_pid"], signal.SIGCONT)
    bed.start()
    ended = await bed.event(GroupEnded, job)
    assert ended.attributed_to is Attribution.PLATFORM


async def test_what_the_job_names_and_is_not_there_is_its_own_failure(bed: ExecutionBed, job: str) -> None:
    await bed.submit(job, script="/nowhere/train.py")
    await bed.grant(job, 1)
    ended = await bed.event(GroupEnded, job)
    assert ended.attributed_to is Attribution.JOB
    assert "/nowhere/train.py" in ended.reason
    assert not await bed.events(StartFailed, job)


async def test_environment_values_reach_the_process_and_nothing_else(bed: ExecutionBed, job: str) -> None:
    secret = "s3cret-value"
    bed.database.psql(
        f"insert into intake.environments (job_id, variables) values ('{job}', '{json.dumps({'TOKEN': secret})}')"
    )
    await bed.submit(job, command=("/bin/sh", "-c", 'test "$TOKEN" = ' + secret), environment_names=("TOKEN",))
    await bed.grant(job, 1)
    assert (await bed.event(GroupEnded, job)).exit_code == 0
    assert secret not in (bed.state / "execution.log").read_text()
    assert secret not in bed.database.psql("select register::text || coalesce(spec->>'args', '') from execution.jobs")


def tree_below(pid: int) -> list[int]:
    found, queue = [], [pid]
    while queue:
        for path in Path(f"/proc/{queue.pop()}/task").glob("*/children"):
            children = [int(word) for word in path.read_text().split()]
            found += children
            queue += children
    return found
