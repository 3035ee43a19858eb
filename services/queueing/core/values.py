"""What queueing thinks in: workloads, promises, the capacity, what ``plan`` sees and what it returns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias

from schemas.events.allocation import Reason, StartEstimate
from schemas.events.capacity import Node
from schemas.events.job import RequestRegister, RestartPolicy, RoleRequest
from schemas.events.worker import GroupEnded, RoomFreed
from schemas.vocabulary import (
    FlavorName,
    JobId,
    NodeName,
    PriorityClass,
    QueueName,
    TenantName,
    UserName,
    WaitCode,
)

_URGENCY: Final = {priority: priority.urgency for priority in PriorityClass}


class Standing(StrEnum):
    """Where a workload stands in the ledger."""

    WAITING = "waiting"
    RUNNING = "running"
    """Granted, whether its group has started or not."""
    DRAINING = "draining"
    """Evicted; ``group_ended`` of its attempt has not come yet."""
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitReason:
    """Why an examined workload waits, and what would unblock it."""

    code: WaitCode
    detail: str
    unblocked_by: str
    estimate: StartEstimate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A job's request and its place in the ledger. Counts per role stand in the order of ``roles``.

    ``floor``: workers that the present grant must not go below; a raised minimum changes it at the next
    admission. ``wanted``: size wished for, by the user or by the last accepted proposal; shrinking for others
    leaves it alone. ``size_before``: workers it had before others took some, 0 if they did not.
    ``order`` counts admissions of all jobs: the highest was admitted last.
    ``granted_at_revision``: the capacity report that this attempt was granted on; members that it names are of an
    earlier attempt, which is over. ``best_step``: the highest that any attempt reached; ``fruitless``: attempts in a
    row that the platform ended without a step beyond it. Fields that end in ``_at`` or
    ``_until`` are seconds of this process's monotonic clock and are not saved.
    """

    job_id: JobId
    name: str
    tenant: TenantName
    user: UserName
    queue: QueueName
    roles: tuple[RoleRequest, ...]
    is_resizable: bool
    loses_work_when_resized: bool
    grace_seconds: float
    restart_policy: RestartPolicy
    request: RequestRegister
    granted: tuple[int, ...]
    held: tuple[int, ...]
    wanted: int
    wanted_because: str = ""
    standing: Standing = Standing.WAITING
    epoch: int = 0
    attempt: int = 0
    started_attempt: int = 0
    flavor: FlavorName | None = None
    floor: int = 0
    size_before: int = 0
    order: int = 0
    granted_at_revision: int = 0
    job_failures: int = 0
    platform_failures: int = 0
    best_step: int = 0
    fruitless: int = 0
    back_off_seconds: float = 0.0
    overdue: str = ""
    waiting: WaitReason | None = None
    back_off_until: float | None = None
    started_at: float | None = None
    checkpointed_at: float | None = None

    @property
    def priority(self) -> PriorityClass:
        return self.request.priority

    @property
    def urgency(self) -> int:
        """3 for critical down to 0 for low."""
        return _URGENCY[self.request.priority]

    @property
    def claims(self) -> bool:
        """True if it waits for room: neither held nor backing off."""
        return self.standing is Standing.WAITING and not self.request.held and self.back_off_seconds == 0

    @property
    def workers(self) -> int:
        """Granted members of the elastic role."""
        return sum(n for n, role in zip(self.granted, self.roles, strict=True) if role.elastic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """Room for the whole minimum of a claimant. ``origins``: the jobs that were shrunk or evicted for it."""

    job_id: JobId
    flavor: FlavorName
    members: tuple[int, ...]
    origins: tuple[JobId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The last capacity report."""

    revision: int
    nodes: tuple[Node, ...]
    lost_nodes: tuple[NodeName, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parked:
    """A word of execution that waits for the capacity revision it speaks of. ``ordinal`` keeps their order."""

    ordinal: int
    job_id: JobId
    word: RoomFreed | GroupEnded


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Limits of the policy, from settings. Durations in seconds."""

    minimum_run_seconds: float = 0.0
    """Nobody is preempted for another job sooner than this after its group started."""
    back_off_first_seconds: float = 5.0
    back_off_limit_seconds: float = 300.0
    steady_seconds: float = 300.0
    """An attempt that ran this long ends a row of failures of the platform."""
    platform_retries_without_progress_max: int = 10
    """More attempts in a row that the platform ended without one step further, and the job has failed."""
    explain_seconds: float = 1.0
    """A reason whose code stays and whose numbers move is told at most this often."""


Line: TypeAlias = Sequence[Workload]
"""Waiting workloads that are equal but for their age, the oldest first."""
Shape: TypeAlias = tuple[PriorityClass, QueueName, TenantName, UserName, int, int, tuple[RoleRequest, ...]]
"""What makes two waiting workloads equal for ``plan``: class, queue, owner, workers range, roles."""


def shape_of(workload: Workload) -> Shape:
    request = workload.request
    return (
        request.priority,
        workload.queue,
        workload.tenant,
        workload.user,
        request.workers_min,
        request.workers_max,
        workload.roles,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What ``plan`` decides on.

    ``active``: every workload that is charged for something. ``lines``: per class, queue and shape, the waiting
    workloads that claim room, most urgent first; a plan looks no further into a line than it grants or promises, and
    one step. ``claimants``: those in lines that have a promise.
    """

    capacity: Capacity | None
    active: tuple[Workload, ...]
    lines: tuple[Line, ...]
    claimants: tuple[Workload, ...]
    promises: tuple[Promise, ...]
    rules: Rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    job_id: JobId
    flavor: FlavorName
    workers: int
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """``size_before``: what the workload's field of this name becomes."""

    job_id: JobId
    workers: int
    reason: Reason
    size_before: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Evict:
    job_id: JobId
    reason: Reason


Decision: TypeAlias = Grant | Resize | Evict


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Decisions in the order in which they are to be carried out; all promises that are left, most urgent first;
    and for every examined workload that goes on waiting, why. ``due_seconds``: when time alone may change it.
    """

    decisions: tuple[Decision, ...]
    promises: tuple[Promise, ...]
    waits: Mapping[JobId, WaitReason]
    due_seconds: float | None = None


NO_CAPACITY: Final = WaitReason(
    code=WaitCode.NO_CAPACITY_REPORT,
    detail="nothing has been reported yet about what the cluster can hold",
    unblocked_by="the first capacity report, as soon as execution is up",
)
