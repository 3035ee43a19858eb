"""``plan``: who is granted how much, who makes room for whom, and why everybody else waits.

1. Promises of claimants that went away are dropped; the others are set to the present minimum.
2. If more is granted than there is (a node died), the least urgent give it back.
3. Class by class, from the most urgent: first minimums, in order of urgency. What fits beside everything promised
   ahead is granted; what will fit once the leaving have left is promised; else victims make room and it is promised.
   Then growth, which yields to the minimums above it.
4. A promise that nothing covers any more is voided, and the pass begins again from the most urgent.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import TypeAlias

from schemas.vocabulary import FlavorName, JobId
from services.queueing.core import reasons
from services.queueing.core.desk import Desk, as_started, promises_ahead
from services.queueing.core.explain import why_waiting
from services.queueing.core.gang import minimum_of
from services.queueing.core.growth import grow_class
from services.queueing.core.ordering import urgency_order
from services.queueing.core.placement import is_within, place
from services.queueing.core.preemption import (
    Taking,
    everybody_on,
    evictable_for,
    plan_preemption,
    shrinkable_for,
    stands_after,
)
from services.queueing.core.values import NO_CAPACITY, Plan, Promise, Standing, View, Workload

Line: TypeAlias = tuple[Workload, ...]
"""Waiting workloads of one class, queue and shape, most urgent first."""


class Fate(Enum):
    """What became of a waiting workload that was looked at."""

    GRANTED = auto()
    PROMISED = auto()
    WAITS = auto()
    VOIDED = auto()


def plan(view: View, now: float) -> Plan:
    """Decide on ``view``; ``now`` in seconds of the monotonic clock. Planning again after it changes nothing.

    Cost: (active + shapes waiting + victims looked at) x (active + nodes); pending jobs behind a head cost nothing.
    """
    if view.capacity is None:
        heads = [line[0] for line in view.lines if line]
        return Plan(decisions=(), promises=view.promises, waits={head.job_id: NO_CAPACITY for head in heads})
    desk = Desk(view, view.capacity, now=now)
    classes = _lines_by_class(view)
    correct_promises(desk)
    relieve_shortage(desk)
    restarts = len(view.promises) + 1
    waiting = run_pass(desk, classes, restarts=restarts)
    while waiting is None:
        restarts -= 1
        waiting = run_pass(desk, classes, restarts=restarts)
    return Plan(
        decisions=desk.decisions(),
        promises=desk.promises_by_urgency(),
        waits={workload.job_id: why_waiting(desk, workload) for workload in waiting},
        due_seconds=desk.due_seconds,
    )


def correct_promises(desk: Desk) -> None:
    """Keep those of claimants that still claim, at their present minimum."""
    for job_id in sorted(desk.promises):
        workload = desk.workloads.get(job_id)
        if workload is None or not workload.claims:
            del desk.promises[job_id]
        else:
            desk.promises[job_id] = replace(desk.promises[job_id], members=promised_members(workload))


def promised_members(workload: Workload) -> tuple[int, ...]:
    """A promise is for the whole present minimum, never for what happens to be missing."""
    return minimum_of(workload)


def relieve_shortage(desk: Desk) -> None:
    """If more is granted than there is, take it back, least urgent first, whatever the class."""
    for flavor in sorted(desk.sites):
        if not is_short(desk, flavor, {}):
            continue

        def is_enough(taking: Taking, flavor: FlavorName = flavor) -> bool:
            return not is_short(desk, flavor, stands_after(desk, taking))

        shrinkable, evictable = everybody_on(desk, flavor)
        taking = plan_preemption(shrinkable=shrinkable, evictable=evictable, is_enough=is_enough)
        assert taking is not None, "evicting everybody is always enough"
        _carry_out(desk, taking, None)


def is_short(desk: Desk, flavor: FlavorName, changed: Mapping[JobId, Workload]) -> bool:
    """Whether more is granted than there is, if ``changed`` stood as given. What is leaving counts as gone."""
    return not is_within(desk.room_if(flavor, changed).spare)


def run_pass(desk: Desk, classes: Sequence[tuple[int, Sequence[Line]]], *, restarts: int) -> list[Workload] | None:
    """One pass over all classes: who was looked at and waits. None if a promise was voided: begin again.

    A line is left at the first workload that gets nothing, since those behind it are its equals.
    """
    waiting: list[Workload] = []
    for urgency, lines in classes:
        heap = [(urgency_order(line[0]), index, 0) for index, line in enumerate(lines)]
        heapq.heapify(heap)
        while heap:
            _, index, place_in_line = heapq.heappop(heap)
            workload = lines[index][place_in_line]
            fate = consider(desk, workload)
            if fate is Fate.VOIDED and restarts > 0:
                return None
            if fate is not Fate.GRANTED:
                waiting.append(workload)
            behind = lines[index][place_in_line + 1 :]
            if behind and (fate is not Fate.WAITS or _goes_on(desk, workload, behind)):
                heapq.heappush(heap, (urgency_order(behind[0]), index, place_in_line + 1))
        grow_class(desk, urgency)
    return waiting


def _goes_on(desk: Desk, workload: Workload, behind: Line) -> bool:
    """Whether the rest of a line matters although ``workload`` gets nothing: it waits only for what was taken from
    itself, or somebody behind it has a promise that is to be looked at again.
    """
    made_room = any(workload.job_id in promise.origins for promise in desk.promises.values())
    return made_room or any(other.job_id in desk.promises for other in behind)


def consider(desk: Desk, workload: Workload) -> Fate:
    """Grant, promise, make room for, or leave waiting one claimant."""
    if desk.workloads[workload.job_id].standing is not Standing.WAITING:
        return Fate.GRANTED
    flavors = desk.flavors_for(workload)
    for flavor in flavors:
        if can_start(desk, workload, flavor):
            desk.admit(workload, flavor, workload.request.workers_min, reasons.admission(desk, workload, flavor))
            return Fate.GRANTED
    for flavor in flavors:
        if is_covered(desk, workload, flavor):
            _promise(desk, workload, flavor, Taking())
            return Fate.PROMISED
    found = _cheapest_taking(desk, workload, flavors)
    if found is not None:
        flavor, taking = found
        _carry_out(desk, taking, workload)
        _promise(desk, workload, flavor, taking)
        return Fate.PROMISED
    return Fate.VOIDED if desk.promises.pop(workload.job_id, None) else Fate.WAITS


def can_start(desk: Desk, workload: Workload, flavor: FlavorName) -> bool:
    """Whether the whole minimum fits now beside all charges and all promises ahead, and these stay covered."""
    promises = promises_ahead(desk, workload, flavor)
    members = desk.vectors(workload.job_id, minimum_of(workload), flavor)
    if place(desk.beside_promises(desk.room_now(flavor), flavor, promises), members) is None:
        return False
    if not promises:
        return True
    started = {workload.job_id: as_started(desk, workload, flavor)}
    return desk.keeps_promises(flavor, promises, desk.room_if(flavor, started))


def is_covered(desk: Desk, workload: Workload, flavor: FlavorName) -> bool:
    """Whether the whole minimum will fit, once all that is leaving has left, beside the promises ahead."""
    promises = promises_ahead(desk, workload, flavor)
    room = desk.beside_promises(desk.room_coming(flavor), flavor, promises)
    return place(room, desk.vectors(workload.job_id, minimum_of(workload), flavor)) is not None


def choose_victims(desk: Desk, workload: Workload, flavor: FlavorName) -> Taking | None:
    """Whose room would let the claimant start on this flavor; None if nobody's would."""
    promises = promises_ahead(desk, workload, flavor)
    members = desk.vectors(workload.job_id, minimum_of(workload), flavor)

    def is_enough(taking: Taking) -> bool:
        room = desk.room_if(flavor, stands_after(desk, taking))
        return place(desk.beside_promises(room, flavor, promises), members) is not None

    return plan_preemption(
        shrinkable=shrinkable_for(desk, workload, flavor),
        evictable=evictable_for(desk, workload, flavor),
        is_enough=is_enough,
    )


def _cheapest_taking(
    desk: Desk, workload: Workload, flavors: tuple[FlavorName, ...]
) -> tuple[FlavorName, Taking] | None:
    """The flavor where the fewest are preempted, then the fewest shrunk; the promised flavor wins ties."""
    found: dict[FlavorName, Taking] = {}
    for flavor in flavors:
        taking = choose_victims(desk, workload, flavor)
        if taking is not None:
            found[flavor] = taking
    if not found:
        return None
    return min(found.items(), key=lambda choice: (len(choice[1].evicted), len(choice[1].shrunk)))


def _promise(desk: Desk, workload: Workload, flavor: FlavorName, taking: Taking) -> None:
    """Make a promise or keep the one there is, with the victims that were added to it."""
    known = desk.promises.get(workload.job_id)
    origins = (*(known.origins if known and known.flavor == flavor else ()), *taking.victims)
    desk.promises[workload.job_id] = Promise(
        job_id=workload.job_id,
        flavor=flavor,
        members=promised_members(workload),
        origins=tuple(sorted(dict.fromkeys(origins))),
    )


def _carry_out(desk: Desk, taking: Taking, claimant: Workload | None) -> None:
    """Shrink and evict; without a claimant it is for a shortage of capacity."""
    for job_id in taking.evicted:
        victim = desk.workloads[job_id]
        desk.evict(victim, reasons.preemption(victim, claimant))
    for job_id, workers in taking.shrunk.items():
        victim = desk.workloads[job_id]
        reason = reasons.shrinking(victim, workers, claimant)
        desk.resize(victim, workers, reason, size_before=max(victim.size_before, victim.workers))


def _lines_by_class(view: View) -> list[tuple[int, list[Line]]]:
    """Lines by urgency, the highest first, each in order of urgency; classes that only run are there to grow."""
    classes: dict[int, list[Line]] = {workload.priority.urgency: [] for workload in view.active}
    for line in view.lines:
        ordered = tuple(sorted(line, key=urgency_order))
        if ordered:
            classes.setdefault(ordered[0].priority.urgency, []).append(ordered)
    return [
        (urgency, sorted(lines, key=lambda line: urgency_order(line[0])))
        for urgency, lines in sorted(classes.items(), reverse=True)
    ]
