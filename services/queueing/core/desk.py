"""Plan's working state: the view with the decisions so far, and the room that is left beside them.

Workloads here are values made by the ledger's own steps, so a decision charges in a plan what it will charge when it
is carried out. What a plan decided is the difference between the workloads at its end and at its beginning.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from schemas.events.allocation import Reason
from schemas.vocabulary import FlavorName, JobId, PriorityClass
from services.queueing.core import ledger
from services.queueing.core.gang import members_at, minimum_of
from services.queueing.core.ordering import urgency_order
from services.queueing.core.placement import Claim, Layout, Members, Room, Site, place, reserve
from services.queueing.core.values import (
    Capacity,
    Decision,
    Evict,
    Grant,
    Promise,
    Resize,
    Standing,
    View,
    Workload,
)
from services.queueing.core.wording import workers_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Whom room may be taken from, cheapest first, and the room there would be if all of it were taken."""

    shrinkable: tuple[Workload, ...]
    evictable: tuple[Workload, ...]
    room: Room


class Desk:
    """One plan at work. Nothing outlives the call of ``plan``."""

    def __init__(self, view: View, capacity: Capacity, *, now: float) -> None:
        known = sorted((*view.active, *view.claimants), key=urgency_order)
        heads = [line[0] for line in view.lines]
        self.now: Final = now
        self.rules: Final = view.rules
        self.capacity: Final = capacity
        self.before: Final = {workload.job_id: workload for workload in known}
        self.workloads: Final = dict(self.before)
        self.promises: Final = {promise.job_id: promise for promise in view.promises}
        self.sites: Final = _sites(capacity, [*known, *heads])
        self.reasons: Final[dict[JobId, Reason]] = {}
        self.due_seconds: float | None = None
        self.candidates: Final[dict[tuple[FlavorName, int], Candidates]] = {}
        self.takings = 0
        """How often somebody was told to make room."""
        self._layouts: Final[dict[tuple[FlavorName, bool], Layout]] = {}
        self._rooms: Final[dict[tuple[FlavorName, bool], Room]] = {}

    def meet(self, workload: Workload) -> None:
        """A waiting workload is looked at for the first time."""
        self.before.setdefault(workload.job_id, workload)
        self.workloads.setdefault(workload.job_id, workload)

    # -- what is left ---------------------------------------------------------------------------------------------
    def room_now(self, flavor: FlavorName) -> Room:
        """Beside all that is charged: what may be granted."""
        return self._room(flavor, charged=True)

    def room_coming(self, flavor: FlavorName) -> Room:
        """Beside all that is granted: what there will be once everything that is leaving has left."""
        return self._room(flavor, charged=False)

    def room_if(self, flavor: FlavorName, changed: Mapping[JobId, Workload], *, charged: bool = False) -> Room:
        """``room_coming`` (``charged``: ``room_now``) if these workloads stood as given."""
        if not changed:
            return self._room(flavor, charged=charged)
        workloads = (changed.get(job_id, workload) for job_id, workload in self.workloads.items())
        claims = (c for w in workloads for c in self._claims(w, flavor, charged=charged))
        return self.sites[flavor].layout(claims).room()

    def finds_place(self, before: Workload, after: Workload, flavor: FlavorName) -> bool:
        """Whether all members would find a place if ``before`` stood as ``after``, which holds more, does: now, and
        once the leaving have left. The room that is left for others may differ, since all are packed anew.
        """
        return all(
            self._with_more(before, after, flavor, charged=charged).room().homeless
            <= self._room(flavor, charged=charged).homeless
            for charged in (True, False)
        )

    def beside_promises(self, room: Room, flavor: FlavorName, promises: tuple[Promise, ...]) -> Room:
        """``room`` less what is promised, in this order; a promise that is not covered takes what it can."""
        for promise in promises:
            room = reserve(room, self.vectors(promise.job_id, promise.members, flavor))
        return room

    def keeps_promises(self, flavor: FlavorName, promises: tuple[Promise, ...], room: Room) -> bool:
        """Whether ``room`` can hold all these promises, in this order."""
        for promise in promises:
            left = place(room, self.vectors(promise.job_id, promise.members, flavor))
            if left is None:
                return False
            room = left
        return True

    def vectors(self, job_id: JobId, members: tuple[int, ...], flavor: FlavorName) -> Members:
        site = self.sites[flavor]
        roles = self.workloads[job_id].roles
        return tuple((site.vector(role.resources), n) for role, n in zip(roles, members, strict=True))

    def flavors_for(self, workload: Workload) -> tuple[FlavorName, ...]:
        """Flavors that have nodes, the promised one first, else by name."""
        promise = self.promises.get(workload.job_id)
        promised = promise.flavor if promise else None
        names = sorted(name for name, site in self.sites.items() if site.open)
        return tuple(sorted(names, key=lambda name: (name != promised, name)))

    def promises_by_urgency(self) -> tuple[Promise, ...]:
        return tuple(
            sorted(self.promises.values(), key=lambda promise: urgency_order(self.workloads[promise.job_id]))
        )

    # -- decisions ------------------------------------------------------------------------------------------------
    def admit(self, workload: Workload, flavor: FlavorName, workers: int, reason: Reason) -> None:
        step = ledger.grant(
            workload,
            workers=workers,
            flavor=flavor,
            order=_NEWEST,
            revision=self.capacity.revision,
            reason=reason,
        )
        self.promises.pop(workload.job_id, None)
        self._put_more(workload, step.workload, flavor, reason)

    def shrink(self, workload: Workload, workers: int, reason: Reason) -> None:
        """For others: it remembers the size that it had."""
        self.takings += 1
        before = max(workload.size_before, workload.workers)
        step = ledger.resize(workload, workers=workers, reason=reason, size_before=before)
        self._put(step.workload, reason)

    def grow(self, workload: Workload, reason: Reason) -> None:
        """By one worker."""
        step = ledger.resize(workload, workers=workload.workers + 1, reason=reason, size_before=workload.size_before)
        assert workload.flavor is not None
        self._put_more(workload, step.workload, workload.flavor, reason)

    def evict(self, workload: Workload, reason: Reason) -> None:
        self.takings += 1
        self._put(ledger.evict(workload, reason=reason, requeue=True).workload, reason)

    def restore(self, before: Workload) -> None:
        """Nothing is taken from it after all."""
        self._put(before, self.reasons[before.job_id])
        del self.reasons[before.job_id]
        for promise in self.promises_by_urgency():
            if before.job_id in promise.origins:
                left = tuple(origin for origin in promise.origins if origin != before.job_id)
                self.promises[promise.job_id] = replace(promise, origins=left)

    def void_promise(self, workload: Workload) -> bool:
        """Nothing covers it any more; False if there was none. Those ahead of it have taken the room that was made
        for it, so they are now whom the victims gave it to.
        """
        voided = self.promises.pop(workload.job_id, None)
        if voided is None:
            return False
        for promise in self.promises_by_urgency():
            is_ahead = urgency_order(self.workloads[promise.job_id]) < urgency_order(workload)
            if promise.flavor == voided.flavor and is_ahead:
                origins = {*promise.origins, *voided.origins} - {promise.job_id}
                self.promises[promise.job_id] = replace(promise, origins=tuple(sorted(origins)))
        return True

    def is_admitted_here(self, workload: Workload) -> bool:
        """True for what this very plan has granted."""
        return self.before[workload.job_id].standing is Standing.WAITING

    def note_due(self, seconds: float) -> None:
        self.due_seconds = seconds if self.due_seconds is None else min(self.due_seconds, seconds)

    def decisions(self) -> tuple[Decision, ...]:
        """What makes room first, then what takes it, each by urgency."""
        made = [
            decision
            for job_id, workload in self.workloads.items()
            if (decision := self._decision(self.before[job_id], workload)) is not None
        ]
        return tuple(sorted(made, key=lambda d: (isinstance(d, Grant), urgency_order(self.before[d.job_id]))))

    def _decision(self, before: Workload, after: Workload) -> Decision | None:
        if after is before:
            return None
        reason = self.reasons[after.job_id]
        if before.standing is Standing.WAITING:
            assert after.flavor is not None
            size = f"starts with {workers_text(after.workers)}"
            told = replace(reason, detail=f"{reason.detail}; {size}")
            return Grant(job_id=after.job_id, flavor=after.flavor, workers=after.workers, reason=told)
        if after.standing is Standing.DRAINING:
            return Evict(job_id=after.job_id, reason=reason)
        if after.workers == before.workers:
            return None
        if after.workers < before.workers:
            change = f"from {workers_text(before.workers)} to {after.workers}"
            reason = replace(reason, detail=f"{change}: {reason.detail}")
        return Resize(job_id=after.job_id, workers=after.workers, reason=reason, size_before=after.size_before)

    def _put(self, workload: Workload, reason: Reason) -> None:
        self.workloads[workload.job_id] = workload
        self.reasons[workload.job_id] = reason
        flavor = workload.flavor
        assert flavor is not None
        for charged in (True, False):
            self._layouts.pop((flavor, charged), None)
            self._rooms.pop((flavor, charged), None)
        for urgency in range(len(PriorityClass)):
            self.candidates.pop((flavor, urgency), None)

    def _put_more(self, before: Workload, after: Workload, flavor: FlavorName, reason: Reason) -> None:
        """As ``_put``, for a workload that only holds more: the layouts need not be made anew."""
        layouts = {
            (flavor, charged): self._with_more(before, after, flavor, charged=charged) for charged in (True, False)
        }
        self._put(after, reason)
        self._layouts.update(layouts)

    def _with_more(self, before: Workload, after: Workload, flavor: FlavorName, *, charged: bool) -> Layout:
        """The layout if ``before`` stood as ``after``, which holds more. Cost: O(1), unless members leave."""
        counts = [ledger.charge_of(w) if charged else w.granted for w in (before, after)]
        is_fresh = self._is_fresh(after)
        site = self.sites[flavor]
        if is_fresh or all(
            site.stands(after.job_id, r.name) <= n for r, n in zip(after.roles, counts[0], strict=True)
        ):
            more = tuple(b - a for a, b in zip(*counts, strict=True))
            return self._layout(flavor, charged=charged).with_more(self.vectors(after.job_id, more, flavor))
        workloads = (after if job_id == after.job_id else w for job_id, w in self.workloads.items())
        return site.layout(c for w in workloads for c in self._claims(w, flavor, charged=charged))

    def _layout(self, flavor: FlavorName, *, charged: bool) -> Layout:
        key = (flavor, charged)
        if key not in self._layouts:
            claims = (c for w in self.workloads.values() for c in self._claims(w, flavor, charged=charged))
            self._layouts[key] = self.sites[flavor].layout(claims)
        return self._layouts[key]

    def _room(self, flavor: FlavorName, *, charged: bool) -> Room:
        key = (flavor, charged)
        if key not in self._rooms:
            self._rooms[key] = self._layout(flavor, charged=charged).room()
        return self._rooms[key]

    def _is_fresh(self, workload: Workload) -> bool:
        """True if the report knows nothing of its members yet: they were granted on it or after it."""
        return workload.granted_at_revision >= self.capacity.revision

    def _claims(self, workload: Workload, flavor: FlavorName, *, charged: bool) -> tuple[Claim, ...]:
        """What the workload takes there."""
        if workload.flavor != flavor:
            return ()
        counts = ledger.charge_of(workload) if charged else workload.granted
        is_fresh = self._is_fresh(workload)
        return tuple(
            Claim(job_id=workload.job_id, role=role.name, size=role.resources, count=count, is_fresh=is_fresh)
            for role, count in zip(workload.roles, counts, strict=True)
            if count > 0
        )


_NEWEST: Final = 2**62
"""Order of an admission that is not carried out yet."""


def promises_ahead(desk: Desk, workload: Workload, flavor: FlavorName) -> tuple[Promise, ...]:
    """Promises that come before ``workload``: those to more urgent claimants, those that came out of it, and those
    ahead of these, or they would take the room in their stead.
    """
    others = [p for p in desk.promises_by_urgency() if p.flavor == flavor and p.job_id != workload.job_id]
    made_for = [desk.workloads[p.job_id] for p in others if workload.job_id in p.origins]
    last = max(urgency_order(w) for w in (workload, *made_for))
    return tuple(p for p in others if urgency_order(desk.workloads[p.job_id]) <= last)


def with_workers(workload: Workload, workers: int) -> Workload:
    """A running workload as if it were granted so many workers: for looking at the room that would be left."""
    return replace(workload, granted=members_at(workload, workers))


def as_started(desk: Desk, workload: Workload, flavor: FlavorName) -> Workload:
    """A waiting workload as if its minimum were granted."""
    return replace(
        workload,
        granted=minimum_of(workload),
        flavor=flavor,
        granted_at_revision=desk.capacity.revision,
    )


def _sites(capacity: Capacity, workloads: list[Workload]) -> dict[FlavorName, Site]:
    names = {name for node in capacity.nodes for name in node.allocatable}
    names |= {name for workload in workloads for role in workload.roles for name in role.resources}
    flavors = {node.flavor for node in capacity.nodes}
    flavors |= {workload.flavor for workload in workloads if workload.flavor is not None}
    ordered = tuple(sorted(names))
    return {flavor: Site(flavor, capacity, names=ordered) for flavor in sorted(flavors)}
