"""Events of ``tide.allocation.v1``: who is granted how much. Published by queueing; key = job id unless said."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from schemas.resources import Resources
from schemas.vocabulary import (
    Attribution,
    DecisionCode,
    EndCause,
    FlavorName,
    Outcome,
    PriorityClass,
    Topic,
    WaitCode,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why. ``code`` is for programs, ``detail`` is one sentence for people, naming no other tenant's job."""

    code: DecisionCode
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureCounts:
    """``of_job`` count against the restart policy; ``without_progress``: attempts in a row that the platform ended
    without one step further."""

    of_job: int
    without_progress: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleGrant:
    """What one role holds: ``members`` processes, of which at least ``minimum`` must be there."""

    role: str
    elastic: bool
    members: int
    minimum: int
    resources: Resources


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationGranted:
    """A gang was admitted, or retried in place.

    By: queueing, when the charge is committed. For: execution, intake, scaling.
    """

    TYPE: ClassVar[Literal["tide.allocation.granted.v1"]] = "tide.allocation.granted.v1"
    TOPIC: ClassVar[Topic] = Topic.ALLOCATION
    epoch: int
    attempt: int
    roles: tuple[RoleGrant, ...]
    flavor: FlavorName
    reason: Reason
    failures: FailureCounts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationResized:
    """The target of a running job changed (or only its minimum: then ``workers_from == workers_to``).

    By: queueing. For: execution, scaling.
    """

    TYPE: ClassVar[Literal["tide.allocation.resized.v1"]] = "tide.allocation.resized.v1"
    TOPIC: ClassVar[Topic] = Topic.ALLOCATION
    epoch: int
    attempt: int
    workers_from: int
    workers_to: int
    roles: tuple[RoleGrant, ...]
    grace_seconds: float
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationEvicted:
    """The allocation is taken back as a whole: preempted, held, cancelled, idle, or the start failed.

    By: queueing. For: execution, scaling. ``group_ended`` of this attempt ends the eviction, nothing else.
    """

    TYPE: ClassVar[Literal["tide.allocation.evicted.v1"]] = "tide.allocation.evicted.v1"
    TOPIC: ClassVar[Topic] = Topic.ALLOCATION
    epoch: int
    attempt: int
    grace_seconds: float
    reason: Reason
    requeue: bool
    failures: FailureCounts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationClosed:
    """The job has ended: terminal, exactly once.

    By: queueing, which alone decides the outcome. For: intake, scaling, execution.
    """

    TYPE: ClassVar[Literal["tide.allocation.closed.v1"]] = "tide.allocation.closed.v1"
    TOPIC: ClassVar[Topic] = Topic.ALLOCATION
    epoch: int
    attempt: int
    outcome: Outcome
    exit_code: int | None
    attributed_to: Attribution | None
    reason: Reason
    cause: EndCause | None = None
    failures: FailureCounts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEstimate:
    """When a waiting job may start, and on what that guess rests. Seconds from now, never an instant."""

    seconds: float
    basis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationWaiting:
    """The binding reason of an examined waiting job changed.

    By: queueing. For: intake.
    """

    TYPE: ClassVar[Literal["tide.allocation.waiting.v1"]] = "tide.allocation.waiting.v1"
    TOPIC: ClassVar[Topic] = Topic.ALLOCATION
    code: WaitCode
    detail: str
    unblocked_by: str
    estimate: StartEstimate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingCount:
    priority: PriorityClass
    jobs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueObserved:
    """How a queue stands. Key = queue name; a snapshot, the next one replaces it.

    By: queueing, when it changed, at most every 5 s. For: intake (place and estimate of those not examined).
    """

    TYPE: ClassVar[Literal["tide.allocation.queue_observed.v1"]] = "tide.allocation.queue_observed.v1"
    TOPIC: ClassVar[Topic] = Topic.ALLOCATION
    pending: tuple[PendingCount, ...]
    head: str | None
    head_code: WaitCode | None
    head_detail: str
    starts_per_minute: float
    reservation: str | None = None
