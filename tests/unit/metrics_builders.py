"""Builders of metrics' tests."""

from typing import Any

from schemas.vocabulary import JobId, TenantName, UtilisationMeasure
from services.metrics.core.groups import Outcome, Rules, Track, start_group
from services.metrics.core.signals import Sample
from services.metrics.core.window import WindowRules

S = 1_000_000
JOB = JobId("j1")
RULES = Rules(
    window=WindowRules(emit_us=5 * S, lateness_us=2 * S, reach_us=3 * S, coverage_ppm=500_000),
    aside_max=8,
    points_max=8,
)


def make_sample(**changes: Any) -> Sample:
    """A second of a worker: 0.6 s of steps, 0.2 s of synchronisation, 0.1 s waiting for input, 0.1 s idle."""
    rank = changes.get("rank", 0)
    values: dict[str, Any] = {
        "job_id": JOB,
        "attempt": 1,
        "member": f"{changes.get('job_id', JOB)}/worker/{rank}/1",
        "generation": 1,
        "rank": rank,
        "world": 2,
        "sequence": 1,
        "wall_us": S,
        "step_us": 600_000,
        "sync_us": 200_000,
        "input_wait_us": 100_000,
        "steps": 10,
        "samples": 100,
        "loss": 0.5,
        "step": 10,
        "total_steps": 1_000,
        "utilisation_ppm": None,
        "measure": UtilisationMeasure.WALL,
    }
    return Sample(**{**values, **changes})


def make_track(*, workers: int = 2, attempt: int = 1, generation: int = 1, now_us: int = 0) -> Track:
    """A job whose group has just started."""
    return started(
        Track(job_id=JOB, tenant=TenantName("default")),
        workers=workers,
        attempt=attempt,
        generation=generation,
        now_us=now_us,
    ).track


def started(track: Track, *, workers: int, attempt: int = 1, generation: int, now_us: int) -> Outcome:
    return start_group(track, attempt=attempt, generation=generation, workers=workers, now_us=now_us, rules=RULES)
