"""Decides what queueing's and intake's events mean for a job: the register of what is wanted."""

from dataclasses import replace
from datetime import datetime
from typing import Final, TypeAlias

from schemas.events.allocation import AllocationClosed, AllocationEvicted, AllocationGranted, AllocationResized
from schemas.events.job import JobEnded, JobSubmitted
from services.execution.core.state import Desired, GenerationState, Job, MemberState

Wanted: TypeAlias = (
    JobSubmitted | JobEnded | AllocationGranted | AllocationResized | AllocationEvicted | AllocationClosed
)
GENERATIONS_KEPT: Final = 64
"""Started generations remembered per job; checkpoints older than all of them are never chosen."""


def apply_event(job: Job, data: Wanted, *, now: datetime) -> Job:
    """The job after one event. A grant and its spec may come in either order; an older epoch changes nothing."""
    match data:
        case JobSubmitted():
            return replace(job, spec=data.spec, tenant=data.tenant) if job.spec is None else job
        case JobEnded():
            return replace(job, ended_at=now, desired=Desired.CLOSED)
        case AllocationClosed():
            return replace(job, desired=Desired.CLOSED, epoch=max(job.epoch, data.epoch))
        case AllocationGranted():
            return _granted(job, data)
        case AllocationResized():
            return _resized(job, data)
        case AllocationEvicted():
            return _evicted(job, data)


def _granted(job: Job, data: AllocationGranted) -> Job:
    if data.epoch <= job.epoch or data.attempt <= job.attempt_ended or job.desired is Desired.CLOSED:
        return job
    if data.attempt > job.attempt:
        job = _begin_attempt(job, data.attempt)
    return replace(
        job, desired=Desired.GRANTED, epoch=data.epoch, roles=data.roles, desired_reason=data.reason.detail
    )


def _resized(job: Job, data: AllocationResized) -> Job:
    if data.epoch <= job.epoch or data.attempt != job.attempt or job.is_over or job.desired is not Desired.GRANTED:
        return job
    return replace(
        job,
        epoch=data.epoch,
        roles=data.roles,
        grace_seconds=data.grace_seconds,
        desired_reason=data.reason.detail,
        unanswered=(*job.unanswered, data.epoch),
    )


def _evicted(job: Job, data: AllocationEvicted) -> Job:
    if data.epoch <= job.epoch or job.desired is Desired.CLOSED:
        return job
    if data.attempt > job.attempt:
        job = _begin_attempt(job, data.attempt)
    if job.is_over:
        return replace(job, epoch=data.epoch)
    return replace(
        job,
        desired=Desired.EVICTED,
        epoch=data.epoch,
        grace_seconds=data.grace_seconds,
        desired_reason=data.reason.detail,
        unanswered=(),
    )


def _begin_attempt(job: Job, attempt: int) -> Job:
    started = [g for g in job.generations if g.state is GenerationState.STARTED]
    return replace(
        job,
        attempt=attempt,
        roles=(),
        unanswered=(),
        grace_seconds=job.spec.grace_seconds if job.spec is not None else job.grace_seconds,
        generations=tuple(started[-GENERATIONS_KEPT:]),
        members=tuple(m for m in job.members if m.state is not MemberState.GONE),
        group_started=False,
        started_at=None,
        finished_step=None,
        verdict=None,
        losses=(),
        crashes=0,
        fruitless=0,
        fruitless_step=0,
        step=0,
        attempt_step=job.step or job.attempt_step,
    )
