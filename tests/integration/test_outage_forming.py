"""Execution is killed while a group is half formed: it falls back or goes on, and nobody is replaced needlessly.

Ten jobs grow from two to three workers and are held at five moments of that, all over one outage. In half of them the
newcomer is killed meanwhile. Three more shrink from three to two, and one of their leavers is killed.
"""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest
from integration.elastic_bed import is_alive
from integration.execution_bed import ExecutionBed, running_bed
from integration.gated_training import GatedJob

from schemas.events.worker import GroupChanged, RoomFreed
from schemas.vocabulary import GroupChangeCause
from shared.testing.postgres import DatabaseServer

MOMENTS = {
    "not_joined": "join-2-1",
    "forming": "forming-2-1",
    "formed": "world-2",
    "swapped": "world-3-1",
    "stepped_once": "world-3-2",
}
"""By name, the gate that holds it there."""
SHRINKS = {"leaves_formed": "world-3", "leaves_swapped": "world-2-1"}
CASES = [f"{moment}-{fate}" for moment in MOMENTS for fate in ("lives", "dies")]
LEAVING = ["leaves_formed-lives", "leaves_formed-dies", "leaves_swapped-lives"]


@pytest.fixture(scope="module")
def jobs(postgres: DatabaseServer) -> Iterator[dict[str, GatedJob]]:
    """After the outage: execution is back, and the gates are open."""
    with running_bed(postgres, {"slots": "64", "silent_seconds": "60"}) as bed:
        jobs = {case: GatedJob(bed, bed.state / "gates" / case, delay=0.25) for case in CASES}
        jobs |= {case: GatedJob(bed, bed.state / "gates" / case, delay=0.25, workers=3) for case in LEAVING}
        asyncio.run(go_through_the_outage(bed, jobs))
        yield jobs


async def go_through_the_outage(bed: ExecutionBed, jobs: dict[str, GatedJob]) -> None:
    async with asyncio.TaskGroup() as group:
        for case, job in jobs.items():
            group.create_task(come_to_the_moment(job, case.split("-")[0]))
    bed.kill()
    for case, job in jobs.items():
        if case.endswith("dies"):
            os.kill(job.pid(2), signal.SIGKILL)
        elif case.startswith("forming"):
            os.kill(job.pid(2), signal.SIGCONT)
    await asyncio.sleep(1.0)
    steps = {case: max(job.applied()) for case, job in jobs.items()}
    for case, job in jobs.items():
        job.open((MOMENTS | SHRINKS)[case.split("-")[0]])
    async with asyncio.TaskGroup() as group:  # training goes on without execution
        for case, job in jobs.items():
            if case != "leaves_formed-dies":  # a group has lost one of its own: it holds its state
                group.create_task(job.steps_beyond(steps[case] + 3))
    bed.start()


async def come_to_the_moment(job: GatedJob, moment: str) -> None:
    gate = (MOMENTS | SHRINKS)[moment]
    await job.begin()
    job.close(gate)
    if moment in ("formed", "leaves_formed"):
        await job.at(gate, "0-1", "1-1")
    await job.bed.resize(job.name, job.workers, 2 if moment in SHRINKS else 3)
    match moment:
        case "forming":
            await job.until(
                lambda: job.pid(2) is not None and state_of(job.pid(2)) == "T", "the newcomer stands still"
            )
        case "formed" | "leaves_formed":
            await job.at("formed-2", "0-1", "1-1", "2-1")
        case "leaves_swapped":
            await job.at(gate, "0-1", "1-1")
        case "not_joined":
            await job.at(gate, "2-1")
        case _:
            await job.at(gate, "0-1", "1-1", "2-1")


def state_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("moment", MOMENTS)
async def test_nobody_is_replaced_where_nobody_died(jobs: dict[str, GatedJob], moment: str) -> None:
    job = jobs[f"{moment}-lives"]
    pids = job.pids(0, 1, 2)
    await job.is_whole(3)
    job.assert_alive(pids)
    changes = await job.bed.events(GroupChanged, job.name)
    assert [(c.workers, c.cause, c.lost) for c in changes] == [(3, GroupChangeCause.RESIZED, ())]
    assert await job.incarnations() == {0: 1, 1: 1, 2: 1}
    job.assert_each_step_once()


@pytest.mark.parametrize("moment", MOMENTS)
async def test_only_the_newcomer_that_died_is_replaced(jobs: dict[str, GatedJob], moment: str) -> None:
    job = jobs[f"{moment}-dies"]
    pids = job.pids(0, 1)
    await job.is_whole(3)
    job.assert_alive(pids)
    assert not is_alive(job.pid(2))
    assert is_alive(job.pid(2, 2))
    assert await job.lost() == [f"{job.name}/worker/2/1"]
    assert await job.incarnations() == {0: 1, 1: 1, 2: 2}
    job.assert_each_step_once()


@pytest.mark.parametrize("case", LEAVING)
async def test_a_shrink_is_carried_through_and_answered_once(jobs: dict[str, GatedJob], case: str) -> None:
    job = jobs[case]
    pids = job.pids(0, 1)
    await job.is_whole(2)
    freed = await job.bed.event(RoomFreed, job.name)
    assert [count.members for count in freed.held] == [2]
    job.assert_alive(pids)
    assert not is_alive(job.pid(2))
    assert await job.incarnations() == {0: 1, 1: 1, 2: 1}, "nobody is started in the leaver's place"
    changes = await job.bed.events(GroupChanged, job.name)
    assert [(c.workers, c.lost) for c in changes] == [(2, ())], "it had been asked to go, however it went"
    assert len(await job.bed.events(RoomFreed, job.name)) == 1
    job.assert_each_step_once()
