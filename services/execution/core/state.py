"""What execution knows for good about a job: the values behind its rows, changed only in a commit."""

from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from functools import lru_cache
from typing import Final

from schemas.events.allocation import RoleGrant
from schemas.events.job import JobSpec
from schemas.events.worker import LostMember
from schemas.resources import Resources
from schemas.vocabulary import (
    WORKER_ROLE,
    AttemptOutcome,
    Attribution,
    EndCause,
    JobId,
    MemberName,
    NodeName,
    TenantName,
    member_name,
)


class MemberState(StrEnum):
    COMMITTED = "committed"
    """The intent stands; a process may or may not exist. It runs no user code."""
    ADMITTED = "admitted"
    GONE = "gone"
    WRITTEN_OFF = "written_off"
    """Its end was never seen. It still counts as capacity that is missing, and never comes back as a member."""


class Ending(StrEnum):
    """Why a member is being ended by us; its exit then says nothing about the job."""

    LEAVER = "leaver"
    ATTEMPT_OVER = "attempt_over"
    ABNORMAL = "abnormal"
    NOT_STARTED = "not_started"


class Desired(StrEnum):
    """What queueing wants with the job."""

    NOTHING = "nothing"
    GRANTED = "granted"
    EVICTED = "evicted"
    CLOSED = "closed"


class GenerationState(StrEnum):
    OFFERED = "offered"
    STARTED = "started"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One process of a job. ``ordinal`` counts a job's members in the order in which they were committed."""

    job_id: JobId
    role: str
    index: int
    incarnation: int
    ordinal: int
    attempt: int
    nonce: str
    node: NodeName
    devices: tuple[int, ...] = ()
    state: MemberState = MemberState.COMMITTED
    ending: Ending | None = None
    ending_reason: str = ""
    finished: bool = False
    exit_code: int | None = None
    attributed_to: Attribution | None = None
    exit_reason: str = ""

    @property
    def name(self) -> MemberName:
        return _name_of(self.job_id, self.role, self.index, self.incarnation)

    @property
    def is_held(self) -> bool:
        """Neither seen gone nor written off: it counts against what is granted."""
        return self.state in (MemberState.COMMITTED, MemberState.ADMITTED)

    @property
    def may_work(self) -> bool:
        """Admitted, and nobody asked it to go."""
        return self.state is MemberState.ADMITTED and self.ending is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One training group that was offered. ``members`` stand in the order of their ranks.

    ``from_step`` is where it took the training over (known once it has started). ``ports`` are the endpoints'
    of a group that talks through ``paddle.distributed``, by rank.
    """

    number: int
    attempt: int
    epoch: int
    members: tuple[MemberName, ...]
    leavers: tuple[MemberName, ...] = ()
    source: int = 0
    checkpoint: str = ""
    state: GenerationState = GenerationState.OFFERED
    from_step: int = 0
    ports: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How the attempt ends, decided while members may still be there. ``final``: trying again is of no use."""

    outcome: AttemptOutcome
    exit_code: int | None
    attributed_to: Attribution | None
    reason: str
    cause: EndCause | None = None
    final: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint: after ``step`` applied steps, written by a member of ``generation``."""

    generation: int
    step: int
    location: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job as execution keeps it.

    ``generations`` holds the started ones (the line that was applied) and what was offered since; ``members`` all
    that are not gone, and those of the present attempt that are. ``incarnations`` is the highest number used per
    (role, index). ``unanswered`` are resize epochs without their ``room_freed``. ``step`` is the highest known of
    this attempt, ``attempt_step`` the highest before it. ``fruitless`` counts losses since ``fruitless_step``.
    """

    job_id: JobId
    tenant: TenantName
    spec: JobSpec | None = None
    desired: Desired = Desired.NOTHING
    epoch: int = 0
    attempt: int = 0
    roles: tuple[RoleGrant, ...] = ()
    grace_seconds: float = 30.0
    desired_reason: str = ""
    attempt_ended: int = 0
    unanswered: tuple[int, ...] = ()
    generation: int = 0
    generations: tuple[Generation, ...] = ()
    members: tuple[Member, ...] = ()
    incarnations: tuple[tuple[str, int, int], ...] = ()
    ordinal: int = 0
    group_started: bool = False
    started_at: datetime | None = None
    run_seconds: float = 0.0
    finished_step: int | None = None
    verdict: Verdict | None = None
    step: int = 0
    attempt_step: int = 0
    losses: tuple[LostMember, ...] = ()
    crashes: int = 0
    fruitless: int = 0
    fruitless_step: int = 0
    start_failed_epoch: int = 0
    overdue_epoch: int = 0
    checkpoint: Checkpoint | None = None
    ended_at: datetime | None = None

    def role(self, name: str) -> RoleGrant | None:
        return next((role for role in self.roles if role.role == name), None)

    @property
    def workers(self) -> RoleGrant:
        """The elastic role's grant; an empty one where there is none."""
        return next((role for role in self.roles if role.elastic), _NO_WORKERS)

    @property
    def is_over(self) -> bool:
        """The present attempt has had its ``group_ended``: nothing is started for it any more."""
        return self.attempt_ended >= self.attempt

    def member(self, name: MemberName) -> Member | None:
        return next((member for member in self.members if member.name == name), None)

    def held(self, role: str | None = None) -> tuple[Member, ...]:
        """Members neither seen gone nor written off, of one role or of all."""
        return tuple(m for m in self.members if m.is_held and (role is None or m.role == role))

    def with_member(self, changed: Member) -> "Job":
        return replace(self, members=tuple(changed if m.name == changed.name else m for m in self.members))

    def with_generation(self, changed: Generation) -> "Job":
        return replace(
            self, generations=tuple(changed if g.number == changed.number else g for g in self.generations)
        )

    @property
    def line(self) -> tuple[Generation, ...]:
        """The last started generation of this attempt and every one offered since, oldest first."""
        own = [g for g in self.generations if g.attempt == self.attempt]
        started = [g.number for g in own if g.state is GenerationState.STARTED]
        first = max(started, default=0)
        return tuple(g for g in own if g.number >= first)

    @property
    def running(self) -> Generation | None:
        """The last started generation of this attempt."""
        return next((g for g in self.line if g.state is GenerationState.STARTED), None)

    @property
    def offered(self) -> Generation | None:
        """The offer that is out: the newest generation, while it has neither started nor failed."""
        last = self.line[-1] if self.line else None
        return last if last is not None and last.state is GenerationState.OFFERED else None


_NO_WORKERS: Final = RoleGrant(role=WORKER_ROLE, elastic=True, members=0, minimum=0, resources=Resources())

_name_of: Final = lru_cache(maxsize=8192)(member_name)
