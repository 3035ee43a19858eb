"""Every event in one sentence, for history and ``why``; and the numbers that history shows beside it."""

from dataclasses import dataclass
from typing import assert_never

from schemas.events.allocation import (
    AllocationClosed,
    AllocationEvicted,
    AllocationGranted,
    AllocationResized,
    AllocationWaiting,
    QueueObserved,
    RoleGrant,
)
from schemas.events.capacity import CapacityObserved
from schemas.events.job import JobChanged, JobEnded, JobSubmitted, RequestRegister
from schemas.events.metric import MetricWindow
from schemas.events.scaling import ScalingProposed
from schemas.events.worker import (
    Checkpointed,
    CheckpointFailed,
    GroupChanged,
    GroupEnded,
    GroupStarted,
    LostMember,
    ResumePoint,
    RoleCount,
    RoomFreed,
    RoomOverdue,
    SkippedCheckpoint,
    StartFailed,
)
from schemas.registry import AllocationData, EventData, JobData, WorkerData
from schemas.vocabulary import Attribution, EndCause, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One event as history keeps it. ``workers``: the size it speaks of, where it speaks of one."""

    summary: str
    epoch: int | None = None
    attempt: int | None = None
    generation: int | None = None
    workers: int | None = None


def tell(data: EventData) -> Told:
    match data:
        case JobSubmitted() | JobChanged() | JobEnded():
            return _tell_job(data)
        case (
            AllocationGranted()
            | AllocationResized()
            | AllocationEvicted()
            | AllocationClosed()
            | AllocationWaiting()
            | QueueObserved()
        ):
            return _tell_allocation(data)
        case (
            GroupStarted()
            | GroupChanged()
            | RoomFreed()
            | RoomOverdue()
            | StartFailed()
            | Checkpointed()
            | CheckpointFailed()
            | GroupEnded()
        ):
            return _tell_worker(data)
        case MetricWindow():
            return Told(summary=_say_window(data), attempt=data.attempt, generation=data.generation)
        case ScalingProposed():
            text = f"Scaling proposes {say_workers(data.workers)}: {data.reason}"
            return Told(summary=sentence(text), epoch=data.epoch, workers=data.workers)
        case CapacityObserved():
            lost = f", {len(data.lost_nodes)} lost" if data.lost_nodes else ""
            return Told(summary=f"Capacity report {data.revision}: {say_count(len(data.nodes), 'node')}{lost}.")
        case _:
            assert_never(data)


def _tell_job(data: JobData) -> Told:
    match data:
        case JobSubmitted():
            request = data.request
            hold = ", on hold" if request.held else ""
            text = f"Submitted to queue {data.queue} with priority {request.priority}, {_say_range(request)}{hold}"
            return Told(summary=sentence(text), workers=request.workers)
        case JobChanged():
            because = f": {data.reason}" if data.reason else ""
            return Told(
                summary=sentence(f"Request {_say_request(data.request)}{because}"), workers=data.request.workers
            )
        case JobEnded():
            used = f"{data.accelerator_seconds:.1f} accelerator seconds were granted in all"
            return Told(summary=sentence(f"Over: {data.outcome}{say_exit(data.exit_code)}; {used}"))
        case _:
            assert_never(data)


def _tell_allocation(data: AllocationData) -> Told:
    match data:
        case AllocationGranted():
            workers = _elastic(data.roles)
            text = f"Granted {_say_roles(data.roles)} ({data.reason.code}): {data.reason.detail}"
            return Told(summary=sentence(text), epoch=data.epoch, attempt=data.attempt, workers=workers)
        case AllocationResized():
            text = f"{_say_resize(data)} ({data.reason.code}): {data.reason.detail}"
            return Told(summary=sentence(text), epoch=data.epoch, attempt=data.attempt, workers=data.workers_to)
        case AllocationEvicted():
            then = "goes back to its queue" if data.requeue else "does not start again by itself"
            text = f"Evicted, {then} ({data.reason.code}): {data.reason.detail}"
            return Told(summary=sentence(text), epoch=data.epoch, attempt=data.attempt, workers=0)
        case AllocationClosed():
            text = f"{_say_outcome(data)} ({data.reason.code}): {data.reason.detail}"
            return Told(summary=sentence(text), epoch=data.epoch, attempt=data.attempt, workers=0)
        case AllocationWaiting():
            return Told(summary=sentence(f"Waits ({data.code}): {data.detail}"))
        case QueueObserved():
            return Told(summary=f"{sum(p.jobs for p in data.pending)} jobs wait in the queue.")
        case _:
            assert_never(data)


def _tell_worker(data: WorkerData) -> Told:
    match data:
        case GroupStarted():
            return Told(
                summary=sentence(_say_started(data)),
                epoch=data.epoch,
                attempt=data.attempt,
                generation=data.generation,
                workers=data.workers,
            )
        case GroupChanged():
            return Told(
                summary=sentence(_say_changed(data)),
                epoch=data.epoch,
                attempt=data.attempt,
                generation=data.generation,
                workers=data.workers,
            )
        case RoomFreed():
            text = f"Nobody is left who has to go; held now: {_say_counts(data.held)}"
            return Told(summary=sentence(text), epoch=data.epoch)
        case RoomOverdue():
            text = (
                f"Room is overdue: {', '.join(data.members)} on {data.node} not seen gone "
                f"{data.overdue_seconds:.0f} s after grace and kill"
            )
            return Told(summary=sentence(text), epoch=data.epoch)
        case StartFailed():
            text = f"Could not start {_say_counts(data.missing)} in time ({data.failure}): {data.detail}"
            return Told(summary=sentence(text), epoch=data.epoch)
        case Checkpointed():
            text = f"Checkpoint at step {data.step} is complete"
            return Told(summary=sentence(text), generation=data.generation)
        case CheckpointFailed():
            text = f"Checkpoint at step {data.step} failed, training goes on: {data.reason}"
            return Told(summary=sentence(text), generation=data.generation)
        case GroupEnded():
            text = (
                f"The processes have ended: {data.outcome}{say_exit(data.exit_code)}{_say_whose(data.attributed_to)}"
                f"{_say_cause(data.cause)}"
            )
            return Told(summary=sentence(f"{text}: {data.reason}"), attempt=data.attempt, workers=0)
        case _:
            assert_never(data)


def sentence(text: str) -> str:
    """One line that ends like a sentence, whatever others wrote into it."""
    line = " ".join(text.split()).rstrip(":")
    return line if line.endswith((".", "!", "?")) else f"{line}."


def say_count(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def say_workers(count: int) -> str:
    return say_count(count, "worker")


def say_exit(code: int | None) -> str:
    if code is None:
        return ""
    return f" by signal {-code}" if code < 0 else f" with exit code {code}"


def _say_range(request: RequestRegister) -> str:
    if request.workers_min == request.workers_max:
        return say_workers(request.workers)
    return f"{request.workers_min}..{request.workers_max} workers, {request.workers} wished for"


def _say_request(request: RequestRegister) -> str:
    if request.cancelled:
        return "cancelled"
    hold = ", on hold" if request.held else ""
    return f"is now: priority {request.priority}, {_say_range(request)}{hold}"


def _elastic(roles: tuple[RoleGrant, ...]) -> int:
    return sum(role.members for role in roles if role.elastic)


def _say_roles(roles: tuple[RoleGrant, ...]) -> str:
    return ", ".join(say_count(role.members, role.role) for role in roles) or "nothing"


def _say_counts(counts: tuple[RoleCount, ...]) -> str:
    return ", ".join(say_count(count.members, count.role) for count in counts) or "nothing"


def _say_resize(data: AllocationResized) -> str:
    if data.workers_from == data.workers_to:
        return f"Limits changed, still {say_workers(data.workers_to)}"
    verb = "Grows" if data.workers_to > data.workers_from else "Shrinks"
    return f"{verb} from {data.workers_from} to {say_workers(data.workers_to)}"


def _say_outcome(data: AllocationClosed) -> str:
    match data.outcome:
        case Outcome.SUCCEEDED:
            return "Succeeded"
        case Outcome.FAILED:
            return f"Failed{say_exit(data.exit_code)}{_say_whose(data.attributed_to)}{_say_cause(data.cause)}"
        case Outcome.CANCELLED:
            return "Cancelled"
        case _:
            assert_never(data.outcome)


def _say_whose(attributed_to: Attribution | None) -> str:
    return "" if attributed_to is None else f", attributed to the {attributed_to}"


def _say_cause(cause: EndCause | None) -> str:
    return "" if cause is None else f", {cause}"


def _say_started(data: GroupStarted) -> str:
    text = f"Runs with {say_workers(data.workers)}"
    if data.resumed_from is not None:
        text += ","
    elif data.skipped or data.steps_dropped:
        text += ", anew from step 0"
    return text + say_resumed(data.resumed_from, steps_dropped=data.steps_dropped, skipped=data.skipped)


def say_resumed(
    resumed_from: ResumePoint | None, *, steps_dropped: int, skipped: tuple[SkippedCheckpoint, ...]
) -> str:
    """What a group went on from, what that costs, and which newer checkpoints were not whole. May be empty."""
    text = f" resumed from the checkpoint of step {resumed_from.step}" if resumed_from is not None else ""
    if steps_dropped:
        text += f"; {say_count(steps_dropped, 'step')} to be done again"
    if skipped:
        told = ", ".join(f"step {each.step} ({each.reason})" for each in skipped)
        text += f"; skipped as not whole: {told}"
    return text


def _say_changed(data: GroupChanged) -> str:
    pause = f"after a pause of {data.pause_seconds:.2f} s at step {data.step}"
    text = f"Goes on with {say_workers(data.workers)} {pause} ({data.cause})"
    if data.resumed_from is not None:
        text = f"Goes on with {say_workers(data.workers)} ({data.cause}),"
        text += say_resumed(data.resumed_from, steps_dropped=data.steps_dropped, skipped=data.skipped)
    if data.exchanged:
        text += f"; exchanged for newcomers, since they have been in too many groups: {', '.join(data.exchanged)}"
    return f"{text}; lost: {', '.join(_say_lost(lost) for lost in data.lost)}" if data.lost else text


def _say_lost(lost: LostMember) -> str:
    return f"{lost.member}{say_exit(lost.exit_code)}{_say_whose(lost.attributed_to)} ({lost.reason})"


def _say_window(data: MetricWindow) -> str:
    if data.utilisation is None:
        return f"No worker reported in the last {data.window_seconds:.0f} s."
    return (
        f"Utilisation {data.utilisation:.0%} ({data.measure}) over {data.window_seconds:.0f} s, "
        f"{data.members_reporting} of {data.members_expected} workers reporting."
    )
