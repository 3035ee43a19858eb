"""Whom to take room from: shrink first, then preempt whole jobs; nobody more than is needed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from schemas.vocabulary import FlavorName, JobId
from services.queueing.core.desk import Candidates, Desk, with_workers
from services.queueing.core.gang import nobody
from services.queueing.core.ordering import eviction_order, shrinking_order
from services.queueing.core.values import Rules, Standing, Workload

IsEnough: TypeAlias = Callable[["Taking"], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Taking:
    """What is taken: jobs that shrink, with the workers left to them, and jobs that are evicted."""

    shrunk: Mapping[JobId, int] = field(default_factory=dict)
    evicted: tuple[JobId, ...] = ()

    @property
    def victims(self) -> tuple[JobId, ...]:
        return (*self.evicted, *(job_id for job_id in self.shrunk if job_id not in self.evicted))


def plan_preemption(
    *, shrinkable: Sequence[Workload], evictable: Sequence[Workload], is_enough: IsEnough
) -> Taking | None:
    """Choose from candidates that are ordered cheapest first; None if all of them are not enough.

    ``is_enough`` must be monotone: taking more never makes it false. No victim of the answer is redundant, and
    none could keep one worker more; the set need not be the cheapest.
    Cost: calls of ``is_enough``: one if all are not enough, else O(victims + log candidates).

    1. Shrink one candidate after the other to its floor, then preempt one after the other, until it is enough.
    2. Spare each preempted one that turned out not to be needed, dearest first.
    3. Give back to each shrunk one, dearest first, the workers that are not needed.
    """
    if not is_enough(_first(shrinkable, evictable, len(shrinkable) + len(evictable))):
        return None
    low, high = 0, len(shrinkable) + len(evictable)
    while low < high:
        middle = (low + high) // 2
        if is_enough(_first(shrinkable, evictable, middle)):
            high = middle
        else:
            low = middle + 1
    return _give_back(_spare(_first(shrinkable, evictable, low), is_enough), shrinkable, is_enough)


def candidates_for(desk: Desk, urgency: int, flavor: FlavorName) -> Candidates:
    """Whom a claimant of this class may take from: running jobs of its class or a lower one that have more than their
    floor may shrink, those of lower classes that have run for the minimum time may be preempted.

    Made once for all claimants of a class, until somebody stands differently.
    """
    known = desk.candidates.get((flavor, urgency))
    if known is not None:
        return known
    running = [w for w in _running_on(desk, flavor) if w.urgency <= urgency]
    shrinkable = sorted((w for w in running if has_spare(w)), key=lambda w: shrinking_order(w, now=desk.now))
    evictable = sorted(
        (w for w in running if w.urgency < urgency and not _is_protected(desk, w)),
        key=lambda w: eviction_order(w, now=desk.now),
    )
    everything = _first(shrinkable, evictable, len(shrinkable) + len(evictable))
    room = desk.room_if(flavor, stands_after(desk, everything))
    found = Candidates(shrinkable=tuple(shrinkable), evictable=tuple(evictable), room=room)
    desk.candidates[flavor, urgency] = found
    return found


def _is_protected(desk: Desk, workload: Workload) -> bool:
    """Granted in this very plan, or not yet run for the minimum time; notes when it will have."""
    if desk.is_admitted_here(workload):
        return True
    protected = protected_seconds(workload, now=desk.now, rules=desk.rules)
    if protected > 0:
        desk.note_due(protected)
    return protected > 0


def everybody_on(desk: Desk, flavor: FlavorName) -> tuple[tuple[Workload, ...], tuple[Workload, ...]]:
    """Candidates when capacity has gone, whatever their class: those to shrink, those to evict."""
    running = tuple(_running_on(desk, flavor))
    shrinkable = sorted((w for w in running if has_spare(w)), key=lambda w: shrinking_order(w, now=desk.now))
    return tuple(shrinkable), tuple(sorted(running, key=lambda w: eviction_order(w, now=desk.now)))


def stands_after(desk: Desk, taking: Taking) -> dict[JobId, Workload]:
    """The victims as they would stand, for looking at the room: what leaves counts as gone."""
    after = {job_id: with_workers(desk.workloads[job_id], workers) for job_id, workers in taking.shrunk.items()}
    for job_id in taking.evicted:
        workload = desk.workloads[job_id]
        after[job_id] = replace(workload, granted=nobody(workload))
    return after


def has_spare(workload: Workload) -> bool:
    return workload.is_resizable and workload.workers > workload.floor


def protected_seconds(workload: Workload, *, now: float, rules: Rules) -> float:
    """How long it may still not be preempted for another job: the rest of its minimum run time."""
    if workload.started_at is None or workload.started_attempt != workload.attempt:
        return 0.0
    return workload.started_at + rules.minimum_run_seconds - now


def _running_on(desk: Desk, flavor: FlavorName) -> list[Workload]:
    return [w for w in desk.workloads.values() if w.standing is Standing.RUNNING and w.flavor == flavor]


def _first(shrinkable: Sequence[Workload], evictable: Sequence[Workload], count: int) -> Taking:
    """The ``count`` cheapest: all that shrink come before any that is preempted."""
    return Taking(
        shrunk={w.job_id: w.floor for w in shrinkable[:count]},
        evicted=tuple(w.job_id for w in evictable[: max(0, count - len(shrinkable))]),
    )


def _spare(taking: Taking, is_enough: IsEnough) -> Taking:
    """Without each eviction that is not needed; the last one added is needed."""
    for job_id in reversed(taking.evicted[:-1]):
        without = Taking(shrunk=taking.shrunk, evicted=tuple(e for e in taking.evicted if e != job_id))
        if is_enough(without):
            taking = without
    return taking


def _give_back(taking: Taking, shrinkable: Sequence[Workload], is_enough: IsEnough) -> Taking:
    """With as few workers taken from each as is enough; those that are evicted shrink no more."""
    shrunk = {job_id: left for job_id, left in taking.shrunk.items() if job_id not in taking.evicted}
    taking = Taking(shrunk=shrunk, evicted=taking.evicted)
    for workload in reversed(shrinkable):
        if workload.job_id in taking.shrunk:
            taking = _give_back_one(taking, workload, is_enough)
    return taking


def _give_back_one(taking: Taking, workload: Workload, is_enough: IsEnough) -> Taking:
    """Bisect for the most workers that ``workload`` can keep."""
    low, high = taking.shrunk[workload.job_id], workload.workers
    while low < high:
        middle = (low + high + 1) // 2
        if is_enough(_with_left(taking, workload, middle)):
            low = middle
        else:
            high = middle - 1
    return _with_left(taking, workload, low)


def _with_left(taking: Taking, workload: Workload, left: int) -> Taking:
    shrunk = {k: v for k, v in taking.shrunk.items() if k != workload.job_id}
    if left < workload.workers:
        shrunk[workload.job_id] = left
    return Taking(shrunk=shrunk, evicted=taking.evicted)
