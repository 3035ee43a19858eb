"""The projection on a real database: registers, history, job.ended once, snapshots, whatever order topics come in."""

import pytest

from schemas.envelope import START, Draft
from schemas.events.job import JobEnded
from schemas.events.scaling import ScalingProposed
from schemas.vocabulary import DEFAULT_TENANT, Outcome, ServiceName
from services.intake.core.readmodel import topics
from services.intake.handlers import Projection
from services.intake.queries import find_job, load_capacity, load_history, load_queues
from shared.testing.clock import FakeClock
from shared.testing.harness import harness, publish, read_data, read_rows
from tests.unit.intake_builders import (
    closed,
    evicted,
    granted,
    group_changed,
    group_ended,
    group_started,
    make_capacity,
    queue_observed,
    resized,
    waiting,
)

JOB = "j00000000000000000000000001"


def projecting(database, clock):
    return harness(database, ServiceName.INTAKE, lambda context: Projection(), topics(), clock=clock)


async def say(run, service, *data, key=JOB):
    await run.publish(service, *(Draft(key=key, tenant=DEFAULT_TENANT, data=item) for item in data))


async def test_the_story_of_a_job_becomes_history(database, clock):
    async with projecting(database, clock) as run:
        await say(run, ServiceName.QUEUEING, waiting(), granted(epoch=1, workers=1))
        await say(run, ServiceName.EXECUTION, group_started())
        await say(run, ServiceName.SCALING, ScalingProposed(epoch=1, workers=2, gain_per_worker=None, reason="busy"))
        await say(run, ServiceName.QUEUEING, resized(epoch=2, before=1, after=2))
        await say(run, ServiceName.EXECUTION, group_changed(epoch=2, generation=2, workers=2), group_ended())
        await say(run, ServiceName.QUEUEING, closed(epoch=3))
        await run.drain()
        async with run.context.read() as connection:
            entries, is_more = await load_history(connection, JOB, after=START, limit=100)
    assert not is_more
    assert [entry.type.split(".")[2] for entry in entries] == [
        "waiting",
        "granted",
        "group_started",
        "proposed",
        "resized",
        "group_changed",
        "group_ended",
        "closed",
        "ended",
    ]
    assert [entry.workers for entry in entries] == [None, 1, 1, 2, 2, 2, 0, 0, None]
    assert entries[4].summary == "Grows from 1 to 2 workers (GREW_PROPOSED): busy."
    assert all(entry.summary.endswith(".") for entry in entries)


async def test_job_ended_is_published_once_with_what_was_used(database):
    clock = FakeClock()
    async with projecting(database, clock) as run:
        await say(run, ServiceName.QUEUEING, granted(epoch=1, workers=2, slots=3))
        clock.advance(10)
        await say(run, ServiceName.QUEUEING, evicted(epoch=2))
        clock.advance(100)
        await say(run, ServiceName.QUEUEING, granted(epoch=3, attempt=2, workers=1))
        clock.advance(5)
        await say(run, ServiceName.QUEUEING, closed(epoch=4, attempt=2, outcome=Outcome.FAILED, exit_code=3))
        await run.drain()
        await say(run, ServiceName.QUEUEING, closed(epoch=4, attempt=2, outcome=Outcome.FAILED, exit_code=3))
        await run.drain()
    [ended] = await read_data(database, JobEnded, JOB)
    assert (ended.outcome, ended.exit_code) == (Outcome.FAILED, 3)
    assert ended.accelerator_seconds == 10 * 2 * 3 + 5


async def test_environment_values_go_with_the_job(database, clock):
    database.psql(f"insert into intake.environments values ('{JOB}', '{{\"A\": \"sesame\"}}'), ('j2', '{{}}')")
    async with projecting(database, clock) as run:
        await say(run, ServiceName.QUEUEING, granted())
        await run.drain()
        assert len(await read_rows(database, "select 1 from intake.environments")) == 2
        await say(run, ServiceName.QUEUEING, closed())
        await run.drain()
    assert await read_rows(database, "select job_id from intake.environments") == [{"job_id": "j2"}]


async def test_a_batch_that_comes_again_changes_nothing(database, clock):
    async with projecting(database, clock) as run:
        await say(run, ServiceName.QUEUEING, granted(), resized(), evicted(epoch=3))
        await say(run, ServiceName.EXECUTION, group_started(), group_ended())
        await run.drain()
        before = await snapshot(database)
        database.psql("delete from log.position where reader = 'intake'")
    async with projecting(database, clock) as run:
        assert await run.drain() > 0
    assert await snapshot(database) == before


@pytest.mark.parametrize("size", [1, 2, 500])
async def test_batches_of_any_size_give_the_same(database, clock, size):
    await publish(database, ServiceName.QUEUEING, *_drafts(granted(), resized(), evicted(epoch=3)))
    await publish(database, ServiceName.EXECUTION, *_drafts(group_started(), group_changed(), group_ended()))
    await publish(database, ServiceName.QUEUEING, *_drafts(granted(epoch=4, attempt=2), closed(epoch=5, attempt=2)))
    async with projecting(database, clock) as run:
        run.consumer._limits = type(run.consumer._limits)(batch_events_max=size)
        await run.drain()
    [row] = await read_rows(database, "select filed_under, allocation->>'attempt' attempt from intake.registers")
    assert row == {"filed_under": "Succeeded", "attempt": "2"}
    assert len(await read_data(database, JobEnded)) == 1


async def test_snapshots_are_replaced_by_their_next(database, clock):
    async with projecting(database, clock) as run:
        await say(
            run, ServiceName.EXECUTION, make_capacity(2, revision=1), make_capacity(4, revision=3), key="cluster"
        )
        await say(run, ServiceName.QUEUEING, queue_observed(head="a"), queue_observed(head="b"), key="default")
        await run.drain()
        await say(run, ServiceName.EXECUTION, make_capacity(8, revision=2), key="cluster")
        await run.drain()
        async with run.context.read() as connection:
            seen = await load_capacity(connection)
            queues = await load_queues(connection, tenant=DEFAULT_TENANT)
    assert seen.observed.revision == 3
    assert queues["default"].observed.head == "b"


async def test_words_that_postgres_cannot_store_do_not_stop_the_projection(database, clock):
    async with projecting(database, clock) as run:
        await say(run, ServiceName.QUEUEING, waiting(detail="a\x00b \\u0000"))
        await run.drain()
        async with run.context.read() as connection:
            [entry], _ = await load_history(connection, JOB, after=START, limit=1)
            assert await find_job(connection, JOB, tenant=DEFAULT_TENANT) is None
    assert "a\ufffdb" in entry.summary
    assert await read_rows(database, "select * from log.quarantine") == []


async def snapshot(database):
    return [
        await read_rows(database, f"select * from intake.{table} order by 1, 2, 3")
        for table in ("registers", "history", "queues")
    ]


def _drafts(*data):
    return [Draft(key=JOB, tenant=DEFAULT_TENANT, data=item) for item in data]
