"""Scaling's memory: granted jobs; every event goes into its register, then the policy judges what was measured."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from schemas.envelope import Draft, Event
from schemas.events.scaling import ScalingProposed
from schemas.registry import EventData
from schemas.vocabulary import JobId
from services.scaling import store
from services.scaling.core.batch import Change, plan_batch, unknown_jobs
from services.scaling.core.registers import Job
from services.scaling.core.threshold import Decision, Keep, Policy, Propose
from services.scaling.settings import ScalingSettings
from shared.clock import Clock
from shared.instant import Instant
from shared.runtime.service import Lease, Transaction
from shared.runtime.sweeps import run_sweeps
from shared.telemetry.instruments import Instruments
from shared.telemetry.logs import get_logger

_log = get_logger(service="scaling")


@dataclass(kw_only=True)
class ScalingHandler:
    """Granted jobs are in memory, all others in rows only: a restart costs what runs, not what waits."""

    clock: Clock
    policy: Policy
    instruments: Instruments
    jobs: dict[JobId, Job] = field(default_factory=dict)
    _pending: Change | None = None

    def __post_init__(self) -> None:
        self._unusable = self.instruments.counter(
            "unusable_windows_total", "Metric windows that broke continuity, by the cause.", ("cause",)
        )

    async def load(self, tx: Transaction) -> None:
        self._pending = None
        self.jobs = {job.job_id: job for job in await store.load_active_jobs(tx, at=Instant.of(self.clock))}

    async def on_events(self, batch: Sequence[Event[EventData]], *, tx: Transaction, now: datetime) -> None:
        at = Instant.of(self.clock)
        stored = await store.load_jobs(tx, unknown_jobs(batch, self.jobs), at=at)
        change = plan_batch(self.jobs | stored, batch, now=at.wall, now_us=at.us, policy=self.policy)
        await store.save_jobs(tx, list(change.jobs.values()), at=at)
        for job_id, decision in change.decisions.items():
            if isinstance(decision, Propose):
                tx.publish(_to_draft(change.jobs[job_id], decision))
        self._pending = change

    def on_committed(self) -> None:
        change, self._pending = self._pending, None
        if change is None:
            return
        for job_id, job in change.jobs.items():
            if job.is_active:
                self.jobs[job_id] = job
            else:
                self.jobs.pop(job_id, None)
        for cause in change.unusable:
            self._unusable.labels(cause.value).inc()
        for job_id, decision in change.decisions.items():
            self._tell(change.jobs[job_id], decision)

    def due_seconds(self) -> float | None:
        """Only events move anything: a job is judged when its next window comes."""
        return None

    def _tell(self, job: Job, decision: Decision) -> None:
        if isinstance(decision, Keep):
            self.instruments.decisions.labels(decision.reason.value).inc()
            return
        self.instruments.decisions.labels("proposed").inc()
        _log.info(
            "size_proposed",
            job_id=job.job_id,
            epoch=job.grant.epoch,
            workers_from=job.grant.workers,
            workers_to=decision.workers,
            reason=decision.reason,
        )


def _to_draft(job: Job, decision: Propose) -> Draft[EventData]:
    data = ScalingProposed(
        epoch=job.grant.epoch, workers=decision.workers, gain_per_worker=None, reason=decision.reason
    )
    return Draft(key=job.job_id, tenant=job.tenant, data=data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Deletes rows of jobs that closed long ago, a bounded number at a time."""

    clock: Clock
    lease: Lease
    settings: ScalingSettings

    async def run(self, stopping: asyncio.Event) -> None:
        await run_sweeps(stopping, self._drop_some, interval_seconds=self.settings.retention_interval_seconds)

    async def _drop_some(self) -> bool:
        """True if there may be more."""
        before = self.clock.now() - timedelta(seconds=self.settings.closed_retention_seconds)
        limit = self.settings.retention_rows_max
        async with self.lease.transaction() as tx:
            return await store.drop_closed_jobs(tx, before=before, limit=limit) >= limit
