"""Why an allocation changed: a code for programs, a sentence with the numbers for people."""

from schemas.events.allocation import Reason
from schemas.vocabulary import DecisionCode, FlavorName
from services.queueing.core.desk import Desk
from services.queueing.core.gang import minimum_of, size_of, wanted_workers
from services.queueing.core.values import Workload
from services.queueing.core.wording import amount_text, job_text, workers_text


def admission(desk: Desk, workload: Workload, flavor: FlavorName) -> Reason:
    """Admitted into idle room, or into room that was made for it."""
    needs = amount_text(size_of(workload, minimum_of(workload)))
    promise = desk.promises.get(workload.job_id)
    if promise is not None and promise.origins:
        return Reason(
            code=DecisionCode.ADMITTED_PROMISE,
            detail=f"the room that was made for it on {flavor} is free: {needs}",
        )
    return Reason(code=DecisionCode.ADMITTED_IDLE, detail=f"its minimum fits into idle room on {flavor}: {needs}")


def preemption(victim: Workload, claimant: Workload | None) -> Reason:
    if claimant is None:
        return Reason(code=DecisionCode.PREEMPTED_FOR_SHORTAGE, detail="the cluster holds less than was granted")
    return Reason(
        code=DecisionCode.PREEMPTED_FOR_CLAIMANT,
        detail=f"preempted for {_claimant_text(victim, claimant)}; it starts again when there is room",
    )


def shrinking(victim: Workload, claimant: Workload | None) -> Reason:
    if claimant is None:
        return Reason(code=DecisionCode.SHRANK_FOR_SHORTAGE, detail="the cluster holds less than was granted")
    return Reason(
        code=DecisionCode.SHRANK_FOR_CLAIMANT,
        detail=f"makes room for {_claimant_text(victim, claimant)}; it grows back when there is room",
    )


def growth(workload: Workload, workers: int) -> Reason:
    """``workload`` as it stood before this plan; ``workers`` is the size it grows to."""
    wanted = wanted_workers(workload)
    size = f"now {workers_text(workers)} of {wanted}"
    if workload.size_before > workload.workers:
        return Reason(code=DecisionCode.GAVE_BACK, detail=f"room that others had needed is free again: {size} wanted")
    if workload.wanted_because:
        return Reason(code=DecisionCode.GREW_PROPOSED, detail=f"{workload.wanted_because}: {size} proposed")
    return Reason(code=DecisionCode.GREW_REQUESTED, detail=f"there is room: {size} wished for")


def _claimant_text(victim: Workload, claimant: Workload) -> str:
    needs = amount_text(size_of(claimant, minimum_of(claimant)))
    return f"{job_text(claimant, reader=victim.tenant)}, {claimant.priority.value}, which needs {needs}"
