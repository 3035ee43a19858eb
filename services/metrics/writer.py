"""Reports from the route to Postgres to memory: many in one transaction, answered after the commit."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from services.metrics import store
from services.metrics.core.groups import Verdict
from services.metrics.core.signals import Sample
from services.metrics.handlers import MetricsHandler
from services.metrics.settings import MetricsSettings
from shared.errors import Conflict, Unavailable
from shared.runtime.service import Lease, Transaction
from shared.runtime.sweeps import run_sweeps
from shared.telemetry.logs import get_logger

_log = get_logger(service="metrics")
_STORED = frozenset({Verdict.COUNTED, Verdict.AHEAD})
_AWAY = "metrics is not the active one here, or has just been stopped"


@dataclass(frozen=True, slots=True)
class _Entry:
    sample: Sample
    answer: asyncio.Future[Verdict]


@dataclass(kw_only=True)
class SampleWriter:
    """The inbox of the route. ``run`` empties it while the lease is held; without it nothing is accepted."""

    handler: MetricsHandler
    lease: Lease
    settings: MetricsSettings
    _inbox: deque[_Entry] = field(default_factory=deque)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def submit(self, sample: Sample) -> Verdict:
        """Hand in one report; returns once it is committed. Raises Unavailable: send it again later."""
        if not (self.handler.is_loaded and self.lease.is_held):
            raise Unavailable(_AWAY)
        if len(self._inbox) >= self.settings.inbox_samples_max:
            raise Unavailable("too many reports wait to be written")
        entry = _Entry(sample, asyncio.get_running_loop().create_future())
        self._inbox.append(entry)
        self._arrived.set()
        try:
            async with asyncio.timeout(self.settings.answer_seconds_max):
                return await entry.answer
        except TimeoutError as exc:
            raise Unavailable("the report could not be written in time") from exc

    async def run(self, stopping: asyncio.Event) -> None:
        """Write what arrives until told to stop, then what is left. A failed write fails its reports only."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._wake_at(stopping))
                while not stopping.is_set() or self._inbox:
                    await self._arrived.wait()
                    if not stopping.is_set():
                        self._arrived.clear()
                        await asyncio.sleep(self.settings.write_interval_seconds)
                    await self._write_all()
        finally:
            self._refuse([self._inbox.popleft() for _ in range(len(self._inbox))])

    async def _wake_at(self, stopping: asyncio.Event) -> None:
        await stopping.wait()
        self._arrived.set()

    async def _write_all(self) -> None:
        while self._inbox:
            size = min(len(self._inbox), self.settings.batch_samples_max)
            batch = [self._inbox.popleft() for _ in range(size)]
            try:
                await self._write(batch)
            except (Unavailable, Conflict) as exc:
                _log.warning("samples_not_written", samples=len(batch), error=str(exc))
            finally:
                self._refuse(batch)

    async def _write(self, batch: Sequence[_Entry]) -> None:
        """Judge, store what counts or waits, commit; then count it.

        Rows first: what is counted twice after a lost commit is told by its sequence, in memory and by the key.
        """
        samples = [entry.sample for entry in batch]
        async with self.lease.transaction() as tx:
            verdicts = list(self.handler.judge(samples))
            stored = [place for place, verdict in enumerate(verdicts) if verdict in _STORED]
            fresh = await store.save_samples(
                tx, [samples[place] for place in stored], received_at=self.handler.clock.now()
            )
        repeated = [p for p in stored if (samples[p].member, samples[p].sequence) not in fresh]
        gone = frozenset(repeated)
        counted = [place for place in range(len(samples)) if place not in gone]
        for place, verdict in zip(counted, self.handler.count([samples[p] for p in counted]), strict=True):
            verdicts[place] = verdict
        for place in repeated:
            verdicts[place] = Verdict.REPEATED
        self.handler.tell(verdicts)
        for entry, verdict in zip(batch, verdicts, strict=True):
            if not entry.answer.done():
                entry.answer.set_result(verdict)

    def _refuse(self, batch: Sequence[_Entry]) -> None:
        for entry in batch:
            if not entry.answer.done():
                entry.answer.set_exception(Unavailable(_AWAY))


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Deletes what is old, a bounded number of rows at a time."""

    handler: MetricsHandler
    lease: Lease
    settings: MetricsSettings

    async def run(self, stopping: asyncio.Event) -> None:
        await run_sweeps(stopping, self._drop_some, interval_seconds=self.settings.retention_interval_seconds)

    async def _drop_some(self) -> bool:
        """True if there may be more."""
        now, limit = self.handler.clock.now(), self.settings.retention_rows_max
        async with self.lease.transaction() as tx:
            dropped = await store.drop_samples(
                tx, before=now - timedelta(seconds=self.settings.sample_retention_seconds), limit=limit
            )
            jobs = await self._drop_jobs(tx, limit=100)
        return dropped >= limit or jobs >= 100

    async def _drop_jobs(self, tx: Transaction, *, limit: int) -> int:
        before = self.handler.clock.now() - timedelta(seconds=self.settings.curve_retention_seconds)
        return await store.drop_ended_jobs(tx, before=before, keep=self.settings.ended_jobs_max, limit=limit)
