"""What a batch of events and the passing of time do to the jobs whose groups are known."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from schemas.envelope import Event
from schemas.events.job import JobEnded
from schemas.events.worker import GroupChanged, GroupEnded, GroupStarted
from schemas.registry import EventData
from schemas.vocabulary import JobId, TenantName
from services.metrics.core.groups import (
    Outcome,
    Rules,
    Track,
    Verdict,
    absorb,
    close_due,
    end_attempt,
    merge,
    start_group,
)
from services.metrics.core.signals import Sample

GroupData: TypeAlias = GroupStarted | GroupChanged | GroupEnded
GROUP_EVENTS: Final = (GroupStarted, GroupChanged, GroupEnded)
ATTEMPT_MAX: Final = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What one batch does: the tracks as they are afterwards, what is published, and which jobs are over."""

    outcomes: Mapping[JobId, Outcome]
    ended: tuple[tuple[JobId, TenantName], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredJob:
    """A job as its row tells it; after its end the row only fences."""

    track: Track
    is_ended: bool


def unknown_jobs(batch: Sequence[Event[EventData]], tracks: Mapping[JobId, Track]) -> dict[JobId, TenantName]:
    """Jobs of whose groups a batch speaks and of whose groups memory knows nothing."""
    spoken = {JobId(event.key): event.tenant for event in batch if isinstance(event.data, GROUP_EVENTS)}
    return {
        job_id: tenant for job_id, tenant in spoken.items() if job_id not in tracks or tracks[job_id].attempt == 0
    }


def recalled(reports: Track | None, stored: StoredJob | None, *, job_id: JobId, tenant: TenantName) -> Track:
    """The track of such a job: its row, with the reports that wait for its group. After the end nothing is news."""
    if stored is None:
        return reports or Track(job_id=job_id, tenant=tenant)
    if stored.is_ended:
        return replace(stored.track, ended_attempt=ATTEMPT_MAX, window=None)
    return replace(stored.track, aside=reports.aside if reports else ())


def absorb_batch(
    tracks: Mapping[JobId, Track], samples: Sequence[Sample], *, now_us: int, rules: Rules
) -> tuple[dict[JobId, Track], tuple[Verdict, ...]]:
    """``absorb`` for reports of many jobs: the tracks that changed, and a verdict for each report."""
    places: dict[JobId, list[int]] = {}
    for place, sample in enumerate(samples):
        places.setdefault(sample.job_id, []).append(place)
    changed: dict[JobId, Track] = {}
    verdicts: dict[int, Verdict] = {}
    for job_id, mine in places.items():
        track = tracks.get(job_id) or Track(job_id=job_id, tenant=TenantName(""))
        changed[job_id], found = absorb(track, [samples[place] for place in mine], now_us=now_us, rules=rules)
        verdicts.update(zip(mine, found, strict=True))
    return changed, tuple(verdicts[place] for place in range(len(samples)))


def plan_batch(
    tracks: Mapping[JobId, Track], batch: Sequence[Event[EventData]], *, now_us: int, rules: Rules
) -> Change:
    """Apply a batch in its order, then close every window that is due. ``tracks`` has every job it speaks of."""
    outcomes: dict[JobId, Outcome] = {}
    ended: dict[JobId, TenantName] = {}
    for event in batch:
        job_id = JobId(event.key)
        if isinstance(event.data, JobEnded):
            ended[job_id] = event.tenant
        elif isinstance(event.data, GROUP_EVENTS):
            before = outcomes.get(job_id, Outcome(track=tracks[job_id]))
            step = _step(before.track, event.data, now_us=now_us, rules=rules)
            if step.track is not before.track:
                known = replace(step, track=replace(step.track, tenant=event.tenant))
                outcomes[job_id] = merge([before, known], start=before.track)
    for job_id, track in tracks.items():
        before = outcomes.get(job_id, Outcome(track=track))
        closed = close_due(before.track, now_us=now_us, rules=rules)
        if closed.windows and job_id not in ended:
            outcomes[job_id] = merge([before, closed], start=before.track)
    return Change(outcomes=outcomes, ended=tuple(sorted(ended.items())))


def _step(track: Track, data: GroupData, *, now_us: int, rules: Rules) -> Outcome:
    if isinstance(data, GroupEnded):
        return end_attempt(track, attempt=data.attempt, now_us=now_us, rules=rules)
    return start_group(
        track,
        attempt=data.attempt,
        generation=data.generation,
        workers=data.workers,
        now_us=now_us,
        rules=rules,
    )
