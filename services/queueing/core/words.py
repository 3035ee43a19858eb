"""What each event means for one workload: the words of users, of scaling and of execution, as steps of the ledger.

Every function is total: a word that is late, repeated or about another epoch or attempt changes nothing.
"""

from dataclasses import replace

from schemas.events.job import JobSubmitted, RequestRegister
from schemas.events.scaling import ScalingProposed
from schemas.events.worker import GroupEnded, RoleCount, RoomFreed, RoomOverdue, StartFailed
from schemas.vocabulary import (
    AttemptOutcome,
    Attribution,
    DecisionCode,
    EndCause,
    JobId,
    Mode,
    Outcome,
    StartFailure,
    TenantName,
)
from services.queueing.core import ledger
from services.queueing.core.ledger import Step, to_reason
from services.queueing.core.retry import (
    got_further,
    is_exhausted,
    may_retry,
    pause_after_platform_failure,
    pause_after_start_failure,
    was_steady,
)
from services.queueing.core.values import Rules, Standing, Workload
from services.queueing.core.wording import workers_text


def on_submitted(job_id: JobId, tenant: TenantName, data: JobSubmitted) -> Step:
    """A new workload, which waits."""
    nobody = (0,) * len(data.roles)
    spec = data.spec
    restarts = spec.mode is Mode.RESTART
    workload = Workload(
        job_id=job_id,
        name=spec.name,
        tenant=tenant,
        user=data.user,
        queue=data.queue,
        roles=data.roles,
        is_resizable=spec.mode is Mode.LIVE or (restarts and spec.checkpoint_path is not None),
        loses_work_when_resized=restarts,
        grace_seconds=spec.grace_seconds,
        restart_policy=spec.restart_policy,
        request=data.request,
        granted=nobody,
        held=nobody,
        wanted=data.request.workers,
    )
    return ledger.wait(workload, ledger.HELD_WAITS) if data.request.held else Step(workload=workload)


def on_changed(workload: Workload, request: RequestRegister) -> Step:
    """The register with the higher version replaces the lower one; a pause ends, since the request changed."""
    if request.version <= workload.request.version:
        return Step(workload=workload)
    wish_changed = request.workers != workload.request.workers
    changed = replace(
        workload,
        request=request,
        wanted=request.workers if wish_changed else workload.wanted,
        wanted_because="" if wish_changed else workload.wanted_because,
        back_off_seconds=0.0,
        back_off_until=None,
    )
    match changed.standing:
        case Standing.WAITING:
            return _change_waiting(changed)
        case Standing.RUNNING:
            return _change_running(changed, wish_changed=wish_changed)
        case _:
            return Step(workload=changed)


def on_proposed(workload: Workload, data: ScalingProposed) -> Step:
    """A proposal for the present epoch is the new size wished for; a smaller one is carried out at once."""
    if workload.standing is not Standing.RUNNING or data.epoch != workload.epoch or not workload.is_resizable:
        return Step(workload=workload)
    request = workload.request
    wanted = min(max(data.workers, request.workers_min), request.workers_max)
    wishing = replace(workload, wanted=wanted, wanted_because=data.reason)
    if wanted >= wishing.workers:
        return Step(workload=wishing)
    reason = to_reason(DecisionCode.SHRANK_PROPOSED, data.reason)
    return ledger.resize(wishing, workers=wanted, reason=reason)


def on_group_started(workload: Workload, attempt: int, *, now: float) -> Step:
    if workload.standing is not Standing.RUNNING or attempt != workload.attempt:
        return Step(workload=workload)
    return Step(workload=replace(workload, started_attempt=attempt, started_at=now))


def on_checkpointed(workload: Workload, *, now: float) -> Step:
    return Step(workload=replace(workload, checkpointed_at=now))


def on_room_freed(workload: Workload, data: RoomFreed) -> Step:
    """The answer to the present resize: what each role holds now. Nothing else lowers a running job's charge."""
    if workload.standing is not Standing.RUNNING or not is_of_present_epoch(workload, data.epoch):
        return Step(workload=workload)
    return Step(workload=replace(workload, held=_per_role(workload, data.held), overdue=""))


def on_room_overdue(workload: Workload, data: RoomOverdue) -> Step:
    """For ``why`` only: the ledger rests without it."""
    if not is_of_present_epoch(workload, data.epoch):
        return Step(workload=workload)
    text = f"{len(data.members)} on node {data.node} not seen gone for {data.overdue_seconds:.0f} s"
    return Step(workload=replace(workload, overdue=text))


def on_start_failed(workload: Workload, data: StartFailed, *, now: float, rules: Rules) -> Step:
    """Give back what is missing if the minimum stays, else evict; in both cases claim nothing for a while."""
    if workload.standing is not Standing.RUNNING or not is_of_present_epoch(workload, data.epoch):
        return Step(workload=workload)
    failures = workload.platform_failures + 1
    pause = pause_after_start_failure(failures, rules)
    is_of_job = data.failure in (StartFailure.IMAGE, StartFailure.SECRET)
    paused = replace(
        workload,
        platform_failures=failures,
        job_failures=workload.job_failures + (1 if is_of_job else 0),
        back_off_seconds=pause,
        back_off_until=now + pause,
    )
    missing = _per_role(workload, data.missing)
    left = sum(
        max(0, granted - gone)
        for granted, gone, role in zip(workload.granted, missing, workload.roles, strict=True)
        if role.elastic
    )
    fixed_missing = any(n for n, role in zip(missing, workload.roles, strict=True) if not role.elastic)
    detail = f"members could not be started ({data.failure.value}): {data.detail}"
    reason = to_reason(DecisionCode.START_FAILED, detail)
    if left >= workload.floor and not fixed_missing and workload.is_resizable:
        return ledger.resize(paused, workers=left, reason=reason)
    return ledger.evict(paused, reason=reason, requeue=True)


def on_group_ended(workload: Workload, data: GroupEnded, *, revision: int, now: float, rules: Rules) -> Step:
    """The attempt is over: close, try again in place, or wait again. The only end of an eviction.

    ``revision``: of the capacity report that is known.
    """
    in_ledger = workload.standing in (Standing.RUNNING, Standing.DRAINING)
    if not in_ledger or data.attempt != workload.attempt:
        return Step(workload=workload)
    if data.outcome is AttemptOutcome.SUCCEEDED:
        return _close(workload, data, Outcome.SUCCEEDED, DecisionCode.COMPLETED)
    workload = _count(workload, data, now=now, rules=rules)
    if workload.request.cancelled:
        return _close(workload, data, Outcome.CANCELLED, DecisionCode.CANCELLED)
    if is_failure_of_job(data):
        may_go_on = may_retry(workload.restart_policy, failures=workload.job_failures, exit_code=data.exit_code)
        if data.final or not may_go_on:
            return _close(workload, data, Outcome.FAILED, DecisionCode.FAILED)
    elif is_exhausted(workload.restart_policy, failures=workload.job_failures):
        return _close(workload, data, Outcome.FAILED, DecisionCode.FAILED)
    elif workload.fruitless > rules.platform_retries_without_progress_max:
        return _give_up(workload, data)
    if workload.standing is Standing.DRAINING:
        return _drained(workload)
    if is_failure_of_job(data):
        detail = f"attempt {workload.attempt} failed ({data.reason}): failure {workload.job_failures} of the job"
        return ledger.retry_in_place(workload, revision=revision, reason=to_reason(DecisionCode.RETRIED, detail))
    return _after_platform_failure(workload, data, revision=revision, now=now, rules=rules)


def is_failure_of_job(data: GroupEnded) -> bool:
    return data.outcome is AttemptOutcome.FAILED and data.attributed_to is not Attribution.PLATFORM


def on_pause_over(workload: Workload) -> Step:
    """It may claim room again."""
    return Step(workload=replace(workload, back_off_seconds=0.0, back_off_until=None))


def is_of_present_epoch(workload: Workload, epoch: int) -> bool:
    """Words about an earlier epoch speak of a target that is no longer the target."""
    return epoch == workload.epoch


def floor_after(workload: Workload) -> int:
    """A lowered minimum holds at once, a raised one from the next admission."""
    return min(workload.floor, workload.request.workers_min)


def _change_waiting(workload: Workload) -> Step:
    request = workload.request
    if request.cancelled:
        reason = to_reason(DecisionCode.CANCELLED, "cancelled before it was granted anything")
        return ledger.close(workload, outcome=Outcome.CANCELLED, reason=reason)
    return ledger.wait(workload, ledger.HELD_WAITS) if request.held else Step(workload=workload)


def _change_running(workload: Workload, *, wish_changed: bool) -> Step:
    request = workload.request
    if request.cancelled:
        reason = to_reason(DecisionCode.CANCELLED, "cancelled")
        return ledger.evict(workload, reason=reason, requeue=False)
    if request.held:
        return ledger.evict(workload, reason=to_reason(DecisionCode.HELD, "held"), requeue=True)
    floor = floor_after(workload)
    workers = target_after(workload, floor=floor, wish_changed=wish_changed)
    if workers == workload.workers and floor == workload.floor:
        return Step(workload=workload)
    wished_less = workers < min(workload.workers, request.workers_max)
    code = DecisionCode.SHRANK_REQUESTED if wished_less else DecisionCode.LIMITS_CHANGED
    limits = f"{request.workers_min} to {request.workers_max}"
    detail = f"{workers_text(request.workers)} are wished for" if wished_less else f"the limits are now {limits}"
    size_before = min(workload.size_before, request.workers_max)
    return ledger.resize(
        workload, workers=workers, floor=floor, size_before=size_before, reason=to_reason(code, detail)
    )


def target_after(workload: Workload, *, floor: int, wish_changed: bool) -> int:
    """Workers after a change of the request: a lowered maximum or wish shrinks at once; growing is for ``plan``."""
    if not workload.is_resizable:
        return workload.workers
    wish = workload.request.workers if wish_changed else workload.workers
    return max(floor, min(workload.workers, workload.request.workers_max, wish))


def _drained(workload: Workload) -> Step:
    freed = ledger.requeue(workload)
    if workload.request.held:
        return ledger.wait(freed.workload, ledger.HELD_WAITS)
    if workload.back_off_seconds > 0:
        return ledger.wait(freed.workload, ledger.back_off_waits(workload.back_off_seconds))
    return freed


def _count(workload: Workload, data: GroupEnded, *, now: float, rules: Rules) -> Workload:
    """The attempt in the workload's counts: whose failure it was, and whether it led anywhere.

    What we asked to go (a preemption, a hold) counts as nobody's, and leaves the row of fruitless attempts alone.
    """
    further = got_further(workload, data, now=now, rules=rules)
    counted = replace(workload, best_step=max(workload.best_step, data.step or 0))
    if is_failure_of_job(data):
        return replace(counted, job_failures=counted.job_failures + 1, fruitless=0)
    if further:
        return replace(counted, fruitless=0)
    if data.outcome is AttemptOutcome.EVICTED and workload.standing is Standing.DRAINING:
        return counted
    return replace(counted, fruitless=counted.fruitless + 1)


def _after_platform_failure(workload: Workload, data: GroupEnded, *, revision: int, now: float, rules: Rules) -> Step:
    failures = 1 if was_steady(workload, now=now, rules=rules) else workload.platform_failures + 1
    workload = replace(workload, platform_failures=failures)
    pause = pause_after_platform_failure(failures, rules)
    detail = f"the platform ended attempt {workload.attempt} ({data.reason})"
    if workload.fruitless > 1:
        allowed = rules.platform_retries_without_progress_max
        detail += f"; {workload.fruitless} in a row without one step further, {allowed} are tried again"
    if pause == 0:
        return ledger.retry_in_place(workload, revision=revision, reason=to_reason(DecisionCode.RETRIED, detail))
    paused = replace(workload, back_off_seconds=pause, back_off_until=now + pause)
    reason = to_reason(DecisionCode.FAILED, f"{detail}; {failures} times in a row: next start in {pause:g} s")
    return ledger.set_aside(paused, reason=reason, waiting=ledger.back_off_waits(pause, after=detail))


def _give_up(workload: Workload, data: GroupEnded) -> Step:
    """The platform's, and yet the end: trying once more has led nowhere too often."""
    told = (
        f"the platform ended {workload.fruitless} attempts in a row without one step further, the last one: "
        f"{data.reason}; if the machine is well, look for what the job does to it, then submit it again"
    )
    return ledger.close(
        workload,
        outcome=Outcome.FAILED,
        reason=to_reason(DecisionCode.FAILED, told),
        exit_code=data.exit_code,
        attributed_to=Attribution.PLATFORM,
        cause=EndCause.NO_PROGRESS,
    )


def _close(workload: Workload, data: GroupEnded, outcome: Outcome, code: DecisionCode) -> Step:
    return ledger.close(
        workload,
        outcome=outcome,
        reason=to_reason(code, data.reason),
        exit_code=data.exit_code,
        attributed_to=data.attributed_to,
        cause=data.cause,
    )


def _per_role(workload: Workload, counts: tuple[RoleCount, ...]) -> tuple[int, ...]:
    """Counts in the order of the workload's roles; a role that is not named counts as 0."""
    named = {count.role: count.members for count in counts}
    return tuple(named.get(role.name, 0) for role in workload.roles)
