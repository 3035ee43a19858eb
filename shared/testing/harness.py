"""Run a handler on a real database without HTTP: publish, drain, look at the log."""

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import text

from schemas.envelope import START, Draft, Event
from schemas.envelope import Sequence as LogSequence
from schemas.registry import EventData
from schemas.vocabulary import DEFAULT_TENANT, ServiceName, Topic
from shared.bus.brokers import Brokers
from shared.bus.log import Partition, Position, to_event
from shared.bus.postgres import read_page
from shared.bus.wakeups import Wakeups
from shared.clock import Clock
from shared.db.engine import Session, plain_engine
from shared.db.transaction import begin
from shared.outbox.outbox import Outbox
from shared.runtime.consumer import Consumer, ConsumerLimits
from shared.runtime.context import Equipment, equip
from shared.runtime.service import Handler, ServiceContext
from shared.settings import ServiceSettings
from shared.telemetry.instruments import Instruments
from shared.testing.clock import FakeClock
from shared.testing.postgres import FreshDatabase

TEST_KEY = bytes(range(32))
T = TypeVar("T", bound=EventData)


def draft(data: EventData, key: str = "j1") -> Draft[EventData]:
    return Draft(key=key, tenant=DEFAULT_TENANT, data=data)


async def publish(
    database: FreshDatabase, service: ServiceName, *drafts: Draft[EventData], clock: Clock | None = None
) -> None:
    """As if ``service`` had published these in one transaction."""
    wakeups = Wakeups(database.url)
    outbox = Outbox(service, clock or FakeClock(), Instruments(service.value))
    async with database.engine(service) as engine, begin(engine, outbox, published=wakeups.published) as tx:
        tx.publish(*drafts)


async def read_log(
    database: FreshDatabase, topics: Iterable[Topic] = tuple(Topic), *, after: LogSequence = START
) -> list[Event[EventData]]:
    """Every event of the log, in order."""
    engine = plain_engine(database.url, Session(application="test"))
    async with engine.connect() as connection:
        positions = {Partition(topic): Position(after) for topic in topics}
        page = await read_page(connection, positions, limit=100_000)
    return [to_event(record) for record in page.records]


async def read_data(database: FreshDatabase, kind: type[T], key: str | None = None) -> list[T]:
    """The data of every event of one kind, in order; of one key if given."""
    events = await read_log(database, [kind.TOPIC])
    return [event.data for event in events if isinstance(event.data, kind) and key in (None, event.key)]


async def read_rows(database: FreshDatabase, statement: str, **parameters: Any) -> list[dict[str, Any]]:
    """Rows as superuser: what the store has written."""
    engine = plain_engine(database.url, Session(application="test"))
    async with engine.connect() as connection:
        return [dict(row) for row in (await connection.execute(text(statement), parameters)).mappings()]


@dataclass(slots=True)
class ServiceHarness:
    """A handler that holds its lease; ``drain`` feeds it until it has nothing to do.

    A second harness after the first one's block is what a restart leaves: memory comes from Postgres.
    """

    database: FreshDatabase
    equipment: Equipment
    consumer: Consumer
    handler: Handler

    @property
    def context(self) -> ServiceContext:
        return self.equipment.context

    async def publish(self, service: ServiceName, *drafts: Draft[EventData]) -> None:
        await publish(self.database, service, *drafts, clock=self.context.clock)

    async def drain(self) -> int:
        """Everything that is published by now; gives the number of batches."""
        return await drain(self.equipment, self.consumer)

    async def log(self, topics: Iterable[Topic] = tuple(Topic)) -> list[Event[EventData]]:
        return await read_log(self.database, topics)


async def settle(equipment: Equipment) -> None:
    """Return once the carrier has everything that is published. The Postgres carrier is the outbox itself."""
    if equipment.relay is not None:
        await equipment.relay.drain()


async def drain(equipment: Equipment, consumer: Consumer) -> int:
    """Have the consumer handle everything that is published by now; gives the number of batches."""
    batches = 0
    while True:
        await settle(equipment)
        batches += await consumer.drain()
        if equipment.relay is None or not await consumer.backlog():
            return batches
        await equipment.log.wait(seen=await equipment.log.wait(seen=-1, seconds=0), seconds=0.1)


@asynccontextmanager
async def equipped(
    database: FreshDatabase,
    service: ServiceName,
    *,
    clock: Clock,
    state_directory: Path = Path("/nonexistent"),
    settings: ServiceSettings | None = None,
    brokers: Brokers | None = None,
) -> AsyncIterator[Equipment]:
    """A service's context on a real database; the lease is not taken yet."""
    equipment = equip(
        service,
        database_url=database.url,
        state_directory=state_directory,
        signing_key=TEST_KEY,
        clock=clock,
        wakeups=Wakeups(database.url),
        settings=settings or ServiceSettings.of(service),
        brokers=brokers,
    )
    try:
        yield equipment
    finally:
        await equipment.lease.release()
        await equipment.close()


@asynccontextmanager
async def harness(
    database: FreshDatabase,
    service: ServiceName,
    make_handler: Callable[[ServiceContext], Handler],
    consumes: Sequence[Topic] | frozenset[Topic],
    *,
    clock: Clock,
    state_directory: Path = Path("/nonexistent"),
    settings: ServiceSettings | None = None,
    brokers: Brokers | None = None,
) -> AsyncIterator[ServiceHarness]:
    """``make_handler(context)`` gives the handler. The lease is held inside the block; nothing runs by itself."""
    async with AsyncExitStack() as stack:
        equipment = await stack.enter_async_context(
            equipped(
                database,
                service,
                clock=clock,
                state_directory=state_directory,
                settings=settings,
                brokers=brokers,
            )
        )
        assert await equipment.lease.try_acquire(url=None), "somebody else holds the lease"
        handler = make_handler(equipment.context)
        limits = ConsumerLimits(
            batch_events_max=equipment.settings.batch_events_max,
            handler_attempts_max=equipment.settings.handler_attempts_max,
            backoff_seconds_max=0.001,
        )
        consumer = Consumer(
            service,
            handler,
            consumes,
            lease=equipment.lease,
            log=equipment.log,
            clock=clock,
            instruments=equipment.context.instruments,
            limits=limits,
        )
        yield ServiceHarness(database=database, equipment=equipment, consumer=consumer, handler=handler)
