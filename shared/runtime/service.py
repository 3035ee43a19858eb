"""What a service is: the handler it brings, and the context that the runtime gives it."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from fastapi import FastAPI
from sqlalchemy import Executable
from sqlalchemy.engine import CursorResult
from sqlalchemy.ext.asyncio import AsyncConnection

from schemas.envelope import Draft, Event
from schemas.registry import EventData
from schemas.vocabulary import ServiceName, Topic
from shared.clock import Clock
from shared.telemetry.instruments import Instruments


class Transaction(Protocol):
    """One Postgres transaction with the outbox in it. What is published appears in the log at the commit."""

    @property
    def connection(self) -> AsyncConnection: ...

    async def execute(
        self, statement: Executable, parameters: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
    ) -> CursorResult[Any]:
        """Run one SQLAlchemy Core statement. Raises Unavailable or Conflict, never a driver's exception."""

    def publish(self, *drafts: Draft[EventData]) -> None:
        """Add events to the outbox, in this order, when the transaction commits."""


TransactionScope: TypeAlias = AbstractAsyncContextManager[Transaction]


class Lease(Protocol):
    """The right to be the one active process of a service. Every commit made under it is guarded by its term."""

    @property
    def is_held(self) -> bool: ...

    @property
    def term(self) -> int: ...

    def transaction(self) -> TransactionScope:
        """A guarded transaction; one at a time. Raises LeaseLost where another holder took over."""


class Directory(Protocol):
    """Where the active process of each service answers HTTP."""

    async def url_of(self, service: ServiceName) -> str | None:
        """``http://host:port`` from its lease row; None while nobody holds the lease."""


class Handler(Protocol):
    """What a service does with events. The loop around it is ``shared.runtime.consumer``.

    Every call happens while the lease is held; calls never overlap.
    """

    async def load(self, tx: Transaction) -> None:
        """Build the memory from Postgres: after the lease was taken, and again after any commit that failed."""

    async def on_events(self, batch: Sequence[Event[EventData]], *, tx: Transaction, now: datetime) -> None:
        """Apply a batch (possibly empty: then something was due). Reader positions advance in the same commit."""

    def on_committed(self) -> None:
        """The transaction of the last ``on_events`` is committed: memory may be made visible, loops woken."""

    def due_seconds(self) -> float | None:
        """Seconds until ``on_events`` wants a call even without events; None: only events matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceContext:
    """What the runtime gives to a service's ``wiring.build``."""

    name: ServiceName
    clock: Clock
    state_directory: Path
    signing_key: bytes
    """256 bits shared by all services of an installation: internal requests, trainer and sample tokens."""
    lease: Lease
    directory: Directory
    instruments: Instruments
    transaction: Callable[[], TransactionScope]
    """An unguarded REPEATABLE READ transaction that may publish: for requests at the door. Raises Conflict on
    a lost race (SQLSTATE 40001): the caller repeats, at most 3 times."""
    read: Callable[[], AbstractAsyncContextManager[AsyncConnection]]
    """A read-only connection from the pool."""
    wait_for_events: Callable[[float], Awaitable[None]]
    """Return when something may have been published, at the latest after so many seconds: for SSE readers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceParts:
    """What ``wiring.build`` returns; the runtime runs it.

    ``loops`` run only while the lease is held, after ``handler.load``, in one task group with the consumer;
    ``standing_loops`` run from start to stop in every process of the service. Each takes the ``stopping`` event
    and returns soon after it is set; returning earlier is a failure.
    """

    handler: Handler
    consumes: frozenset[Topic]
    app: FastAPI
    loops: tuple[Callable[[asyncio.Event], Awaitable[None]], ...] = ()
    standing_loops: tuple[Callable[[asyncio.Event], Awaitable[None]], ...] = ()
    serves_without_events: bool = False
    """It is ready although no events come: the door takes submissions, which are safe in Postgres."""
