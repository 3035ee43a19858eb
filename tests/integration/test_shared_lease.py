"""Leases: expiry, a dead holder, a crashed service in the same process, the directory."""

import asyncio
import os
import subprocess
import sys

import pytest
from sqlalchemy import text

from schemas.vocabulary import ServiceName
from shared.errors import LeaseLost
from shared.runtime.identity import ProcessIdentity, _start_of, this_process
from shared.settings import ServiceSettings
from shared.testing.clock import FakeClock
from shared.testing.harness import equipped, read_rows
from shared.testing.postgres import FreshDatabase

SERVICE = ServiceName.QUEUEING
HOLD = """
import asyncio, sys
from pathlib import Path
from schemas.vocabulary import ServiceName
from shared.bus.wakeups import Wakeups
from shared.clock import SystemClock
from shared.runtime.context import equip
from shared.settings import ServiceSettings
from shared.telemetry.logs import configure_logging

async def main():
    made = equip(
        ServiceName.QUEUEING, database_url=sys.argv[1], state_directory=Path("/"), signing_key=b"",
        clock=SystemClock(), wakeups=Wakeups(sys.argv[1]), settings=ServiceSettings.of(ServiceName.QUEUEING),
    )
    configure_logging(level="info", log_format="json")
    assert await made.lease.try_acquire(url="http://old:1")
    print("held", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_a_dead_holder_of_this_machine_is_displaced_at_once(database: FreshDatabase, clock: FakeClock) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, database.url], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        async with equipped(database, SERVICE, clock=clock) as other:
            assert not await other.lease.try_acquire(url=None), "the holder lives"
            assert await other.context.directory.url_of(SERVICE) == "http://old:1"
            holder.kill()
            holder.wait()
            assert await other.lease.try_acquire(url="http://new:1")
            assert other.lease.term == 2
            clock.advance(2)
            assert await other.context.directory.url_of(SERVICE) == "http://new:1"
        async with equipped(database, SERVICE, clock=clock) as later:
            assert await later.context.directory.url_of(SERVICE) is None, "a lease that was given up has no address"


async def test_a_holder_on_another_host_or_in_another_pid_namespace_costs_the_whole_lease(
    database: FreshDatabase, clock: FakeClock
) -> None:
    async with equipped(database, SERVICE, clock=clock) as first, equipped(database, SERVICE, clock=clock) as second:
        assert await first.lease.try_acquire(url=None)
        database.psql("update log.lease set host = host || 'x', pid = 1, process_start = 1")
        assert not await second.lease.try_acquire(url=None)
        database.psql("update log.lease set expires_at = now()")
        assert await second.lease.try_acquire(url=None)


async def test_a_service_that_crashed_in_this_process_is_displaced_by_its_successor(
    database: FreshDatabase, clock: FakeClock
) -> None:
    async with equipped(database, SERVICE, clock=clock) as first, equipped(database, SERVICE, clock=clock) as second:
        assert await first.lease.try_acquire(url=None)
        first.lease._forget()  # the release did not reach the database
        assert await second.lease.try_acquire(url=None)
        assert second.lease.term == 2


async def test_one_of_many_that_ask_at_once_gets_it(database: FreshDatabase, clock: FakeClock) -> None:
    async with equipped(database, SERVICE, clock=clock) as a, equipped(database, SERVICE, clock=clock) as b:
        for _ in range(10):
            async with asyncio.TaskGroup() as group:
                tries = [group.create_task(one.lease.try_acquire(url=None)) for one in (a, b, a, b)]
            assert sum(task.result() for task in tries) == 1
            await a.lease.release()
            await b.lease.release()


async def test_a_renewal_between_look_and_take_wins(database: FreshDatabase, clock: FakeClock) -> None:
    """The taker has seen an expired lease; its holder renews it before the taker's update gets the row."""
    async with equipped(database, SERVICE, clock=clock) as holder, equipped(database, SERVICE, clock=clock) as other:
        assert await holder.lease.try_acquire(url=None)
        database.psql("update log.lease set expires_at = now() - interval '1 second'")
        async with database.engine() as engine, asyncio.TaskGroup() as group, engine.begin() as renewing:
            await renewing.execute(text("update log.lease set expires_at = now() + interval '5 seconds'"))
            take = group.create_task(other.lease.try_acquire(url=None))
            waits = "select count(*) as n from pg_stat_activity where wait_event_type = 'Lock'"
            while (await read_rows(database, waits))[0]["n"] == 0:
                await asyncio.sleep(0.01)
        assert take.result() is False
        assert holder.lease.term == 1


async def test_renewal_keeps_it_and_notices_its_loss(database: FreshDatabase, clock: FakeClock) -> None:
    """Held for as long as the lease is good after the last renewal was sent, by the holder's own clock."""
    settings = ServiceSettings.of(SERVICE).model_copy(update={"lease_seconds": 3600.0, "lease_renew_seconds": 0.01})
    expiry = "select extract(epoch from expires_at) as at from log.lease"
    async with (
        equipped(database, SERVICE, clock=clock, settings=settings) as holder,
        equipped(database, SERVICE, clock=clock, settings=settings) as other,
    ):
        assert await holder.lease.try_acquire(url=None)
        first = (await read_rows(database, expiry))[0]["at"]
        clock.advance(3599)
        assert holder.lease.is_held

        async def watch() -> None:
            while (await read_rows(database, expiry))[0]["at"] <= first:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            clock.advance(3599)
            assert holder.lease.is_held
            async with database.engine() as engine:
                while not await other.lease.try_acquire(url=None):
                    async with engine.begin() as connection:
                        await connection.execute(text("update log.lease set expires_at = now()"))

        async def both() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(holder.lease.run_renewal(asyncio.Event()))
                group.create_task(watch())

        with pytest.raises(ExceptionGroup) as caught:
            await both()
        assert isinstance(caught.value.exceptions[0], LeaseLost)
        assert not holder.lease.is_held


async def test_a_lease_that_ran_out_while_nobody_took_it_is_taken_up_again_under_its_term(
    database: FreshDatabase, clock: FakeClock
) -> None:
    async with equipped(database, SERVICE, clock=clock) as holder:
        assert await holder.lease.try_acquire(url=None)
        clock.advance(60)
        database.psql("update log.lease set expires_at = now() - interval '1 minute'")
        assert not holder.lease.is_held
        await holder.lease._renew()
        assert holder.lease.is_held
        assert await read_rows(database, "select term, expires_at > now() as valid from log.lease") == [
            {"term": 1, "valid": True}
        ]


async def test_a_transaction_inside_a_transaction_is_a_mistake_that_is_told(
    database: FreshDatabase, clock: FakeClock
) -> None:
    async with equipped(database, SERVICE, clock=clock) as holder:
        assert await holder.lease.try_acquire(url=None)
        async with holder.lease.transaction():
            with pytest.raises(AssertionError, match="wait for itself"):
                async with holder.lease.transaction():
                    pass


def test_identity_tells_a_process_from_a_later_one_with_its_pid() -> None:
    own = this_process()
    assert not own.is_gone
    assert ProcessIdentity(host=own.host, pid=own.pid, start=own.start - 1).is_gone
    assert not ProcessIdentity(host="elsewhere", pid=own.pid, start=own.start - 1).is_gone
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    started = _start_of(child)
    assert started is not None
    identity = ProcessIdentity(host=own.host, pid=child, start=started)
    assert not identity.is_gone
    os.close(writing)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert identity.is_gone, "a zombie commits nothing"
    os.waitpid(child, 0)
    os.close(reading)
