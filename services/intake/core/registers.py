"""What the other services said last about a job: one register per topic, each guarded by its own version.

Topics have no order among each other, so no register looks at another one, and none goes by arrival.
Folding an event again, or one that is older than what is there, changes nothing.
"""

from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import TypeAlias

from schemas.envelope import START, Sequence
from schemas.events.allocation import (
    AllocationClosed,
    AllocationEvicted,
    AllocationGranted,
    AllocationResized,
    AllocationWaiting,
    FailureCounts,
    Reason,
    RoleGrant,
)
from schemas.events.metric import MetricWindow
from schemas.events.scaling import ScalingProposed
from schemas.events.worker import (
    Checkpointed,
    CheckpointFailed,
    GroupChanged,
    GroupEnded,
    GroupStarted,
    ResumePoint,
    RoomFreed,
    RoomOverdue,
    SkippedCheckpoint,
    StartFailed,
)
from schemas.resources import CPU, MEMORY, MILLI, SHM
from schemas.vocabulary import AttemptOutcome, Attribution, EndCause, GroupChangeCause, Outcome

GrantData: TypeAlias = AllocationGranted | AllocationResized | AllocationEvicted | AllocationClosed
GroupData: TypeAlias = (
    GroupStarted | GroupChanged | GroupEnded | RoomFreed | RoomOverdue | StartFailed | Checkpointed | CheckpointFailed
)


class GrantState(StrEnum):
    """Ordered: inside one epoch a later state replaces an earlier one, and ``CLOSED`` is for good."""

    NONE = "none"
    GRANTED = "granted"
    EVICTED = "evicted"
    CLOSED = "closed"

    @property
    def rank(self) -> int:
        return tuple(GrantState).index(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Accelerators granted over time, by the clock of queueing alone; grace after an eviction is not counted.

    ``settled_milliseconds``: milliseconds times thousandths of an accelerator, up to ``since``.
    """

    settled_milliseconds: int = 0
    held_milli: int = 0
    since: datetime | None = None

    def at(self, now: datetime, *, held_milli: int) -> "Usage":
        """Settle up to ``now``, and go on with another size. A clock that went back counts as standing still."""
        return Usage(settled_milliseconds=self._until(now), held_milli=held_milli, since=now)

    def accelerator_seconds(self, now: datetime) -> float:
        return self._until(now) / (1000 * MILLI)

    def _until(self, now: datetime) -> int:
        if self.since is None or not self.held_milli:
            return self.settled_milliseconds
        elapsed = max(0, round((now - self.since).total_seconds() * 1000))
        return self.settled_milliseconds + elapsed * self.held_milli


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What queueing granted. Version: the epoch, then the state."""

    state: GrantState = GrantState.NONE
    epoch: int = 0
    attempt: int = 0
    roles: tuple[RoleGrant, ...] = ()
    resized_epoch: int = 0
    """The last epoch that changed the target of a running job; 0 if none did in this attempt."""
    reason: Reason | None = None
    outcome: Outcome | None = None
    exit_code: int | None = None
    attributed_to: Attribution | None = None
    cause: EndCause | None = None
    failures: FailureCounts | None = None
    closed_at: datetime | None = None
    usage: Usage = Usage()

    @property
    def workers(self) -> int:
        """Members granted to the elastic role; 0 unless the state is granted."""
        return sum(role.members for role in self.roles if role.elastic) if self.state is GrantState.GRANTED else 0

    @property
    def minimum(self) -> int:
        return sum(role.minimum for role in self.roles if role.elastic) if self.state is GrantState.GRANTED else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Why queueing says the job waits; None from a grant on. Version: the sequence of the last word on either."""

    said: AllocationWaiting | None = None
    sequence: Sequence = START


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFailure:
    """How the last attempt that failed has ended."""

    attempt: int
    exit_code: int | None
    attributed_to: Attribution | None
    cause: EndCause | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What execution said about the processes. Version: the attempt, then the generation; per fact its epoch."""

    attempt: int = 0
    generation: int = 0
    epoch: int = 0
    workers: int = 0
    started: bool = False
    ended: bool = False
    cause: GroupChangeCause | None = None
    ended_as: AttemptOutcome | None = None
    failure: AttemptFailure | None = None
    first_started_at: datetime | None = None
    image_digest: str | None = None
    step: int | None = None
    pause_seconds: float | None = None
    freed_epoch: int = 0
    overdue: RoomOverdue | None = None
    start_failed: StartFailed | None = None
    resumed_from: ResumePoint | None = None
    """The checkpoint that this attempt went on from last, with what that cost; None if it never did."""
    steps_dropped: int = 0
    skipped: tuple[SkippedCheckpoint, ...] = ()
    checkpoint: Checkpointed | None = None
    checkpoint_failed: CheckpointFailed | None = None

    def has_ended(self, attempt: int) -> bool:
        """A later attempt begins only after the earlier one has ended, whether or not that was read here."""
        return self.attempt > attempt or (self.attempt == attempt and self.ended)

    def has_started(self, attempt: int) -> bool:
        return self.attempt > attempt or (self.attempt == attempt and self.started)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The last window of metrics. Version: attempt, generation, sequence."""

    window: MetricWindow | None = None
    sequence: Sequence = START


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """The last proposal of scaling. Version: the epoch it is based on, then the sequence."""

    proposed: ScalingProposed | None = None
    sequence: Sequence = START


def fold_grant(grant: Grant, data: GrantData, *, at: datetime) -> Grant:
    """``at`` is the publisher's clock."""
    state = _state_of(data)
    if grant.state is GrantState.CLOSED or not _is_newer(grant, data.epoch, state):
        return grant
    failures = grant.failures if isinstance(data, AllocationResized) else data.failures
    folded = replace(
        grant, state=state, epoch=data.epoch, attempt=data.attempt, reason=data.reason, failures=failures
    )
    match data:
        case AllocationGranted():
            return replace(
                folded, roles=data.roles, resized_epoch=0, usage=grant.usage.at(at, held_milli=held(data.roles))
            )
        case AllocationResized():
            resized = data.epoch if data.workers_from != data.workers_to else grant.resized_epoch
            usage = grant.usage.at(at, held_milli=held(data.roles))
            return replace(folded, roles=data.roles, resized_epoch=resized, usage=usage)
        case AllocationEvicted():
            return replace(folded, roles=(), usage=grant.usage.at(at, held_milli=0))
        case AllocationClosed():
            return replace(
                folded,
                roles=(),
                outcome=data.outcome,
                exit_code=data.exit_code,
                attributed_to=data.attributed_to,
                cause=data.cause,
                closed_at=at,
                usage=grant.usage.at(at, held_milli=0),
            )


def _state_of(data: GrantData) -> GrantState:
    match data:
        case AllocationGranted() | AllocationResized():
            return GrantState.GRANTED
        case AllocationEvicted():
            return GrantState.EVICTED
        case AllocationClosed():
            return GrantState.CLOSED


def _is_newer(grant: Grant, epoch: int, state: GrantState) -> bool:
    """``closed`` replaces whatever is there: it comes exactly once, and a job without a grant has no epoch."""
    return state is GrantState.CLOSED or (epoch, state.rank) > (grant.epoch, grant.state.rank)


def held(roles: tuple[RoleGrant, ...]) -> int:
    """Thousandths of an accelerator that a grant holds: whatever is neither cpu nor memory."""
    return sum(
        role.members * amount
        for role in roles
        for name, amount in role.resources.amounts
        if name not in (CPU, MEMORY, SHM)
    )


def fold_waiting(waiting: Waiting, data: AllocationWaiting | GrantData, *, sequence: Sequence) -> Waiting:
    """Both kinds come from the same topic, so the sequence orders them; a grant ends the waiting."""
    if sequence <= waiting.sequence:
        return waiting
    return Waiting(said=data if isinstance(data, AllocationWaiting) else None, sequence=sequence)


def fold_group(group: Group, data: GroupData, *, at: datetime) -> Group:
    match data:
        case GroupStarted():
            return _fold_started(group, data, at=at)
        case GroupChanged():
            return _fold_changed(group, data, at=at)
        case GroupEnded():
            return _fold_ended(group, data)
        case RoomFreed():
            return replace(group, freed_epoch=max(group.freed_epoch, data.epoch))
        case RoomOverdue():
            is_newer = group.overdue is None or data.epoch >= group.overdue.epoch
            return replace(group, overdue=data) if is_newer else group
        case StartFailed():
            is_newer = group.start_failed is None or data.epoch >= group.start_failed.epoch
            return replace(group, start_failed=data) if is_newer else group
        case Checkpointed():
            last = group.checkpoint
            is_newer = last is None or (data.generation, data.step) > (last.generation, last.step)
            return replace(group, checkpoint=data) if is_newer else group
        case CheckpointFailed():
            failed = group.checkpoint_failed
            is_newer = failed is None or (data.generation, data.step) > (failed.generation, failed.step)
            return replace(group, checkpoint_failed=data) if is_newer else group


def _fold_started(group: Group, data: GroupStarted, *, at: datetime) -> Group:
    if data.attempt < group.attempt or (data.attempt == group.attempt and (group.started or group.ended)):
        return group
    return replace(
        group,
        attempt=data.attempt,
        generation=data.generation,
        epoch=data.epoch,
        workers=data.workers,
        started=True,
        ended=False,
        cause=None,
        ended_as=None,
        first_started_at=group.first_started_at or at,
        image_digest=data.image_digest or group.image_digest,
        step=None if data.resumed_from is None else data.resumed_from.step,
        pause_seconds=None,
        resumed_from=data.resumed_from,
        steps_dropped=data.steps_dropped,
        skipped=data.skipped,
    )


def _fold_changed(group: Group, data: GroupChanged, *, at: datetime) -> Group:
    is_old = data.attempt < group.attempt or (data.attempt == group.attempt and group.ended)
    if is_old or data.generation <= group.generation:
        return group
    if data.resumed_from is not None or data.attempt > group.attempt:
        group = replace(group, resumed_from=data.resumed_from, steps_dropped=data.steps_dropped, skipped=data.skipped)
    return replace(
        group,
        attempt=data.attempt,
        generation=data.generation,
        epoch=data.epoch,
        workers=data.workers,
        started=True,
        ended=False,
        cause=data.cause,
        ended_as=None,
        first_started_at=group.first_started_at or at,
        step=data.step,
        pause_seconds=data.pause_seconds,
    )


def _fold_ended(group: Group, data: GroupEnded) -> Group:
    if data.attempt < group.attempt or (data.attempt == group.attempt and group.ended):
        return group
    return replace(
        group,
        attempt=data.attempt,
        workers=0,
        started=group.started and data.attempt == group.attempt,
        ended=True,
        cause=None,
        ended_as=data.outcome,
        failure=_failure_of(data) or group.failure,
        step=data.step if data.step is not None else group.step,
    )


def _failure_of(data: GroupEnded) -> AttemptFailure | None:
    if data.outcome is not AttemptOutcome.FAILED:
        return None
    return AttemptFailure(
        attempt=data.attempt,
        exit_code=data.exit_code,
        attributed_to=data.attributed_to,
        cause=data.cause,
        reason=data.reason,
    )


def fold_measured(measured: Measured, data: MetricWindow, *, sequence: Sequence) -> Measured:
    if measured.window is not None:
        last = (measured.window.attempt, measured.window.generation, measured.sequence)
        if (data.attempt, data.generation, sequence) <= last:
            return measured
    return Measured(window=data, sequence=sequence)


def fold_proposal(proposal: Proposal, data: ScalingProposed, *, sequence: Sequence) -> Proposal:
    if proposal.proposed is not None and (data.epoch, sequence) <= (proposal.proposed.epoch, proposal.sequence):
        return proposal
    return Proposal(proposed=data, sequence=sequence)
