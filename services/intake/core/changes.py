"""What a PATCH or a cancel makes of the request register."""

from dataclasses import dataclass, replace
from typing import TypeAlias

from schemas.api.jobs import Invalid, PatchJob
from schemas.events.job import RequestRegister
from schemas.vocabulary import JobPhase, Mode
from services.intake.core.validation import Size, size_errors

_SIZES = ("workers_min", "workers_max", "workers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """The register to be written: one version further."""

    request: RequestRegister


@dataclass(frozen=True, slots=True, kw_only=True)
class Unchanged:
    """All is as it was asked for: no new version, no event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TooLate:
    """The job has ended, or is being cancelled."""

    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrong:
    errors: tuple[Invalid, ...]


Change: TypeAlias = Changed | Unchanged | TooLate | Wrong


def plan_patch(request: RequestRegister, patch: PatchJob, *, phase: JobPhase, mode: Mode) -> Change:
    """A lowered maximum pulls the size wished for along, a raised minimum pushes it, unless it is named as well."""
    if phase.is_terminal:
        return TooLate(detail=f"the job has ended: {phase}")
    if request.cancelled:
        return TooLate(detail="the job is being cancelled")
    named = patch.model_fields_set - {"reason"}
    if all(getattr(patch, name) is None for name in sorted(named)):
        return Wrong(
            errors=(
                Invalid(
                    field="",
                    detail="names nothing to change",
                    way_out="give priority, workers_min, workers_max, workers or held",
                ),
            )
        )
    size = _size_after(request, patch)
    errors = _fixed_errors(request, patch) if mode is Mode.FIXED else size_errors(size)
    if errors:
        return Wrong(errors=tuple(errors))
    changed = replace(
        request,
        priority=patch.priority or request.priority,
        workers_min=size.low,
        workers_max=size.high,
        workers=size.wished,
        held=request.held if patch.held is None else patch.held,
    )
    return Unchanged() if changed == request else Changed(request=replace(changed, version=request.version + 1))


def plan_cancel(request: RequestRegister, *, phase: JobPhase) -> Change:
    """Asking again is no mistake; only a job that ended otherwise cannot be cancelled any more."""
    if phase.is_terminal and phase is not JobPhase.CANCELLED:
        return TooLate(detail=f"the job has ended: {phase}")
    if request.cancelled or phase is JobPhase.CANCELLED:
        return Unchanged()
    return Changed(request=replace(request, cancelled=True, version=request.version + 1))


def _size_after(request: RequestRegister, patch: PatchJob) -> Size:
    low = request.workers_min if patch.workers_min is None else patch.workers_min
    high = request.workers_max if patch.workers_max is None else patch.workers_max
    wished = min(max(request.workers, low), high) if patch.workers is None else patch.workers
    return Size(low=low, high=high, wished=wished)


def _fixed_errors(request: RequestRegister, patch: PatchJob) -> list[Invalid]:
    return [
        Invalid(
            field=f"/{name}",
            detail="a job in fixed mode is never resized",
            way_out=f"leave it at {getattr(request, name)}, or cancel the job and submit it anew",
        )
        for name in _SIZES
        if getattr(patch, name) not in (None, getattr(request, name))
    ]
