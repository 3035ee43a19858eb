"""Metrics' memory, and what worker events and the passing of time do to it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import groupby
from typing import Final

from schemas.envelope import Draft, Event
from schemas.registry import EventData
from schemas.vocabulary import JobId
from services.metrics import store
from services.metrics.core.batch import Change, absorb_batch, plan_batch, recalled, unknown_jobs
from services.metrics.core.groups import Rules, Track, Verdict
from services.metrics.core.signals import Sample
from shared.clock import Clock
from shared.instant import Instant
from shared.runtime.service import Transaction
from shared.telemetry.instruments import Instruments
from shared.telemetry.logs import get_logger

_TENTHS: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_log = get_logger(service="metrics")


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
        self._utilisation = self.instruments.histogram(
            "window_utilisation_ratio", "Utilisation that a closed window tells.", buckets=_TENTHS
        )
        self._verdicts = self.instruments.counter("samples_total", "Reports, by what became of them.", ("verdict",))

    async def load(self, tx: Transaction) -> None:
        self.is_loaded = False
        self._pending = None
        at = Instant.of(self.clock)
        tracks = {track.job_id: track for track in await store.load_open_jobs(tx, at=at)}
        fresh = at.wall - timedelta(microseconds=self.rules.window.reach_us)
        opened = (at.to_wall(track.window.opened_us) for track in tracks.values() if track.window)
        stored = await store.load_samples(tx, since=min([fresh, *opened]), fresh=fresh, at=at)
        for received_us, together in groupby(stored, key=lambda item: item.received_us):
            tracks |= absorb_batch(tracks, [i.sample for i in together], now_us=received_us, rules=self.rules)[0]
        self.tracks = tracks
        self.is_loaded = True

    async def on_events(self, batch: Sequence[Event[EventData]], *, tx: Transaction, now: datetime) -> None:
        at = Instant.of(self.clock)  # inside the transaction: later than every report that was counted before it
        tracks = self.tracks | await self._rows_of(batch, tx=tx, at=at)
        change = plan_batch(tracks, batch, now_us=at.us, rules=self.rules)
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
                if window.utilisation is not None:
                    self._utilisation.observe(window.utilisation)
        for job_id, _ in change.ended:
            self.tracks.pop(job_id, None)
            _log.info("job_forgotten", job_id=job_id)
        self._sweep()

    def due_seconds(self) -> float | None:
        """Until the first window may close. One that waits for late reports is looked at in every interval."""
        opened = [track.window.opened_us for track in self.tracks.values() if track.window and not track.is_quiet]
        if not opened:
            return None
        now_us = Instant.of(self.clock).us
        soonest_us = min(opened) + self.rules.window.emit_us - now_us
        pause_us = self._closed_us + round(self.close_interval_seconds * 1e6) - now_us
        return max(0, soonest_us, pause_us) / 1e6

    def judge(self, samples: Sequence[Sample]) -> tuple[Verdict, ...]:
        """What would become of these reports now. Changes nothing."""
        return absorb_batch(self.tracks, samples, now_us=Instant.of(self.clock).us, rules=self.rules)[1]

    def count(self, samples: Sequence[Sample]) -> tuple[Verdict, ...]:
        """Take in reports whose rows are committed (or that need none); a verdict for each, in their order."""
        changed, verdicts = absorb_batch(self.tracks, samples, now_us=Instant.of(self.clock).us, rules=self.rules)
        self.tracks |= changed
        return verdicts

    def tell(self, verdicts: Iterable[Verdict]) -> None:
        for verdict in verdicts:
            self._verdicts.labels(verdict.value).inc()

    async def _rows_of(
        self, batch: Sequence[Event[EventData]], *, tx: Transaction, at: Instant
    ) -> dict[JobId, Track]:
        """Tracks of the jobs that a batch speaks of and that memory knows nothing of but reports."""
        unknown = unknown_jobs(batch, self.tracks)
        stored = await store.load_jobs(tx, sorted(unknown), at=at)
        return {
            job_id: recalled(self.tracks.get(job_id), stored.get(job_id), job_id=job_id, tenant=tenant)
            for job_id, tenant in unknown.items()
        }

    async def _save(self, change: Change, *, tx: Transaction, at: Instant) -> None:
        outcomes = change.outcomes
        await store.save_jobs(tx, [outcome.track for outcome in outcomes.values()], at=at)
        points = [(job_id, point) for job_id, outcome in outcomes.items() for point in outcome.points]
        await store.save_points(tx, points, at=at)
        await store.thin_curves(tx, [outcome.track for outcome in outcomes.values() if outcome.thinned])
        await store.end_jobs(tx, change.ended, at=at)

    def _sweep(self) -> None:
        """Drop jobs of which nothing is known but reports that waited for too long."""
        oldest_us = Instant.of(self.clock).us - self.rules.window.reach_us
        for job_id in [
            job_id
            for job_id, track in self.tracks.items()
            if track.attempt == 0 and all(waiting.received_us < oldest_us for waiting in track.aside)
        ]:
            del self.tracks[job_id]
