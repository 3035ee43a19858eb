"""The read model of one job: what was asked for, and what the other services said about it since."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime

from schemas.envelope import Event, Sequence
from schemas.events.allocation import (
    AllocationClosed,
    AllocationEvicted,
    AllocationGranted,
    AllocationResized,
    AllocationWaiting,
    QueueObserved,
)
from schemas.events.capacity import CapacityObserved
from schemas.events.job import JobChanged, JobEnded, JobSpec, JobSubmitted, RequestRegister, RoleRequest
from schemas.events.metric import MetricWindow
from schemas.events.scaling import ScalingProposed
from schemas.events.worker import (
    Checkpointed,
    CheckpointFailed,
    GroupChanged,
    GroupEnded,
    GroupStarted,
    RoomFreed,
    RoomOverdue,
    StartFailed,
)
from schemas.registry import EventData
from schemas.vocabulary import JobId, JobPhase, PriorityClass, QueueName, TenantName, Topic, UserName
from services.intake.core.phase import phase_of
from services.intake.core.registers import (
    Grant,
    GrantState,
    Group,
    Measured,
    Proposal,
    Waiting,
    fold_grant,
    fold_group,
    fold_measured,
    fold_proposal,
    fold_waiting,
)
from services.intake.core.summaries import Told, tell


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """What the user sent, and the request register as it is now."""

    job_id: JobId
    tenant: TenantName
    user: UserName
    queue: QueueName
    spec: JobSpec
    roles: tuple[RoleRequest, ...]
    request: RequestRegister
    warnings: tuple[str, ...]
    allow_unsatisfiable: bool
    submitted_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Registers:
    """One per topic; each is folded from its own topic alone.

    ``submitted_xid``: the transaction that submitted the job, 0 until its event was read; later words of
    queueing carry a higher one.
    """

    grant: Grant = field(default_factory=Grant)
    waiting: Waiting = field(default_factory=Waiting)
    group: Group = field(default_factory=Group)
    measured: Measured = field(default_factory=Measured)
    proposal: Proposal = field(default_factory=Proposal)
    submitted_xid: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRow:
    """One event of a job's history."""

    job_id: JobId
    sequence: Sequence
    time: datetime
    type: str
    told: Told
    data: EventData


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """A job whose allocation was closed by this batch: ``job.ended`` is to be published, once."""

    job_id: JobId
    tenant: TenantName
    data: JobEnded


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSeen:
    """How a queue stood, by the log's position."""

    tenant: TenantName
    queue: QueueName
    observed: QueueObserved
    sequence: Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """What a batch makes of the read model. Jobs and queues once each, ordered by key."""

    jobs: tuple[tuple[JobId, Registers], ...]
    history: tuple[HistoryRow, ...]
    endings: tuple[Ending, ...]
    queues: tuple[QueueSeen, ...]
    capacity: CapacityObserved | None


def jobs_of(batch: Iterable[Event[EventData]]) -> tuple[JobId, ...]:
    """The jobs whose registers a batch may change; sorted."""
    return tuple(sorted({JobId(event.key) for event in batch if is_about_a_job(event.data)}))


def is_about_a_job(data: EventData) -> bool:
    return not isinstance(data, QueueObserved | CapacityObserved)


def is_history(data: EventData) -> bool:
    """Windows are curves (metrics keeps them); snapshots are about no job."""
    return is_about_a_job(data) and not isinstance(data, MetricWindow)


def fold_batch(known: dict[JobId, Registers], batch: Iterable[Event[EventData]]) -> Folded:
    """Fold a batch per key first, so that each row is written once. ``known`` lacks jobs never spoken of."""
    jobs = dict(known)
    history: list[HistoryRow] = []
    endings: list[Ending] = []
    queues: dict[tuple[TenantName, QueueName], QueueSeen] = {}
    capacity: CapacityObserved | None = None
    for event in batch:
        if isinstance(event.data, QueueObserved):
            seen = _queue_seen(event, event.data)
            queues[seen.tenant, seen.queue] = _newer(queues.get((seen.tenant, seen.queue)), seen)
        elif isinstance(event.data, CapacityObserved):
            if capacity is None or event.data.revision >= capacity.revision:
                capacity = event.data
        else:
            job_id = JobId(event.key)
            before = jobs.get(job_id, Registers())
            after = fold_event(before, event)
            jobs[job_id] = after
            if after.grant.state is GrantState.CLOSED and before.grant.state is not GrantState.CLOSED:
                endings.append(Ending(job_id=job_id, tenant=event.tenant, data=ended(after)))
            if is_history(event.data):
                history.append(_history_row(event))
    return Folded(
        jobs=tuple(sorted(jobs.items())),
        history=tuple(history),
        endings=tuple(endings),
        queues=tuple(queues[key] for key in sorted(queues)),
        capacity=capacity,
    )


def fold_event(registers: Registers, event: Event[EventData]) -> Registers:
    """One event into the register of its topic."""
    data, at, sequence = event.data, event.time, event.sequence
    match data:
        case AllocationGranted() | AllocationResized() | AllocationEvicted() | AllocationClosed():
            return replace(
                registers,
                grant=fold_grant(registers.grant, data, at=at),
                waiting=fold_waiting(registers.waiting, data, sequence=sequence),
            )
        case AllocationWaiting():
            return replace(registers, waiting=fold_waiting(registers.waiting, data, sequence=sequence))
        case (
            GroupStarted()
            | GroupChanged()
            | GroupEnded()
            | RoomFreed()
            | RoomOverdue()
            | StartFailed()
            | Checkpointed()
            | CheckpointFailed()
        ):
            return replace(registers, group=fold_group(registers.group, data, at=at))
        case MetricWindow():
            return replace(registers, measured=fold_measured(registers.measured, data, sequence=sequence))
        case ScalingProposed():
            return replace(registers, proposal=fold_proposal(registers.proposal, data, sequence=sequence))
        case JobSubmitted():
            return replace(registers, submitted_xid=sequence.xid)
        case JobChanged() | JobEnded() | QueueObserved() | CapacityObserved():
            return registers


def ended(registers: Registers) -> JobEnded:
    """The facts of ``job.ended`` from a closed grant."""
    grant = registers.grant
    assert grant.outcome is not None, "only a closed job has ended"
    assert grant.closed_at is not None, "closed without a time"
    return JobEnded(
        outcome=grant.outcome,
        exit_code=grant.exit_code,
        attributed_to=grant.attributed_to,
        reason="" if grant.reason is None else grant.reason.detail,
        image_digest=registers.group.image_digest,
        accelerator_seconds=round(grant.usage.accelerator_seconds(grant.closed_at), 3),
        cause=grant.cause,
    )


def filed_under(registers: Registers) -> JobPhase:
    """The phase as far as the other services decide it, for lists: Queued stands for Queued and Held.

    The request register adds the hold; it lies in another row, which other transactions write.
    """
    neutral = RequestRegister(version=0, priority=PriorityClass.LOW, workers_min=1, workers_max=1, workers=1)
    return phase_of(neutral, registers.grant, registers.group).phase


def topics() -> frozenset[Topic]:
    """Everything: its own topic too, so that history holds what users did, in the order of the log."""
    return frozenset(Topic)


def _queue_seen(event: Event[EventData], data: QueueObserved) -> QueueSeen:
    return QueueSeen(tenant=event.tenant, queue=QueueName(event.key), observed=data, sequence=event.sequence)


def _newer(known: QueueSeen | None, seen: QueueSeen) -> QueueSeen:
    return seen if known is None or seen.sequence > known.sequence else known


def _history_row(event: Event[EventData]) -> HistoryRow:
    return HistoryRow(
        job_id=JobId(event.key),
        sequence=event.sequence,
        time=event.time,
        type=event.type,
        told=tell(event.data),
        data=event.data,
    )
