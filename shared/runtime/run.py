"""Run one service: HTTP at once, everything else while the lease is held, and an ordered stop."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeAlias

from schemas.vocabulary import ServiceName
from shared.bus.brokers import Brokers
from shared.bus.retention import run_retention
from shared.bus.topics import ensure_topics
from shared.bus.wakeups import Wakeups
from shared.clock import Clock, SystemClock, pause
from shared.db.errors import connecting
from shared.db.horizon import Horizon
from shared.db.migrate import is_migrated
from shared.errors import Conflict, LeaseLost, Unavailable
from shared.http import add_readiness, bind, run_http
from shared.outbox.relay import READER as RELAY
from shared.outbox.relay import send_again
from shared.runtime.backoff import backoff_seconds
from shared.runtime.consumer import Consumer, ConsumerLimits
from shared.runtime.context import Equipment, equip
from shared.runtime.installation import Installation
from shared.runtime.service import ServiceContext, ServiceParts
from shared.settings import ServiceSettings, SettingsError
from shared.telemetry.logs import bind_log_fields, get_logger

Build: TypeAlias = Callable[[ServiceContext], ServiceParts]
Loop: TypeAlias = Callable[[asyncio.Event], Awaitable[None]]
_PING_SECONDS: Final = 1.0
_log = get_logger()


class LoopEnded(Exception):
    """A loop returned although nobody asked it to stop."""


@dataclass(slots=True)
class _State:
    """What ``/readyz`` tells."""

    database: str | None = "the database has not answered yet"
    role: str | None = "looking whether another process is active"
    is_stopping: bool = False

    carrier: Callable[[], str | None] = lambda: None
    """Why no events come, where that keeps the service from what it is for."""

    def reason(self) -> str | None:
        return "stopping" if self.is_stopping else self.database or self.role or self.carrier()


@dataclass(slots=True, kw_only=True)
class _Run:
    """One run of one service in this process."""

    equipment: Equipment
    parts: ServiceParts
    clock: Clock
    database_url: str
    brokers: Brokers | None
    url: str = ""
    state: _State = field(default_factory=_State)

    @property
    def name(self) -> ServiceName:
        return self.equipment.context.name

    @property
    def settings(self) -> ServiceSettings:
        return self.equipment.settings


async def run_service(
    name: ServiceName,
    build: Build,
    installation: Installation,
    stopping: asyncio.Event,
    *,
    wakeups: Wakeups | None = None,
    clock: Clock | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Until ``stopping``; then: not ready, stop fetching, finish the batch, give up the lease, close.

    What is left after ``drain_seconds`` is cut off. ``wakeups``: those of the process, where several services share
    them (the caller runs them then). ``on_ready`` gets the URL once this process serves, active or standby.
    Raises SettingsError for bad settings, and whatever ended the service.
    """
    bind_log_fields({"service": name.value})
    try:
        await _run_service(name, build, installation, stopping, wakeups=wakeups, clock=clock, on_ready=on_ready)
    except BaseExceptionGroup as failed:
        settings, _ = failed.split(SettingsError)
        if settings is None:
            raise
        raise _first(settings) from failed


def _first(failed: BaseExceptionGroup[SettingsError]) -> SettingsError:
    """The settings that are wrong end the service, not the group of tasks that found it."""
    found: BaseException = failed
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    assert isinstance(found, SettingsError)
    return found


async def _run_service(
    name: ServiceName,
    build: Build,
    installation: Installation,
    stopping: asyncio.Event,
    *,
    wakeups: Wakeups | None,
    clock: Clock | None,
    on_ready: Callable[[str], None] | None,
) -> None:
    clock = clock or SystemClock()
    settings = ServiceSettings.of(name)
    own = wakeups or Wakeups(installation.database_url)
    equipment = equip(
        name,
        database_url=installation.database_url,
        state_directory=installation.state_directory,
        signing_key=installation.signing_key,
        clock=clock,
        wakeups=own,
        settings=settings,
        brokers=installation.brokers,
    )
    try:
        parts = build(equipment.context)
        run = _Run(
            equipment=equipment,
            parts=parts,
            clock=clock,
            database_url=installation.database_url,
            brokers=installation.brokers,
        )
        await _run(run, stopping, background=None if wakeups else own.run, on_ready=on_ready)
    finally:
        await equipment.lease.release()
        await equipment.close()
        _log.info("service_stopped")


async def _run(
    run: _Run, stopping: asyncio.Event, *, background: Loop | None, on_ready: Callable[[str], None] | None
) -> None:
    settings = run.settings
    bound = bind(settings.host, settings.port)
    run.url = bound.url(settings.advertise_host)
    if not run.parts.serves_without_events:
        run.state.carrier = lambda: run.equipment.log.trouble if run.equipment.lease.is_held else None
    add_readiness(run.parts.app, run.state.reason)
    _log.info("service_started", url=run.url)
    closing = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(run_http(run.parts.app, bound, closing, drain_seconds=settings.drain_seconds / 2))
        if background is not None:
            group.create_task(_standing(background, closing))
        if on_ready is not None:
            group.create_task(_tell_ready(run, on_ready, closing))
        try:
            await _work(run, stopping)
        finally:
            closing.set()


async def _work(run: _Run, stopping: asyncio.Event) -> None:
    """Everything but HTTP, until stopped or cut off; then the lease goes."""
    try:
        async with asyncio.timeout(None) as limit, asyncio.TaskGroup() as group:
            stop = group.create_task(_on_stop(run, stopping, limit))
            await _until_migrated(run, stopping)
            tasks = [group.create_task(_standing(loop, stopping)) for loop in run.parts.standing_loops]
            tasks.append(group.create_task(_standing(_retention(run), stopping)))
            tasks.append(group.create_task(_ping(run, stopping)))
            await _until_topics(run, stopping)
            if run.equipment.relay is not None:
                tasks.append(group.create_task(_standing(run.equipment.relay.run, stopping)))
            await _active(run, stopping)
            await asyncio.wait(tasks)
            stop.cancel()
    except TimeoutError:
        _log.warning("drain_cut_off", drain_seconds=run.settings.drain_seconds)
    await run.equipment.lease.release()


async def _on_stop(run: _Run, stopping: asyncio.Event, limit: asyncio.Timeout) -> None:
    await stopping.wait()
    run.state.is_stopping = True
    limit.reschedule(asyncio.get_running_loop().time() + run.settings.drain_seconds)


async def _until_migrated(run: _Run, stopping: asyncio.Event) -> None:
    """Whoever starts the installation migrates; services only wait for it."""
    while not stopping.is_set():
        try:
            if await is_migrated(run.database_url):
                return
            run.state.role = "waiting for the database to be migrated"
        except (Unavailable, Conflict) as exc:
            _log.debug("database_not_reached", detail=str(exc))
        await pause(stopping, 0.2)


async def _until_topics(run: _Run, stopping: asyncio.Event) -> None:
    """The first process that gets there makes them. Raises SettingsError for topics that cannot be used."""
    failures = 0
    while run.brokers is not None and not stopping.is_set():
        try:
            await ensure_topics(run.brokers, before_making=partial(send_again, run.equipment.engine))
            return
        except Unavailable as exc:
            failures += 1
            run.state.role = None if run.parts.serves_without_events else str(exc)
            if failures == 1:
                _log.warning("kafka_not_reached", detail=str(exc))
        await pause(stopping, backoff_seconds(failures, maximum=2.0))


def _retention(run: _Run) -> Loop:
    readers = () if run.equipment.relay is None else (RELAY,)
    return lambda stopping: run_retention(run.equipment.engine, run.clock, stopping, readers=readers)


async def _standing(loop: Loop, stopping: asyncio.Event) -> None:
    """Run a loop until stopped; a database that is away only makes it begin again."""
    failures = 0
    while not stopping.is_set():
        try:
            await loop(stopping)
            if not stopping.is_set():
                raise LoopEnded(f"{getattr(loop, '__qualname__', loop)} returned")
        except (Unavailable, Conflict) as exc:
            failures += 1
            _log.warning("loop_interrupted", error=type(exc).__name__, detail=str(exc))
            await pause(stopping, backoff_seconds(failures, maximum=5.0))


# -- while active ---------------------------------------------------------------------------------------------


async def _active(run: _Run, stopping: asyncio.Event) -> None:
    """Take the lease, work under it, and begin again when it is lost."""
    lease = run.equipment.lease
    while not stopping.is_set():
        if not await _acquire(run, stopping):
            return
        run.state.role = "loading"
        try:
            await _hold(run, stopping)
        except* LeaseLost as lost:
            run.state.role = "another process has become the active one"
            _log.warning("lease_lost", detail=str(lost.exceptions[0]))
        await lease.release()


async def _acquire(run: _Run, stopping: asyncio.Event) -> bool:
    """True once the lease is held; a standby is ready meanwhile, and says what it is."""
    lease = run.equipment.lease
    ended = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(_watch_standby(run, ended))
        try:
            return await lease.acquire(stopping, url=run.url)
        finally:
            ended.set()


async def _watch_standby(run: _Run, ended: asyncio.Event) -> None:
    while not ended.is_set():
        if run.equipment.lease.is_standby:
            run.state.role = None
            run.parts.app.state.role = "standby"
        await pause(ended, 0.1)


async def _hold(run: _Run, stopping: asyncio.Event) -> None:
    """Load, then consume and run the loops until stopped. Raises LeaseLost in a group."""
    parts, equipment, settings = run.parts, run.equipment, run.settings
    consumer = Consumer(
        run.name,
        parts.handler,
        parts.consumes,
        lease=equipment.lease,
        log=equipment.log,
        clock=run.clock,
        instruments=equipment.context.instruments,
        limits=ConsumerLimits(
            batch_events_max=settings.batch_events_max,
            batch_interval_seconds=settings.batch_interval_seconds,
            poll_seconds_max=settings.poll_seconds_max,
            handler_attempts_max=settings.handler_attempts_max,
            backoff_seconds_max=settings.backoff_seconds_max,
        ),
    )
    ended = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        renewal = group.create_task(equipment.lease.run_renewal(ended))
        if await _load(run, consumer, stopping):
            run.parts.app.state.role = "active"
            run.state.role = None
            tasks = [group.create_task(_standing(consumer.run, stopping))]
            tasks += [group.create_task(_standing(loop, stopping)) for loop in parts.loops]
            lag = group.create_task(consumer.run_lag(ended))
            await asyncio.wait(tasks)
            lag.cancel()
        renewal.cancel()


async def _load(run: _Run, consumer: Consumer, stopping: asyncio.Event) -> bool:
    """Until it has worked (True) or ``stopping`` is set (False)."""
    failures = 0
    while not stopping.is_set():
        try:
            await consumer.load()
        except (Unavailable, Conflict) as exc:
            failures += 1
            _log.warning("not_loaded", error=type(exc).__name__, detail=str(exc))
            await pause(stopping, backoff_seconds(failures, maximum=run.settings.backoff_seconds_max))
            continue
        _log.info("service_active", term=run.equipment.lease.term)
        return True
    return False


# -- readiness ------------------------------------------------------------------------------------------------


async def _ping(run: _Run, stopping: asyncio.Event) -> None:
    """Know whether the database answers, and whether a transaction is open in it for long."""
    horizon = Horizon(run.clock, run.equipment.context.instruments)
    engine = run.equipment.engine.execution_options(isolation_level="AUTOCOMMIT")
    while not stopping.is_set():
        try:
            async with asyncio.timeout(run.settings.connect_seconds):
                with connecting():
                    async with engine.connect() as connection:
                        await horizon.look(connection)
            run.state.database = None
        except (Unavailable, Conflict, TimeoutError):
            run.state.database = "the database does not answer"
        await pause(stopping, _PING_SECONDS)


async def _tell_ready(run: _Run, on_ready: Callable[[str], None], closing: asyncio.Event) -> None:
    while run.state.reason() is not None and not closing.is_set():
        await pause(closing, 0.02)
    if not closing.is_set():
        on_ready(run.url)
