"""A model of execution: it reads grants one by one, starts and ends members on nodes, and says what it saw.

It keeps execution's side of the handshake to the letter, so what goes wrong in a simulation is queueing's doing.
Members are physical: they take room on a node until they are gone, whatever anybody believes.
"""

import random
from dataclasses import dataclass, field

from schemas.events.allocation import (
    AllocationClosed,
    AllocationEvicted,
    AllocationGranted,
    AllocationResized,
)
from schemas.events.capacity import CapacityObserved, Node, NodeMembers
from schemas.events.worker import (
    GroupEnded,
    GroupStarted,
    RoleCount,
    RoomFreed,
    StartFailed,
)
from schemas.registry import EventData
from schemas.resources import MILLI, SLOT
from schemas.vocabulary import (
    DEFAULT_FLAVOR,
    AttemptOutcome,
    Attribution,
    JobId,
    NodeName,
    StartFailure,
)
from tests.simulation.builders import slots


@dataclass(slots=True, kw_only=True)
class Member:
    """A process. ``leaving``: told to go. ``stuck``: does not go, whatever it is told."""

    job_id: JobId
    role: str
    index: int
    node: str
    slots: int
    is_up: bool = False
    leaving: bool = False
    stuck: bool = False
    written_off_at: int | None = None
    """Capacity revision from which on its room is not counted."""
    is_replaced: bool = False
    """It was not leaving when it was written off: another one stands for it within the same charge."""


@dataclass(slots=True, kw_only=True)
class Target:
    """The newest allocation event that was read for a job."""

    epoch: int
    attempt: int
    members: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    is_resize: bool = False
    is_evicted: bool = False
    is_closed: bool = False


class Execution:
    """``said``: events to be published, taken by the world after every call."""

    def __init__(self, nodes: dict[str, int], rng: random.Random) -> None:
        self.rng = rng
        self.nodes = nodes
        self.answers = dict.fromkeys(nodes, True)
        self.members: list[Member] = []
        self.targets: dict[JobId, Target] = {}
        self.ended: dict[JobId, int] = {}
        self.ending: dict[JobId, tuple[AttemptOutcome, Attribution | None]] = {}
        self.started: dict[JobId, int] = {}
        self.answered: dict[JobId, int] = {}
        self.failed_start: dict[JobId, int] = {}
        self.revision = 0
        self.said: list[tuple[str, EventData]] = []
        self._reported: CapacityObserved | None = None
        self.report()

    # -- what it reads --------------------------------------------------------------------------------------------
    def read(self, key: JobId, data: EventData) -> None:
        """An older epoch than the newest is ignored."""
        known = self.targets.get(key)
        match data:
            case AllocationGranted() | AllocationResized():
                target = Target(
                    epoch=data.epoch,
                    attempt=data.attempt,
                    members={role.role: role.members for role in data.roles},
                    sizes={role.role: role.resources[SLOT] // MILLI for role in data.roles},
                    is_resize=isinstance(data, AllocationResized),
                )
            case AllocationEvicted():
                target = Target(epoch=data.epoch, attempt=data.attempt, is_evicted=True)
            case AllocationClosed():
                target = Target(epoch=data.epoch, attempt=data.attempt, is_closed=True)
            case _:
                return
        if known is None or target.epoch > known.epoch:
            self.targets[key] = target
        self.reconcile()

    # -- what it does ---------------------------------------------------------------------------------------------
    def reconcile(self) -> None:
        for job_id in sorted(self.targets):
            self._reconcile(job_id, self.targets[job_id])

    def held(self, job_id: JobId) -> list[Member]:
        """Neither gone nor written off."""
        return [m for m in self.members if m.job_id == job_id and m.written_off_at is None]

    def is_active(self, job_id: JobId) -> bool:
        """Whether the newest grant is to be carried out."""
        target = self.targets[job_id]
        return (
            not target.is_evicted
            and not target.is_closed
            and job_id not in self.ending
            and target.attempt > self.ended.get(job_id, 0)
        )

    def free_on(self, node: str) -> int:
        """Physically: every process counts until it is gone."""
        return self.nodes[node] - sum(m.slots for m in self.members if m.node == node)

    def report(self) -> int:
        """Say what the cluster can hold, if that changed; its revision."""
        nodes = tuple(
            Node(
                name=NodeName(name),
                flavor=DEFAULT_FLAVOR,
                allocatable=slots(count - sum(m.slots for m in self._written_off_on(name))),
                used_by_others=slots(0),
                members=self._standing_on(name),
            )
            for name, count in sorted(self.nodes.items())
            if self.answers[name]
        )
        lost = tuple(NodeName(name) for name in sorted(self.nodes) if not self.answers[name])
        report = CapacityObserved(revision=self.revision, nodes=nodes, lost_nodes=lost)
        if self._reported is None or report != self._reported:
            self.revision += 1
            self._reported = CapacityObserved(revision=self.revision, nodes=nodes, lost_nodes=lost)
            self.said.append(("cluster", self._reported))
        return self.revision

    def end(self, job_id: JobId, outcome: AttemptOutcome, blame: Attribution | None) -> None:
        """The group's word: every member is told to go, the attempt is over once they are gone."""
        self.ending[job_id] = (outcome, blame)
        self.reconcile()

    def go(self, member: Member) -> None:
        """The process is gone, and is seen gone."""
        self.members.remove(member)
        self.reconcile()

    def write_off(self, member: Member) -> None:
        """It does not answer: its room is no longer counted, from the next revision on."""
        member.is_replaced = not member.leaving
        member.leaving = True
        member.written_off_at = self.revision
        member.written_off_at = self.report()
        self.reconcile()

    def set_answers(self, node: str, answers: bool) -> None:
        """A node is lost or is back: reported at once."""
        self.answers[node] = answers
        self.report()
        self.reconcile()

    def fail_start(self, job_id: JobId, failure: StartFailure) -> None:
        """The start limit is over: name what is missing, once for each epoch."""
        target = self.targets[job_id]
        missing = self.missing(job_id)
        if missing and self.failed_start.get(job_id) != target.epoch:
            self.failed_start[job_id] = target.epoch
            counts = tuple(RoleCount(role=role, members=n) for role, n in sorted(missing.items()))
            said = StartFailed(epoch=target.epoch, missing=counts, failure=failure, detail="no start")
            self.said.append((job_id, said))

    def missing(self, job_id: JobId) -> dict[str, int]:
        up = [m for m in self.held(job_id) if m.is_up and not m.leaving]
        wanted = self.targets[job_id].members
        short = {role: n - sum(1 for m in up if m.role == role) for role, n in wanted.items()}
        return {role: n for role, n in short.items() if n > 0}

    # -- one job --------------------------------------------------------------------------------------------------
    def _reconcile(self, job_id: JobId, target: Target) -> None:
        active = self.is_active(job_id)
        for role in sorted({m.role for m in self.held(job_id)} | set(target.members)):
            self._reconcile_role(job_id, role, target, target.members.get(role, 0) if active else 0)
        if active:
            self._answer(job_id, target)
            if not self.missing(job_id) and self.started.get(job_id) != target.attempt:
                self.started[job_id] = target.attempt
                self.said.append((job_id, _group_started(target)))
        elif (job_id in self.ending or target.is_evicted) and not self.held(job_id):
            self._end_attempt(job_id, target)

    def _reconcile_role(self, job_id: JobId, role: str, target: Target, wanted: int) -> None:
        held = [m for m in self.held(job_id) if m.role == role]
        staying = [m for m in held if not m.leaving]
        staying.sort(key=lambda m: (not self.answers[m.node], not m.is_up, m.index))
        for member in staying[wanted:]:
            member.leaving = True
        count = len(staying)
        while count < wanted and len(held) < wanted:
            nodes = [n for n in sorted(self.nodes) if self.answers[n] and self.free_on(n) >= target.sizes[role]]
            if not nodes:
                break
            taken = {m.index for m in held}
            index = next(i for i in range(99) if i not in taken)
            member = Member(
                job_id=job_id, role=role, index=index, node=self.rng.choice(nodes), slots=target.sizes[role]
            )
            self.members.append(member)
            held.append(member)
            count += 1

    def _answer(self, job_id: JobId, target: Target) -> None:
        """Every resize once, when no leaver is left."""
        held = self.held(job_id)
        counts = {role: sum(1 for m in held if m.role == role) for role in target.members}
        if (
            target.is_resize
            and self.answered.get(job_id) != target.epoch
            and not any(m.leaving for m in held)
            and all(counts[role] <= n for role, n in target.members.items())
        ):
            self.answered[job_id] = target.epoch
            roles = tuple(RoleCount(role=role, members=n) for role, n in sorted(counts.items()))
            said = RoomFreed(epoch=target.epoch, held=roles, capacity_revision=self._revision_of(job_id))
            self.said.append((job_id, said))

    def _end_attempt(self, job_id: JobId, target: Target) -> None:
        if target.attempt <= self.ended.get(job_id, 0) or target.is_closed:
            return
        outcome, blame = self.ending.pop(job_id, (AttemptOutcome.EVICTED, None))
        self.ended[job_id] = target.attempt
        said = GroupEnded(
            attempt=target.attempt,
            outcome=outcome,
            exit_code=0 if outcome is AttemptOutcome.SUCCEEDED else 1,
            attributed_to=blame,
            reason=outcome.value,
            step=None,
            capacity_revision=self._revision_of(job_id),
        )
        self.said.append((job_id, said))

    def _revision_of(self, job_id: JobId) -> int:
        """The report that first lacks what was written off of this job."""
        return max((m.written_off_at or 0 for m in self.members if m.job_id == job_id), default=0)

    def _written_off_on(self, node: str) -> list[Member]:
        return [m for m in self.members if m.node == node and m.written_off_at is not None]

    def _standing_on(self, node: str) -> tuple[NodeMembers, ...]:
        counts: dict[tuple[JobId, str], int] = {}
        for m in self.members:
            if m.node == node and m.written_off_at is None:
                counts[m.job_id, m.role] = counts.get((m.job_id, m.role), 0) + 1
        return tuple(NodeMembers(job_id=job_id, role=role, members=n) for (job_id, role), n in sorted(counts.items()))


def _group_started(target: Target) -> GroupStarted:
    return GroupStarted(
        epoch=target.epoch,
        attempt=target.attempt,
        generation=target.attempt,
        workers=sum(target.members.values()),
        resumed_from=None,
        steps_dropped=0,
    )
