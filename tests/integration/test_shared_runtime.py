"""The runtime of services, for real: start, standby, loss of the database, failures, ordered stop."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import httpx
import pytest
from sqlalchemy import text

from schemas.envelope import Draft, Event
from schemas.events.worker import RoomFreed
from schemas.registry import EventData
from schemas.vocabulary import ServiceName, Topic
from shared.clock import pause
from shared.db.embedded import EmbeddedPostgres
from shared.db.migrate import migrate
from shared.http import make_app
from shared.runtime.installation import Installation
from shared.runtime.run import run_service
from shared.runtime.service import ServiceContext, ServiceParts, Transaction
from shared.runtime.supervisor import run_all
from shared.testing.harness import TEST_KEY, draft, publish, read_rows
from shared.testing.postgres import FreshDatabase

PATIENCE_SECONDS = 60
INSERT = text("insert into scaling.seen (number) values (:number)")


def freed(number: int) -> Draft[EventData]:
    return draft(RoomFreed(epoch=number, held=(), capacity_revision=0))


@dataclass
class Small:
    """A service that writes down what it reads; the tests give it loops and faults."""

    loops: tuple[Callable[[asyncio.Event], Awaitable[None]], ...] = ()
    during_batch: Callable[[], Awaitable[None]] | None = None
    fails_loading: Callable[[], None] | None = None
    writes: bool = True
    loads: int = 0
    builds: int = 0
    contexts: list[ServiceContext] = field(default_factory=list)
    entered: asyncio.Event = field(default_factory=asyncio.Event)
    leave: asyncio.Event = field(default_factory=asyncio.Event)

    def build(self, context: ServiceContext) -> ServiceParts:
        self.builds += 1
        self.contexts.append(context)
        app = make_app("small", ready=lambda: None, instruments=context.instruments)

        @app.get("/slow")
        async def slow() -> str:
            self.entered.set()
            await self.leave.wait()
            return "done"

        return ServiceParts(handler=self, consumes=frozenset({Topic.WORKER}), app=app, loops=self.loops)

    async def load(self, tx: Transaction) -> None:
        self.loads += 1
        if self.fails_loading:
            self.fails_loading()

    async def on_events(self, batch: Sequence[Event[EventData]], *, tx: Transaction, now: datetime) -> None:
        if self.during_batch:
            await self.during_batch()
        for event in batch:
            assert isinstance(event.data, RoomFreed)
            if self.writes:
                await tx.execute(INSERT, {"number": event.data.epoch})

    def on_committed(self) -> None:
        pass

    def due_seconds(self) -> float | None:
        return None


@dataclass
class Running:
    """One run of ``Small``: its address once it is ready, and how to stop it."""

    stopping: asyncio.Event
    url: asyncio.Future[str]

    async def readyz(self) -> httpx.Response:
        async with httpx.AsyncClient() as client:
            return await client.get(f"{await self.url}/readyz")


@asynccontextmanager
async def running(url: str, small: Small, name: ServiceName = ServiceName.SCALING) -> AsyncIterator[Running]:
    installation = Installation(state_directory=Path("/nonexistent"), database_url=url, signing_key=TEST_KEY)
    run = Running(asyncio.Event(), asyncio.get_running_loop().create_future())

    def ready(url: str) -> None:
        run.url.set_result(url)

    async with asyncio.timeout(PATIENCE_SECONDS), asyncio.TaskGroup() as group:
        group.create_task(run_service(name, small.build, installation, run.stopping, on_ready=ready))
        yield run
        run.stopping.set()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDE_SCALING_LEASE_RENEW_SECONDS", "0.2")
    monkeypatch.setenv("TIDE_SCALING_LEASE_RETRY_SECONDS", "0.05")


@pytest.fixture
def seen(database: FreshDatabase) -> FreshDatabase:
    database.psql("create table scaling.seen (n bigint generated always as identity, number int)")
    return database


async def until(numbers: list[int], database: FreshDatabase) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while [
            row["number"] for row in await read_rows(database, "select number from scaling.seen order by n")
        ] != numbers:
            await asyncio.sleep(0.02)


async def test_a_service_starts_works_and_stops_in_order(seen: FreshDatabase) -> None:
    small = Small()
    async with running(seen.url, small) as run:
        answer = await run.readyz()
        assert answer.json() == {"status": "ready", "role": "active"}
        assert await small.contexts[0].directory.url_of(ServiceName.SCALING) == await run.url
        await publish(seen, ServiceName.EXECUTION, freed(1), freed(2))
        await until([1, 2], seen)
        async with httpx.AsyncClient() as client:
            metrics = (await client.get(f"{await run.url}/metrics")).text
        assert 'tidewright_scaling_handled_events_total{topic="tide.worker.v1"} 2.0' in metrics
        assert "tidewright_scaling_lease_held_info 1.0" in metrics
    assert not small.contexts[0].lease.is_held
    assert await read_rows(seen, "select url, expires_at <= now() as expired from log.lease") == [
        {"url": None, "expired": True}
    ]


async def test_the_batch_in_hand_is_finished_before_the_stop(seen: FreshDatabase) -> None:
    entered = asyncio.Event()

    async def slow() -> None:
        entered.set()
        await asyncio.sleep(0.4)

    async with running(seen.url, Small(during_batch=slow)) as run:
        await run.url
        await publish(seen, ServiceName.EXECUTION, freed(1))
        await entered.wait()
        run.stopping.set()
        await asyncio.sleep(0.1)
        answer = await run.readyz()
        assert (answer.status_code, answer.json()["detail"]) == (503, "stopping")
    await until([1], seen)


async def test_the_lease_is_given_up_while_requests_under_way_still_finish(seen: FreshDatabase) -> None:
    small = Small()
    async with running(seen.url, small) as run, httpx.AsyncClient(base_url=await run.url) as client:
        async with asyncio.TaskGroup() as group:
            answer = group.create_task(client.get("/slow", timeout=30))
            await small.entered.wait()
            run.stopping.set()
            while await read_rows(seen, "select url from log.lease") != [{"url": None}]:
                await asyncio.sleep(0.02)
            assert not answer.done()
            small.leave.set()
        assert answer.result().json() == "done"


async def test_what_does_not_stop_is_cut_off(seen: FreshDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDE_SCALING_DRAIN_SECONDS", "0.3")
    cancelled = asyncio.Event()

    async def stubborn(_: asyncio.Event) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()

    async with running(seen.url, Small(loops=(stubborn,))) as run:
        await run.url
        run.stopping.set()
    assert cancelled.is_set()
    assert (await read_rows(seen, "select url from log.lease")) == [{"url": None}]


async def test_a_standby_is_ready_says_so_and_takes_over_at_once(seen: FreshDatabase) -> None:
    first, second = Small(), Small()
    async with running(seen.url, second) as standby_run:
        async with running(seen.url, first):
            async with asyncio.timeout(PATIENCE_SECONDS):
                while first.loads + second.loads == 0 or not standby_run.url.done():
                    await asyncio.sleep(0.02)
            active, standby = (first, second) if first.loads else (second, first)
            assert standby.loads == 0
            if standby is second:
                assert (await standby_run.readyz()).json() == {"status": "ready", "role": "standby"}
        await publish(seen, ServiceName.EXECUTION, freed(1))
        await until([1], seen)
        assert second.loads == 1
        assert (await standby_run.readyz()).json() == {"status": "ready", "role": "active"}
    assert active.loads == 1


async def test_a_lost_lease_drops_the_memory_and_the_service_begins_again(seen: FreshDatabase) -> None:
    small = Small()
    async with running(seen.url, small) as run:
        await run.url
        seen.psql("update log.lease set owner = 'thief', term = term + 1, expires_at = now(), pid = 0, host = 'else'")
        async with asyncio.timeout(PATIENCE_SECONDS):
            while small.loads < 2:
                await asyncio.sleep(0.02)
        await publish(seen, ServiceName.EXECUTION, freed(1))
        await until([1], seen)
    assert small.builds == 1, "the process and its HTTP go on"
    assert small.contexts[0].lease.term == 3


async def test_a_loop_that_returns_early_is_a_failure_of_the_service(seen: FreshDatabase) -> None:
    async def brief(_: asyncio.Event) -> None:
        return

    async def run() -> None:
        async with running(seen.url, Small(loops=(brief,))):
            await asyncio.sleep(PATIENCE_SECONDS)

    with pytest.raises(ExceptionGroup) as caught:
        await run()
    assert "brief returned" in flattened(caught.value)


def flattened(group: BaseExceptionGroup[BaseException]) -> str:
    return " ".join(flattened(e) if isinstance(e, BaseExceptionGroup) else str(e) for e in group.exceptions)


async def test_a_service_waits_for_its_database_and_outlives_its_postmaster(
    state_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started before Postgres; then the postmaster is killed again and again while events come in."""
    server = EmbeddedPostgres(state=state_directory, durable=False)  # the kill is of a process, not of the machine
    small = Small()
    numbers: list[int] = []
    async with running(server.url, small) as run:
        await asyncio.sleep(0.3)
        assert not run.url.done()
        await asyncio.to_thread(server.start)
        await migrate(server.url)
        database = FreshDatabase(name="tidewright", url=server.url, server=server)
        database.psql("create table scaling.seen (n bigint generated always as identity, number int)")
        await run.url
        for round_number in range(3):
            batch = [round_number * 10 + n for n in range(5)]
            await publish(database, ServiceName.EXECUTION, *[freed(number) for number in batch])
            numbers += batch
            pid = server.postmaster_pid()
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.2)
            await asyncio.to_thread(server.start)
            await until(numbers, database)
        assert small.builds == 1
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (await run.readyz()).status_code != 200:
                await asyncio.sleep(0.05)


async def test_a_right_that_is_missing_is_blamed_on_no_record(seen: FreshDatabase) -> None:
    seen.psql("revoke insert on scaling.seen from tide_scaling")

    async def run() -> None:
        async with running(seen.url, Small()) as run:
            await run.url
            await publish(seen, ServiceName.EXECUTION, freed(1))
            await asyncio.sleep(PATIENCE_SECONDS)

    with pytest.raises(ExceptionGroup) as caught:
        await run()
    assert "permission denied" in flattened(caught.value)
    assert await read_rows(seen, "select * from log.quarantine") == []


# -- several services in one process --------------------------------------------------------------------------


def installation_of(database: FreshDatabase) -> Installation:
    return Installation(state_directory=Path("/nonexistent"), database_url=database.url, signing_key=TEST_KEY)


async def test_one_that_fails_is_restarted_alone(seen: FreshDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDE_METRICS_LEASE_RETRY_SECONDS", "0.05")
    starts = 0

    async def fails_once(stopping: asyncio.Event) -> None:
        nonlocal starts
        starts += 1
        if starts == 1:
            raise ZeroDivisionError
        await stopping.wait()

    steady, shaky, stopping = Small(), Small(loops=(fails_once,), writes=False), asyncio.Event()
    services = {ServiceName.SCALING: steady.build, ServiceName.METRICS: shaky.build}
    async with asyncio.timeout(PATIENCE_SECONDS), asyncio.TaskGroup() as group:
        code = group.create_task(run_all(services, installation_of(seen), stopping))
        while starts < 2:
            await asyncio.sleep(0.02)
        await publish(seen, ServiceName.EXECUTION, freed(1))
        await until([1], seen)
        stopping.set()
    assert code.result() == 0
    assert (steady.builds, steady.loads) == (1, 1)
    assert shaky.builds == 2


async def test_three_failures_of_one_within_a_minute_end_the_process(seen: FreshDatabase) -> None:
    def fails() -> None:
        raise ZeroDivisionError

    steady, broken, stopping = Small(), Small(fails_loading=fails), asyncio.Event()
    services = {ServiceName.SCALING: steady.build, ServiceName.METRICS: broken.build}
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert await run_all(services, installation_of(seen), stopping) == 1
    assert broken.loads == 3
    assert steady.builds == 1


async def test_a_pause_ends_when_stopping() -> None:
    stopping = asyncio.Event()
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        group.create_task(pause(stopping, 3600))
        stopping.set()
