"""Queueing's loop: one batch is applied to the memory, planned on, and saved, in one transaction."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from schemas.envelope import Draft, Event
from schemas.events.allocation import (
    AllocationClosed,
    AllocationEvicted,
    AllocationGranted,
    AllocationResized,
    QueueObserved,
)
from schemas.events.job import JobSubmitted
from schemas.registry import EventData
from schemas.vocabulary import DecisionCode, JobId, PriorityClass
from services.queueing.core.book import Book, QueueKey
from services.queueing.core.cycle import apply_word, end_pauses, next_pause_seconds, settle
from services.queueing.core.observing import observe_queues
from services.queueing.settings import QueueingSettings
from services.queueing.store import delete_old_tombstones, load_book, load_closed, save_changes
from shared.clock import Clock
from shared.runtime.service import Transaction
from shared.telemetry.instruments import Instruments
from shared.telemetry.logs import get_logger

log = get_logger(service="queueing")


class QueueingHandler:
    """Keeps all open workloads in memory; a commit that fails makes the runtime load them again."""

    def __init__(self, settings: QueueingSettings, clock: Clock, instruments: Instruments) -> None:
        self._settings = settings
        self._rules = settings.rules
        self._clock = clock
        self._instruments = instruments
        self._pending_jobs = instruments.gauge(
            "pending_jobs_total", "Jobs that wait and are not held.", ("priority",)
        )
        self._charged_jobs = instruments.gauge("charged_jobs_total", "Jobs that something is charged to.")
        instruments.begin_at_zero(instruments.decisions, DecisionCode)
        self._plan_seconds = instruments.histogram("plan_seconds", "One plan, carried out in memory.")
        self._book = Book()
        self._observed: dict[QueueKey, QueueObserved] = {}
        self._observed_at = 0.0
        self._tombstones_at = 0.0
        self._due_at: float | None = None
        self._drafts: list[Draft[EventData]] = []

    async def load(self, tx: Transaction) -> None:
        now = self._clock.monotonic()
        self._book = await load_book(tx, now=now)
        self._observed = {}
        self._observed_at = now - self._settings.observe_seconds
        self._tombstones_at = now
        self._due_at = now
        self._drafts = []
        log.info("queueing_loaded", jobs=len(self._book.workloads), promises=len(self._book.promises))

    async def on_events(self, batch: Sequence[Event[EventData]], *, tx: Transaction, now: datetime) -> None:
        monotonic = self._clock.monotonic()
        closed = await load_closed(tx, [JobId(e.key) for e in batch if isinstance(e.data, JobSubmitted)])
        self._drafts = self._turn(batch, closed, monotonic)
        await save_changes(tx, self._book.take_changes(), now=now)
        if monotonic - self._tombstones_at >= self._settings.tombstone_interval_seconds:
            self._tombstones_at = monotonic
            oldest = now - timedelta(seconds=self._settings.tombstone_seconds)
            await delete_old_tombstones(tx, before=oldest)
        tx.publish(*self._drafts)

    def on_committed(self) -> None:
        for draft in self._drafts:
            _log_decision(draft, self._instruments)
        self._drafts = []
        queues = self._book.pending.values()
        for priority in PriorityClass:
            self._pending_jobs.labels(priority.value).set(sum(counts.get(priority, 0) for counts in queues))
        self._charged_jobs.set(self._book.charged_jobs)

    def due_seconds(self) -> float | None:
        """Until the end of a pause, a plan that waits for time, or a snapshot that may be published."""
        return None if self._due_at is None else max(0.0, self._due_at - self._clock.monotonic())

    def _turn(
        self, batch: Sequence[Event[EventData]], closed: frozenset[JobId], now: float
    ) -> list[Draft[EventData]]:
        """Words, pauses that are over, plan, snapshots."""
        book, rules = self._book, self._rules
        drafts: list[Draft[EventData]] = []
        for event in batch:
            if event.key not in closed:
                drafts += apply_word(book, JobId(event.key), event.tenant, event.data, now=now, rules=rules)
        end_pauses(book, now=now)
        with self._plan_seconds.time():
            planned, due = settle(book, now=now, rules=rules)
        observed, observe_due = self._observe(now)
        dues = (due, next_pause_seconds(book, now=now), observe_due)
        self._due_at = min((now + seconds for seconds in dues if seconds is not None), default=None)
        return [*drafts, *planned, *observed]

    def _observe(self, now: float) -> tuple[list[Draft[EventData]], float | None]:
        """Snapshots that changed, if some time has passed since the last; else in how many seconds."""
        snapshots = observe_queues(self._book, now=now)
        if snapshots == self._observed:
            return [], self._settings.observe_seconds if any(
                s.starts_per_minute for s in snapshots.values()
            ) else None
        wait_seconds = self._observed_at + self._settings.observe_seconds - now
        if wait_seconds > 0:
            return [], wait_seconds
        changed = [(queue, s) for queue, s in snapshots.items() if self._observed.get(queue) != s]
        self._observed, self._observed_at = snapshots, now
        return [Draft(key=queue, tenant=tenant, data=s) for (tenant, queue), s in changed], None


def _log_decision(draft: Draft[EventData], instruments: Instruments) -> None:
    """One line per decision about a grant."""
    data = draft.data
    if isinstance(data, AllocationGranted | AllocationResized | AllocationEvicted | AllocationClosed):
        instruments.decisions.labels(reason=data.reason.code.value).inc()
        kind = data.TYPE.removeprefix("tide.allocation.").removesuffix(".v1")
        log.info(
            "allocation_decided",
            decision=kind,
            job_id=draft.key,
            epoch=data.epoch,
            attempt=data.attempt,
            reason=data.reason.code.value,
            detail=data.reason.detail,
        )
