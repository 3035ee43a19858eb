"""Queueing and a model of execution under faults: delays, reordering across topics, lost nodes, stuck processes, and
crashes of queueing between any two steps, after which it goes on from its saved rows alone.

Time is virtual, the log is lists, a transaction is an assignment. Every commit is checked against the laws; at the
end nothing breaks any more and everything has to settle.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from schemas.events.allocation import AllocationWaiting
from schemas.events.job import JobChanged, JobSubmitted
from schemas.events.scaling import ScalingProposed
from schemas.events.worker import RoomFreed, StartFailed
from schemas.registry import EventData, decode, encode
from schemas.vocabulary import (
    DEFAULT_TENANT,
    DEFAULT_USER,
    AttemptOutcome,
    Attribution,
    JobId,
    StartFailure,
    Topic,
)
from services.queueing.core import cycle
from services.queueing.core.book import Book
from services.queueing.core.plan import plan
from services.queueing.core.values import Standing
from services.queueing.translate import (
    Row,
    capacity_row,
    charge_rows,
    parked_row,
    promise_row,
    to_capacity,
    to_parked,
    to_promise,
    to_workload,
    waiting_row,
    workload_row,
)
from tests.simulation import laws
from tests.simulation.execution import Execution, Member
from tests.simulation.laws import RULES, Books, Commit, LawBroken

_INBOX = (Topic.JOB, Topic.WORKER, Topic.CAPACITY, Topic.SCALING)
_ROUNDS_MAX = 600
Message = tuple[JobId, str, bytes]


@dataclass(slots=True)
class Rows:
    """What queueing has saved, as its tables hold it."""

    workloads: dict[str, Row] = field(default_factory=dict)
    charges: dict[str, list[Row]] = field(default_factory=dict)
    waiting: dict[str, Row | None] = field(default_factory=dict)
    promises: list[Row] = field(default_factory=list)
    parked: dict[int, Row] = field(default_factory=dict)
    capacity: Row | None = None
    tombstones: set[str] = field(default_factory=set)
    positions: dict[Topic, int] = field(default_factory=lambda: dict.fromkeys(_INBOX, 0))


class World:
    """``jobs``: what may be submitted. Actions are methods; ``check`` follows every one."""

    def __init__(self, nodes: dict[str, int], jobs: dict[JobId, JobSubmitted], rng: random.Random) -> None:
        self.rng = rng
        self.jobs = jobs
        self.now = 0.0
        self.log: dict[Topic, list[Message]] = {topic: [] for topic in Topic}
        self.execution = Execution(nodes, rng)
        self.execution_position = 0
        self.requests = {job_id: data.request for job_id, data in jobs.items()}
        self.submitted: set[JobId] = set()
        self.outcomes: dict[JobId, str] = {}
        self.rows = Rows()
        self.book = Book()
        self.trace: list[str] = []
        self.counts: dict[str, int] = {}
        """How often each kind of decision and fault occurred."""
        self._publish_said()

    # -- users and scaling ----------------------------------------------------------------------------------------
    def submit(self, job_id: JobId) -> None:
        self.submitted.add(job_id)
        self._append(Topic.JOB, job_id, self.jobs[job_id])

    def change(self, job_id: JobId, **changes: Any) -> None:
        """A new version of the request register."""
        old = self.requests[job_id]
        self.requests[job_id] = replace(old, version=old.version + 1, **changes)
        self._append(Topic.JOB, job_id, JobChanged(request=self.requests[job_id], by=DEFAULT_USER))

    def propose(self, job_id: JobId, workers: int, *, epochs_ago: int = 0) -> None:
        epoch = self.book.workloads[job_id].epoch - epochs_ago
        said = ScalingProposed(epoch=epoch, workers=workers, gain_per_worker=None, reason="utilisation")
        self._append(Topic.SCALING, job_id, said)

    def repeat(self, topic: Topic) -> None:
        """A word comes again, after others: nobody dropped it on the way."""
        self.log[topic].append(self.rng.choice(self.log[topic]))

    # -- queueing -------------------------------------------------------------------------------------------------
    def turn(self, counts: dict[Topic, int], *, crash: bool = False) -> None:
        """Queueing takes so many events of each topic and commits; or crashes before the commit."""
        before = self._books()
        positions = dict(self.rows.positions)
        drafts: list[tuple[JobId, EventData]] = []
        topics = sorted(counts)
        self.rng.shuffle(topics)
        for topic in topics:
            start = positions[topic]
            for key, kind, payload in self.log[topic][start : start + counts[topic]]:
                positions[topic] += 1
                data = decode(kind, payload)
                if not (isinstance(data, JobSubmitted) and self.has_closed(key)):
                    drafts += self._apply(key, data)
        cycle.end_pauses(self.book, now=self.now)
        planned, _ = cycle.settle(self.book, now=self.now, rules=RULES)
        drafts += _keyed(planned)
        if crash:
            self._count("crash")
            self.reload()
            return
        self._save(positions)
        self._count("parked", len(self.book.parked))
        self._count("promises", len(self.book.promises))
        for key, data in drafts:
            if not isinstance(data, AllocationWaiting):
                self._count(data.reason.code.value)
            self._append(Topic.ALLOCATION, key, data)
            if data.TYPE == "tide.allocation.closed.v1":
                self._close(key, data.outcome.value)
        commit = Commit(before=before, after=self._books(), events=drafts)
        laws.check_commit(commit)
        if commit.takes_room:
            self._check_written_off()
        self._check_rest()

    def has_closed(self, job_id: JobId) -> bool:
        return job_id in self.rows.tombstones

    def _apply(self, key: JobId, data: EventData) -> list[tuple[JobId, EventData]]:
        before = self.book.workloads.get(key)
        drafts = cycle.apply_word(self.book, key, DEFAULT_TENANT, data, now=self.now, rules=RULES)
        is_old = isinstance(data, StartFailed | RoomFreed) and before is not None and data.epoch != before.epoch
        if is_old and self.book.workloads.get(key) is not before:
            raise LawBroken("old epochs are not heard", f"{data} at epoch {before.epoch if before else None}")
        return _keyed(drafts)

    def reload(self) -> None:
        """Queueing starts anew from its rows."""
        rows = self.rows
        self.book = Book.restored(
            workloads=[
                to_workload(row, rows.charges[job_id], rows.waiting[job_id]) for job_id, row in rows.workloads.items()
            ],
            promises=[to_promise(row) for row in rows.promises],
            capacity=to_capacity(rows.capacity) if rows.capacity else None,
            parked=[to_parked(row) for row in rows.parked.values()],
            now=self.now,
        )

    def unread(self, topic: Topic) -> int:
        return len(self.log[topic]) - self.rows.positions[topic]

    # -- execution ------------------------------------------------------------------------------------------------
    def execution_reads(self) -> None:
        key, kind, payload = self.log[Topic.ALLOCATION][self.execution_position]
        self.execution_position += 1
        self.execution.read(key, decode(kind, payload))
        self._publish_said()

    def has_allocations(self) -> bool:
        return self.execution_position < len(self.log[Topic.ALLOCATION])

    def member_up(self, member: Member) -> None:
        member.is_up = True
        self.execution.reconcile()
        self._publish_said()

    def member_gone(self, member: Member) -> None:
        self.execution.go(member)
        self._publish_said()

    def write_off(self, member: Member) -> None:
        self.execution.write_off(member)
        self._publish_said()

    def end_group(self, job_id: JobId, outcome: AttemptOutcome, blame: Attribution | None) -> None:
        self.execution.end(job_id, outcome, blame)
        self._publish_said()

    def fail_start(self, job_id: JobId, failure: StartFailure) -> None:
        self.execution.fail_start(job_id, failure)
        self._publish_said()

    def set_answers(self, node: str, answers: bool) -> None:
        self.execution.set_answers(node, answers)
        self._publish_said()

    def report(self) -> None:
        self.execution.report()
        self._publish_said()

    # -- laws over both -------------------------------------------------------------------------------------------
    def check(self) -> None:
        """Nobody holds more than it is charged for."""
        live: dict[tuple[JobId, str], int] = {}
        for member in self.execution.members:
            if member.written_off_at is None:
                live[member.job_id, member.role] = live.get((member.job_id, member.role), 0) + 1
        for (job_id, role), count in live.items():
            w = self.book.workloads.get(job_id)
            held = {r.name: max(g, h) for r, g, h in zip(w.roles, w.granted, w.held, strict=True)} if w else {}
            if count > held.get(role, 0):
                raise LawBroken("live within charge", f"{job_id} {role}: {count} live, charged {held}")

    def settle(self) -> None:
        """Nothing breaks any more: everybody reads, everything that was told to go goes, until nothing moves."""
        for _ in range(_ROUNDS_MAX):
            if not self._settle_once():
                return
        raise LawBroken("comes to rest", "still moving")

    def finish_all(self) -> None:
        """Settle, then let one group after the other succeed until every job has ended."""
        self.settle()
        self._check_settled()
        for job_id in sorted(self.submitted):
            if self.requests[job_id].held and job_id not in self.outcomes:
                self.change(job_id, held=False)
        for _ in range(4 * len(self.jobs) + 4):
            self.settle()
            running = [w.job_id for w in self.book.workloads.values() if w.standing is Standing.RUNNING]
            if not running:
                break
            self.end_group(min(running), AttemptOutcome.SUCCEEDED, None)
        self.settle()
        self._check_settled()
        left = [w for w in self.book.workloads.values() if laws.need(w) <= self._books().slots]
        if left and laws.is_uniform(self._books()):
            raise LawBroken("jobs end", f"{[w.job_id for w in left]} never ended")

    # -- helpers --------------------------------------------------------------------------------------------------
    def _settle_once(self) -> bool:
        moved = False
        if any(self.unread(topic) for topic in _INBOX):
            self.turn({topic: self.unread(topic) for topic in _INBOX})
            moved = True
        while self.has_allocations():
            self.execution_reads()
            moved = True
        for member in list(self.execution.members):
            if member in self.execution.members and self.execution.answers[member.node]:
                if member.leaving and (not member.stuck or member.written_off_at is not None):
                    self.member_gone(member)
                    moved = True
                elif not member.is_up and not member.leaving:
                    self.member_up(member)
                    moved = True
        self.report()
        self.check()
        return moved or self._time_out() or any(self.unread(topic) for topic in _INBOX)

    def _time_out(self) -> bool:
        """Deadlines pass only when nothing else can happen."""
        for member in self.execution.members:
            hopeless = not self.execution.answers[member.node] or member.stuck
            if hopeless and member.written_off_at is None:
                self.write_off(member)
                return True
        for job_id in sorted(self.execution.targets):
            target = self.execution.targets[job_id]
            tried = self.execution.failed_start.get(job_id) == target.epoch
            if self.execution.is_active(job_id) and self.execution.missing(job_id) and not tried:
                self.fail_start(job_id, StartFailure.UNSCHEDULABLE)
                return True
        pause = cycle.next_pause_seconds(self.book, now=self.now)
        if pause is not None:
            self.now += pause
            self.turn({})
            return True
        return False

    def _check_settled(self) -> None:
        for w in self.book.workloads.values():
            if w.standing is Standing.DRAINING:
                raise LawBroken("evictions end", f"{w.job_id} drains for ever")
            if laws.charge(w) != laws.size(w, w.granted):
                raise LawBroken("charges settle", f"{w.job_id}: granted {w.granted}, held {w.held}")
            if self.requests[w.job_id].cancelled:
                raise LawBroken("jobs end", f"{w.job_id} was cancelled")
            if w.standing is Standing.RUNNING:
                up = sum(1 for m in self.execution.held(w.job_id) if m.is_up and not m.leaving)
                if up != sum(w.granted):
                    raise LawBroken("what is granted runs", f"{w.job_id}: {up} of {w.granted}")
            if w.request != self.requests[w.job_id]:
                raise LawBroken("the highest version wins", f"{w.job_id}: {w.request}")
        if self.book.parked:
            raise LawBroken("parked words are heard", str(self.book.parked[0]))
        if self.book.promises:
            raise LawBroken("promises end", str(sorted(self.book.promises)))
        if self._books().charged > self._books().slots:
            raise LawBroken("charges settle", "above capacity at rest")

    def _check_rest(self) -> None:
        view = self.book.view(RULES)
        again = plan(view, self.now)
        if again.decisions or {p.job_id: p for p in again.promises} != self.book.promises:
            raise LawBroken("comes to rest", f"a second plan decides {again.decisions} {again.promises}")

    def _check_written_off(self) -> None:
        """Room of a process that is written off is granted to nobody before the capacity lacks it."""
        if self.book.capacity is None:
            return
        known = self.book.capacity.revision
        lurking = [
            m
            for m in self.execution.members
            if m.written_off_at is not None and m.written_off_at > known
            if not m.is_replaced and self._is_counted(m)
        ]
        extra = 0
        for job_id in {m.job_id for m in lurking}:
            sizes = sum(m.slots for m in lurking if m.job_id == job_id)
            live = sum(m.slots for m in self.execution.held(job_id))
            w = self.book.workloads.get(job_id)
            charge = laws.charge(w) if w else 0
            extra += max(0, min(sizes, live + sizes - charge))
        books = self._books()
        if extra and books.charged + extra > books.slots:
            raise LawBroken("written-off room", f"{books.charged}+{extra} of {books.slots}")

    def _is_counted(self, member: Member) -> bool:
        """Whether queueing's report still counts the node it stands on."""
        assert self.book.capacity is not None
        return any(node.name == member.node for node in self.book.capacity.nodes)

    def _books(self) -> Books:
        return Books(
            workloads=dict(self.book.workloads), promises=dict(self.book.promises), capacity=self.book.capacity
        )

    def _save(self, positions: dict[Topic, int]) -> None:
        changes = self.book.take_changes()
        rows = self.rows
        rows.positions = positions
        for w in changes.workloads:
            rows.workloads[w.job_id] = workload_row(w)
            rows.charges[w.job_id] = charge_rows(w)
            rows.waiting[w.job_id] = waiting_row(w)
        for w in changes.closed:
            for table in (rows.workloads, rows.charges, rows.waiting):
                table.pop(w.job_id, None)
            rows.tombstones.add(w.job_id)
        if changes.promises is not None:
            rows.promises = [promise_row(p) for p in changes.promises]
        for ordinal in changes.unparked:
            rows.parked.pop(ordinal, None)
        for word in changes.parked:
            rows.parked[word.ordinal] = parked_row(word)
        if changes.capacity is not None:
            rows.capacity = capacity_row(changes.capacity)

    def _count(self, name: str, by: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + by

    def _close(self, job_id: JobId, outcome: str) -> None:
        if job_id in self.outcomes:
            raise LawBroken("one outcome", f"{job_id}: {self.outcomes[job_id]}, then {outcome}")
        self.outcomes[job_id] = outcome

    def _append(self, topic: Topic, key: JobId, data: EventData) -> None:
        if topic is Topic.ALLOCATION and key in self.outcomes:
            raise LawBroken("one outcome", f"{key} has ended: {data}")
        self.log[topic].append((key, data.TYPE, encode(data)))

    def _publish_said(self) -> None:
        said, self.execution.said = self.execution.said, []
        for key, data in said:
            self._append(data.TOPIC, JobId(key), data)


def _keyed(drafts: Iterable[Any]) -> list[tuple[JobId, EventData]]:
    return [(JobId(draft.key), draft.data) for draft in drafts]
