"""Metrics' memory, and what worker events and the passing of time do to it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import groupby

from schemas.envelope import Draft, Event
from schemas.events.job import JobEnded
from schemas.events.worker import GroupChanged, GroupEnded, GroupStarted
from schemas.registry import EventData
from schemas.vocabulary import JobId, TenantName
from services.metrics import store
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
from services.metrics.store import Instant
from shared.clock import Clock
from shared.runtime.service import Transaction
from shared.telemetry.instruments import Instruments
from shared.telemetry.logs import get_logger

_log = get_logger(service="metrics")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What one batch does: the tracks as they are afterwards, what is published, and which jobs are over."""

    outcomes: Mapping[JobId, Outcome]
    ended: tuple[tuple[JobId, TenantName], ...] = ()


@dataclass(kw_only=True)
class MetricsHandler:
    """Tracks of all jobs whose group is known. Written rows come first, memory follows the commit."""

    clock: Clock
    rules: Rules
    close_interval_seconds: float
    instruments: Instruments
    tracks: dict[JobId, Track] = field(default_factory=dict)
    is_loaded: bool = False
    _pending: Change | None = None
    _closed_us: int = 0

    def __post_init__(self) -> None:
        self._windows = self.instruments.counter("windows_total", "Closed windows.", ("complete",))
        self._verdicts = self.instruments.counter("samples_total", "Reports, by what became of them.", ("verdict",))

    def instant(self) -> Instant:
        return Instant(wall=self.clock.now(), us=round(self.clock.monotonic() * 1e6))

    async def load(self, tx: Transaction) -> None:
        self.is_loaded = False
        self._pending = None
        at = self.instant()
        tracks = {track.job_id: track for track in await store.load_open_jobs(tx, at=at)}
        fresh = at.wall - timedelta(microseconds=self.rules.window.reach_us)
        opened = (at.to_wall(track.window.opened_us) for track in tracks.values() if track.window)
        stored = await store.load_samples(tx, since=min([fresh, *opened]), fresh=fresh, at=at)
        for received_us, together in groupby(stored, key=lambda item: item.received_us):
            tracks |= self._absorbed(tracks, [item.sample for item in together], now_us=received_us)[0]
        self.tracks = tracks
        self.is_loaded = True

    async def on_events(self, batch: Sequence[Event[EventData]], *, tx: Transaction, now: datetime) -> None:
        at = self.instant()  # inside the transaction: later than every report that was counted before it
        tracks = self.tracks | await self._rows_of(batch, tx=tx, at=at)
        change = fold(tracks, batch, now_us=at.us, rules=self.rules)
        await self._save(change, tx=tx, at=at)
        for job_id, outcome in change.outcomes.items():
            drafts = (Draft(key=job_id, tenant=outcome.track.tenant, data=window) for window in outcome.windows)
            tx.publish(*drafts)
        self._pending = change
        self._closed_us = at.us

    def on_committed(self) -> None:
        change, self._pending = self._pending, None
        if change is None:
            return
        for job_id, outcome in change.outcomes.items():
            self.tracks[job_id] = outcome.track
            for window in outcome.windows:
                complete = window.members_reporting >= window.members_expected
                self._windows.labels("yes" if complete else "no").inc()
        for job_id, _ in change.ended:
            self.tracks.pop(job_id, None)
            _log.info("job_forgotten", job_id=job_id)
        self._sweep()

    def due_seconds(self) -> float | None:
        """Until the first window may close. One that waits for late reports is looked at in every interval."""
        opened = [track.window.opened_us for track in self.tracks.values() if track.window]
        if not opened:
            return None
        now_us = self.instant().us
        soonest_us = min(opened) + self.rules.window.emit_us - now_us
        pause_us = self._closed_us + round(self.close_interval_seconds * 1e6) - now_us
        return max(0, soonest_us, pause_us) / 1e6

    def judge(self, samples: Sequence[Sample]) -> tuple[Verdict, ...]:
        """What would become of these reports now. Changes nothing."""
        return self._absorbed(self.tracks, samples, now_us=self.instant().us)[1]

    def count(self, samples: Sequence[Sample]) -> tuple[Verdict, ...]:
        """Take in reports whose rows are committed (or that need none); a verdict for each, in their order."""
        changed, verdicts = self._absorbed(self.tracks, samples, now_us=self.instant().us)
        self.tracks |= changed
        return verdicts

    def tell(self, verdicts: Iterable[Verdict]) -> None:
        for verdict in verdicts:
            self._verdicts.labels(verdict.value).inc()

    def _absorbed(
        self, tracks: Mapping[JobId, Track], samples: Sequence[Sample], *, now_us: int
    ) -> tuple[dict[JobId, Track], tuple[Verdict, ...]]:
        places: dict[JobId, list[int]] = {}
        for place, sample in enumerate(samples):
            places.setdefault(sample.job_id, []).append(place)
        changed: dict[JobId, Track] = {}
        verdicts: list[Verdict] = [Verdict.AHEAD] * len(samples)
        for job_id, mine in places.items():
            track = tracks.get(job_id) or Track(job_id=job_id, tenant=TenantName(""))
            changed[job_id], found = absorb(track, [samples[p] for p in mine], now_us=now_us, rules=self.rules)
            for place, verdict in zip(mine, found, strict=True):
                verdicts[place] = verdict
        return changed, tuple(verdicts)

    async def _rows_of(
        self, batch: Sequence[Event[EventData]], *, tx: Transaction, at: Instant
    ) -> dict[JobId, Track]:
        """Tracks of jobs that a batch speaks of and that memory does not hold. A job that has ended has none."""
        starts = [event for event in batch if isinstance(event.data, (GroupStarted, GroupChanged, GroupEnded))]
        tenants = {JobId(event.key): event.tenant for event in starts}
        unknown = sorted(job_id for job_id in tenants if not self._knows(job_id))
        stored = await store.load_jobs(tx, unknown, at=at)
        found: dict[JobId, Track] = {}
        for job_id in unknown:
            aside = self.tracks[job_id].aside if job_id in self.tracks else ()
            row = stored.get(job_id)
            if row is None:
                found[job_id] = Track(job_id=job_id, tenant=tenants[job_id], aside=aside)
            elif not row.is_ended:
                found[job_id] = replace(row.track, aside=aside)
        return found

    def _knows(self, job_id: JobId) -> bool:
        return job_id in self.tracks and self.tracks[job_id].attempt > 0

    async def _save(self, change: Change, *, tx: Transaction, at: Instant) -> None:
        outcomes = change.outcomes
        await store.save_jobs(tx, [outcome.track for outcome in outcomes.values()], at=at)
        points = [(job_id, point) for job_id, outcome in outcomes.items() for point in outcome.points]
        await store.save_points(tx, points, at=at)
        await store.thin_curves(tx, [outcome.track for outcome in outcomes.values() if outcome.thinned])
        await store.end_jobs(tx, change.ended, at=at)

    def _sweep(self) -> None:
        """Drop jobs of which nothing is known but reports that waited for too long."""
        oldest_us = self.instant().us - self.rules.window.reach_us
        for job_id in [
            job_id
            for job_id, track in self.tracks.items()
            if track.attempt == 0 and all(waiting.received_us < oldest_us for waiting in track.aside)
        ]:
            del self.tracks[job_id]


def fold(tracks: Mapping[JobId, Track], batch: Sequence[Event[EventData]], *, now_us: int, rules: Rules) -> Change:
    """Apply a batch in its order, then close every window that is due. Jobs that are not in ``tracks`` have ended."""
    outcomes: dict[JobId, Outcome] = {}
    ended: dict[JobId, TenantName] = {}
    for event in batch:
        job_id = JobId(event.key)
        if isinstance(event.data, JobEnded):
            ended[job_id] = event.tenant
        elif job_id in tracks:
            before = outcomes.get(job_id, Outcome(track=tracks[job_id]))
            step = _step(before.track, event.data, now_us=now_us, rules=rules)
            if step is not None:
                known = replace(step, track=replace(step.track, tenant=event.tenant))
                outcomes[job_id] = merge([before, known], start=before.track)
    for job_id, track in tracks.items():
        before = outcomes.get(job_id, Outcome(track=track))
        closed = close_due(before.track, now_us=now_us, rules=rules)
        if closed.windows and job_id not in ended:
            outcomes[job_id] = merge([before, closed], start=before.track)
    return Change(outcomes=outcomes, ended=tuple(sorted(ended.items())))


def _step(track: Track, data: EventData, *, now_us: int, rules: Rules) -> Outcome | None:
    """None for an event that says nothing about groups, or nothing new."""
    match data:
        case GroupStarted() | GroupChanged():
            outcome = start_group(
                track,
                attempt=data.attempt,
                generation=data.generation,
                workers=data.workers,
                now_us=now_us,
                rules=rules,
            )
        case GroupEnded():
            outcome = end_attempt(track, attempt=data.attempt, now_us=now_us, rules=rules)
        case _:
            return None
    return None if outcome.track is track else outcome
