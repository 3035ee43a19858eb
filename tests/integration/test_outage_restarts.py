"""Execution dies at its own worst moments: in a drain, twice in a row, below a minimum, around a start."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from integration.elastic_bed import ZygoteBed, is_alive
from integration.execution_bed import ExecutionBed, running_bed
from integration.gated_training import GatedJob

from schemas.events.worker import GroupEnded, GroupStarted, StartFailed
from schemas.vocabulary import AttemptOutcome, Attribution
from shared.testing.postgres import DatabaseServer

RECOVER_SECONDS = 4.0
GRACE_SECONDS = 2.0
LIMITS = {"recover_seconds": str(RECOVER_SECONDS), "slots": "64"}


@pytest.fixture(scope="module")
def bed(postgres: DatabaseServer) -> Iterator[ExecutionBed]:
    with running_bed(postgres, LIMITS) as bed:
        yield bed


@pytest.fixture
def zygote(bed: ExecutionBed) -> Iterator[ZygoteBed]:
    """For a test that makes it stand still."""
    assert bed.zygote is not None
    yield bed.zygote
    bed.zygote.process.send_signal(signal.SIGCONT)


async def restart(bed: ExecutionBed, *, after: float = 0.0) -> None:
    bed.kill()
    await asyncio.sleep(after)
    bed.start()
    await bed.ready()


async def test_below_its_minimum_a_group_has_its_time_of_execution_not_of_the_clock(
    bed: ExecutionBed, tmp_path: Path
) -> None:
    """Paused, the allocation kept, and whole again: an outage longer than the deadline does not count."""
    job = GatedJob(bed, tmp_path)
    await job.begin(minimum=2)
    pids = job.pids(0)
    job.close("join-1-2")
    os.kill(job.pid(1), signal.SIGKILL)
    await job.at("join-1-2", "1-2")
    step = max(job.applied())
    await restart(bed, after=RECOVER_SECONDS + 0.5)
    assert max(job.applied()) == step, "paused"
    assert await bed.events(GroupEnded, job.name) == []
    job.open("join-1-2")
    await job.is_whole(2)
    job.assert_alive(pids)
    assert await job.incarnations() == {0: 1, 1: 2}
    job.assert_each_step_once()
    await job.end()


async def test_past_its_deadline_it_ends_as_a_failure_of_the_platform_and_starts_anew_from_its_checkpoint(
    bed: ExecutionBed, tmp_path: Path
) -> None:
    job = GatedJob(bed, tmp_path)
    await job.begin(minimum=2, checkpoint_every_steps=10)
    await job.steps_beyond(12)
    began = time.monotonic()
    job.close("join")
    os.kill(job.pid(1), signal.SIGKILL)
    ended = await bed.event(GroupEnded, job.name, seconds=RECOVER_SECONDS + 15)
    assert time.monotonic() - began > RECOVER_SECONDS
    assert (ended.outcome, ended.attributed_to) == (AttemptOutcome.FAILED, Attribution.PLATFORM)
    assert "minimum" in ended.reason
    assert not any(is_alive(job.pid(*which)) for which in ((0,), (1,), (1, 2)))
    job.open("join")
    await bed.grant(job.name, 2, minimum=2, attempt=2)
    again = await bed.event(GroupStarted, job.name, number=2, seconds=40)
    assert again.resumed_from is not None
    assert again.resumed_from.step >= 10
    assert again.resumed_from.step + again.steps_dropped == ended.step, "what is lost is said"
    await job.steps_beyond(ended.step + 3)
    await bed.evict(job.name, attempt=2)
    await bed.event(GroupEnded, job.name, number=2, seconds=30)


async def test_two_restarts_in_the_middle_of_a_drain_end_it_once(bed: ExecutionBed, tmp_path: Path) -> None:
    """A script that does not come to its boundary gets its grace, and not one second for each restart more."""
    job = GatedJob(bed, tmp_path)
    await job.begin()
    job.close("world-2")
    await job.at("world-2", "0-1", "1-1")
    pids = job.pids(0, 1)
    await bed.evict(job.name, grace=GRACE_SECONDS)

    async def is_draining() -> bool:
        return {m["ending"] for m in await bed.members(job.name)} == {"attempt_over"}

    await bed.until(is_draining, 10, "draining")
    await restart(bed)
    await restart(bed)
    began = time.monotonic()
    ended = await bed.event(GroupEnded, job.name, seconds=GRACE_SECONDS + 10)
    assert ended.outcome is AttemptOutcome.EVICTED
    assert not any(is_alive(pid) for pid in pids.values())
    await restart(bed)
    assert time.monotonic() - began < GRACE_SECONDS + 10
    await bed.until(lambda: says_nothing_more(bed), 10)
    assert len(await bed.events(GroupEnded, job.name)) == 1
    assert [m["state"] for m in await bed.members(job.name)] == ["gone", "gone"]


async def says_nothing_more(bed: ExecutionBed) -> bool:
    await asyncio.sleep(1.0)
    return True


async def test_two_restarts_in_a_row_while_a_worker_dies(bed: ExecutionBed, tmp_path: Path) -> None:
    job = GatedJob(bed, tmp_path, workers=3)
    await job.begin()
    pids = job.pids(0, 1)
    bed.kill()
    os.kill(job.pid(2), signal.SIGKILL)
    bed.start()
    await job.until(lambda: "membership_listens" in bed.log, "it begins to hear its trainers")
    await restart(bed)
    await job.is_whole(3)
    job.assert_alive(pids)
    assert await job.incarnations() == {0: 1, 1: 1, 2: 2}
    job.assert_each_step_once()
    await job.end()


async def test_killed_between_the_commit_of_an_intent_and_the_fork(bed: ExecutionBed, tmp_path: Path) -> None:
    """The zygote is not to be found meanwhile: the member is a row alone when execution dies."""
    job = GatedJob(bed, tmp_path)
    link = bed.state / "zygote.sock"
    away = link.rename(bed.state / "zygote.away")
    await job.begin(trains=False)
    await bed.until(lambda: bed.members(job.name), 20, "the intents")
    bed.kill()
    assert job.pid(0) is None
    away.rename(link)
    bed.start()
    await job.trains()
    assert await job.incarnations() == {0: 1, 1: 1}
    assert await bed.events(StartFailed, job.name) == []
    await job.end()


async def test_killed_between_the_request_and_the_record_of_a_process(
    bed: ExecutionBed, zygote: ZygoteBed, tmp_path: Path
) -> None:
    """The request lies with a zygote that stands still; the next execution asks again: one process comes of it."""
    job = GatedJob(bed, tmp_path, workers=1)
    zygote.process.send_signal(signal.SIGSTOP)
    await job.begin(trains=False)
    await bed.until(lambda: bed.members(job.name), 20, "the intent")
    await asyncio.sleep(0.5)  # more than it takes to ask
    await restart(bed)
    await asyncio.sleep(0.5)
    zygote.process.send_signal(signal.SIGCONT)
    await job.trains()
    assert await job.incarnations() == {0: 1}
    assert workers_below(zygote, job) == [job.pid(0)], "one process, of one of the two requests"
    await job.end()


def workers_below(zygote: ZygoteBed, job: GatedJob) -> list[int]:
    """Living processes whose log is this job's, whoever their parent is."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            log = str((entry / "fd" / "1").readlink())
        except OSError:
            continue
        if f"/run/{job.name}/" in log and "tide-shim" not in (entry / "comm").read_text():
            found.append(int(entry.name))
    return found
