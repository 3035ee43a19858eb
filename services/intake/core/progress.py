"""How far a job is, when it will be done, and whether that is too late."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from schemas.events.metric import MetricWindow
from schemas.vocabulary import JobPhase


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """``percent`` in 0..100; both are None where the script does not say how long it is."""

    percent: float | None
    remaining_seconds: float | None


def estimate_of(window: MetricWindow) -> Estimate | None:
    """None where nothing was reported about steps. Steps count from 0: ``step`` of ``total_steps`` are done."""
    progress = window.progress
    if progress is None:
        return None
    if not progress.total_steps:
        return Estimate(percent=None, remaining_seconds=progress.remaining_seconds)
    done = min(max(progress.step, 0), progress.total_steps)
    percent = round(100 * done / progress.total_steps, 2)
    return Estimate(percent=percent, remaining_seconds=progress.remaining_seconds)


def is_late(
    *,
    finish_by: datetime | None,
    phase: JobPhase,
    now: datetime,
    ended_at: datetime | None,
    remaining_seconds: float | None,
) -> bool:
    """An ended job by its end; a running one by its estimate; any other once the moment has passed."""
    if finish_by is None:
        return False
    if phase.is_terminal:
        return ended_at is not None and ended_at > finish_by
    if phase is JobPhase.RUNNING and remaining_seconds is not None:
        return now + timedelta(seconds=remaining_seconds) > finish_by
    return now > finish_by
