"""The loop that makes members equal what is granted: look, decide, commit, then act."""

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from schemas.envelope import Draft
from schemas.events.capacity import CapacityObserved
from schemas.registry import EventData
from schemas.vocabulary import CLUSTER_KEY, DEFAULT_FLAVOR, DEFAULT_TENANT, Attribution, JobId, MemberName, Mode
from services.execution.core.capacity import observe_node
from services.execution.core.generations import members_of_line, needs_checkpoint
from services.execution.core.placement import devices_needed, free_devices
from services.execution.core.reconcile import decide
from services.execution.core.seen import Limits
from services.execution.core.state import Checkpoint, Job, MemberState
from services.execution.core.turn import (
    AnswerAdmission,
    AskToStop,
    Decision,
    Effect,
    Kill,
    Now,
    OfferGeneration,
    StartMember,
    Supply,
    Terminate,
    WithdrawGeneration,
)
from services.execution.decisions import log_changes, plan_endpoints
from services.execution.local.checkpoints import ShelfReader
from services.execution.membership.endpoint import MembershipEndpoint
from services.execution.memory import JobView, Memory
from services.execution.ports import Executor
from services.execution.settings import ExecutionSettings
from services.execution.store import StoredJob, load_capacity, load_jobs, save_capacity, save_checkpoints, save_jobs
from shared.clock import Clock
from shared.errors import Conflict, Unavailable
from shared.runtime.service import Lease, Transaction
from shared.telemetry.instruments import Instruments
from shared.telemetry.logs import get_logger

_NONCES_AT_ONCE: Final = 64
_ROUTINE_SECONDS: Final = 1.0
"""So long checkpoints and steps wait at most to be committed."""
_FAILURE_PAUSE_SECONDS: Final = 0.5
_GAP_SECONDS: Final = 2.0
"""Two rounds that are further apart have time between them in which nothing could be decided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one look at all jobs decided: by job, with the capacity report if one is due."""

    decisions: Mapping[JobId, Decision]
    before: Mapping[JobId, StoredJob]
    capacity: CapacityObserved | None
    checkpoints: tuple[tuple[JobId, Checkpoint], ...]
    write_offs: frozenset[MemberName]

    routine_is_due: bool

    @property
    def needs_commit(self) -> bool:
        """Checkpoints and steps alone wait a moment for others, or for something else to be committed."""
        return (
            self.capacity is not None
            or (self.routine_is_due and bool(self.checkpoints))
            or any(d.events or self._has_changed(job_id, d.job) for job_id, d in self.decisions.items())
        )

    def _has_changed(self, job_id: JobId, job: Job) -> bool:
        before = self.before[job_id].job
        return job != (before if self.routine_is_due else replace(before, step=job.step))


class Reconciler:
    """One loop over all active jobs. Whatever it commits happens before whatever it does."""

    def __init__(
        self,
        settings: ExecutionSettings,
        memory: Memory,
        executor: Executor,
        endpoint: MembershipEndpoint,
        *,
        lease: Lease,
        clock: Clock,
        instruments: Instruments,
        has_uncommitted: Callable[[], bool],
        shelves: ShelfReader,
    ) -> None:
        self._settings = settings
        self._limits: Limits = settings.limits()
        self._memory = memory
        self._executor = executor
        self._endpoint = endpoint
        self._lease = lease
        self._clock = clock
        self._instruments = instruments
        self._has_uncommitted = has_uncommitted
        self._shelves = shelves
        self._published: CapacityObserved | None = None
        self._published_at = float("-inf")
        self._told_write_offs: frozenset[MemberName] | None = None
        self._saved_at = float("-inf")
        self._settle_at = float("inf")
        self._began_at = (clock.now(), clock.monotonic())
        self._decided_at = float("inf")
        self._is_behind = False
        self._log = get_logger(part="reconciler")
        self._round_seconds = instruments.histogram(
            "round_seconds", "One look at all jobs, commit and acts included."
        )
        self._members = instruments.gauge("held_members_total", "Processes that are held now.")
        self._offers = instruments.counter("generations_offered_total", "Training groups offered.")
        self._ends = instruments.counter("members_gone_total", "Members seen gone, by whose doing.", ("attribution",))
        instruments.begin_at_zero(self._ends, (*Attribution, "none"))

    # -- the loop -----------------------------------------------------------------------------------------------

    async def run(self, stopping: asyncio.Event) -> None:
        """Until told to stop. Raises LeaseLost; what a commit lacks for other reasons is read again and repeated."""
        self._begin()
        while not stopping.is_set():
            await self._wait(stopping)
            if stopping.is_set():
                return
            try:
                if self._is_behind:
                    await self._reload()
                if self._lease.is_held:
                    with self._round_seconds.time():
                        await self._round()
            except (Unavailable, Conflict) as exc:
                self._is_behind = True
                self._log.warning("round_failed", reason=str(exc))
                await asyncio.sleep(_FAILURE_PAUSE_SECONDS)

    def _begin(self) -> None:
        """After a start, or a lease taken over: who runs is given time to come back."""
        self._published, self._told_write_offs = None, None
        self._began_at = (self._clock.now(), self._clock.monotonic())
        self._settle_at = self._clock.monotonic() + self._settings.rejoin_seconds
        self._memory.settled = False

    async def _wait(self, stopping: asyncio.Event) -> None:
        try:
            async with asyncio.timeout(self._settings.observe_seconds):
                await self._memory.wake.wait()
        except TimeoutError:
            pass
        self._memory.wake.clear()

    async def _reload(self) -> None:
        """The outcome of a commit may be unknown: Postgres alone knows what is, and nothing is decided before."""
        async with self._lease.transaction() as tx:
            stored = await load_jobs(tx.connection)
            self._published = await load_capacity(tx.connection)
        self._memory.reload(stored.values())
        self._is_behind = False

    async def _round(self) -> None:
        if self._has_uncommitted():
            return
        self._skip_gap(self._clock.monotonic())
        self._look()
        await self._look_for_checkpoints()
        planned = self._plan()
        if not planned.needs_commit:
            self._adopt(planned, committed=False)
            return
        if self._published is None:
            await self._load_capacity()
        async with self._lease.transaction() as tx:
            # Waiting for the transaction took time: what was heard meanwhile counts, and so does the memory.
            if self._has_uncommitted():
                return
            planned = self._plan()
            await self._save(tx, planned)
        self._adopt(planned, committed=True)

    def _skip_gap(self, now: float) -> None:
        """Clocks on workers run while execution can decide: Postgres may have been away, or this process stopped."""
        gap = now - self._decided_at
        if gap > _GAP_SECONDS:
            self._log.warning("clocks_skip", seconds=round(gap, 3))
            for view in self._memory.jobs.values():
                view.skip(gap, now)
            self._decided_at = now

    async def _load_capacity(self) -> None:
        async with self._lease.transaction() as tx:
            self._published = await load_capacity(tx.connection)

    # -- looking ------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """At every process that is not seen gone."""
        watched: list[MemberName] = []
        for view in self._memory.jobs.values():
            whole = view.job.spec is not None and view.job.spec.mode is not Mode.LIVE
            for member in view.job.members:
                if member.state is not MemberState.GONE:
                    watched.append(member.name)
                    view.processes[member.name] = self._executor.look(member, watch_activity=whole)
        self._executor.keep_only(frozenset(watched))
        if not self._memory.settled:
            self._memory.settled = self._clock.monotonic() >= self._settle_at or self._all_are_back()

    def _all_are_back(self) -> bool:
        """Every member that may hold a group's state and still runs has a connection."""
        for view in self._memory.jobs.values():
            if view.job.spec is None or view.job.spec.mode is not Mode.LIVE:
                continue
            for name in members_of_line(view.job):
                process, report = view.processes.get(name), view.reports.get(name)
                runs = process is not None and process.recorded and not process.ended
                if runs and (report is None or not report.connected):
                    return False
        return True

    async def _look_for_checkpoints(self) -> None:
        """Only where a group may have to begin without anyone's state; after it was seen that nobody writes now."""
        views = list(self._memory.jobs.values())
        found = await self._shelves.look([v.job for v in views if needs_checkpoint(v.job, v.reports)])
        for view in views:
            view.shelf = found.get(view.job.job_id)

    # -- deciding -----------------------------------------------------------------------------------------------

    def _plan(self) -> Round:
        """Decide about every active job, one after the other: accelerators taken by one are not given to the next."""
        now = self._clock.monotonic()
        before = {job_id: view.saved for job_id, view in sorted(self._memory.jobs.items())}
        after = {job_id: self._memory.jobs[job_id].job for job_id in before}
        write_offs = frozenset(m.name for job in after.values() for m in job.members if m.state is _WRITTEN_OFF)
        instant = Now(
            monotonic=now,
            wall=self._steady_wall(now),
            capacity_revision=self._published.revision if self._published is not None else 0,
            capacity_tells_all=write_offs == self._told_write_offs,
        )
        decisions: dict[JobId, Decision] = {}
        taken = {n for job in after.values() for m in job.members if m.state is not _GONE for n in m.devices}
        free = list(free_devices(taken, self._executor.accelerators, self._executor.accelerators))
        for job_id in before:
            view = self._memory.jobs[job_id]
            seen = view.seen(
                stores=self._endpoint.stores_of(job_id),
                settled=self._memory.settled,
                now=now,
                interval=self._settings.checkpoint_event_seconds,
            )
            decision = decide(
                view.job,
                seen,
                limits=self._limits,
                since=view.since,
                now=instant,
                supply=self._supply(view.job, free),
            )
            decision = replace(decision, job=plan_endpoints(decision.job, self._settings.membership_host))
            decisions[job_id] = decision
            after[job_id] = decision.job
            if decision.job.ordinal != view.job.ordinal:  # it has new members
                given = {number for member in decision.job.members for number in member.devices}
                free = [number for number in free if number not in given]
        return Round(
            decisions=decisions,
            before=before,
            capacity=self._plan_capacity(after, now),
            checkpoints=tuple((job_id, word) for job_id, view in self._memory.jobs.items() for word in view.words),
            routine_is_due=now - self._saved_at >= _ROUTINE_SECONDS,
            write_offs=frozenset(m.name for job in after.values() for m in job.members if m.state is _WRITTEN_OFF),
        )

    def _steady_wall(self, now: float) -> datetime:
        """The wall clock of the start, gone on since: how long a job has run must not jump with the clock."""
        wall, monotonic = self._began_at
        return wall + timedelta(seconds=now - monotonic)

    def _supply(self, job: Job, free: Sequence[int]) -> Supply:
        """As much as the job could need at most. Cost: what it is granted, however many jobs there are."""
        members = min(_NONCES_AT_ONCE, sum(grant.members for grant in job.roles))
        devices = sum(grant.members * devices_needed(grant) for grant in job.roles)
        return Supply(
            nonces=tuple(secrets.token_hex(16) for _ in range(members)),
            devices=tuple(free[:devices]),
            node=self._executor.node,
        )

    def _plan_capacity(self, after: Mapping[JobId, Job], now: float) -> CapacityObserved | None:
        """A new report if anything in it changed, or the last one is old."""
        node = observe_node(after.values(), name=self._executor.node, flavor=DEFAULT_FLAVOR, size=self._executor.size)
        published = self._published
        is_due = now - self._published_at >= self._settings.capacity_seconds
        if published is not None and published.nodes == (node,) and not is_due:
            return None
        revision = published.revision + 1 if published is not None else 1
        return CapacityObserved(revision=revision, nodes=(node,))

    # -- committing and acting ----------------------------------------------------------------------------------

    async def _save(self, tx: Transaction, planned: Round) -> None:
        changes = [
            (planned.before[job_id], replace(planned.before[job_id], job=decision.job))
            for job_id, decision in planned.decisions.items()
        ]
        await save_jobs(tx, changes)
        await save_checkpoints(tx, planned.checkpoints, now=self._clock.now())
        if planned.capacity is not None:
            await save_capacity(tx, planned.capacity)
            tx.publish(_draft(CLUSTER_KEY, None, planned.capacity))
        for job_id, decision in planned.decisions.items():
            for event in decision.events:
                tx.publish(_draft(job_id, decision.job, event))

    def _adopt(self, planned: Round, *, committed: bool) -> None:
        """What was decided stands: make it visible, then act on it."""
        now = self._decided_at = self._clock.monotonic()
        if planned.capacity is not None:
            self._published, self._published_at = planned.capacity, now
            self._told_write_offs = planned.write_offs
        if committed:
            self._saved_at = now
        for job_id, decision in planned.decisions.items():
            view = self._memory.jobs.get(job_id)
            if view is None:
                continue
            self._note(view, planned.before[job_id].job, decision, now)
            for effect in decision.effects:
                self._act(view, decision.job, effect)
            self._endpoint.tidy(decision.job)
            if planned.checkpoints and committed:
                catalogued = [word for owner, word in planned.checkpoints if owner == job_id]
                view.words = [word for word in view.words if word not in catalogued]
            self._memory.commit(replace(planned.before[job_id], job=decision.job), with_step=committed)
        self._members.set(sum(len(view.job.held()) for view in self._memory.jobs.values()))

    def _note(self, view: JobView, before: Job, decision: Decision, now: float) -> None:
        view.since = dict(decision.since)
        if decision.job.checkpoint != before.checkpoint:
            view.announced_at = now
        if any(event.TYPE == "tide.worker.checkpoint_failed.v1" for event in decision.events):
            view.failure, view.failure_at = None, now
        for event in decision.events:
            self._instruments.decisions.labels(event.TYPE).inc()
        log_changes(self._log, before, decision.job, decision.events)
        for member in decision.job.members:
            former = before.member(member.name)
            if member.state is MemberState.GONE and (former is None or former.state is not MemberState.GONE):
                self._ends.labels(member.attributed_to.value if member.attributed_to else "none").inc()

    def _act(self, view: JobView, job: Job, effect: Effect) -> None:
        match effect:
            case StartMember():
                self._executor.start(effect.member)
            case AnswerAdmission():
                view.asking.pop(effect.member, None)
                self._endpoint.answer_admission(effect.member, effect.nonce, effect.refusal)
            case OfferGeneration():
                self._offers.inc()
                self._endpoint.offer(job, effect)
            case WithdrawGeneration():
                self._endpoint.withdraw(job, effect.generation)
            case AskToStop():
                self._endpoint.ask_to_stop(effect.member, grace_seconds=effect.grace_seconds, reason=effect.reason)
            case Terminate():
                self._executor.terminate(effect.member)
            case Kill():
                self._executor.kill(effect.member)


_GONE: Final = MemberState.GONE
_WRITTEN_OFF: Final = MemberState.WRITTEN_OFF


def _draft(key: str, job: Job | None, data: EventData) -> Draft[EventData]:
    return Draft(key=key, tenant=job.tenant if job is not None else DEFAULT_TENANT, data=data)
