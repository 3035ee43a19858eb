"""What must hold of queueing's ledger, said once more and independently of the code that has to keep it.

A law gets the books before and after one commit; it raises ``LawBroken`` with its name. Sizes are whole slots here.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from schemas.events.allocation import (
    AllocationClosed,
    AllocationEvicted,
    AllocationGranted,
    AllocationResized,
)
from schemas.registry import EventData
from schemas.resources import MILLI, SLOT, Resources
from schemas.vocabulary import DecisionCode, JobId
from services.queueing.core.values import Capacity, Promise, Rules, Standing, Workload

_SHRUNK_FOR = DecisionCode.SHRANK_FOR_CLAIMANT
_EVICTED_FOR = DecisionCode.PREEMPTED_FOR_CLAIMANT


class LawBroken(AssertionError):
    """``law`` names it."""

    def __init__(self, law: str, detail: str) -> None:
        super().__init__(f"{law}: {detail}")
        self.law = law


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """Queueing's state at one moment."""

    workloads: Mapping[JobId, Workload]
    promises: Mapping[JobId, Promise]
    capacity: Capacity | None

    @property
    def slots(self) -> int:
        if self.capacity is None:
            return 0
        return sum((n.allocatable - n.used_by_others)[SLOT] // MILLI for n in self.capacity.nodes)

    @property
    def granted(self) -> int:
        return sum(size(w, w.granted) for w in self.workloads.values())

    @property
    def charged(self) -> int:
        return sum(charge(w) for w in self.workloads.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """One transaction of queueing: before, after, and what it published."""

    before: Books
    after: Books
    events: Sequence[tuple[JobId, EventData]]

    @property
    def takes_room(self) -> bool:
        return any(
            isinstance(data, AllocationGranted)
            or (isinstance(data, AllocationResized) and data.workers_to > data.workers_from)
            for _, data in self.events
        )

    @property
    def capacity_changed(self) -> bool:
        return self.before.capacity != self.after.capacity


def check_commit(commit: Commit) -> None:
    """Every law of one commit."""
    check_charges(commit)
    check_gangs(commit.after)
    check_counters(commit)
    check_placement(commit)
    check_promises(commit.after)
    check_promises_are_kept(commit)
    check_victims(commit)
    if is_uniform(commit.after) and commit.after.capacity is not None:
        check_nothing_is_left_lying(commit)
        check_nobody_is_overtaken(commit)


def check_charges(commit: Commit) -> None:
    after, slots = commit.after.charged, commit.after.slots
    if after <= slots:
        return
    if commit.takes_room and not _only_retries(commit):
        raise LawBroken("charges within capacity", f"{after} of {slots} charged after a grant")
    if after > commit.before.charged:
        raise LawBroken("charges within capacity", f"raised from {commit.before.charged} to {after} of {slots}")


def check_gangs(books: Books) -> None:
    for w in books.workloads.values():
        servers = tuple(g for g, role in zip(w.granted, w.roles, strict=True) if not role.elastic)
        fixed = tuple(role.count for role in w.roles if not role.elastic)
        if w.standing is Standing.RUNNING and (w.workers < w.floor or servers != fixed):
            raise LawBroken("whole gangs", f"{w.job_id} runs with {w.granted}, floor {w.floor}, fixed {fixed}")
        if w.standing is Standing.RUNNING and w.floor > w.request.workers_min:
            raise LawBroken("lowered limits at once", f"{w.job_id} has floor {w.floor}: {w.request}")
        if w.standing is Standing.RUNNING and w.is_resizable and w.workers > max(w.request.workers_max, w.floor):
            raise LawBroken("lowered limits at once", f"{w.job_id} has {w.workers} workers: {w.request}")
        if w.standing is Standing.WAITING and charge(w):
            raise LawBroken("whole gangs", f"{w.job_id} waits and is charged {charge(w)}")
        if w.standing is Standing.DRAINING and any(w.granted):
            raise LawBroken("whole gangs", f"{w.job_id} drains and is granted {w.granted}")


def check_counters(commit: Commit) -> None:
    for job_id, data in commit.events:
        before = commit.before.workloads.get(job_id)
        if not isinstance(data, AllocationGranted | AllocationResized | AllocationEvicted | AllocationClosed):
            continue
        epoch, attempt = (before.epoch, before.attempt) if before else (0, 0)
        if data.epoch <= epoch:
            raise LawBroken("epochs rise", f"{job_id}: {data.epoch} after {epoch}")
        if isinstance(data, AllocationGranted) and data.attempt <= attempt:
            raise LawBroken("every run is an attempt of its own", f"{job_id}: {data.attempt} after {attempt}")
        after = commit.after.workloads.get(job_id)
        is_admission = isinstance(data, AllocationGranted) and not _is_retry(commit, job_id)
        if is_admission and after and after.back_off_seconds > 0:
            raise LawBroken("back-off claims nothing", f"{job_id} is granted in its pause")


def check_placement(commit: Commit) -> None:
    """A gang that is granted can be packed beside the members of others where they stand."""
    capacity = commit.after.capacity
    for job_id, data in commit.events:
        if not isinstance(data, AllocationGranted) or capacity is None:
            continue
        if _is_retry(commit, job_id):
            continue
        free = []
        for node in capacity.nodes:
            standing = sum(
                m.members * size_of_role(commit.after.workloads[m.job_id], m.role)
                for m in node.members
                if m.job_id in commit.after.workloads
                and charge(commit.after.workloads[m.job_id])
                and commit.after.workloads[m.job_id].granted_at_revision < capacity.revision
            )
            leaving = sum(
                max(0, _standing_of(capacity, w) - _least(commit, w))
                for w in commit.after.workloads.values()
                if any(m.job_id == w.job_id for m in node.members)
            )
            free.append(node.allocatable[SLOT] // MILLI - standing + leaving)
        sizes = [role.resources[SLOT] // MILLI for role in data.roles for _ in range(role.members)]
        if not packs(free, sizes):
            raise LawBroken("placement, not sums", f"{job_id} needs {sizes}, nodes have {free}")


def check_promises(books: Books) -> None:
    """A promise is for the whole present minimum of somebody who claims, and all of them are covered."""
    if books.capacity is None:
        return
    for promise in books.promises.values():
        w = books.workloads.get(promise.job_id)
        if w is None or w.standing is not Standing.WAITING or w.request.held or w.back_off_seconds > 0:
            raise LawBroken("claimants claim", f"{promise.job_id} has a promise and does not claim")
        if size(w, promise.members) != need(w):
            raise LawBroken("whole promises", f"{promise.job_id}: {promise.members}, needs {need(w)}")
        ahead = sum(p_size(books, p) for p in promises_ahead(books, w))
        if books.slots - books.granted - ahead < need(w):
            raise LawBroken("promises are covered", f"{promise.job_id}: {books.slots}-{books.granted}-{ahead}")


def check_promises_are_kept(commit: Commit) -> None:
    """A promise ends in a grant, or its claimant goes away, or something more urgent needs the room."""
    if commit.capacity_changed:
        return
    for job_id in commit.before.promises:
        before, after = commit.before.workloads[job_id], commit.after.workloads.get(job_id)
        if after is None or after.standing is not Standing.WAITING or job_id in commit.after.promises:
            continue
        if after.request != before.request or after.back_off_seconds > 0:
            continue
        origins = commit.before.promises[job_id].origins
        takers = [w.job_id for w in commit.after.workloads.values() if _takes_more(commit, w)]
        rivals = [j for j in takers if urgency(commit.after.workloads[j]) < urgency(after)]
        if any(j in origins for j in takers) and not [j for j in rivals if j not in origins]:
            raise LawBroken("room goes to whom it was made for", f"{takers} took back what {job_id} waits for")
        if not [j for j in rivals if not (origins and _only_grew(commit, j))]:
            raise LawBroken("promises are kept", f"{job_id} lost its promise to nobody more urgent")


def check_victims(commit: Commit) -> None:
    """Each victim has a claimant of a higher class (to shrink: or the same) who would be short without it."""
    after = commit.after
    for job_id, data in commit.events:
        if not isinstance(data, AllocationResized | AllocationEvicted):
            continue
        if data.reason.code in (DecisionCode.SHRANK_FOR_SHORTAGE, DecisionCode.PREEMPTED_FOR_SHORTAGE):
            _check_shortage(commit, job_id)
        if data.reason.code not in (_SHRUNK_FOR, _EVICTED_FOR):
            continue
        victim = after.workloads[job_id]
        claimants = [after.workloads[p.job_id] for p in after.promises.values() if job_id in p.origins]
        if not claimants:
            raise LawBroken("no victim without a claimant", f"{job_id} gives room to nobody")
        top = max(w.priority.urgency for w in claimants)
        if top < victim.priority.urgency or (data.reason.code is _EVICTED_FOR and top == victim.priority.urgency):
            raise LawBroken("victims are less urgent", f"{job_id} gives room to class {top}")
        if is_uniform(after):
            given = _was_granted(commit, victim) if data.reason.code is _EVICTED_FOR else 1
            least = victim.priority.urgency + (1 if data.reason.code is _EVICTED_FOR else 0)
            having = [w for p in after.promises.values() if (w := after.workloads[p.job_id]).urgency >= least]
            if not any(_is_short_without(after, claimant, given) for claimant in having):
                raise LawBroken("no redundant victim", f"{job_id} gave {given} too many")


def _was_granted(commit: Commit, victim: Workload) -> int:
    before = commit.before.workloads[victim.job_id]
    return size(before, before.granted) if before.standing is Standing.RUNNING else size(victim, victim.held)


def _check_shortage(commit: Commit, job_id: JobId) -> None:
    """What is leaving counts as gone: nobody gives back more than what is granted exceeds the cluster by."""
    victim = commit.after.workloads[job_id]
    was = commit.before.workloads[job_id]
    least = size(was, was.granted) if victim.standing is Standing.DRAINING else 1
    for_others = sum(
        size(before, before.granted) - size(after, after.granted)
        for key, data in commit.events
        if isinstance(data, AllocationResized | AllocationEvicted) and data.reason.code in (_SHRUNK_FOR, _EVICTED_FOR)
        for before, after in [(commit.before.workloads[key], commit.after.workloads[key])]
    )
    if is_uniform(commit.after) and commit.after.granted + for_others + least <= commit.after.slots:
        raise LawBroken("shortage counts what is granted", f"{job_id} gave back {least} too many")


def check_nothing_is_left_lying(commit: Commit) -> None:
    """Work conservation: who fits is granted, who is covered has a promise, who may grow has grown."""
    after = commit.after
    for w in after.workloads.values():
        ahead = sum(p_size(after, p) for p in promises_ahead(after, w))
        if claims(w):
            if after.slots - after.charged - ahead >= need(w):
                raise LawBroken("work conservation", f"{w.job_id} fits and waits")
            if w.job_id not in after.promises and after.slots - after.granted - ahead >= need(w):
                raise LawBroken("who is covered has a promise", f"{w.job_id} is covered")
        if _could_grow(w) and not _was_shrunk(commit, w):
            kept = sum(p_size(after, p) for p in after.promises.values() if _is_before_growth(after, p, w))
            if after.slots - after.charged - kept >= size_of_role(w, w.roles[0].name):
                raise LawBroken("work conservation", f"{w.job_id} could grow")


def check_nobody_is_overtaken(commit: Commit) -> None:
    """Nobody is admitted into room that a more urgent one waits for and would fit into, unless it made that room."""
    after = commit.after
    for job_id, data in commit.events:
        taker = after.workloads.get(job_id)
        if not isinstance(data, AllocationGranted) or _is_retry(commit, job_id) or taker is None:
            continue
        origins = [origin for p in commit.before.promises.values() for origin in p.origins]
        for w in after.workloads.values():
            if claims(w) and urgency(w) < urgency(taker) and w.job_id not in origins:
                ahead = sum(p_size(after, p) for p in promises_ahead(after, w))
                if after.slots - after.charged + charge(taker) - ahead >= need(w):
                    raise LawBroken("nobody is overtaken", f"{job_id} has what {w.job_id} waits for")


# -- the arithmetic -------------------------------------------------------------------------------------------
def size(w: Workload, members: Sequence[int]) -> int:
    return sum(n * role.resources[SLOT] // MILLI for n, role in zip(members, w.roles, strict=True))


def slots_of(resources: Resources) -> int:
    return resources[SLOT] // MILLI


def charge(w: Workload) -> int:
    return size(w, [max(g, h) for g, h in zip(w.granted, w.held, strict=True)])


def need(w: Workload) -> int:
    return size(w, [w.request.workers_min if role.elastic else role.count for role in w.roles])


def urgency(w: Workload) -> tuple[int, JobId]:
    return (-w.priority.urgency, w.job_id)


def claims(w: Workload) -> bool:
    return w.standing is Standing.WAITING and not w.request.held and w.back_off_seconds == 0


def promises_ahead(books: Books, w: Workload) -> list[Promise]:
    """Those to more urgent claimants, those that came out of ``w``, and whatever is ahead of them."""
    ends = [urgency(books.workloads[p.job_id]) for p in books.promises.values() if w.job_id in p.origins]
    last = max([urgency(w), *ends])
    return [p for p in books.promises.values() if p.job_id != w.job_id and urgency(books.workloads[p.job_id]) <= last]


def p_size(books: Books, promise: Promise) -> int:
    return size(books.workloads[promise.job_id], promise.members)


def _takes_more(commit: Commit, w: Workload) -> bool:
    return _takes(commit.after, w) > _takes(commit.before, w)


def _only_grew(commit: Commit, job_id: JobId) -> bool:
    """It ran before and runs now: what it took is growth."""
    before = commit.before.workloads.get(job_id)
    after = commit.after.workloads[job_id]
    return before is not None and before.standing is after.standing is Standing.RUNNING


def _takes(books: Books, w: Workload) -> int:
    known = books.workloads.get(w.job_id)
    promise = books.promises.get(w.job_id)
    return (size(known, known.granted) if known else 0) + (p_size(books, promise) if promise else 0)


def _is_short_without(books: Books, claimant: Workload, given: int) -> bool:
    ahead = sum(p_size(books, p) for p in promises_ahead(books, claimant))
    return books.slots - books.granted - given - ahead < need(claimant)


def _is_before_growth(books: Books, promise: Promise, w: Workload) -> bool:
    claimant = books.workloads[promise.job_id]
    return claimant.priority.urgency >= w.priority.urgency or bool(promise.origins)


def _could_grow(w: Workload) -> bool:
    wanted = min(max(w.wanted, w.request.workers_min), w.request.workers_max)
    still = all(h <= g for g, h in zip(w.granted, w.held, strict=True))
    return (
        w.standing is Standing.RUNNING and w.is_resizable and w.back_off_seconds == 0 and w.workers < wanted and still
    )


def _was_shrunk(commit: Commit, w: Workload) -> bool:
    before = commit.before.workloads.get(w.job_id)
    return before is not None and before.workers > w.workers


def is_uniform(books: Books) -> bool:
    return all(role.resources[SLOT] == MILLI for w in books.workloads.values() for role in w.roles)


def size_of_role(w: Workload, name: str) -> int:
    return next(role.resources[SLOT] // MILLI for role in w.roles if role.name == name)


def _standing_of(capacity: Capacity, w: Workload) -> int:
    return sum(m.members * size_of_role(w, m.role) for n in capacity.nodes for m in n.members if m.job_id == w.job_id)


def _least(commit: Commit, w: Workload) -> int:
    """What surely still stands of what the report names; the rest may be gone since."""
    before = commit.before.workloads.get(w.job_id)
    return min(charge(w), size(before, before.granted) if before else 0)


def _is_retry(commit: Commit, job_id: JobId) -> bool:
    before = commit.before.workloads.get(job_id)
    return before is not None and before.standing is Standing.RUNNING


def _only_retries(commit: Commit) -> bool:
    """A retry in place raises no charge."""
    taking = [
        job_id
        for job_id, data in commit.events
        if isinstance(data, AllocationGranted)
        or (isinstance(data, AllocationResized) and data.workers_to > data.workers_from)
    ]
    return all(_is_retry(commit, job_id) and _no_more(commit, job_id) for job_id in taking)


def _no_more(commit: Commit, job_id: JobId) -> bool:
    after = commit.after.workloads.get(job_id)
    return after is None or charge(after) <= charge(commit.before.workloads[job_id])


def packs(free: Sequence[int], sizes: Iterable[int]) -> bool:
    """Whether all sizes find a place; tries everything. Small inputs only."""
    left = sorted(sizes, reverse=True)
    if not left:
        return True
    return any(
        packs([f - left[0] if i == j else f for j, f in enumerate(free)], left[1:])
        for i, f in enumerate(free)
        if f >= left[0] and f not in free[:i]
    )


RULES = Rules(back_off_first_seconds=5.0, back_off_limit_seconds=20.0, steady_seconds=100.0, explain_seconds=0.0)
