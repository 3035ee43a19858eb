"""What scaling knows of a job: one register per topic, each guarded by its own version, never by arrival."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

from schemas.events.allocation import (
    AllocationClosed,
    AllocationEvicted,
    AllocationGranted,
    AllocationResized,
    RoleGrant,
)
from schemas.events.job import JobChanged, JobSubmitted, RequestRegister
from schemas.events.metric import MetricWindow
from schemas.events.worker import GroupChanged, GroupEnded, GroupStarted
from schemas.vocabulary import JobId, Mode, TenantName
from services.scaling.core.stability import Band, Streak, Unusable, extend, to_part


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What of the request register matters here. Version 0: not seen yet."""

    version: int = 0
    workers_min: int = 0
    workers_max: int = 0
    held: bool = False
    cancelled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What is granted. ``workers`` counts the elastic role; 0: nothing."""

    epoch: int = 0
    attempt: int = 0
    workers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The newest group that has started, and the newest attempt that has ended."""

    attempt: int = 0
    generation: int = 0
    workers: int = 0
    ended_attempt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job. ``disturbed_us``: when its allocation changed or a member was lost, on our own clock.

    ``proposed``: epoch and workers of the last proposal. ``mode`` is None until the submission is seen.
    """

    job_id: JobId
    tenant: TenantName
    mode: Mode | None = None
    has_checkpoint_path: bool = False
    request: Request = Request()
    grant: Grant = Grant()
    group: Group = Group()
    disturbed_us: int | None = None
    streak: Streak | None = None
    proposed: tuple[int, int] | None = None
    closed: bool = False

    @property
    def is_active(self) -> bool:
        """Worth keeping in memory: only what is granted can be judged."""
        return not self.closed and self.grant.workers > 0


RegisterData: TypeAlias = (
    JobSubmitted
    | JobChanged
    | AllocationGranted
    | AllocationResized
    | AllocationEvicted
    | AllocationClosed
    | GroupStarted
    | GroupChanged
    | GroupEnded
)
REGISTER_EVENTS = (
    JobSubmitted,
    JobChanged,
    AllocationGranted,
    AllocationResized,
    AllocationEvicted,
    AllocationClosed,
    GroupStarted,
    GroupChanged,
    GroupEnded,
)


def apply(job: Job, data: RegisterData, *, now_us: int) -> Job:
    """The job after an event of the job, allocation or worker topic. What is no news changes nothing."""
    match data:
        case JobSubmitted():
            told = replace(job, mode=data.spec.mode, has_checkpoint_path=data.spec.checkpoint_path is not None)
            return _request(told, data.request)
        case JobChanged():
            return _request(job, data.request)
        case AllocationGranted() | AllocationResized():
            grant = Grant(epoch=data.epoch, attempt=data.attempt, workers=elastic_workers(data.roles))
            return _grant(job, grant, now_us=now_us)
        case AllocationEvicted():
            return _grant(job, Grant(epoch=data.epoch, attempt=data.attempt), now_us=now_us)
        case AllocationClosed():
            return replace(job, closed=True, streak=None)
        case GroupStarted() | GroupChanged():
            return _group(job, data, now_us=now_us)
        case GroupEnded():
            ended = max(job.group.ended_attempt, data.attempt)
            streak = None if job.group.attempt <= ended else job.streak
            return replace(job, group=replace(job.group, ended_attempt=ended), streak=streak)


def elastic_workers(roles: Iterable[RoleGrant]) -> int:
    return sum(role.members for role in roles if role.elastic)


def _request(job: Job, register: RequestRegister) -> Job:
    if register.version <= job.request.version:
        return job
    request = Request(
        version=register.version,
        workers_min=register.workers_min,
        workers_max=register.workers_max,
        held=register.held,
        cancelled=register.cancelled,
    )
    return replace(job, request=request, streak=None if register.held or register.cancelled else job.streak)


def _grant(job: Job, grant: Grant, *, now_us: int) -> Job:
    """Every change of the allocation begins a cooldown, and the window anew."""
    if grant.epoch <= job.grant.epoch:
        return job
    return replace(job, grant=grant, disturbed_us=now_us, streak=None)


def _group(job: Job, data: GroupStarted | GroupChanged, *, now_us: int) -> Job:
    """A streak belongs to one generation, so a new one begins it anew, whether its windows came before or after.

    Losing a member begins a cooldown: crashing workers never grow.
    """
    if (data.attempt, data.generation) <= (job.group.attempt, job.group.generation):
        return job
    lost = isinstance(data, GroupChanged) and bool(data.lost)
    group = replace(job.group, attempt=data.attempt, generation=data.generation, workers=data.workers)
    return replace(job, group=group, disturbed_us=now_us if lost else job.disturbed_us)


def observe(job: Job, window: MetricWindow, *, age_us: int, now_us: int, band: Band) -> tuple[Job, Unusable | None]:
    """The job after a metric window: its streak longer, begun anew, or broken (and by what).

    A window of an older generation is no news. One of a generation whose worker event is still to come begins a
    streak of its own, which counts once that event is there: topics have no order among each other.
    """
    named = (window.attempt, window.generation)
    known = (job.group.attempt, job.group.generation)
    streak_of = (job.streak.attempt, job.streak.generation) if job.streak else known
    if named < max(known, streak_of) or window.attempt <= job.group.ended_attempt:
        return job, None
    expected = job.group.workers if named == known else None
    part = to_part(window, age_us=age_us, expected=expected, band=band)
    if isinstance(part, Unusable):
        return replace(job, streak=None), part
    streak = extend(job.streak, part, attempt=window.attempt, generation=window.generation, now_us=now_us, band=band)
    return replace(job, streak=streak), None
