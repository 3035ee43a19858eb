"""The life of a job: its phase and flags, a pure function of three registers with one writer each."""

from dataclasses import dataclass
from typing import Final, assert_never

from schemas.events.job import RequestRegister
from schemas.vocabulary import DecisionCode, GroupChangeCause, JobFlag, JobPhase, Outcome
from services.intake.core.registers import Grant, GrantState, Group

_TERMINAL: Final = {
    Outcome.SUCCEEDED: JobPhase.SUCCEEDED,
    Outcome.FAILED: JobPhase.FAILED,
    Outcome.CANCELLED: JobPhase.CANCELLED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a job stands; the flags in the order of their vocabulary."""

    phase: JobPhase
    flags: tuple[JobFlag, ...]


def phase_of(request: RequestRegister, grant: Grant, group: Group) -> Standing:
    """Total over every combination of registers, also those that only a delayed topic can show.

    1. closed: by the outcome, for good, without flags.
    2. no grant: Held or Queued.
    3. evicted: Draining until the group of that attempt has ended, then as without a grant.
    4. granted: Running once the group of this attempt has started, else Starting; flag ``ending`` if it has ended.
    """
    match grant.state:
        case GrantState.CLOSED:
            assert grant.outcome is not None, "closed without an outcome"
            return Standing(phase=_TERMINAL[grant.outcome], flags=())
        case GrantState.NONE:
            phase = _waiting_phase(request)
        case GrantState.EVICTED:
            phase = _waiting_phase(request) if group.has_ended(grant.attempt) else JobPhase.DRAINING
        case GrantState.GRANTED:
            phase = JobPhase.RUNNING if group.has_started(grant.attempt) else JobPhase.STARTING
        case _:
            assert_never(grant.state)
    return Standing(phase=phase, flags=_flags(request, grant, group, phase=phase))


def _waiting_phase(request: RequestRegister) -> JobPhase:
    return JobPhase.HELD if request.held else JobPhase.QUEUED


def _flags(request: RequestRegister, grant: Grant, group: Group, *, phase: JobPhase) -> tuple[JobFlag, ...]:
    ending = grant.state is GrantState.GRANTED and group.has_ended(grant.attempt)
    in_step = phase is JobPhase.RUNNING and not ending and group.attempt == grant.attempt
    resizing = in_step and is_resizing(grant, group)
    is_set = {
        JobFlag.CANCELLING: request.cancelled,
        JobFlag.RESIZING: resizing,
        JobFlag.RECOVERING: (in_step and _lost_somebody(grant, group)) or _is_retry(grant, phase=phase),
        JobFlag.ENDING: ending,
        JobFlag.SHORT_OF_WORKERS: in_step and not resizing and group.workers < grant.workers,
    }
    return tuple(flag for flag in JobFlag if is_set[flag])


def is_resizing(grant: Grant, group: Group) -> bool:
    """The target has moved since the running group was formed, or its leavers have not been seen gone."""
    is_unanswered = grant.resized_epoch > group.freed_epoch
    is_unformed = grant.resized_epoch > group.epoch and group.workers != grant.workers
    return is_unanswered or is_unformed


def _lost_somebody(grant: Grant, group: Group) -> bool:
    return group.cause is GroupChangeCause.MEMBER_LOST and group.workers < grant.workers


def _is_retry(grant: Grant, *, phase: JobPhase) -> bool:
    is_retried = grant.reason is not None and grant.reason.code is DecisionCode.RETRIED
    return phase is JobPhase.STARTING and is_retried
