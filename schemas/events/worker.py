"""Events of ``tide.worker.v1``: what processes do. Published by execution; key = job id."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from schemas.vocabulary import (
    AttemptOutcome,
    Attribution,
    EndCause,
    GroupChangeCause,
    MemberName,
    NodeName,
    StartFailure,
    Topic,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleCount:
    role: str
    members: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """The checkpoint that a group went on from."""

    generation: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedCheckpoint:
    """A newer checkpoint that a group did not go on from, since it was not whole."""

    generation: int
    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LostMember:
    """A member that is gone. ``exit_code`` is negative for a signal, None where nobody saw it."""

    member: MemberName
    exit_code: int | None
    attributed_to: Attribution
    reason: str
    cause: EndCause | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStarted:
    """The first generation of an attempt has started: its second all-reduce has passed.

    By: execution. For: queueing, intake, scaling, metrics. ``steps_dropped``: had been applied, and are done again.
    """

    TYPE: ClassVar[Literal["tide.worker.group_started.v1"]] = "tide.worker.group_started.v1"
    TOPIC: ClassVar[Topic] = Topic.WORKER
    epoch: int
    attempt: int
    generation: int
    workers: int
    resumed_from: ResumePoint | None
    steps_dropped: int
    image_digest: str | None = None
    skipped: tuple[SkippedCheckpoint, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupChanged:
    """A later generation has started.

    By: execution. For: intake, scaling, metrics. ``pause_seconds``: last old step to first new one.
    ``resumed_from``: all members were lost; else the state came from one that lived.
    ``exchanged``: members that it was formed without, since newcomers take their places.
    """

    TYPE: ClassVar[Literal["tide.worker.group_changed.v1"]] = "tide.worker.group_changed.v1"
    TOPIC: ClassVar[Topic] = Topic.WORKER
    epoch: int
    attempt: int
    generation: int
    workers: int
    step: int
    pause_seconds: float
    cause: GroupChangeCause
    lost: tuple[LostMember, ...] = ()
    resumed_from: ResumePoint | None = None
    steps_dropped: int = 0
    skipped: tuple[SkippedCheckpoint, ...] = ()
    exchanged: tuple[MemberName, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomFreed:
    """The answer to a resize: no leaver is left, and each role holds at most its target.

    By: execution, for every resize epoch once. For: queueing, which ignores any epoch but the present one.
    """

    TYPE: ClassVar[Literal["tide.worker.room_freed.v1"]] = "tide.worker.room_freed.v1"
    TOPIC: ClassVar[Topic] = Topic.WORKER
    epoch: int
    held: tuple[RoleCount, ...]
    capacity_revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomOverdue:
    """Grace and kill are over, and members were not seen gone. For ``why``; the ledger does without it.

    By: execution. For: queueing.
    """

    TYPE: ClassVar[Literal["tide.worker.room_overdue.v1"]] = "tide.worker.room_overdue.v1"
    TOPIC: ClassVar[Topic] = Topic.WORKER
    epoch: int
    members: tuple[MemberName, ...]
    node: NodeName
    overdue_seconds: float
    capacity_revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFailed:
    """The start limit is over and members are missing.

    By: execution. For: queueing, which ignores any epoch but the present one.
    """

    TYPE: ClassVar[Literal["tide.worker.start_failed.v1"]] = "tide.worker.start_failed.v1"
    TOPIC: ClassVar[Topic] = Topic.WORKER
    epoch: int
    missing: tuple[RoleCount, ...]
    failure: StartFailure
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointed:
    """A checkpoint is complete.

    By: execution, at most every 30 s for each job. For: queueing (cost to lose), intake.
    """

    TYPE: ClassVar[Literal["tide.worker.checkpointed.v1"]] = "tide.worker.checkpointed.v1"
    TOPIC: ClassVar[Topic] = Topic.WORKER
    generation: int
    step: int
    location: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed:
    """A checkpoint could not be written; training goes on.

    By: execution, at most every 30 s for each job. For: intake.
    """

    TYPE: ClassVar[Literal["tide.worker.checkpoint_failed.v1"]] = "tide.worker.checkpoint_failed.v1"
    TOPIC: ClassVar[Topic] = Topic.WORKER
    generation: int
    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEnded:
    """The attempt is over and no member is left that is not written off. Every attempt gets exactly one.

    By: execution. For: queueing, which closes, retries or requeues. ``final``: trying again is of no use. ``step`` is
    null for jobs whose steps nobody counts. ``attributed_to`` null: nobody's, it was asked for.
    """

    TYPE: ClassVar[Literal["tide.worker.group_ended.v1"]] = "tide.worker.group_ended.v1"
    TOPIC: ClassVar[Topic] = Topic.WORKER
    attempt: int
    outcome: AttemptOutcome
    exit_code: int | None
    attributed_to: Attribution | None
    reason: str
    step: int | None
    capacity_revision: int
    cause: EndCause | None = None
    final: bool = False
