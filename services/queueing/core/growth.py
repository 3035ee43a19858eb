"""Who grows into idle room: jobs that run below the size they want, class by class, one worker at a time."""

import heapq

from schemas.events.allocation import Reason
from services.queueing.core import ledger, reasons
from services.queueing.core.desk import Desk, with_workers
from services.queueing.core.gang import wanted_workers
from services.queueing.core.ordering import growing_order
from services.queueing.core.placement import place
from services.queueing.core.values import Promise, Standing, Workload


def grow_class(desk: Desk, urgency: int) -> None:
    """Hand idle room to running jobs of one class until none can take another worker.

    Among them the one with the fewest workers is next; who cannot take one now cannot later in this plan.
    Cost: O(workers handed out) looks at the room.
    """
    growing = [
        growing_order(w, workers=w.workers)
        for w in desk.workloads.values()
        if w.urgency == urgency and may_grow(desk, w)
    ]
    heapq.heapify(growing)
    while growing:
        _, job_id = heapq.heappop(growing)
        workload = desk.workloads[job_id]
        if has_room_for_one(desk, workload):
            desk.grow(workload, _reason(desk, workload))
            grown = desk.workloads[job_id]
            if grown.workers < wanted_workers(grown):
                heapq.heappush(growing, growing_order(grown, workers=grown.workers))


def may_grow(desk: Desk, workload: Workload) -> bool:
    """Running, resizable (or admitted just now), below what it wants, not backing off."""
    return (
        workload.standing is Standing.RUNNING
        and (workload.is_resizable or desk.is_admitted_here(workload))
        and workload.back_off_seconds == 0
        and workload.workers < wanted_workers(workload)
    )


def has_room_for_one(desk: Desk, workload: Workload) -> bool:
    """Whether one more worker fits into what is free and not promised, and every such promise stays covered."""
    flavor = workload.flavor
    assert flavor is not None
    promises = promises_before_growth(desk, workload)
    grown = with_workers(workload, workload.workers + 1)
    more = tuple(after - now for after, now in zip(ledger.charge_of(grown), ledger.charge_of(workload), strict=True))
    free = desk.beside_promises(desk.room_now(flavor), flavor, promises)
    if place(free, desk.vectors(workload.job_id, more, flavor)) is None:
        return False
    if not desk.finds_place(workload, grown, flavor):
        return False
    return not promises or desk.keeps_promises(flavor, promises, desk.room_if(flavor, {workload.job_id: grown}))


def promises_before_growth(desk: Desk, workload: Workload) -> tuple[Promise, ...]:
    """Growth yields to promises of its own class and higher ones, and to those of lower classes that somebody was
    shrunk or evicted for, perhaps the job itself: a victim's room goes to its claimant.
    """
    return tuple(
        promise
        for promise in desk.promises_by_urgency()
        if promise.flavor == workload.flavor
        and (desk.workloads[promise.job_id].urgency >= workload.urgency or promise.origins)
    )


def _reason(desk: Desk, workload: Workload) -> Reason:
    """Why it gets one worker more; for a job admitted in this plan the reason of its admission stays."""
    if desk.is_admitted_here(workload):
        return desk.reasons[workload.job_id]
    return reasons.growth(desk.before[workload.job_id], workload.workers + 1)
