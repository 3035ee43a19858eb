"""What a batch of events does to the jobs that it speaks of, and what is proposed for those it measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from schemas.envelope import Event
from schemas.events.metric import MetricWindow
from schemas.registry import EventData
from schemas.vocabulary import JobId
from services.scaling.core.registers import REGISTER_EVENTS, Job, apply, observe
from services.scaling.core.stability import Unusable
from services.scaling.core.threshold import Decision, Keep, Policy, decide


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What one batch does: jobs as they are afterwards, what was decided, and which windows said nothing."""

    jobs: Mapping[JobId, Job]
    decisions: Mapping[JobId, Decision]
    unusable: tuple[Unusable, ...] = ()


def unknown_jobs(batch: Sequence[Event[EventData]], known: Mapping[JobId, Job]) -> list[JobId]:
    """Jobs whose registers a batch writes and that are not in memory. Windows alone are no reason to look."""
    return sorted({JobId(event.key) for event in batch if isinstance(event.data, REGISTER_EVENTS)} - known.keys())


def plan_batch(
    known: Mapping[JobId, Job], batch: Sequence[Event[EventData]], *, now: datetime, now_us: int, policy: Policy
) -> Change:
    """Apply a batch in its order; then judge once every job of which it brought a window.

    The age of a window is by its publisher's clock against ours. Two clocks are compared here on purpose: where
    they disagree by more than ``staleness_seconds``, windows become unusable and nothing moves.
    """
    jobs: dict[JobId, Job] = {}
    measured: dict[JobId, None] = {}
    unusable: list[Unusable] = []
    for event in batch:
        job_id, data = JobId(event.key), event.data
        job = jobs.get(job_id) or known.get(job_id)
        if job is not None and job.closed:
            continue
        if isinstance(data, REGISTER_EVENTS):
            jobs[job_id] = apply(job or Job(job_id=job_id, tenant=event.tenant), data, now_us=now_us)
        elif isinstance(data, MetricWindow) and job is not None and job.is_active:
            age_us = (now - event.time) // timedelta(microseconds=1)
            jobs[job_id], cause = observe(job, data, age_us=age_us, now_us=now_us, band=policy.band)
            measured[job_id] = None
            unusable += [] if cause is None else [cause]
    decisions: dict[JobId, Decision] = {}
    for job_id in measured:
        decisions[job_id] = decide(jobs[job_id], now_us=now_us, policy=policy)
        jobs[job_id] = _proposed(jobs[job_id], decisions[job_id])
    return Change(jobs=jobs, decisions=decisions, unusable=tuple(unusable))


def _proposed(job: Job, decision: Decision) -> Job:
    """The job once a decision about it is published."""
    if isinstance(decision, Keep):
        return job
    return replace(job, proposed=(job.grant.epoch, decision.workers))
