"""Live jobs on real trainers: resizes, a killed and a stuck worker, a killed execution, eviction and resumption."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from integration.elastic_bed import ZygoteBed, is_alive
from integration.execution_bed import ROOT, ExecutionBed

from schemas.events.worker import Checkpointed, GroupChanged, GroupEnded, GroupStarted, RoomFreed
from schemas.vocabulary import AttemptOutcome, GroupChangeCause, Mode
from shared.testing.postgres import FreshDatabase, temporary_state_directory

DIGITS = str(ROOT / "examples" / "digits.py")


@pytest.fixture(scope="module")
def zygote() -> Iterator[ZygoteBed]:
    with temporary_state_directory() as base:
        bed = ZygoteBed(base)
        bed.start()
        yield bed
        bed.stop()


@pytest_asyncio.fixture
async def bed(database: FreshDatabase, state_directory: Path, zygote: ZygoteBed) -> AsyncIterator[ExecutionBed]:
    bed = ExecutionBed(database, state_directory, zygote.socket_path, settings={"silent_seconds": "3"})
    bed.start()
    try:
        yield bed
        bed.stop()
    finally:
        if bed.process is not None and bed.process.poll() is None:
            bed.kill()
        bed.kill_all_members()


async def start_digits(bed: ExecutionBed, workers: int, *, delay: float, epochs: int, minimum: int = 1) -> None:
    await bed.submit(
        "j1",
        mode=Mode.LIVE,
        script=DIGITS,
        args=("--epochs", str(epochs), "--step-delay", str(delay)),
        checkpoint_every_steps=20,
    )
    await bed.grant("j1", workers, minimum=minimum)


async def steps(bed: ExecutionBed, at_least: int) -> None:
    """Until so many steps are in the ledgers."""

    async def look() -> bool:
        return len(applied(bed)) >= at_least

    await bed.until(look, 60, f"{at_least} steps")


def ledgers(bed: ExecutionBed) -> list[dict[str, Any]]:
    paths = sorted(bed.state.glob("run/j1/*/ledger.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines() if line.endswith("}")]


def applied(bed: ExecutionBed) -> dict[int, set[int]]:
    """Generations in which each step was applied."""
    found: dict[int, set[int]] = {}
    for line in ledgers(bed):
        if line["k"] == "applied":
            found.setdefault(line["step"], set()).add(line["generation"])
    return found


def assert_each_step_once(bed: ExecutionBed) -> None:
    found = applied(bed)
    assert sorted(found) == list(range(len(found)))
    assert not {step: generations for step, generations in found.items() if len(generations) > 1}


async def test_job_grows_shrinks_and_succeeds(bed: ExecutionBed) -> None:
    await start_digits(bed, 1, delay=0.02, epochs=14)
    started = await bed.event(GroupStarted, "j1", seconds=40)
    assert (started.workers, started.resumed_from, started.steps_dropped) == (1, None, 0)
    first = await bed.worker_pid("j1")
    epoch = await bed.resize("j1", 1, 3)
    grown = await bed.event(GroupChanged, "j1", seconds=40)
    assert (grown.workers, grown.epoch, grown.cause) == (3, epoch, GroupChangeCause.RESIZED)
    assert grown.pause_seconds > 0
    freed = await bed.event(RoomFreed, "j1")
    assert freed.epoch == epoch
    epoch = await bed.resize("j1", 3, 1)
    freed = await bed.event(RoomFreed, "j1", number=2)
    assert (freed.epoch, [count.members for count in freed.held]) == (epoch, 1 * [1])
    shrunk = await bed.event(GroupChanged, "j1", number=2)
    assert (shrunk.workers, shrunk.lost) == (1, ())
    assert await bed.worker_pid("j1") == first
    assert is_alive(first)
    ended = await bed.event(GroupEnded, "j1", seconds=60)
    assert (ended.outcome, ended.exit_code) == (AttemptOutcome.SUCCEEDED, 0)
    assert ended.step == 14 * 15
    assert_each_step_once(bed)
    assert any("held-out accuracy" in line["line"] for line in await bed.log_lines("j1"))
    assert [m["exit_code"] for m in await bed.members("j1")] == [0, 0, 0]


async def test_killed_worker_alone_is_replaced(bed: ExecutionBed) -> None:
    await start_digits(bed, 3, delay=0.03, epochs=40)
    await bed.event(GroupStarted, "j1", seconds=40)
    await steps(bed, 10)
    pids = [await bed.worker_pid("j1", index) for index in range(3)]
    os.kill(pids[0], signal.SIGKILL)
    await replaced(bed, index=0)
    assert is_alive(pids[1])
    assert is_alive(pids[2])
    changes = await bed.events(GroupChanged, "j1")
    assert [lost.member for change in changes for lost in change.lost] == ["j1/worker/0/1"]
    await bed.evict("j1")
    ended = await bed.event(GroupEnded, "j1", seconds=30)
    assert ended.outcome is AttemptOutcome.EVICTED
    assert_each_step_once(bed)


async def test_stopped_worker_alone_is_replaced(bed: ExecutionBed) -> None:
    await start_digits(bed, 3, delay=0.03, epochs=60)
    await bed.event(GroupStarted, "j1", seconds=40)
    await steps(bed, 10)
    pids = [await bed.worker_pid("j1", index) for index in range(3)]
    os.kill(pids[1], signal.SIGSTOP)
    await replaced(bed, index=1)
    assert not is_alive(pids[1])
    assert is_alive(pids[0])
    assert is_alive(pids[2])
    lost = [each for change in await bed.events(GroupChanged, "j1") for each in change.lost]
    assert [each.member for each in lost] == ["j1/worker/1/1"]
    assert "stopped" in lost[0].reason
    await bed.evict("j1")
    await bed.event(GroupEnded, "j1", seconds=30)
    assert_each_step_once(bed)


async def replaced(bed: ExecutionBed, *, index: int) -> None:
    """The second incarnation of the index is in a started group of three."""

    async def look() -> bool:
        changes = await bed.events(GroupChanged, "j1")
        members = [m for m in await bed.members("j1") if m["state"] == "admitted"]
        return (
            bool(changes)
            and changes[-1].workers == 3
            and (index, 2) in [(m["index"], m["incarnation"]) for m in members]
        )

    await bed.until(look, 60, "replaced")


async def test_killed_execution_adopts_the_group(bed: ExecutionBed) -> None:
    await start_digits(bed, 2, delay=0.03, epochs=30)
    await bed.event(GroupStarted, "j1", seconds=40)
    pids = [await bed.worker_pid("j1", index) for index in range(2)]
    bed.kill()
    before = len(applied(bed))
    await asyncio.sleep(2.0)
    assert len(applied(bed)) > before + 10  # nobody waits for execution
    bed.start()
    epoch = await bed.resize("j1", 2, 3)
    grown = await bed.event(GroupChanged, "j1", seconds=40)
    assert (grown.workers, grown.epoch) == (3, epoch)
    assert [await bed.worker_pid("j1", index) for index in range(2)] == pids
    ended = await bed.event(GroupEnded, "j1", seconds=90)
    assert ended.outcome is AttemptOutcome.SUCCEEDED
    assert len(await bed.events(GroupStarted, "j1")) == 1
    assert len(await bed.members("j1")) == 3
    assert_each_step_once(bed)


async def test_job_that_ends_in_the_outage_has_succeeded(bed: ExecutionBed) -> None:
    await start_digits(bed, 2, delay=0.05, epochs=3)
    await bed.event(GroupStarted, "j1", seconds=40)
    pids = [await bed.worker_pid("j1", index) for index in range(2)]
    bed.kill()
    for _ in range(400):
        if not any(is_alive(pid) for pid in pids):
            break
        await asyncio.sleep(0.05)
    assert not any(is_alive(pid) for pid in pids)
    bed.start()
    ended = await bed.event(GroupEnded, "j1", seconds=30)
    assert (ended.outcome, ended.exit_code, ended.step) == (AttemptOutcome.SUCCEEDED, 0, 45)


async def test_evicted_job_goes_on_from_its_checkpoint(bed: ExecutionBed) -> None:
    await start_digits(bed, 2, delay=0.02, epochs=12)
    await bed.event(GroupStarted, "j1", seconds=40)
    await steps(bed, 30)
    await bed.evict("j1")
    ended = await bed.event(GroupEnded, "j1", seconds=30)
    assert ended.outcome is AttemptOutcome.EVICTED
    done = len(applied(bed))
    await bed.grant("j1", 1, attempt=2)
    again = await bed.event(GroupStarted, "j1", number=2, seconds=40)
    assert again.resumed_from is not None
    assert again.resumed_from.step == done
    assert again.steps_dropped == 0
    assert await bed.events(Checkpointed, "j1")
    ended = await bed.event(GroupEnded, "j1", number=2, seconds=60)
    assert ended.outcome is AttemptOutcome.SUCCEEDED
    assert_each_step_once(bed)


async def test_exception_in_a_worker_is_the_jobs_failure(bed: ExecutionBed) -> None:
    script = bed.state / "broken.py"
    script.write_text(
        Path(DIGITS)
        .read_text()
        .replace("scores = model", "assert step.index < 8 or job.rank\n            scores = model")
    )
    await bed.submit("j1", mode=Mode.LIVE, script=str(script), args=("--step-delay", "0.02"))
    await bed.grant("j1", 2)
    ended = await bed.event(GroupEnded, "j1", seconds=60)
    assert (ended.outcome, ended.exit_code) == (AttemptOutcome.FAILED, 1)
    assert any("AssertionError" in line["line"] for line in await bed.log_lines("j1"))
