"""Makes what a service is given: engine, outbox, lease, directory, transactions."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from schemas.vocabulary import ServiceName
from shared.bus.brokers import Brokers
from shared.bus.kafka import KafkaLog
from shared.bus.log import Log
from shared.bus.postgres import PostgresLog, load_log_id
from shared.bus.wakeups import Wakeups
from shared.clock import Clock
from shared.db.engine import service_engine
from shared.db.errors import connecting, translated
from shared.db.transaction import begin
from shared.outbox.outbox import Outbox
from shared.outbox.relay import READER as RELAY
from shared.outbox.relay import Relay
from shared.outbox.sender import Sender
from shared.runtime.directory import PostgresDirectory
from shared.runtime.lease import LeaseTiming, PostgresLease
from shared.runtime.service import ServiceContext, Transaction
from shared.settings import ServiceSettings
from shared.telemetry.instruments import Instruments


@dataclass(frozen=True, slots=True, kw_only=True)
class Equipment:
    """A service's context and the parts that only the runtime uses. ``close`` it at the end."""

    context: ServiceContext
    settings: ServiceSettings
    engine: AsyncEngine
    log: Log
    """What the service's handler reads."""
    lease: PostgresLease
    wakeups: Wakeups
    relay: Relay | None
    """One candidate for the installation's relay, where events are carried by Kafka."""

    async def close(self) -> None:
        await self.log.close()
        if self.relay is not None:
            await self.relay.close()
        await self.engine.dispose()


def equip(
    service: ServiceName,
    *,
    database_url: str,
    state_directory: Path,
    signing_key: bytes,
    clock: Clock,
    wakeups: Wakeups,
    settings: ServiceSettings,
    brokers: Brokers | None = None,
) -> Equipment:
    """Nothing is connected yet. Raises SettingsError for a URL that is none."""
    engine = service_engine(database_url, service, settings)
    instruments = Instruments(service.value)
    outbox = Outbox(service, clock, instruments)

    def lease_named(name: str, instruments: Instruments) -> PostgresLease:
        return PostgresLease(
            engine,
            name,
            outbox=outbox,
            wakeups=wakeups,
            instruments=instruments,
            clock=clock,
            timing=LeaseTiming(
                lease_seconds=settings.lease_seconds,
                renew_seconds=settings.lease_renew_seconds,
                retry_seconds=settings.lease_retry_seconds,
            ),
        )

    lease = lease_named(service.value, instruments)
    context = ServiceContext(
        name=service,
        clock=clock,
        state_directory=state_directory,
        signing_key=signing_key,
        lease=lease,
        directory=PostgresDirectory(engine, clock),
        instruments=instruments,
        transaction=_door(engine, outbox, wakeups),
        read=_reader(engine),
        wait_for_events=_Waiter(wakeups).wait,
    )
    outbox_log = PostgresLog(engine, wakeups)
    log: Log = outbox_log
    relay = None
    if brokers is not None:
        log = KafkaLog(
            brokers,
            group=f"tide.{service.value}",
            load_log_id=lambda: _log_id(engine),
            instruments=instruments,
        )
        relay = Relay(
            log=outbox_log,
            sender=Sender(brokers, seconds=settings.send_seconds),
            lease=lease_named(RELAY, Instruments(RELAY)),
            clock=clock,
            instruments=instruments,
        )
    return Equipment(
        context=context,
        settings=settings,
        engine=engine,
        log=log,
        lease=lease,
        wakeups=wakeups,
        relay=relay,
    )


async def _log_id(engine: AsyncEngine) -> str:
    with connecting():
        async with engine.connect() as connection:
            return await load_log_id(connection)


def _door(
    engine: AsyncEngine, outbox: Outbox, wakeups: Wakeups
) -> Callable[[], AbstractAsyncContextManager[Transaction]]:
    repeatable = engine.execution_options(isolation_level="REPEATABLE READ")
    return lambda: begin(repeatable, outbox, published=wakeups.published)


def _reader(engine: AsyncEngine) -> Callable[[], AbstractAsyncContextManager[AsyncConnection]]:
    read_only = engine.execution_options(postgresql_readonly=True)

    @asynccontextmanager
    async def read() -> AsyncIterator[AsyncConnection]:
        with connecting():
            connection = await read_only.connect().start()
        try:
            with translated():
                yield connection
        finally:
            await connection.close()

    return read


class _Waiter:
    """Remembers for each task what it has seen, so that what is published while it reads is not slept through."""

    def __init__(self, wakeups: Wakeups) -> None:
        self._wakeups = wakeups
        self._seen: WeakKeyDictionary[asyncio.Task[object], int] = WeakKeyDictionary()

    async def wait(self, seconds: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        seen = self._seen.get(task, -1)
        self._seen[task] = await self._wakeups.wait(seen=seen, seconds=seconds)
