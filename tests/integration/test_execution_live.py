"""Live jobs on real trainers: resizes, a killed and a stuck worker, a killed execution, eviction and resumption."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from integration.elastic_bed import ZygoteBed, is_alive
from integration.execution_bed import NAMES, ROOT, ExecutionBed

from schemas.events.worker import Checkpointed, GroupChanged, GroupEnded, GroupStarted, RoomFreed
from schemas.vocabulary import AttemptOutcome, GroupChangeCause, Mode
from shared.testing.postgres import DatabaseServer, temporary_state_directory

DIGITS = str(ROOT / "examples" / "digits.py")


@pytest.fixture(scope="module")
def bed(postgres: DatabaseServer) -> Iterator[ExecutionBed]:
    """One installation for all tests of this file; each has a job of its own."""
    with (
        temporary_state_directory() as base,
        temporary_state_directory() as state,
        postgres.database() as database,
    ):
        zygote = ZygoteBed(base)
        zygote.start()
        bed = ExecutionBed(database, state, zygote.socket_path, settings={"silent_seconds": "3"})
        try:
            bed.start()
            yield bed
            bed.stop()
        finally:
            bed.clean_up()
            zygote.stop()


@pytest.fixture
def job() -> str:
    return next(NAMES)


async def start_digits(
    bed: ExecutionBed, job: str, workers: int, *, delay: float, epochs: int, minimum: int = 1
) -> None:
    await bed.submit(
        job,
        mode=Mode.LIVE,
        script=DIGITS,
        args=("--epochs", str(epochs), "--step-delay", str(delay)),
        checkpoint_every_steps=20,
    )
    await bed.grant(job, workers, minimum=minimum)


async def steps(bed: ExecutionBed, job: str, at_least: int) -> None:
    """Until so many steps are in the ledgers."""

    async def look() -> bool:
        return len(applied(bed, job)) >= at_least

    await bed.until(look, 60, f"{at_least} steps")


def ledgers(bed: ExecutionBed, job: str) -> list[dict[str, Any]]:
    paths = sorted(bed.state.glob(f"run/{job}/*/ledger.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines() if line.endswith("}")]


def applied(bed: ExecutionBed, job: str) -> dict[int, set[int]]:
    """Generations in which each step was applied."""
    found: dict[int, set[int]] = {}
    for line in ledgers(bed, job):
        if line["k"] == "applied":
            found.setdefault(line["step"], set()).add(line["generation"])
    return found


def assert_each_step_once(bed: ExecutionBed, job: str) -> None:
    found = applied(bed, job)
    assert sorted(found) == list(range(len(found)))
    assert not {step: generations for step, generations in found.items() if len(generations) > 1}


async def test_job_grows_shrinks_and_succeeds(bed: ExecutionBed, job: str) -> None:
    await start_digits(bed, job, 1, delay=0.02, epochs=14)
    started = await bed.event(GroupStarted, job, seconds=40)
    assert (started.workers, started.resumed_from, started.steps_dropped) == (1, None, 0)
    first = await bed.worker_pid(job)
    epoch = await bed.resize(job, 1, 3)
    grown = await bed.event(GroupChanged, job, seconds=40)
    assert (grown.workers, grown.epoch, grown.cause) == (3, epoch, GroupChangeCause.RESIZED)
    assert grown.pause_seconds > 0
    freed = await bed.event(RoomFreed, job)
    assert freed.epoch == epoch
    epoch = await bed.resize(job, 3, 1)
    freed = await bed.event(RoomFreed, job, number=2)
    assert (freed.epoch, [count.members for count in freed.held]) == (epoch, 1 * [1])
    shrunk = await bed.event(GroupChanged, job, number=2)
    assert (shrunk.workers, shrunk.lost) == (1, ())
    assert await bed.worker_pid(job) == first
    assert is_alive(first)
    ended = await bed.event(GroupEnded, job, seconds=60)
    assert (ended.outcome, ended.exit_code) == (AttemptOutcome.SUCCEEDED, 0)
    assert ended.step == 14 * 15
    assert_each_step_once(bed, job)
    assert any("held-out accuracy" in line["line"] for line in await bed.log_lines(job))
    assert [m["exit_code"] for m in await bed.members(job)] == [0, 0, 0]


async def test_killed_worker_alone_is_replaced(bed: ExecutionBed, job: str) -> None:
    await start_digits(bed, job, 3, delay=0.03, epochs=40)
    await bed.event(GroupStarted, job, seconds=40)
    await steps(bed, job, 10)
    pids = [await bed.worker_pid(job, index) for index in range(3)]
    os.kill(pids[0], signal.SIGKILL)
    await replaced(bed, job, index=0)
    assert is_alive(pids[1])
    assert is_alive(pids[2])
    changes = await bed.events(GroupChanged, job)
    assert [lost.member for change in changes for lost in change.lost] == [f"{job}/worker/0/1"]
    await bed.evict(job)
    ended = await bed.event(GroupEnded, job, seconds=30)
    assert ended.outcome is AttemptOutcome.EVICTED
    assert_each_step_once(bed, job)


async def test_stopped_worker_alone_is_replaced(bed: ExecutionBed, job: str) -> None:
    await start_digits(bed, job, 3, delay=0.03, epochs=60)
    await bed.event(GroupStarted, job, seconds=40)
    await steps(bed, job, 10)
    pids = [await bed.worker_pid(job, index) for index in range(3)]
    os.kill(pids[1], signal.SIGSTOP)
    await replaced(bed, job, index=1)
    assert not is_alive(pids[1])
    assert is_alive(pids[0])
    assert is_alive(pids[2])
    lost = [each for change in await bed.events(GroupChanged, job) for each in change.lost]
    assert [each.member for each in lost] == [f"{job}/worker/1/1"]
    assert "stopped" in lost[0].reason
    await bed.evict(job)
    await bed.event(GroupEnded, job, seconds=30)
    assert_each_step_once(bed, job)


async def replaced(bed: ExecutionBed, job: str, *, index: int) -> None:
    """The second incarnation of the index is in a started group of three."""

    async def look() -> bool:
        changes = await bed.events(GroupChanged, job)
        members = [m for m in await bed.members(job) if m["state"] == "admitted"]
        return (
            bool(changes)
            and changes[-1].workers == 3
            and (index, 2) in [(m["index"], m["incarnation"]) for m in members]
        )

    await bed.until(look, 60, "replaced")


async def test_killed_execution_adopts_the_group(bed: ExecutionBed, job: str) -> None:
    await start_digits(bed, job, 2, delay=0.03, epochs=30)
    await bed.event(GroupStarted, job, seconds=40)
    pids = [await bed.worker_pid(job, index) for index in range(2)]
    bed.kill()
    before = len(applied(bed, job))
    await asyncio.sleep(2.0)
    assert len(applied(bed, job)) > before + 10  # nobody waits for execution
    bed.start()
    epoch = await bed.resize(job, 2, 3)
    grown = await bed.event(GroupChanged, job, seconds=40)
    assert (grown.workers, grown.epoch) == (3, epoch)
    assert [await bed.worker_pid(job, index) for index in range(2)] == pids
    ended = await bed.event(GroupEnded, job, seconds=90)
    assert ended.outcome is AttemptOutcome.SUCCEEDED
    assert len(await bed.events(GroupStarted, job)) == 1
    assert len(await bed.members(job)) == 3
    assert_each_step_once(bed, job)


async def test_job_that_ends_in_the_outage_has_succeeded(bed: ExecutionBed, job: str) -> None:
    await start_digits(bed, job, 2, delay=0.05, epochs=3)
    await bed.event(GroupStarted, job, seconds=40)
    pids = [await bed.worker_pid(job, index) for index in range(2)]
    bed.kill()
    for _ in range(400):
        if not any(is_alive(pid) for pid in pids):
            break
        await asyncio.sleep(0.05)
    assert not any(is_alive(pid) for pid in pids)
    bed.start()
    ended = await bed.event(GroupEnded, job, seconds=30)
    assert (ended.outcome, ended.exit_code, ended.step) == (AttemptOutcome.SUCCEEDED, 0, 45)


async def test_evicted_job_goes_on_from_its_checkpoint(bed: ExecutionBed, job: str) -> None:
    await start_digits(bed, job, 2, delay=0.02, epochs=12)
    await bed.event(GroupStarted, job, seconds=40)
    await steps(bed, job, 30)
    await bed.evict(job)
    ended = await bed.event(GroupEnded, job, seconds=30)
    assert ended.outcome is AttemptOutcome.EVICTED
    done = len(applied(bed, job))
    await bed.grant(job, 1, attempt=2)
    again = await bed.event(GroupStarted, job, number=2, seconds=40)
    assert again.resumed_from is not None
    assert again.resumed_from.step == done
    assert again.steps_dropped == 0
    assert await bed.events(Checkpointed, job)
    ended = await bed.event(GroupEnded, job, number=2, seconds=60)
    assert ended.outcome is AttemptOutcome.SUCCEEDED
    assert_each_step_once(bed, job)


async def test_exception_in_a_worker_is_the_jobs_failure(bed: ExecutionBed, job: str) -> None:
    script = bed.state / "broken.py"
    script.write_text(
        Path(DIGITS)
        .read_text()
        .replace("scores = model", "assert step.index < 8 or job.rank\n            scores = model")
    )
    await bed.submit(job, mode=Mode.LIVE, script=str(script), args=("--step-delay", "0.02"))
    await bed.grant(job, 2)
    ended = await bed.event(GroupEnded, job, seconds=60)
    assert (ended.outcome, ended.exit_code) == (AttemptOutcome.FAILED, 1)
    assert any("AssertionError" in line["line"] for line in await bed.log_lines(job))
