"""``plan``: who is granted how much, who makes room for whom, and why everybody else waits.

1. Promises of claimants that went away are dropped; the others are set to the present minimum.
2. If more is granted than there is (a node died), the least urgent give it back.
3. Class by class, from the most urgent: first minimums, in order of urgency. What fits beside everything promised
   ahead is granted; what will fit once the leaving have left is promised; else victims make room and it is promised.
   Victims of one claimant that those of another made redundant are spared. Then growth, which yields to the minimums
   above it.
4. A promise that nothing covers any more is voided, and the pass begins again from the most urgent.
"""

import heapq
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto

from schemas.events.job import RoleRequest
from schemas.vocabulary import FlavorName, JobId
from services.queueing.core import reasons
from services.queueing.core.desk import Desk, as_started, promises_ahead
from services.queueing.core.explain import why_waiting
from services.queueing.core.gang import minimum_of
from services.queueing.core.growth import grow_class
from services.queueing.core.ordering import urgency_order
from services.queueing.core.placement import Room, is_within, place
from services.queueing.core.preemption import (
    Taking,
    candidates_for,
    everybody_on,
    plan_preemption,
    stands_after,
)
from services.queueing.core.sparing import spare_victims
from services.queueing.core.values import NO_CAPACITY, Line, Plan, Promise, Standing, View, Workload, shape_of


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
        heads = [line[0] for line in view.lines]
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
    """One pass over all classes: who was looked at and waits. None if a promise was voided: begin again."""
    waiting: list[Workload] = []
    fates = Considered()
    for urgency, lines in classes:
        heap = [(urgency_order(line[0]), index, 0) for index, line in enumerate(lines)]
        heapq.heapify(heap)
        while heap:
            _, index, place_in_line = heapq.heappop(heap)
            line = lines[index]
            workload = line[place_in_line]
            fate = fates.consider(desk, workload)
            if fate is Fate.VOIDED and restarts > 0:
                return None
            if fate is not Fate.GRANTED:
                waiting.append(workload)
            following = next_in_line(desk, line, place_in_line, fate)
            if following < len(line):
                heapq.heappush(heap, (urgency_order(line[following]), index, following))
        spare_victims(desk, urgency)
        grow_class(desk, urgency)
    return waiting


def next_in_line(desk: Desk, line: Line, place_in_line: int, fate: Fate) -> int:
    """Whom to look at next in a line; its length if nobody.

    If one gets nothing, nobody behind it does, since they are its equals; unless it waits only for what was taken
    from itself. But those behind it that have a promise are to be looked at again.
    """
    workload = line[place_in_line]
    if fate in (Fate.GRANTED, Fate.PROMISED) or _made_room(desk, workload):
        return place_in_line + 1
    shape = shape_of(workload)
    behind = [
        job_id for job_id in desk.promises if job_id > workload.job_id and shape_of(desk.before[job_id]) == shape
    ]
    return bisect_left(line, min(behind), key=lambda w: w.job_id) if behind else len(line)


class Considered:
    """Remembers within a pass what found no room, so that equals of another line are not looked at again.

    Room only shrinks on the way down, except where somebody is told to make more of it.
    """

    def __init__(self) -> None:
        self._failed: dict[tuple[int, tuple[RoleRequest, ...], tuple[int, ...]], int] = {}

    def consider(self, desk: Desk, workload: Workload) -> Fate:
        needs = (workload.urgency, workload.roles, minimum_of(workload))
        is_plain = workload.job_id not in desk.promises and not _made_room(desk, workload)
        if is_plain and self._failed.get(needs) == desk.takings:
            desk.meet(workload)
            return Fate.WAITS
        fate = consider(desk, workload)
        if is_plain and fate is Fate.WAITS:
            self._failed[needs] = desk.takings
        return fate


def _made_room(desk: Desk, workload: Workload) -> bool:
    return any(workload.job_id in promise.origins for promise in desk.promises.values())


def consider(desk: Desk, workload: Workload) -> Fate:
    """Grant, promise, make room for, or leave waiting one claimant."""
    desk.meet(workload)
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
    return Fate.VOIDED if desk.void_promise(workload) else Fate.WAITS


def can_start(desk: Desk, workload: Workload, flavor: FlavorName) -> bool:
    """Whether the whole minimum fits now beside all charges and all promises ahead, and these stay covered."""
    promises = promises_ahead(desk, workload, flavor)
    members = desk.vectors(workload.job_id, minimum_of(workload), flavor)
    if place(desk.beside_promises(desk.room_now(flavor), flavor, promises), members) is None:
        return False
    started = as_started(desk, workload, flavor)
    if not desk.finds_place(workload, started, flavor):
        return False
    return not promises or desk.keeps_promises(flavor, promises, desk.room_if(flavor, {workload.job_id: started}))


def is_covered(desk: Desk, workload: Workload, flavor: FlavorName) -> bool:
    """Whether the whole minimum will fit, once all that is leaving has left, beside the promises ahead."""
    return would_cover(desk, workload, flavor, desk.room_coming(flavor))


def would_cover(desk: Desk, workload: Workload, flavor: FlavorName, room: Room) -> bool:
    """Whether ``room`` has place for the whole minimum beside the promises ahead.

    If one of these is less urgent (it came out of the workload itself), they must also all fit in order of urgency,
    which is how the next plan looks at them.
    """
    promises = promises_ahead(desk, workload, flavor)
    members = minimum_of(workload)
    if place(desk.beside_promises(room, flavor, promises), desk.vectors(workload.job_id, members, flavor)) is None:
        return False
    if all(urgency_order(desk.workloads[p.job_id]) < urgency_order(workload) for p in promises):
        return True
    promise = Promise(job_id=workload.job_id, flavor=flavor, members=members)
    ordered = sorted((*promises, promise), key=lambda p: urgency_order(desk.workloads[p.job_id]))
    return desk.keeps_promises(flavor, tuple(ordered), room)


def choose_victims(desk: Desk, workload: Workload, flavor: FlavorName) -> Taking | None:
    """Whose room would let the claimant start on this flavor; None if nobody's would."""

    def is_enough(taking: Taking) -> bool:
        return would_cover(desk, workload, flavor, desk.room_if(flavor, stands_after(desk, taking)))

    candidates = candidates_for(desk, workload.urgency, flavor)
    if not would_cover(desk, workload, flavor, candidates.room):
        return None
    return plan_preemption(shrinkable=candidates.shrinkable, evictable=candidates.evictable, is_enough=is_enough)


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
        reason = reasons.shrinking(victim, claimant)
        desk.shrink(victim, workers, reason)


def _lines_by_class(view: View) -> list[tuple[int, list[Line]]]:
    """Lines by urgency, the highest first, by their heads; classes that only run are there to grow."""
    classes: dict[int, list[Line]] = {workload.urgency: [] for workload in view.active}
    for line in view.lines:
        classes.setdefault(line[0].urgency, []).append(line)
    return [
        (urgency, sorted(lines, key=lambda line: urgency_order(line[0])))
        for urgency, lines in sorted(classes.items(), reverse=True)
    ]
