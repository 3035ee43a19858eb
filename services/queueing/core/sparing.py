"""Victims that turned out not to be needed: chosen for one claimant, made redundant by those of the next.

Each claimant's victims are no more than it needs when they are chosen. Where several claimants took room in one plan,
a whole job preempted for a later one may cover an earlier one as well; whoever is not needed then is spared.
"""

from schemas.vocabulary import DecisionCode
from services.queueing.core.desk import Desk, with_workers
from services.queueing.core.ordering import eviction_order
from services.queueing.core.values import Standing, Workload


def spare_victims(desk: Desk, urgency: int) -> None:
    """Give back, dearest first, what all promises of this class and higher ones can do without.

    Before lower classes are looked at: what is left over of a victim must not become their reason to evict it.
    Cost: O(victims) looks at the room.
    """
    victims = [
        desk.before[job_id]
        for job_id, reason in desk.reasons.items()
        if reason.code in _FOR_CLAIMANTS and not desk.is_admitted_here(desk.before[job_id])
    ]
    made_for = [p for p in desk.promises.values() if any(w.job_id in p.origins for w in victims)]
    if len(made_for) < 2:
        return
    dearest_first = sorted(victims, key=lambda w: eviction_order(w, now=desk.now), reverse=True)
    for before in dearest_first:
        if desk.workloads[before.job_id].standing is Standing.DRAINING and _can_do_without(desk, before, urgency):
            desk.restore(before)
    for before in dearest_first:
        victim = desk.workloads[before.job_id]
        if victim.standing is Standing.RUNNING and victim.workers < before.workers:
            _give_back(desk, before, victim, urgency)


_FOR_CLAIMANTS = (DecisionCode.PREEMPTED_FOR_CLAIMANT, DecisionCode.SHRANK_FOR_CLAIMANT)


def _give_back(desk: Desk, before: Workload, victim: Workload, urgency: int) -> None:
    """As many workers as it can keep."""
    low, high = victim.workers, before.workers
    while low < high:
        middle = (low + high + 1) // 2
        if _can_do_without(desk, with_workers(before, middle), urgency):
            low = middle
        else:
            high = middle - 1
    if low == before.workers:
        desk.restore(before)
    elif low > victim.workers:
        reason = desk.reasons[before.job_id]
        desk.restore(before)
        desk.shrink(before, low, reason)


def _can_do_without(desk: Desk, restored: Workload, urgency: int) -> bool:
    """Whether every promise of this class and higher ones stays covered if the victim stood so."""
    flavor = restored.flavor
    assert flavor is not None
    promises = tuple(
        p for p in desk.promises_by_urgency() if p.flavor == flavor and desk.workloads[p.job_id].urgency >= urgency
    )
    return desk.keeps_promises(flavor, promises, desk.room_if(flavor, {restored.job_id: restored}))
