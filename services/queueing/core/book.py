"""Queueing's memory: every open workload, indexed so that a plan costs shapes and not jobs.

The only mutable thing in this core. It is built from saved rows and changed by steps of the ledger; what changed
since the last ``take_changes`` is what has to be saved.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias, overload

from schemas.vocabulary import JobId, PriorityClass, QueueName, TenantName
from services.queueing.core import ledger
from services.queueing.core.values import (
    Capacity,
    Parked,
    Promise,
    Rules,
    Shape,
    Standing,
    View,
    Workload,
    shape_of,
)

_MINUTE: Final = 60.0
_LONG_AGO: Final = float("-inf")
QueueKey: TypeAlias = tuple[TenantName, QueueName]


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What a commit must save. ``promises`` and ``capacity`` are None where they did not change."""

    workloads: tuple[Workload, ...] = ()
    closed: tuple[Workload, ...] = ()
    promises: tuple[Promise, ...] | None = None
    capacity: Capacity | None = None
    parked: tuple[Parked, ...] = ()
    unparked: tuple[int, ...] = ()


class Book:
    """All open workloads. Costs: ``put`` O(log line), ``view`` O(active + lines)."""

    def __init__(self) -> None:
        self.workloads: Final[dict[JobId, Workload]] = {}
        self.promises: dict[JobId, Promise] = {}
        self.capacity: Capacity | None = None
        self.parked: list[Parked] = []
        self.pending: Final[dict[QueueKey, dict[PriorityClass, int]]] = {}
        """How many wait and are not held."""
        self.explained: Final[dict[JobId, float]] = {}
        """Waiting workloads that a plan gave a reason, and when: seconds of the monotonic clock."""
        self.paused: Final[dict[JobId, None]] = {}
        """Workloads that back off."""
        self.orders = 0
        self._starts: Final[deque[tuple[float, QueueKey]]] = deque()
        self._ordinals = 0
        self._active: Final[dict[JobId, None]] = {}
        self._lines: Final[dict[Shape, list[JobId]]] = {}
        self._changed: Final[dict[JobId, Workload]] = {}
        self._promises_changed = False
        self._capacity_changed = False
        self._newly_parked: list[Parked] = []
        self._unparked: list[int] = []

    @classmethod
    def restored(
        cls,
        *,
        workloads: Iterable[Workload],
        promises: Iterable[Promise],
        capacity: Capacity | None,
        parked: Iterable[Parked],
        now: float,
    ) -> "Book":
        """From saved rows. Durations that were running start anew, as seconds of this process's clock."""
        book = cls()
        book.promises = {promise.job_id: promise for promise in promises}
        book.capacity = capacity
        book.parked = sorted(parked, key=lambda p: p.ordinal)
        book._ordinals = max((p.ordinal for p in book.parked), default=0)
        book.restore(workloads, now=now)
        return book

    def restore(self, workloads: Iterable[Workload], *, now: float) -> None:
        """Add saved workloads: to be called before anything is changed."""
        for workload in workloads:
            self.put(_with_clocks(workload, now))
            self.orders = max(self.orders, workload.order)
        self._changed.clear()

    def put(self, workload: Workload) -> None:
        """Add or replace; a closed workload leaves the memory."""
        before = self.workloads.get(workload.job_id)
        if before is workload:
            return
        self._changed[workload.job_id] = workload
        if before is not None:
            self._unindex(before)
        if workload.standing is Standing.CLOSED:
            self.workloads.pop(workload.job_id, None)
            self.explained.pop(workload.job_id, None)
            return
        self.workloads[workload.job_id] = workload
        self._index(workload)

    def knows(self, job_id: JobId) -> bool:
        """True if it is open, or has closed since the last ``take_changes``: then no row tells of it yet."""
        return job_id in self.workloads or job_id in self._changed

    def set_promises(self, promises: Iterable[Promise]) -> None:
        promised = {promise.job_id: promise for promise in promises}
        if promised != self.promises:
            self.promises = promised
            self._promises_changed = True

    def set_capacity(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self._capacity_changed = True

    def park(self, job_id: JobId, word: "Parked") -> None:
        """Keep a word until its capacity revision has come; ``word.ordinal`` is set here."""
        self._ordinals += 1
        kept = replace(word, job_id=job_id, ordinal=self._ordinals)
        self.parked.append(kept)
        self._newly_parked.append(kept)

    def take_parked(self) -> tuple[Parked, ...]:
        """All parked words in their order; those that still have to wait are parked again."""
        words, self.parked = tuple(self.parked), []
        self._unparked.extend(word.ordinal for word in words)
        return words

    @property
    def charged_jobs(self) -> int:
        """How many have a charge."""
        return len(self._active)

    def view(self, rules: Rules) -> View:
        """What ``plan`` decides on. Its lines look into the book: it is of use until the book changes."""
        claimants = (self.workloads.get(job_id) for job_id in self.promises)
        return View(
            capacity=self.capacity,
            active=tuple(self.workloads[job_id] for job_id in sorted(self._active)),
            lines=tuple(_LineView(job_ids, self.workloads) for job_ids in self._lines.values()),
            claimants=tuple(w for w in claimants if w is not None and w.claims),
            promises=tuple(self.promises.values()),
            rules=rules,
        )

    def lines(self) -> Iterable[tuple[Shape, list[JobId]]]:
        """Every line, with its jobs in order."""
        return self._lines.items()

    def note_start(self, workload: Workload, now: float) -> None:
        self._starts.append((now, (workload.tenant, workload.queue)))

    def starts_in_last_minute(self, now: float) -> dict["QueueKey", int]:
        """Admissions by queue."""
        while self._starts and now - self._starts[0][0] > _MINUTE:
            self._starts.popleft()
        counts: dict[QueueKey, int] = {}
        for _, queue in self._starts:
            counts[queue] = counts.get(queue, 0) + 1
        return counts

    def take_changes(self) -> Changes:
        """What changed since the last call."""
        parked_now = {word.ordinal for word in self.parked}
        changed = self._changed.values()
        changes = Changes(
            workloads=tuple(w for w in changed if w.standing is not Standing.CLOSED),
            closed=tuple(w for w in changed if w.standing is Standing.CLOSED),
            promises=tuple(self.promises.values()) if self._promises_changed else None,
            capacity=self.capacity if self._capacity_changed else None,
            parked=tuple(word for word in self._newly_parked if word.ordinal in parked_now),
            unparked=tuple(self._unparked),
        )
        self._changed.clear()
        self._promises_changed = self._capacity_changed = False
        self._newly_parked, self._unparked = [], []
        return changes

    def _index(self, workload: Workload) -> None:
        job_id = workload.job_id
        if any(ledger.charge_of(workload)):
            self._active[job_id] = None
        if workload.back_off_seconds > 0:
            self.paused[job_id] = None
        if workload.claims:
            insort(self._lines.setdefault(shape_of(workload), []), job_id)
            if workload.waiting is not None:
                self.explained.setdefault(job_id, _LONG_AGO)
        else:
            self.explained.pop(job_id, None)
        if _is_pending(workload):
            counts = self.pending.setdefault((workload.tenant, workload.queue), {})
            counts[workload.priority] = counts.get(workload.priority, 0) + 1

    def _unindex(self, workload: Workload) -> None:
        job_id = workload.job_id
        self._active.pop(job_id, None)
        self.paused.pop(job_id, None)
        if workload.claims:
            shape = shape_of(workload)
            line = self._lines[shape]
            del line[bisect_left(line, job_id)]
            if not line:
                del self._lines[shape]
        if _is_pending(workload):
            self.pending[workload.tenant, workload.queue][workload.priority] -= 1


class _LineView(Sequence[Workload]):
    """A line of the book, looked up as it is read: copying 100,000 jobs would cost more than planning."""

    __slots__ = ("_job_ids", "_workloads")

    def __init__(self, job_ids: list[JobId], workloads: dict[JobId, Workload]) -> None:
        self._job_ids = job_ids
        self._workloads = workloads

    def __len__(self) -> int:
        return len(self._job_ids)

    @overload
    def __getitem__(self, index: int) -> Workload: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Workload]: ...
    def __getitem__(self, index: int | slice) -> Workload | Sequence[Workload]:
        if isinstance(index, slice):
            return tuple(self._workloads[job_id] for job_id in self._job_ids[index])
        return self._workloads[self._job_ids[index]]


def _is_pending(workload: Workload) -> bool:
    return workload.standing is Standing.WAITING and not workload.request.held


def _with_clocks(workload: Workload, now: float) -> Workload:
    has_started = workload.standing is Standing.RUNNING and workload.started_attempt == workload.attempt
    if workload.back_off_seconds == 0 and not has_started:
        return workload
    return replace(
        workload,
        back_off_until=now + workload.back_off_seconds if workload.back_off_seconds > 0 else None,
        started_at=now if has_started else None,
        checkpointed_at=None,
    )
