"""The ledger: what a job is charged for, and each step of a grant's life as a new workload and its events.

Nothing here asks whether a step is wise (``plan`` does) or which word caused it (``words`` does).
"""

from dataclasses import dataclass, replace

from schemas.events.allocation import (
    AllocationClosed,
    AllocationEvicted,
    AllocationGranted,
    AllocationResized,
    AllocationWaiting,
    FailureCounts,
    Reason,
)
from schemas.registry import AllocationData
from schemas.vocabulary import Attribution, DecisionCode, EndCause, FlavorName, Outcome, WaitCode
from services.queueing.core.gang import members_at, nobody, to_role_grants
from services.queueing.core.values import Standing, WaitReason, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A workload after a step, and the events that tell of it, in order."""

    workload: Workload
    events: tuple[AllocationData, ...] = ()


def charge_of(workload: Workload) -> tuple[int, ...]:
    """Members charged per role: the larger of what is granted and what is still held."""
    return tuple(max(g, h) for g, h in zip(workload.granted, workload.held, strict=True))


def held_at_least_granted(workload: Workload) -> tuple[int, ...]:
    """What is held once a shrink or an eviction is decided: nobody has left yet, so all that was granted."""
    return charge_of(workload)


def grant(workload: Workload, *, workers: int, flavor: FlavorName, order: int, revision: int, reason: Reason) -> Step:
    """Admit a waiting gang: a new attempt. ``order``: admissions so far; ``revision``: of the capacity report."""
    assert workload.standing is Standing.WAITING
    floor = workload.request.workers_min
    assert workers >= floor or not any(role.elastic for role in workload.roles)
    admitted = replace(
        workload,
        standing=Standing.RUNNING,
        epoch=workload.epoch + 1,
        attempt=workload.attempt + 1,
        granted=members_at(workload, workers),
        held=nobody(workload),
        flavor=flavor,
        floor=floor,
        order=order,
        granted_at_revision=revision,
        size_before=0,
        waiting=None,
        overdue="",
        started_at=None,
        checkpointed_at=None,
    )
    return Step(workload=admitted, events=(_granted(admitted, reason),))


def retry_in_place(workload: Workload, *, revision: int, reason: Reason) -> Step:
    """A new attempt on the room that the job has: the charge stays what is granted."""
    assert workload.standing is Standing.RUNNING
    again = replace(
        workload,
        epoch=workload.epoch + 1,
        attempt=next_attempt(workload),
        held=nobody(workload),
        granted_at_revision=revision,
        overdue="",
        started_at=None,
        checkpointed_at=None,
    )
    return Step(workload=again, events=(_granted(again, reason),))


def next_attempt(workload: Workload) -> int:
    """Every admission and every retry in place is an attempt of its own."""
    return workload.attempt + 1


def resize(
    workload: Workload, *, workers: int, reason: Reason, floor: int | None = None, size_before: int = 0
) -> Step:
    """Set the target of a running job. What leaves stays charged until execution has seen it gone."""
    assert workload.standing is Standing.RUNNING
    floor = workload.floor if floor is None else floor
    assert workers >= floor
    before = workload.workers
    resized = replace(
        workload,
        epoch=workload.epoch + 1,
        granted=members_at(workload, workers),
        held=held_at_least_granted(workload) if workers < before else workload.held,
        floor=floor,
        size_before=size_before if size_before > workers else 0,
    )
    event = AllocationResized(
        epoch=resized.epoch,
        attempt=resized.attempt,
        workers_from=before,
        workers_to=workers,
        roles=to_role_grants(resized, members=resized.granted, floor=floor),
        grace_seconds=workload.grace_seconds,
        reason=reason,
    )
    return Step(workload=resized, events=(event,))


def evict(workload: Workload, *, reason: Reason, requeue: bool) -> Step:
    """Take the whole allocation back. The charge stays until ``group_ended`` of this attempt."""
    assert workload.standing is Standing.RUNNING
    draining = replace(
        workload,
        standing=Standing.DRAINING,
        epoch=workload.epoch + 1,
        held=held_at_least_granted(workload),
        granted=nobody(workload),
        size_before=0,
    )
    return Step(workload=draining, events=(_evicted(draining, reason, requeue=requeue),))


def set_aside(workload: Workload, *, reason: Reason, waiting: WaitReason) -> Step:
    """Give up the room of a job whose attempt has ended by itself: it waits again, charged for nothing."""
    assert workload.standing is Standing.RUNNING
    freed = replace(_freed(workload), epoch=workload.epoch + 1)
    waits = wait(freed, waiting)
    return Step(workload=waits.workload, events=(_evicted(freed, reason, requeue=True), *waits.events))


def requeue(workload: Workload) -> Step:
    """The eviction is over: the job waits again, charged for nothing."""
    assert workload.standing is Standing.DRAINING
    freed = _freed(workload)
    return Step(workload=freed)


def wait(workload: Workload, reason: WaitReason) -> Step:
    """Note why it waits; an event only if that changed."""
    if workload.waiting == reason:
        return Step(workload=workload)
    event = AllocationWaiting(
        code=reason.code, detail=reason.detail, unblocked_by=reason.unblocked_by, estimate=reason.estimate
    )
    return Step(workload=replace(workload, waiting=reason), events=(event,))


def close(
    workload: Workload,
    *,
    outcome: Outcome,
    reason: Reason,
    exit_code: int | None = None,
    attributed_to: Attribution | None = None,
    cause: EndCause | None = None,
) -> Step:
    """The end, once and for good."""
    assert workload.standing is not Standing.CLOSED
    closed = replace(
        workload,
        standing=Standing.CLOSED,
        epoch=workload.epoch + 1,
        granted=nobody(workload),
        held=nobody(workload),
        waiting=None,
    )
    event = AllocationClosed(
        epoch=closed.epoch,
        attempt=closed.attempt,
        outcome=outcome,
        exit_code=exit_code,
        attributed_to=attributed_to,
        reason=reason,
        cause=cause,
        failures=failures_of(workload),
    )
    return Step(workload=closed, events=(event,))


HELD_WAITS = WaitReason(code=WaitCode.HELD, detail="the job is held", unblocked_by="releasing it: tide release")


def back_off_waits(seconds: float, *, after: str = "the last start failed") -> WaitReason:
    """The reason of a job that claims nothing for a while."""
    return WaitReason(
        code=WaitCode.BACK_OFF,
        detail=f"{after}; the next one is tried after a pause of {seconds:g} s",
        unblocked_by="the end of the pause, a change of the cluster's capacity, or a change of the job",
    )


def to_reason(code: DecisionCode, detail: str) -> Reason:
    return Reason(code=code, detail=detail)


def _freed(workload: Workload) -> Workload:
    return replace(
        workload,
        standing=Standing.WAITING,
        granted=nobody(workload),
        held=nobody(workload),
        flavor=None,
        size_before=0,
        waiting=None,
        overdue="",
        started_at=None,
        checkpointed_at=None,
    )


def _granted(workload: Workload, reason: Reason) -> AllocationGranted:
    assert workload.flavor is not None
    return AllocationGranted(
        epoch=workload.epoch,
        attempt=workload.attempt,
        roles=to_role_grants(workload, members=workload.granted, floor=workload.floor),
        flavor=workload.flavor,
        reason=reason,
        failures=failures_of(workload),
    )


def _evicted(workload: Workload, reason: Reason, *, requeue: bool) -> AllocationEvicted:
    return AllocationEvicted(
        epoch=workload.epoch,
        attempt=workload.attempt,
        grace_seconds=workload.grace_seconds,
        reason=reason,
        requeue=requeue,
        failures=failures_of(workload),
    )


def failures_of(workload: Workload) -> FailureCounts | None:
    """None where nothing has failed yet."""
    if not (workload.job_failures or workload.fruitless):
        return None
    return FailureCounts(of_job=workload.job_failures, without_progress=workload.fruitless)
