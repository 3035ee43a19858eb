"""The loop around a handler: read, decode, handle in one guarded transaction, and go on or begin again."""

import asyncio
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from schemas.envelope import Event
from schemas.registry import EventData
from schemas.vocabulary import ServiceName, Topic
from shared.bus import quarantine
from shared.bus.log import Log, Partition, Position, Record, positions_after, to_event
from shared.bus.positions import advance_positions, load_positions
from shared.bus.quarantine import Cause, SetAside
from shared.clock import Clock, pause
from shared.db.errors import is_own_mistake
from shared.db.transaction import PostgresTransaction
from shared.errors import Conflict, LeaseLost, Poison, Unavailable
from shared.runtime.backoff import backoff_seconds
from shared.runtime.service import Handler, Lease, Transaction
from shared.telemetry.instruments import Instruments
from shared.telemetry.logs import get_logger

_log = get_logger()
_POLL_SECONDS_MIN: Final = 0.005
_IDLE_COMMIT_SECONDS: Final = 60.0
"""An idle reader stores how far it has looked so often, so that retention is not held back."""
_UPKEEP_SECONDS: Final = 5.0
_LAG_ROWS_MAX: Final = 10_000
_GIVEN_UP_IN_A_ROW_MAX: Final = 3
"""A handler that fails on more records in a row, with none handled in between, is itself what fails."""


class HandlerBroken(Exception):
    """No record is to blame: the service ends, and quarantine is not filled with all that comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerLimits:
    """Settings of the loop, in seconds and counts (see ``ServiceSettings``)."""

    batch_events_max: int = 500
    batch_interval_seconds: float = 0.0
    poll_seconds_max: float = 0.25
    handler_attempts_max: int = 5
    backoff_seconds_max: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """Records as their handler gets them, those set aside, and where the reader stands afterwards."""

    records: Sequence[Record]
    positions: Mapping[Partition, Position]
    events: tuple[Event[EventData], ...] = ()
    aside: tuple[SetAside, ...] = ()
    retried: bool = False
    """They come from quarantine: they leave it with the commit, and their key is parked no more."""


@dataclass(slots=True)
class _Memory:
    """What the loop knows between commits; dropped with the handler's memory."""

    stored: dict[Partition, Position] = field(default_factory=dict)
    looked: dict[Partition, Position] = field(default_factory=dict)
    parked: frozenset[str] = frozenset()


class Consumer:
    """Feeds one handler from the topics it consumes. Every commit is guarded by the lease.

    Numbered as in ``step``: (1) read everything new, over all topics, in log order; (2) decode, setting aside what
    cannot be; (3) handle the rest in one transaction with the positions; (4) tell the handler. A failed
    commit drops all memory. A handler that raises is fed halves until one record is found to be the cause.
    """

    def __init__(
        self,
        service: ServiceName,
        handler: Handler,
        consumes: Collection[Topic],
        *,
        lease: Lease,
        log: Log,
        clock: Clock,
        instruments: Instruments,
        limits: ConsumerLimits,
    ) -> None:
        self._reader = service.value
        self._handler = handler
        self._lease = lease
        self._log = log
        self._clock = clock
        self._instruments = instruments
        instruments.begin_at_zero(instruments.quarantined_records, Cause)
        self._limits = limits
        self._partitions = log.partitions(consumes)
        self._counts = {topic: log.count(topic) for topic in consumes}
        self._memory = _Memory()
        self._committed_at = 0.0
        self._upkeep_at = -_UPKEEP_SECONDS
        self._given_up = 0
        """Records set aside in a row, with none handled in between."""
        self.is_loaded = False

    # -- the loop ---------------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Build handler's and loop's memory from Postgres. Raises Unavailable, Conflict or LeaseLost."""
        self.is_loaded = False
        async with self._lease.transaction() as tx:
            stored = await load_positions(tx, self._reader, self._partitions, counts=self._counts)
            parked = await quarantine.load_parked(tx, self._reader)
            await self._handler.load(tx)
        self._memory = _Memory(stored=stored, looked=dict(stored), parked=parked)
        self._committed_at = self._clock.monotonic()
        self.is_loaded = True

    async def run(self, stopping: asyncio.Event) -> None:
        """Until ``stopping``, with the batch in hand finished. Raises LeaseLost, and what is no record's fault."""
        failures, seen, idle_seconds = 0, -1, _POLL_SECONDS_MIN
        while not stopping.is_set():
            began = self._clock.monotonic()
            try:
                if not self.is_loaded:
                    await self.load()
                seen = await self._log.wait(seen=-1, seconds=0) if seen < 0 else seen
                worked = await self.step()
                failures = 0
            except (Unavailable, Conflict) as exc:
                failures += 1
                level = logging.WARNING if failures == 1 else logging.DEBUG
                _log.log(level, "batch_not_committed", error=type(exc).__name__, detail=str(exc), failures=failures)
                self._instruments.handler_failures.labels(type(exc).__name__).inc()
                await pause(stopping, backoff_seconds(failures, maximum=self._limits.backoff_seconds_max))
                continue
            if worked:
                idle_seconds = _POLL_SECONDS_MIN
                left = began + self._limits.batch_interval_seconds - self._clock.monotonic()
                if left > 0:
                    await pause(stopping, left)
                continue
            woken = await self._wait(seen, idle_seconds, stopping)
            idle_seconds = (
                _POLL_SECONDS_MIN if woken != seen else min(2 * idle_seconds, self._limits.poll_seconds_max)
            )
            seen = woken

    async def step(self) -> bool:
        """One read and its batch; False if there was nothing to do. The loop's memory must be loaded."""
        await self._upkeep()
        looked = self._memory.looked
        page = await self._log.read(looked, limit=self._limits.batch_events_max)  # (1)
        if page.records or self._is_due():
            await self._handle(_Batch(records=page.records, positions=page.positions))
            return True
        self._memory.looked = dict(page.positions)
        if self._clock.monotonic() - self._committed_at > _IDLE_COMMIT_SECONDS:
            await self._commit(_Batch(records=(), positions=page.positions), calls_handler=False)
        return False

    async def drain(self) -> int:
        """Step until nothing is left to do; gives the number of steps that did something. For tests and tools."""
        steps = 0
        while True:
            if not self.is_loaded:
                await self.load()
            if not await self.step():
                return steps
            steps += 1

    async def backlog(self) -> int:
        """Records that wait, as far as the carrier knows (at most 10,000). Raises Unavailable."""
        return (await self._log.backlog(self._memory.looked, limit=_LAG_ROWS_MAX)).rows

    def _is_due(self) -> bool:
        seconds = self._handler.due_seconds()
        return seconds is not None and seconds <= 0

    async def _wait(self, seen: int, idle_seconds: float, stopping: asyncio.Event) -> int:
        """Until something is published, is due, or it is time to look again."""
        due = self._handler.due_seconds()
        seconds = idle_seconds if due is None else min(idle_seconds, max(due, 0.0))
        return seen if stopping.is_set() else await self._log.wait(seen=seen, seconds=max(seconds, 0.001))

    # -- one batch --------------------------------------------------------------------------------------------

    async def _handle(self, batch: _Batch) -> None:
        """Commit the batch; if its handler raises, find the record that is the cause."""
        try:
            called = await self._commit(batch)
        except (Unavailable, Conflict, LeaseLost):
            self.is_loaded = False
            raise
        except Exception as exc:  # supervises the handler: whatever one record makes it raise is that record's
            self.is_loaded = False
            if not batch.records or is_own_mistake(exc):
                raise
            await self._isolate(batch, exc)
            return
        if batch.records:
            self._given_up = 0
        if called:
            self._handler.on_committed()  # (4)

    async def _isolate(self, batch: _Batch, failure: Exception) -> None:
        """Halves until one record is left; that one is tried again, and at last set aside."""
        self._instruments.handler_failures.labels(type(failure).__name__).inc()
        if len(batch.records) > 1 and not batch.retried:
            await self._split(batch)
            return
        record = batch.records[0]
        reason = f"{type(failure).__name__}: {failure}"
        async with self._lease.transaction() as tx:
            attempts = await quarantine.count_failure(tx, self._reader, record, reason)
        _log.error(
            "handler_failed",
            type=record.type,
            key=record.key,
            sequence=str(record.sequence),
            attempts=attempts,
            exc_info=failure,
        )
        await self.load()
        if isinstance(failure, Poison) or attempts >= self._limits.handler_attempts_max or batch.retried:
            await self._give_up(batch, reason)
            return
        await asyncio.sleep(backoff_seconds(attempts, maximum=self._limits.backoff_seconds_max))
        await self._handle(batch)

    async def _split(self, batch: _Batch) -> None:
        middle = len(batch.records) // 2
        first, second = batch.records[:middle], batch.records[middle:]
        await self.load()
        await self._handle(_Batch(records=first, positions=positions_after(first, self._memory.stored)))
        if not self.is_loaded:
            await self.load()
        await self._handle(_Batch(records=second, positions=batch.positions))

    async def _give_up(self, batch: _Batch, reason: str) -> None:
        """Set the record aside (a retried key: all that it had) and go on without it."""
        if batch.retried:
            aside = tuple(SetAside(record=r, cause=Cause.FAILED, reason=reason) for r in batch.records)
        else:
            aside = (SetAside(record=batch.records[0], cause=Cause.FAILED, reason=reason),)
        self._given_up += 1
        if self._given_up > _GIVEN_UP_IN_A_ROW_MAX:
            raise HandlerBroken(f"the handler fails on every record: {reason}")
        given_up = _Batch(records=batch.records, positions=batch.positions, aside=aside)
        await self._commit(given_up, calls_handler=False)

    async def _commit(self, batch: _Batch, *, calls_handler: bool = True) -> bool:
        """One transaction; gives whether the handler was called in it."""
        began = time.perf_counter()
        memory = self._memory
        if calls_handler:
            batch = self._decoded(batch)  # (2)
        now = self._clock.now()
        async with self._lease.transaction() as tx:
            await self._settle(tx, batch)
            await advance_positions(tx, self._reader, stored=memory.stored, reached=batch.positions)
            await quarantine.set_aside(tx, self._reader, batch.aside, now=now)
            called = calls_handler and (bool(batch.events) or not batch.records)
            if called:
                assert isinstance(tx, PostgresTransaction)
                tx.traces = {event.key: event.traceparent for event in batch.events}
                await self._handler.on_events(batch.events, tx=tx, now=now)  # (3)
        self._after(batch, seconds=time.perf_counter() - began)
        return called

    async def _settle(self, tx: Transaction, batch: _Batch) -> None:
        """What the commit ends: a count of failures, a stay in quarantine."""
        if len(batch.records) == 1:
            await quarantine.forget_failure(tx, self._reader, batch.records[0])
        if batch.retried:
            await quarantine.take_out(tx, self._reader, batch.records)

    def _decoded(self, batch: _Batch) -> _Batch:
        """Records as events; set aside are those that cannot be, and those whose key is parked."""
        parked = set() if batch.retried else set(self._memory.parked)
        events: list[Event[EventData]] = []
        aside: list[SetAside] = []
        for record in batch.records:
            if record.parks_its_key and record.key in parked:
                aside.append(
                    SetAside(record=record, cause=Cause.PARKED, reason="follows an earlier record of its key")
                )
                continue
            try:
                events.append(to_event(record))
            except Poison as exc:
                aside.append(SetAside(record=record, cause=Cause.UNDECODABLE, reason=str(exc)))
                if record.parks_its_key and record.key:
                    parked.add(record.key)
        return _Batch(
            records=batch.records,
            positions=batch.positions,
            events=tuple(events),
            aside=tuple(aside),
            retried=batch.retried,
        )

    def _after(self, batch: _Batch, *, seconds: float) -> None:
        memory = self._memory
        memory.stored = dict(batch.positions)
        memory.looked = dict(batch.positions)
        memory.parked |= {item.record.key for item in batch.aside if item.parks_key and item.record.key}
        self._log.committed(memory.stored)
        self._committed_at = self._clock.monotonic()
        self._instruments.handler_seconds.observe(seconds)
        for event in batch.events:
            self._instruments.batch_events.labels(event.topic.value).inc()
        for item in batch.aside:
            self._instruments.quarantined_records.labels(item.cause.value).inc()
            _log.error(
                "record_quarantined",
                type=item.record.type,
                key=item.record.key,
                sequence=str(item.record.sequence),
                cause=item.cause.value,
                reason=item.reason,
            )

    # -- now and then -----------------------------------------------------------------------------------------

    async def _upkeep(self) -> None:
        """Every few seconds: take up keys that are to be retried, learn which were dropped."""
        now = self._clock.monotonic()
        if now - self._upkeep_at < _UPKEEP_SECONDS:
            return
        self._upkeep_at = now
        async with self._lease.transaction() as tx:
            marked = await quarantine.load_marked(tx, self._reader)
            self._memory.parked = await quarantine.load_parked(tx, self._reader)
        if marked:
            _log.info("key_retried", key=marked[0].key, records=len(marked))
            await self._handle(_Batch(records=marked, positions=self._memory.stored, retried=True))
            if not self.is_loaded:
                await self.load()
            self._upkeep_at = -_UPKEEP_SECONDS

    async def run_lag(self, stopping: asyncio.Event) -> None:
        """Keep the instruments of lag up to date."""
        while not stopping.is_set():
            try:
                backlog = await self._log.backlog(self._memory.stored, limit=_LAG_ROWS_MAX)
            except Unavailable:
                backlog = None
            if backlog is not None:
                age = (self._clock.now() - backlog.oldest).total_seconds() if backlog.oldest else 0.0
                self._instruments.consumer_lag_events.set(backlog.rows)
                self._instruments.oldest_unread_seconds.set(max(0.0, age))
            await pause(stopping, _UPKEEP_SECONDS)
