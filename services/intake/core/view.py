"""How a job is shown: its view, why it waits, and the one sentence that answers "why is it as it is?"."""

from dataclasses import replace
from datetime import datetime

from schemas.api.jobs import (
    AttemptFailureView,
    FailuresView,
    JobView,
    ProgressView,
    WaitingView,
    WorkersView,
)
from schemas.vocabulary import JobFlag, JobPhase, MemberName, RestartPolicyKind, WaitCode
from services.intake.core.phase import Standing, phase_of
from services.intake.core.progress import estimate_of, is_late
from services.intake.core.readmodel import JobRecord, QueueSeen, Registers
from services.intake.core.registers import Grant, GrantState, Group
from services.intake.core.summaries import say_count, say_exit, say_resumed, say_workers, sentence


def standing_of(record: JobRecord, registers: Registers) -> Standing:
    return phase_of(record.request, registers.grant, registers.group)


def job_view(
    record: JobRecord,
    registers: Registers,
    *,
    now: datetime,
    queue: QueueSeen | None = None,
    ahead: int | None = None,
) -> JobView:
    """``queue``: the last snapshot of the job's queue, ``ahead``: jobs before it, where somebody counted."""
    standing = standing_of(record, registers)
    grant, group, request = registers.grant, registers.group, record.request
    finish_by = None if record.spec.finish_by is None else datetime.fromisoformat(record.spec.finish_by)
    progress = progress_view(registers)
    closed = grant.state is GrantState.CLOSED
    return JobView(
        id=record.job_id,
        name=record.spec.name,
        tenant=record.tenant,
        user=record.user,
        queue=record.queue,
        priority=request.priority,
        mode=record.spec.mode,
        phase=standing.phase,
        flags=list(standing.flags),
        workers=WorkersView(
            min=request.workers_min,
            max=request.workers_max,
            wished=request.workers,
            granted=grant.workers,
            running=running_workers(registers, phase=standing.phase),
        ),
        version=request.version,
        epoch=grant.epoch,
        attempt=grant.attempt,
        generation=group.generation,
        submitted_at=record.submitted_at,
        started_at=group.first_started_at,
        ended_at=grant.closed_at,
        outcome=grant.outcome,
        exit_code=grant.exit_code,
        attributed_to=grant.attributed_to,
        cause=grant.cause,
        reason=grant.reason.detail if closed and grant.reason is not None else None,
        failures=failures_view(record, grant),
        last_failure=last_failure_view(group),
        waiting=waiting_view(record, registers, standing, queue=queue, ahead=ahead),
        progress=progress,
        finish_by=finish_by,
        late=is_late(
            finish_by=finish_by,
            phase=standing.phase,
            now=now,
            ended_at=grant.closed_at,
            remaining_seconds=None if progress is None else progress.remaining_seconds,
        ),
        accelerator_seconds=round(grant.usage.accelerator_seconds(now), 3),
        labels=dict(record.spec.labels),
        warnings=list(record.warnings),
    )


def failures_view(record: JobRecord, grant: Grant) -> FailuresView:
    policy, counts = record.spec.restart_policy, grant.failures
    return FailuresView(
        of_job=counts.of_job if counts is not None else 0,
        retries=0 if policy.kind is RestartPolicyKind.NEVER else policy.limit,
        without_progress=counts.without_progress if counts is not None else 0,
    )


def last_failure_view(group: Group) -> AttemptFailureView | None:
    failure = group.failure
    if failure is None:
        return None
    return AttemptFailureView(
        attempt=failure.attempt,
        exit_code=failure.exit_code,
        attributed_to=failure.attributed_to,
        cause=failure.cause,
        reason=failure.reason,
    )


def running_workers(registers: Registers, *, phase: JobPhase) -> int:
    """Members of the started group; 0 once it has ended or while another attempt is being started."""
    group = registers.group
    is_there = group.started and not group.ended and phase in (JobPhase.RUNNING, JobPhase.DRAINING)
    return group.workers if is_there else 0


def progress_view(registers: Registers) -> ProgressView | None:
    """From the last window, and the step at which the attempt ended after it; None before the first window."""
    window, group = registers.measured.window, registers.group
    if window is None or window.progress is None:
        return None
    if group.ended and group.attempt == window.attempt and group.step is not None:
        step = max(window.progress.step, group.step)
        window = replace(window, progress=replace(window.progress, step=step))
    estimate = estimate_of(window)
    assert estimate is not None, "a window with progress has an estimate"
    assert window.progress is not None
    ended = registers.grant.state is GrantState.CLOSED
    return ProgressView(
        step=window.progress.step,
        total_steps=window.progress.total_steps,
        percent=estimate.percent,
        remaining_seconds=None if ended else estimate.remaining_seconds,
        loss=window.loss,
        samples_per_second=window.samples_per_second,
        utilisation=window.utilisation,
        measure=window.measure,
    )


def waiting_view(
    record: JobRecord,
    registers: Registers,
    standing: Standing,
    *,
    queue: QueueSeen | None,
    ahead: int | None,
) -> WaitingView | None:
    """None for a job that does not wait.

    1. on hold: the hold.  2. examined: queueing's own words.
    3. its queue was seen after it was submitted, with another head: the place.  4. else: not yet considered.
    """
    if standing.phase is JobPhase.HELD:
        return WaitingView(
            code=WaitCode.HELD, detail="The job is on hold.", unblocked_by=f"tide release {record.job_id}"
        )
    if standing.phase is not JobPhase.QUEUED:
        return None
    said = registers.waiting.said
    if said is not None:
        return WaitingView(
            code=said.code,
            detail=said.detail,
            unblocked_by=said.unblocked_by,
            start_estimate_seconds=None if said.estimate is None else said.estimate.seconds,
            estimate_basis=None if said.estimate is None else said.estimate.basis,
        )
    if queue is not None and is_behind(record, registers, queue):
        return _behind(record, queue, ahead=ahead)
    return WaitingView(
        code=WaitCode.NOT_YET_CONSIDERED,
        detail="Queueing has not looked at this job yet.",
        unblocked_by="the next look of queueing, usually within a second",
    )


def is_behind(record: JobRecord, registers: Registers, queue: QueueSeen) -> bool:
    """The queue was seen with another head, by a transaction later than the one that submitted the job."""
    is_seen = 0 < registers.submitted_xid < queue.sequence.xid
    return is_seen and queue.observed.head is not None and queue.observed.head != record.job_id


def _behind(record: JobRecord, queue: QueueSeen, *, ahead: int | None) -> WaitingView:
    observed = queue.observed
    head_waits = f"the head waits: {observed.head_detail.strip() or observed.head_code or 'for room'}"
    place = "Other jobs are" if ahead is None else f"{say_count(ahead, 'job')} {'is' if ahead == 1 else 'are'}"
    seconds = None
    if ahead is not None and observed.starts_per_minute > 0:
        seconds = round((ahead + 1) / observed.starts_per_minute * 60, 1)
    return WaitingView(
        code=WaitCode.BEHIND_IN_QUEUE,
        detail=sentence(f"{place} ahead in queue {record.queue}; {head_waits}"),
        unblocked_by="the start of those ahead, or a higher priority",
        start_estimate_seconds=seconds,
        estimate_basis=None if seconds is None else f"{observed.starts_per_minute:g} starts a minute in this queue",
    )


def say_why(
    record: JobRecord,
    registers: Registers,
    *,
    waiting: WaitingView | None,
    decision: str | None,
    silent_seconds: float | None = None,
) -> str:
    """``decision``: the last one of queueing, told. ``silent_seconds``: how long execution has said nothing,
    where that is longer than it should be."""
    standing = standing_of(record, registers)
    parts = [_say_standing(registers, standing, waiting=waiting)]
    parts += [text for flag, text in _FLAG_WORDS if flag in standing.flags]
    if standing.phase is JobPhase.RUNNING and decision is not None:
        parts.append(f"Last decision: {sentence(decision)}")
    if standing.phase is JobPhase.RUNNING:
        parts += _checkpoints(registers.group)
    parts += _overdue(registers, standing)
    if silent_seconds is not None and not standing.phase.is_terminal:
        parts.append(
            f"Execution has reported nothing for {silent_seconds:.0f} s: until it does, what is held stays held."
        )
    return " ".join(parts)


def _say_standing(registers: Registers, standing: Standing, *, waiting: WaitingView | None) -> str:
    grant, group = registers.grant, registers.group
    detail = "" if grant.reason is None else grant.reason.detail
    match standing.phase:
        case JobPhase.QUEUED | JobPhase.HELD:
            assert waiting is not None, "a queued job waits for something"
            return sentence(waiting.detail)
        case JobPhase.STARTING:
            return sentence(f"{say_workers(grant.workers)} granted, starting: {detail}")
        case JobPhase.RUNNING:
            running = running_workers(registers, phase=standing.phase)
            return sentence(f"Runs with {say_workers(running)}" + _say_granted(grant.workers, running))
        case JobPhase.DRAINING:
            return sentence(f"Being stopped, {say_workers(group.workers)} left: {detail}")
        case JobPhase.SUCCEEDED | JobPhase.FAILED | JobPhase.CANCELLED:
            return sentence(f"{standing.phase}{say_exit(grant.exit_code)}: {detail}")


def _say_granted(granted: int, running: int) -> str:
    return "" if granted == running else f", {granted} granted"


def _overdue(registers: Registers, standing: Standing) -> list[str]:
    """Members of the present epoch that were not seen gone, while the job still holds or gives up room."""
    overdue = registers.group.overdue
    is_present = overdue is not None and overdue.epoch == registers.grant.epoch
    if overdue is None or not is_present or registers.group.freed_epoch >= overdue.epoch:
        return []
    if standing.phase not in (JobPhase.RUNNING, JobPhase.STARTING, JobPhase.DRAINING):
        return []
    return [f"Not seen gone on {overdue.node}: {_listed(overdue.members)}; their room counts as held."]


def _checkpoints(group: Group) -> list[str]:
    """What this attempt went on from, and that checkpoints fail at present."""
    parts = []
    if group.resumed_from is not None:
        resumed = say_resumed(group.resumed_from, steps_dropped=group.steps_dropped, skipped=group.skipped)
        parts.append(sentence(f"It was{resumed}"))
    failed, last = group.checkpoint_failed, group.checkpoint
    if failed is not None and (last is None or (failed.generation, failed.step) > (last.generation, last.step)):
        kept = "none is kept" if last is None else f"the last whole one is of step {last.step}"
        parts.append(sentence(f"The checkpoint of step {failed.step} failed ({failed.reason}); {kept}"))
    return parts


def _listed(members: tuple[MemberName, ...]) -> str:
    return ", ".join(members[:3]) + (f" and {len(members) - 3} more" if len(members) > 3 else "")


_FLAG_WORDS = (
    (JobFlag.CANCELLING, "It is being cancelled."),
    (JobFlag.ENDING, "Its processes have ended; queueing decides what follows."),
    (JobFlag.RESIZING, "A resize is under way."),
    (JobFlag.RECOVERING, "A lost worker is being replaced."),
    (JobFlag.SHORT_OF_WORKERS, "It has fewer workers than granted."),
)
