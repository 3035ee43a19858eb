"""Execution is dead for longer than any limit that runs while it is there, and much happens to its jobs meanwhile.

Limits are the defaults: 0.25 s to reconnect, 5 s to rejoin, 15 s of silence. All jobs go through one outage.
"""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest
from integration.execution_bed import ExecutionBed, running_bed
from integration.gated_training import GatedJob

from schemas.events.worker import GroupChanged, GroupEnded, GroupStarted
from schemas.vocabulary import AttemptOutcome, Attribution, GroupChangeCause
from services.execution.settings import ExecutionSettings
from shared.testing.postgres import DatabaseServer

OUTAGE_SECONDS = 17.0
LIMITS = ("reconnect_seconds_max", "rejoin_seconds", "silent_seconds", "gather_seconds")
WORKERS = {
    "one_dies": 3,
    "below_minimum": 2,
    "all_die": 2,
    "all_die_without_a_checkpoint": 2,
    "one_and_its_shim_die": 2,
    "stands_still": 2,
    "evaluates": 2,
    "finishes": 2,
    "is_left_alone": 2,
}


@pytest.fixture(scope="module")
def jobs(postgres: DatabaseServer) -> Iterator[dict[str, GatedJob]]:
    """Execution has just come back."""
    defaults = {limit: str(ExecutionSettings.model_fields[limit].default) for limit in LIMITS}
    assert max(map(float, defaults.values())) < OUTAGE_SECONDS
    with running_bed(postgres, {"slots": "64", **defaults}) as bed:
        jobs = {case: GatedJob(bed, bed.state / "gates" / case, workers=n, delay=0.2) for case, n in WORKERS.items()}
        asyncio.run(go_through_the_outage(bed, jobs))
        yield jobs


async def go_through_the_outage(bed: ExecutionBed, jobs: dict[str, GatedJob]) -> None:
    jobs["finishes"].steps = 30
    async with asyncio.TaskGroup() as group:
        for case, job in jobs.items():
            minimum = 2 if case in ("below_minimum", "all_die") else 1
            every = 5 if case == "all_die" else 1_000_000
            group.create_task(job.begin(minimum=minimum, checkpoint_every_steps=every))
    await jobs["all_die"].steps_beyond(8)
    jobs["evaluates"].close("evaluating-1-1")
    await jobs["evaluates"].at("evaluating-1-1", "1-1")
    bed.kill()
    for case, index in (("one_dies", 0), ("below_minimum", 1), ("all_die", 0), ("all_die", 1)):
        os.kill(jobs[case].pid(index), signal.SIGKILL)
    for index in (0, 1):
        os.kill(jobs["all_die_without_a_checkpoint"].pid(index), signal.SIGKILL)
    shim = bed.record(jobs["one_and_its_shim_die"].name, 1)["shim_pid"]
    os.kill(shim, signal.SIGKILL)
    os.kill(jobs["one_and_its_shim_die"].pid(1), signal.SIGKILL)
    os.kill(jobs["stands_still"].pid(1), signal.SIGSTOP)
    await asyncio.sleep(OUTAGE_SECONDS)
    os.kill(jobs["stands_still"].pid(1), signal.SIGCONT)
    jobs["evaluates"].open("evaluating-1-1")
    bed.start()


@pytest.mark.parametrize("case", ["one_dies", "below_minimum", "one_and_its_shim_die"])
async def test_the_dead_one_alone_is_replaced_and_no_step_is_lost(jobs: dict[str, GatedJob], case: str) -> None:
    job = jobs[case]
    dead = 0 if case == "one_dies" else 1
    others = [index for index in range(job.workers) if index != dead]
    pids = job.pids(*others)
    await job.is_whole(job.workers)
    job.assert_alive(pids)
    assert await job.incarnations() == {dead: 2, **dict.fromkeys(others, 1)}
    assert await job.lost() == [f"{job.name}/worker/{dead}/1"]
    changes = await job.bed.events(GroupChanged, job.name)
    assert changes[-1].cause is GroupChangeCause.MEMBER_REPLACED or changes[0].cause is GroupChangeCause.MEMBER_LOST
    held = max(line["step"] for line in job.ledger() if line["k"] == "waiting")
    assert changes[0].step >= held, "the survivors' state goes on"
    await job.steps_beyond(held + 5)
    job.assert_each_step_once()


async def test_the_exit_that_its_shim_did_not_see_is_unknown_or_a_kill_never_success(
    jobs: dict[str, GatedJob],
) -> None:
    job = jobs["one_and_its_shim_die"]
    await job.is_whole(2)
    gone = next(m for m in await job.bed.members(job.name) if (m["index"], m["incarnation"]) == (1, 1))
    assert gone["exit_code"] in (None, -9)
    assert gone["attributed_to"] == Attribution.PLATFORM.value


async def test_when_all_have_died_the_attempt_goes_on_from_the_newest_checkpoint(jobs: dict[str, GatedJob]) -> None:
    job = jobs["all_die"]
    await job.is_whole(2)
    assert await job.incarnations() == {0: 2, 1: 2}
    assert not await job.bed.events(GroupEnded, job.name)
    resumed = [line for line in job.ledger() if line["k"] == "adopted" and line["source"] == "checkpoint"]
    assert resumed
    assert all(line["step"] >= 5 and line["step"] % 5 == 0 for line in resumed)
    before = [s for s, g in job.applied().items() if 1 in g]
    assert max(before) - resumed[0]["step"] < 5, "of a line with a checkpoint every 5 steps at most 5 are lost"


async def test_when_all_have_died_without_a_checkpoint_the_attempt_is_the_platforms_failure(
    jobs: dict[str, GatedJob],
) -> None:
    job = jobs["all_die_without_a_checkpoint"]
    ended = await job.bed.event(GroupEnded, job.name, seconds=30)
    assert (ended.outcome, ended.attributed_to) == (AttemptOutcome.FAILED, Attribution.PLATFORM)
    assert "no checkpoint" in ended.reason
    applied = job.applied()
    assert all(len(generations) == 1 for generations in applied.values()), "nobody began anew at step 0"
    assert not [m for m in await job.bed.members(job.name) if m["state"] != "gone"]


@pytest.mark.parametrize("case", ["stands_still", "evaluates", "is_left_alone"])
async def test_nobody_is_replaced_where_nobody_died(jobs: dict[str, GatedJob], case: str) -> None:
    job = jobs[case]
    pids = job.pids(0, 1)
    step = max(job.applied())
    await job.steps_beyond(step + 5)
    job.assert_alive(pids)
    assert await job.incarnations() == {0: 1, 1: 1}
    assert await job.lost() == []
    job.assert_each_step_once()


async def test_training_did_not_pause_while_nobody_was_there(jobs: dict[str, GatedJob]) -> None:
    """Whom nothing happened to made its steps, about five a second, and most of them in the outage."""
    job = jobs["is_left_alone"]
    assert len(job.applied()) > OUTAGE_SECONDS / 0.2 / 2
    assert len(await job.bed.events(GroupStarted, job.name)) == 1
    assert await job.bed.events(GroupChanged, job.name) == []


async def test_who_finished_in_the_outage_has_succeeded(jobs: dict[str, GatedJob]) -> None:
    job = jobs["finishes"]
    ended = await job.bed.event(GroupEnded, job.name, seconds=30)
    assert (ended.outcome, ended.exit_code, ended.step) == (AttemptOutcome.SUCCEEDED, 0, 30)
    assert [m["exit_code"] for m in await job.bed.members(job.name)] == [0, 0]
