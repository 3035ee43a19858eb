"""Members that have been in too many groups are exchanged on real trainers, and nothing of the training is lost."""

import asyncio
from collections.abc import Iterator

import pytest

from schemas.events.worker import GroupChanged, GroupEnded, GroupStarted, RoomFreed
from schemas.vocabulary import AttemptOutcome, GroupChangeCause
from shared.testing.postgres import DatabaseServer
from tests.integration.elastic_bed import is_alive
from tests.integration.execution_bed import NAMES, ExecutionBed, running_bed
from tests.integration.test_execution_live import assert_each_step_once, start_digits, steps

SETTINGS = {"member_generations_max": "3", "mark_seconds": "0.05", "gather_seconds": "10"}


@pytest.fixture
def bed(postgres: DatabaseServer) -> Iterator[ExecutionBed]:
    with running_bed(postgres, SETTINGS) as bed:
        yield bed


async def test_worn_members_go_first_and_newcomers_take_their_places(bed: ExecutionBed) -> None:
    job = next(NAMES)
    await start_digits(bed, job, 2, delay=0.03, epochs=60, minimum=2)
    await bed.event(GroupStarted, job, seconds=40)
    for number, (old, new) in enumerate([(2, 3), (3, 2), (2, 3)], start=1):
        await bed.resize(job, old, new, minimum=2)
        await changed(bed, job, number)
    assert [m["ending"] for m in await bed.members(job)] == [None, None, "leaver", None]

    # Workers 0 and 1 have been in four generations. The job shrinks: the first of them goes, not the highest index.
    await bed.resize(job, 3, 2, minimum=2)
    await changed(bed, job, 4)
    assert await endings(bed, job) == {"0/1", "2/1"}
    survivor = await bed.worker_pid(job, 2, 2)

    # It grows: the newcomer takes the place of worker 1 first, then comes another.
    epoch = await bed.resize(job, 2, 3, minimum=2)
    exchange, growth = await changed(bed, job, 5), await changed(bed, job, 6)
    assert (exchange.workers, exchange.exchanged) == (2, (f"{job}/worker/1/1",))
    assert (exchange.epoch, exchange.cause) == (epoch, GroupChangeCause.RESIZED)
    assert (growth.workers, growth.exchanged, growth.cause) == (3, (), GroupChangeCause.MEMBER_REPLACED)
    assert await endings(bed, job) == {"0/1", "2/1", "1/1"}
    assert await bed.worker_pid(job, 2, 2) == survivor
    assert is_alive(survivor)

    rows = {f"{m['index']}/{m['incarnation']}": m for m in await bed.members(job)}
    assert "it has been in more" in rows["0/1"]["exit_reason"]
    assert "exchanged for a newcomer: it has been in more than 3 generations" in rows["1/1"]["exit_reason"]
    assert [rows[each]["exit_code"] for each in ("0/1", "1/1", "2/1")] == [0, 0, 0]
    assert [freed.epoch for freed in await bed.events(RoomFreed, job)] == [2, 3, 4, 5, 6]
    changes = await bed.events(GroupChanged, job)
    assert min(change.workers for change in changes) == 2, "never below the minimum"
    assert not [change.lost for change in changes if change.lost]
    done = await bed.evict(job)
    ended = await bed.event(GroupEnded, job, seconds=40)
    assert (ended.outcome, done) == (AttemptOutcome.EVICTED, 7)
    assert_each_step_once(bed, job)


async def changed(bed: ExecutionBed, job: str, number: int) -> GroupChanged:
    """The so many-th change of the group, once its members have had the time to tell how many they have been in."""
    found = await bed.event(GroupChanged, job, number=number, seconds=40)
    await steps(bed, job, found.step + 5)
    await asyncio.sleep(0.3)
    return found


async def endings(bed: ExecutionBed, job: str) -> set[str]:
    return {f"{m['index']}/{m['incarnation']}" for m in await bed.members(job) if m["ending"] is not None}
