"""Jobs are cancelled while execution is dead, each at another moment: when it is back, each ends once and wholly."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator

import pytest
from integration.elastic_bed import is_alive
from integration.execution_bed import ExecutionBed, running_bed
from integration.gated_training import GatedJob

from schemas.events.worker import GroupEnded
from schemas.vocabulary import AttemptOutcome
from shared.testing.postgres import DatabaseServer

GRACE_SECONDS = 3.0
MOMENTS = (
    "trains",
    "does_not_come_to_its_boundary",
    "newcomer_not_formed",
    "half_swapped",
    "below_its_minimum",
    "died_in_the_outage",
    "finished_in_the_outage",
    "not_joined",
    "not_admitted",
)


@pytest.fixture(scope="module")
def jobs(postgres: DatabaseServer) -> Iterator[dict[str, GatedJob]]:
    """After the outage; what each was when execution died stands in its name."""
    with running_bed(postgres, {"slots": "64", "silent_seconds": "60"}) as bed:
        jobs = {moment: GatedJob(bed, bed.state / "gates" / moment, delay=0.2) for moment in MOMENTS}
        asyncio.run(go_through_the_outage(bed, jobs))
        yield jobs


async def go_through_the_outage(bed: ExecutionBed, jobs: dict[str, GatedJob]) -> None:
    jobs["finished_in_the_outage"].steps = 20
    async with asyncio.TaskGroup() as group:
        for moment, job in jobs.items():
            group.create_task(come_to(moment, job))
    bed.kill()
    for index in (0, 1):
        os.kill(jobs["died_in_the_outage"].pid(index), signal.SIGKILL)
    finishes = jobs["finished_in_the_outage"]
    finishes.open("step-5")
    await finishes.until(lambda: not any(is_alive(pid) for pid in finishes.pids(0, 1).values()), "it has finished")
    for job in jobs.values():
        await bed.evict(job.name, grace=GRACE_SECONDS)
    bed.start()


async def come_to(moment: str, job: GatedJob) -> None:
    """Until execution may be killed."""
    job.gates.mkdir(parents=True)
    match moment:
        case "not_joined":
            job.close("join")
            await job.begin(trains=False)
            await job.at("join", "0-1", "1-1")
        case "not_admitted":
            job.workers = 1
            await job.begin_without_admission()
        case "does_not_come_to_its_boundary":
            await job.begin()
            job.close("world-2")
            await job.at("world-2", "0-1", "1-1")
        case "newcomer_not_formed":
            await job.begin()
            job.close("join-2-1")
            await job.bed.resize(job.name, 2, 3)
            await job.at("join-2-1", "2-1")
        case "half_swapped":
            job.close("world-3-2")
            await job.begin()
            await job.bed.resize(job.name, 2, 3)
            await job.at("world-3-2", "0-1", "1-1", "2-1")
        case "below_its_minimum":
            await job.begin(minimum=2)
            job.close("join-1-2")
            os.kill(job.pid(1), signal.SIGKILL)
            await job.at("join-1-2", "1-2")
        case "finished_in_the_outage":
            job.close("step-5")
            await job.begin()
        case _:
            await job.begin()


@pytest.mark.parametrize("moment", MOMENTS)
async def test_it_ends_once_and_nothing_is_left(jobs: dict[str, GatedJob], moment: str) -> None:
    job, began = jobs[moment], time.monotonic()
    ended = await job.bed.event(GroupEnded, job.name, seconds=GRACE_SECONDS + 10)
    wanted = AttemptOutcome.SUCCEEDED if moment == "finished_in_the_outage" else AttemptOutcome.EVICTED
    assert ended.outcome is wanted
    assert time.monotonic() - began < GRACE_SECONDS + 10
    members = await job.bed.members(job.name)
    assert {member["state"] for member in members} == {"gone"}
    pids = [job.pid(member["index"], member["incarnation"]) for member in members]
    assert not any(pid is not None and is_alive(pid) for pid in pids)


async def test_none_was_ended_twice_nor_started_again(jobs: dict[str, GatedJob]) -> None:
    """Last: whatever could come late has had its time."""
    for moment, job in jobs.items():
        assert len(await job.bed.events(GroupEnded, job.name)) == 1, moment
        replaced = {1: 2} if moment == "below_its_minimum" else {}
        assert await job.incarnations() == {**dict.fromkeys(await job.incarnations(), 1), **replaced}, moment
        if moment not in ("died_in_the_outage", "not_joined", "not_admitted"):
            job.assert_each_step_once()
