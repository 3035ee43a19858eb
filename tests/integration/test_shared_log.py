"""The Postgres carrier by itself: its query plan, wake-ups across processes, retention, errors, the door."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest
from sqlalchemy import bindparam, text

from schemas.envelope import START, Draft
from schemas.events.worker import RoomFreed
from schemas.registry import EventData
from schemas.vocabulary import ServiceName, Topic
from shared.bus.log import Partition, Position
from shared.bus.postgres import READ, end_of_log, read_page, trimmed_until
from shared.bus.retention import delete_old_rows
from shared.bus.wakeups import Wakeups
from shared.errors import Conflict, Poison, Unavailable
from shared.testing.clock import FakeClock
from shared.testing.harness import draft, equipped, publish, read_log, read_rows
from shared.testing.postgres import FreshDatabase

WORKER = Partition(Topic.WORKER)


def freed(number: int) -> Draft[EventData]:
    return draft(RoomFreed(epoch=number, held=(), capacity_revision=0))


def fill(database: FreshDatabase, rows: int) -> None:
    database.psql(
        "insert into log.outbox (time, topic, key, type, headers, payload) select now(), case when n % 2 = 0 then "
        f"'tide.worker.v1' else 'tide.job.v1' end, 'j', 't', '', '' from generate_series(1, {rows}) n"
    )


async def test_the_reader_uses_the_index_and_sorts_nothing(database: FreshDatabase) -> None:
    fill(database, 20_000)
    database.psql("analyze log.outbox")
    explain = text(f"explain (costs off) {READ.text}").bindparams(
        *[bindparam(key, type_=READ._bindparams[key].type) for key in ("xid", "id", "topics", "limit")]
    )
    async with database.engine(ServiceName.SCALING) as engine, engine.connect() as connection:
        parameters = {"xid": 5, "id": 7, "topics": ["tide.worker.v1"], "limit": 100}
        plan = "\n".join((await connection.execute(explain, parameters)).scalars())
    assert "Index Scan using outbox_pkey" in plan
    assert "Index Cond: ((ROW(xid, id) > ROW(" in plan
    assert "(xid < pg_snapshot_xmin(pg_current_snapshot()))" in plan
    assert "Sort" not in plan
    assert "Seq Scan" not in plan


@asynccontextmanager
async def carrying(url: str) -> AsyncIterator[Wakeups]:
    wakeups, stopping = Wakeups(url), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(wakeups.run(stopping))
        yield wakeups
        stopping.set()


async def until_listening(database: FreshDatabase, count: int) -> None:
    query = "select count(*) as n from pg_stat_activity where datname = current_database() and query ilike 'listen%'"
    while (await read_rows(database, query))[0]["n"] < count:
        await asyncio.sleep(0.01)


async def test_a_wakeup_reaches_another_process_and_survives_a_lost_connection(database: FreshDatabase) -> None:
    """Two hubs, as two processes have them; the server cuts their connections in between."""
    async with carrying(database.url) as here, carrying(database.url) as there:
        await until_listening(database, 2)
        for _ in range(2):
            seen = await there.wait(seen=-1, seconds=0)
            waiting_since = time.monotonic()
            here.published()
            assert await there.wait(seen=seen, seconds=5) > seen
            assert time.monotonic() - waiting_since < 2.5
            database.psql(
                "select pg_terminate_backend(pid) from pg_stat_activity "
                "where application_name = 'tidewright-wakeups' and datname = current_database()"
            )
            await asyncio.sleep(0.1)
            await until_listening(database, 2)


async def test_many_wakeups_are_one_notification(database: FreshDatabase) -> None:
    async with carrying(database.url) as here, carrying(database.url) as there:
        await until_listening(database, 2)
        before = await there.wait(seen=-1, seconds=0)
        for _ in range(1_000):
            here.published()
            await asyncio.sleep(0)
        await asyncio.sleep(0.2)
        assert 1 <= await there.wait(seen=-1, seconds=0) - before < 100


async def test_waiting_ends_at_its_time_and_misses_nothing_that_came_before(database: FreshDatabase) -> None:
    wakeups = Wakeups(database.url)
    seen = await wakeups.wait(seen=-1, seconds=0)
    assert await wakeups.wait(seen=seen, seconds=0.01) == seen
    wakeups.published()
    assert await wakeups.wait(seen=seen, seconds=60) == seen + 1


async def test_the_services_wait_does_not_sleep_through_what_is_published_while_it_reads(
    database: FreshDatabase, clock: FakeClock
) -> None:
    async with equipped(database, ServiceName.INTAKE, clock=clock) as intake:
        await intake.context.wait_for_events(0)
        intake.wakeups.published()
        async with asyncio.timeout(1):
            await intake.context.wait_for_events(60)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await intake.context.wait_for_events(60)


# -- retention ------------------------------------------------------------------------------------------------


async def test_retention_deletes_what_is_old_and_behind_every_reader(database: FreshDatabase) -> None:
    clock = FakeClock()
    for number in range(4):
        await publish(database, ServiceName.EXECUTION, freed(number), clock=clock)
        clock.advance(3600)
    events = await read_log(database)
    async with database.engine(ServiceName.SCALING) as engine:
        everything_is_old = clock.now() + timedelta(days=1)
        assert await delete_old_rows(engine, before=everything_is_old) == 0, "without readers nothing goes"
        for reader, at in (("scaling", events[2].sequence), ("intake", events[1].sequence)):
            database.psql(f"insert into log.position values ('{reader}', 'tide.worker.v1', 0, '{at.xid}', {at.id})")
        assert await delete_old_rows(engine, before=events[0].time) == 0
        assert await delete_old_rows(engine, before=everything_is_old, limit=1) == 1
        async with engine.connect() as connection:
            assert await trimmed_until(connection) == events[0].sequence
        assert await delete_old_rows(engine, before=everything_is_old) == 1
        assert await delete_old_rows(engine, before=everything_is_old) == 0
    assert [event.sequence for event in await read_log(database)] == [event.sequence for event in events[2:]]


async def test_one_process_at_a_time_does_the_retention(database: FreshDatabase) -> None:
    await publish(database, ServiceName.EXECUTION, freed(1))
    (event,) = await read_log(database)
    sequence = event.sequence
    database.psql(f"insert into log.position values ('r', 't', 0, '{sequence.xid}', {sequence.id})")
    before = event.time + timedelta(days=1)
    async with database.engine(ServiceName.SCALING) as engine, database.engine() as other, other.begin() as holding:
        await holding.execute(text("select pg_advisory_xact_lock(:key)"), {"key": 0x7469_6466})
        assert await delete_old_rows(engine, before=before) == 0
        await holding.rollback()
        assert await delete_old_rows(engine, before=before) == 1


# -- errors and the door --------------------------------------------------------------------------------------


async def test_a_lost_race_at_the_door_is_a_conflict_and_publishes_nothing(
    database: FreshDatabase, clock: FakeClock
) -> None:
    database.psql("create table intake.race (version int); insert into intake.race values (0)")
    update = text("update intake.race set version = version + 1")
    async with equipped(database, ServiceName.INTAKE, clock=clock) as intake:

        async def both() -> None:
            async with intake.context.transaction() as first:
                await first.execute(text("select version from intake.race"))
                async with intake.context.transaction() as second:
                    await second.execute(update)
                    second.publish(freed(2))
                first.publish(freed(1))
                await first.execute(update)

        with pytest.raises(Conflict):
            await both()
    assert [event.data for event in await read_log(database)] == [freed(2).data]


@pytest.mark.parametrize(
    ("statement", "error"),
    [
        ("select cast('x' || chr(0) as text)", Poison),
        ('select \'{"a": "\\u0000"}\'::jsonb', Poison),
        ("insert into scaling.t values (null)", Poison),
        ("insert into scaling.t values (1), (1)", Conflict),
        ("select 1; kill", Unavailable),
        ("set local statement_timeout = 5; select pg_sleep(1)", Unavailable),
        ("set local lock_timeout = 5; update log.lease set term = 1", Unavailable),
        ("set local idle_in_transaction_session_timeout = 5", Unavailable),
    ],
)
async def test_the_drivers_errors_become_ours(
    database: FreshDatabase, clock: FakeClock, statement: str, error: type[Exception]
) -> None:
    database.psql("create table scaling.t (n int primary key)")
    database.psql("insert into log.lease values ('x', 0, 'o', 1, now(), null, 'h', 1, 1)")

    async def run() -> None:
        async with scaling.context.transaction() as tx:
            for part in statement.split("; "):
                if part == "kill":
                    pid = (await tx.execute(text("select pg_backend_pid()"))).scalar()
                    database.psql(f"select pg_terminate_backend({pid})")
                await tx.execute(text(part.replace(":", "\\:")))
            if "idle" in statement:
                await asyncio.sleep(0.1)

    async with equipped(database, ServiceName.SCALING, clock=clock) as scaling, database.engine() as other:
        async with other.begin() as holding:
            if "lock_timeout" in statement:
                await holding.execute(text("lock table log.lease"))
            with pytest.raises(error):
                await run()
        async with scaling.context.transaction() as tx:
            await tx.execute(text("select 1"))


async def test_our_own_mistakes_pass_unchanged(database: FreshDatabase, clock: FakeClock) -> None:
    from sqlalchemy.exc import ProgrammingError

    async with equipped(database, ServiceName.SCALING, clock=clock) as scaling:
        for statement in ("selekt 1", "delete from log.outbox"):
            with pytest.raises(ProgrammingError):
                async with scaling.context.transaction() as tx:
                    await tx.execute(text(statement))


async def test_what_reads_cannot_write(database: FreshDatabase, clock: FakeClock) -> None:
    database.psql("create table scaling.t (n int)")
    async with equipped(database, ServiceName.SCALING, clock=clock) as scaling:
        with pytest.raises(Unavailable, match="read-only"):
            async with scaling.context.read() as connection:
                await connection.execute(text("insert into scaling.t values (1)"))


async def test_a_pool_that_is_used_up_is_unavailable_and_comes_back(
    database: FreshDatabase, clock: FakeClock
) -> None:
    from shared.settings import ServiceSettings

    settings = ServiceSettings.of(ServiceName.SCALING).model_copy(
        update={"pool_connections_max": 2, "pool_wait_seconds": 0.05}
    )
    async with equipped(database, ServiceName.SCALING, clock=clock, settings=settings) as scaling:
        async with scaling.context.read(), scaling.context.read():
            with pytest.raises(Unavailable, match="became free"):
                async with scaling.context.read():
                    pass
        async with scaling.context.read() as connection:
            assert (await connection.execute(text("select 1"))).scalar() == 1


async def test_the_end_of_the_log_is_behind_everything_that_is_decided(database: FreshDatabase) -> None:
    await publish(database, ServiceName.EXECUTION, freed(1))
    async with database.engine() as engine, engine.connect() as connection:
        end = await end_of_log(connection)
        assert (await read_page(connection, {WORKER: Position(START)}, limit=10)).records != ()
        assert (await read_page(connection, {WORKER: Position(end)}, limit=10)).records == ()
        await publish(database, ServiceName.EXECUTION, freed(2))
        assert len((await read_page(connection, {WORKER: Position(end)}, limit=10)).records) == 1
