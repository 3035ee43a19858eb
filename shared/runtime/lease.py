"""Leases: one active process for each service, and every commit guarded by its term."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import BigInteger, Float, Integer, Text, bindparam, text
from sqlalchemy.ext.asyncio import AsyncEngine

from shared.bus.wakeups import Wakeups
from shared.clock import Clock, pause
from shared.db.errors import connecting
from shared.db.transaction import PostgresTransaction, begin
from shared.errors import Conflict, LeaseLost, Unavailable
from shared.outbox.outbox import Outbox
from shared.runtime.identity import ProcessIdentity, new_owner, this_process
from shared.runtime.service import Transaction
from shared.telemetry.instruments import Instruments
from shared.telemetry.logs import get_logger

_log = get_logger()
_TYPES: Final = (
    bindparam("service", type_=Text()),
    bindparam("partition", type_=Integer()),
    bindparam("owner", type_=Text()),
    bindparam("term", type_=BigInteger()),
)
_LOOK: Final = text(
    """
    select l.owner, l.term, l.host, l.pid, l.process_start, l.expires_at <= clock_timestamp() as expired
      from log.lease l where l.service = :service and l.partition = :partition
    """
).bindparams(*_TYPES[:2])
_FIRST: Final = text(
    """
    insert into log.lease (service, partition, owner, term, expires_at, url, host, pid, process_start)
    values (:service, :partition, :owner, :term, clock_timestamp() + make_interval(secs => :seconds), :url, :host,
            :pid, :start)
    on conflict do nothing returning term
    """
).bindparams(*_TYPES, bindparam("seconds", type_=Float()), bindparam("start", type_=BigInteger()))
_TAKE: Final = text(
    """
    update log.lease l
       set owner = :owner, term = :term, expires_at = clock_timestamp() + make_interval(secs => :seconds), url = :url,
           host = :host, pid = :pid, process_start = :start
     where l.service = :service and l.partition = :partition and l.owner = :seen_owner and l.term = :term - 1
       and (:is_gone or l.expires_at <= clock_timestamp())
    returning l.term
    """
).bindparams(*_TYPES, bindparam("seconds", type_=Float()), bindparam("start", type_=BigInteger()))
_RENEW: Final = text(
    """
    update log.lease l set expires_at = clock_timestamp() + make_interval(secs => :seconds)
     where l.service = :service and l.partition = :partition and l.owner = :owner and l.term = :term
    """
).bindparams(*_TYPES, bindparam("seconds", type_=Float()))
_RELEASE: Final = text(
    """
    update log.lease l set expires_at = clock_timestamp(), url = null
     where l.service = :service and l.partition = :partition and l.owner = :owner and l.term = :term
    """
).bindparams(*_TYPES)
# The row lock makes a taker wait for the commit, and shows it the new term afterwards.
_GUARD: Final = text(
    """
    select 1 from log.lease l
     where l.service = :service and l.partition = :partition and l.owner = :owner and l.term = :term
       for update
    """
).bindparams(*_TYPES)

_living_owners: Final[set[str]] = set()
"""Holdings of this process: a row of this process that is not among them was left by a service that crashed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTiming:
    """Seconds: how long a lease is good for, and how often it is renewed and looked for."""

    lease_seconds: float = 5.0
    renew_seconds: float = 1.5
    retry_seconds: float = 0.25


class PostgresLease:
    """Implements ``shared.runtime.service.Lease``. Time limits are by the database's clock."""

    def __init__(
        self,
        engine: AsyncEngine,
        name: str,
        *,
        outbox: Outbox,
        wakeups: Wakeups,
        instruments: Instruments,
        clock: Clock,
        timing: LeaseTiming,
        partition: int = 0,
    ) -> None:
        self._engine = engine.execution_options(isolation_level="READ COMMITTED")
        self._single = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._outbox = outbox
        self._wakeups = wakeups
        self._instruments = instruments
        self._clock = clock
        self._timing = timing
        self._row: dict[str, Any] = {"service": name, "partition": partition, "owner": "", "term": 0}
        self._held_until = 0.0
        self._one_at_a_time = asyncio.Lock()
        self._renewals_missed = 0
        self._user: asyncio.Task[Any] | None = None
        self.is_standby = False
        """Another process holds it."""

    @property
    def is_held(self) -> bool:
        """By this process's own clock, counted from before the last renewal was sent."""
        return self._clock.monotonic() < self._held_until

    @property
    def term(self) -> int:
        return int(self._row["term"])

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        return self._transaction()

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[PostgresTransaction]:
        task = asyncio.current_task()
        assert task is not self._user, "a transaction of the lease inside another one would wait for itself"
        async with self._one_at_a_time:
            if not self._row["owner"]:
                raise LeaseLost(f"{self._row['service']} does not hold its lease")
            self._user = task
            try:
                async with begin(
                    self._engine, self._outbox, guard=self._guard, published=self._wakeups.published
                ) as tx:
                    yield tx
            finally:
                self._user = None

    async def _guard(self, tx: PostgresTransaction) -> None:
        if (await tx.execute(_GUARD, self._row)).scalar() is None:
            self._instruments.fenced_writes.inc()
            self._forget()
            raise LeaseLost(f"{self._row['service']} is led by another process now")

    # -- holding ----------------------------------------------------------------------------------------------

    async def acquire(self, stopping: asyncio.Event, *, url: str | None) -> bool:
        """Wait until it is ours (True), or ``stopping`` is set (False). Survives a database that is away."""
        while not stopping.is_set():
            try:
                if await self.try_acquire(url=url):
                    return True
            except (Unavailable, Conflict) as exc:
                _log.debug("lease_not_reached", detail=str(exc))
            await pause(stopping, self._timing.retry_seconds)
        return False

    async def try_acquire(self, *, url: str | None) -> bool:
        """One attempt: free, expired, or its holder is a dead process of this machine. Raises Unavailable."""
        process, owner = this_process(), new_owner()
        sent = self._clock.monotonic()
        row = {
            "service": self._row["service"],
            "partition": self._row["partition"],
            "owner": owner,
            "seconds": self._timing.lease_seconds,
            "url": url,
            "host": process.host,
            "pid": process.pid,
            "start": process.start,
        }
        _living_owners.add(owner)  # before its row can be seen
        try:
            term = await self._take(row)
        except BaseException:
            _living_owners.discard(owner)
            raise
        self.is_standby = term is None
        if term is None:
            _living_owners.discard(owner)
            return False
        self._row.update(owner=owner, term=term)
        self._held_until = sent + self._timing.lease_seconds
        self._instruments.lease_held.set(1)
        _log.info("lease_taken", service=self._row["service"], term=term)
        return True

    async def _take(self, row: dict[str, Any]) -> int | None:
        """The new term; None if another holds it or was quicker."""
        with connecting():
            async with self._single.connect() as connection:
                held = (await connection.execute(_LOOK, self._row)).one_or_none()
                if held is None:
                    return (await connection.execute(_FIRST, {**row, "term": 1})).scalar()
                if not (held.expired or _is_gone(held)):
                    return None
                take = {**row, "term": held.term + 1, "seen_owner": held.owner, "is_gone": not held.expired}
                return (await connection.execute(_TAKE, take)).scalar()

    async def run_renewal(self, stopping: asyncio.Event) -> None:
        """Renew until ``stopping``. Raises LeaseLost once another process has it.

        While the database is away the lease is not held, but it is taken up again under the same term if nobody
        else took it: no commit can have happened meanwhile.
        """
        while not stopping.is_set():
            await pause(stopping, self._timing.renew_seconds)
            if not stopping.is_set():
                await self._renew()

    async def _renew(self) -> None:
        sent = self._clock.monotonic()
        try:
            with connecting():
                async with self._single.connect() as connection:
                    parameters = {**self._row, "seconds": self._timing.lease_seconds}
                    rows = (await connection.execute(_RENEW, parameters)).rowcount
        except (Unavailable, Conflict) as exc:
            self._renewals_missed += 1
            level = logging.WARNING if self._renewals_missed == 1 else logging.DEBUG
            _log.log(level, "lease_not_renewed", service=self._row["service"], detail=str(exc))
            return
        self._renewals_missed = 0
        if rows == 0:
            self._forget()
            raise LeaseLost(f"{self._row['service']} is led by another process now")
        self._held_until = sent + self._timing.lease_seconds

    async def release(self) -> None:
        """Give it up, so that the next holder need not wait. Best effort: it runs out anyway."""
        row = dict(self._row)
        self._forget()
        if not row["owner"]:
            return
        try:
            with connecting():
                async with self._single.connect() as connection:
                    await connection.execute(_RELEASE, row)
        except (Unavailable, Conflict) as exc:
            _log.warning("lease_not_released", service=row["service"], detail=str(exc))

    def _forget(self) -> None:
        _living_owners.discard(self._row["owner"])
        self._row["owner"] = ""
        self._held_until = 0.0
        self._instruments.lease_held.set(0)


def _is_gone(row: Any) -> bool:
    holder = ProcessIdentity(host=row.host, pid=row.pid, start=row.process_start)
    return holder.is_gone or (holder == this_process() and row.owner not in _living_owners)
