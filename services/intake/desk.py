"""The desk: what each request does, from a validated body to the answer's model. Knows nothing of HTTP."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from sqlalchemy.ext.asyncio import AsyncConnection
from ulid import ULID

from schemas.api.jobs import (
    CapacityView,
    History,
    JobList,
    JobView,
    NodeHolder,
    NodeView,
    PatchJob,
    SubmitJob,
    WhyView,
)
from schemas.envelope import Draft
from schemas.envelope import Sequence as LogSequence
from schemas.events.allocation import AllocationClosed, AllocationEvicted, AllocationGranted, AllocationResized
from schemas.events.capacity import CapacityObserved
from schemas.events.job import JobChanged, RequestRegister
from schemas.events.scaling import ScalingProposed
from schemas.vocabulary import JobId, JobPhase, QueueName, WaitCode
from services.intake.core.batches import Answer, Created, KeyReused, Repeated
from services.intake.core.changes import Change, Changed, TooLate, Unchanged, Wrong, plan_cancel, plan_patch
from services.intake.core.fit import NeverFits, accelerator_name, never_fits
from services.intake.core.readmodel import JobRecord, QueueSeen, Registers
from services.intake.core.validation import Accepted, Caller, Refused, judge
from services.intake.core.view import is_behind, job_view, say_why, standing_of
from services.intake.queries import (
    CapacitySeen,
    JobFilter,
    count_ahead,
    find_job,
    is_known,
    list_jobs,
    load_capacity,
    load_history,
    load_last,
    load_names,
    load_queues,
)
from services.intake.settings import IntakeSettings
from services.intake.store import StoredJob, Submission, load_job, save_request
from services.intake.writer import SubmissionWriter
from shared.clock import Clock
from shared.errors import Conflict, Rejected
from shared.problems import Unprocessable
from shared.runtime.service import TransactionScope
from shared.telemetry.logs import get_logger
from shared.telemetry.trace import current_trace

ATTEMPTS: Final = 3
_TURN_JOBS: Final = 50
"""Jobs of a list that are judged without a pause: about 5 ms."""
_DECISIONS: Final = tuple(
    kind.TYPE for kind in (AllocationGranted, AllocationResized, AllocationEvicted, AllocationClosed)
)
_log = get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """``is_new`` is False for a repeat of an Idempotency-Key."""

    view: JobView
    is_new: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One job as it was asked for. ``key`` and ``body_hash`` are both given or both None."""

    body: SubmitJob
    key: str | None = None
    body_hash: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered:
    """One job of a list. ``is_new`` is False for a repeat of its Idempotency-Key."""

    job_id: JobId
    name: str
    warnings: tuple[str, ...]
    is_new: bool


class CapacityCache:
    """The last capacity report, looked up at most once per ``capacity_cache_seconds``."""

    def __init__(
        self, read: Callable[[], AbstractAsyncContextManager[AsyncConnection]], clock: Clock, seconds: float
    ) -> None:
        self._read = read
        self._clock = clock
        self._seconds = seconds
        self._seen: CapacitySeen | None = None
        self._looked_at: float | None = None
        self._lock = asyncio.Lock()

    async def get(self) -> CapacitySeen | None:
        """None before the first report."""
        if self._is_stale():
            async with self._lock:
                if self._is_stale():
                    async with self._read() as connection:
                        self._seen = await load_capacity(connection)
                    self._looked_at = self._clock.monotonic()
        return self._seen

    def _is_stale(self) -> bool:
        return self._looked_at is None or self._clock.monotonic() - self._looked_at > self._seconds


class Desk:
    """Every query names the tenant: a job of another one does not exist here."""

    def __init__(
        self,
        *,
        transaction: Callable[[], TransactionScope],
        read: Callable[[], AbstractAsyncContextManager[AsyncConnection]],
        clock: Clock,
        writer: SubmissionWriter,
        settings: IntakeSettings,
    ) -> None:
        self._transaction = transaction
        self._read = read
        self._clock = clock
        self._writer = writer
        self._settings = settings
        self._capacity = CapacityCache(read, clock, settings.capacity_cache_seconds)

    # -- submissions --------------------------------------------------------------------------------------------

    async def submit(
        self,
        body: SubmitJob,
        *,
        caller: Caller,
        key: str | None,
        body_hash: bytes | None,
        allow_unsatisfiable: bool,
    ) -> Submitted:
        """Raises Unprocessable, Rejected, TooBusy, Unavailable. Nothing is kept of a refused body, nor its key."""
        observed = await self._observed()
        now = self._clock.now()
        submission = self._judge(
            Request(body=body, key=key, body_hash=body_hash),
            caller=caller,
            observed=observed,
            now=now,
            allow_unsatisfiable=allow_unsatisfiable,
        )
        record = submission.record
        answer = await self._writer.submit(submission)
        match answer:
            case Created():
                _log.info("job_accepted", job_id=record.job_id, queue=record.queue, priority=record.request.priority)
                return Submitted(view=job_view(record, Registers(), now=now), is_new=True)
            case Repeated():
                return Submitted(view=await self.get(answer.job_id, caller=caller), is_new=False)
            case KeyReused():
                raise _key_reused()

    async def submit_many(
        self, requests: Sequence[Request | Unprocessable | Rejected], *, caller: Caller, allow_unsatisfiable: bool
    ) -> list[Entered | Unprocessable | Rejected]:
        """A list of jobs: each is accepted or refused on its own, in the order of the list, all in few commits.

        ``requests`` may hold refusals already: they stay where they are. Raises TooBusy, with none of them kept, and
        Unavailable: then nobody knows which were written, and the keys tell when the list is sent again.
        """
        observed = await self._observed()
        now = self._clock.now()
        outcomes: list[Submission | Unprocessable | Rejected] = []
        for number, request in enumerate(requests):
            if number % _TURN_JOBS == _TURN_JOBS - 1:
                await asyncio.sleep(0)  # others get their turn
            if not isinstance(request, Request):
                outcomes.append(request)
                continue
            try:
                outcomes.append(
                    self._judge(
                        request, caller=caller, observed=observed, now=now, allow_unsatisfiable=allow_unsatisfiable
                    )
                )
            except (Unprocessable, Rejected) as refused:
                outcomes.append(refused)
        written = iter(await self._writer.submit_many([each for each in outcomes if isinstance(each, Submission)]))
        answers = [_answered(each, next(written)) if isinstance(each, Submission) else each for each in outcomes]
        accepted = sum(isinstance(answer, Entered) and answer.is_new for answer in answers)
        _log.info("jobs_accepted", jobs=accepted, of=len(answers))
        return answers

    async def _observed(self) -> CapacityObserved | None:
        seen = await self._capacity.get()
        return None if seen is None else seen.observed

    def _judge(
        self,
        request: Request,
        *,
        caller: Caller,
        observed: CapacityObserved | None,
        now: datetime,
        allow_unsatisfiable: bool,
    ) -> Submission:
        """Raises Unprocessable or Rejected."""
        judgement = judge(
            request.body,
            caller=caller,
            accelerator=accelerator_name(observed, default=self._settings.accelerator_resource),
            now=now,
            allow_unsatisfiable=allow_unsatisfiable,
            is_local=self._settings.adapter == "local",
        )
        if isinstance(judgement, Refused):
            raise Unprocessable(judgement.errors)
        record = _record_of(judgement, now=now)
        if not allow_unsatisfiable:
            _refuse_what_never_fits(record, record.request, observed)
        return Submission(
            record=record,
            environment=judgement.environment,
            key=request.key,
            body_hash=request.body_hash,
            trace=current_trace(),
        )

    # -- one job ------------------------------------------------------------------------------------------------

    async def get(self, job_id: JobId, *, caller: Caller) -> JobView:
        async with self._read() as connection:
            stored = _found(await find_job(connection, job_id, tenant=caller.tenant), job_id)
            queues = await load_queues(connection, tenant=caller.tenant)
        return self._view(stored, queues.get(stored.record.queue))

    async def require(self, job_id: JobId, *, caller: Caller) -> None:
        """Raises Rejected (404) for an id that is unknown to this tenant."""
        async with self._read() as connection:
            if not await is_known(connection, job_id, tenant=caller.tenant):
                raise unknown_job(job_id)

    async def patch(
        self, job_id: JobId, patch: PatchJob, *, caller: Caller, versions: frozenset[int] | None
    ) -> JobView:
        """``versions``: only if the register has one of these (If-Match). Raises Rejected, Unprocessable, Conflict.

        Never-fits is checked again where the minimum rises.
        """

        def plan(stored: StoredJob) -> Change:
            phase = standing_of(stored.record, stored.registers).phase
            return plan_patch(stored.record.request, patch, phase=phase, mode=stored.record.spec.mode)

        return await self._change(job_id, plan, caller=caller, versions=versions, reason=patch.reason)

    async def cancel(self, job_id: JobId, *, caller: Caller, reason: str) -> JobView:
        """Raises Rejected (404; 409 for a job that ended otherwise)."""

        def plan(stored: StoredJob) -> Change:
            phase = standing_of(stored.record, stored.registers).phase
            return plan_cancel(stored.record.request, phase=phase)

        return await self._change(job_id, plan, caller=caller, versions=None, reason=reason)

    async def _change(
        self,
        job_id: JobId,
        plan: Callable[[StoredJob], Change],
        *,
        caller: Caller,
        versions: frozenset[int] | None,
        reason: str,
    ) -> JobView:
        """Load, decide, save; a lost race is decided anew, at most 3 times."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await self._change_once(job_id, plan, caller=caller, versions=versions, reason=reason)
            except Conflict:
                if attempt == ATTEMPTS:
                    raise
        raise AssertionError("the loop above returns or raises")

    async def _change_once(
        self,
        job_id: JobId,
        plan: Callable[[StoredJob], Change],
        *,
        caller: Caller,
        versions: frozenset[int] | None,
        reason: str,
    ) -> JobView:
        seen = await self._capacity.get()
        async with self._transaction() as tx:
            stored = _found(await load_job(tx, job_id, tenant=caller.tenant), job_id)
            _check_version(stored.record.request, versions)
            change = plan(stored)
            match change:
                case Wrong():
                    raise Unprocessable(change.errors)
                case TooLate():
                    raise Rejected(409, "too_late", change.detail, way_out="submit a new job")
                case Unchanged():
                    record = stored.record
                case Changed():
                    record = replace(stored.record, request=change.request)
                    if (
                        change.request.workers_min > stored.record.request.workers_min
                        and not record.allow_unsatisfiable
                    ):
                        _refuse_what_never_fits(record, change.request, None if seen is None else seen.observed)
                    await save_request(tx, job_id, change.request)
                    data = JobChanged(request=change.request, by=caller.user, reason=reason)
                    tx.publish(Draft(key=job_id, tenant=record.tenant, data=data))
        if isinstance(change, Changed):
            _log.info(
                "job_changed", job_id=job_id, version=record.request.version, cancelled=record.request.cancelled
            )
        return self._view(StoredJob(record=record, registers=stored.registers), None)

    # -- lists and explanations ---------------------------------------------------------------------------------

    async def list(self, wanted: JobFilter) -> JobList:
        async with self._read() as connection:
            page, is_more = await list_jobs(connection, wanted)
            queues = await load_queues(connection, tenant=wanted.tenant)
        items = [self._view(stored, queues.get(stored.record.queue)) for stored in page]
        return JobList(items=items, next_cursor=items[-1].id if is_more else None)

    async def why(self, job_id: JobId, *, caller: Caller) -> WhyView:
        async with self._read() as connection:
            stored = _found(await find_job(connection, job_id, tenant=caller.tenant), job_id)
            queues = await load_queues(connection, tenant=caller.tenant)
            queue = queues.get(stored.record.queue)
            ahead = await self._ahead(connection, stored, queue)
            decision = await load_last(connection, job_id, _DECISIONS)
            scaling = await load_last(connection, job_id, (ScalingProposed.TYPE,))
            capacity = await load_capacity(connection)
        now = self._clock.now()
        view = job_view(stored.record, stored.registers, now=now, queue=queue, ahead=ahead)
        window = stored.registers.measured.window
        summary = say_why(
            stored.record,
            stored.registers,
            waiting=view.waiting,
            decision=None if decision is None else decision.summary,
            silent_seconds=self._silence(capacity, now=now),
        )
        return WhyView(
            id=job_id,
            phase=view.phase,
            summary=summary,
            waiting=view.waiting,
            decision=decision,
            scaling=scaling,
            utilisation=None if window is None else window.utilisation,
            measure=None if window is None else window.measure,
            queue_ahead=ahead,
        )

    async def history(self, job_id: JobId, *, caller: Caller, after: LogSequence, limit: int) -> History:
        async with self._read() as connection:
            if not await is_known(connection, job_id, tenant=caller.tenant):
                raise unknown_job(job_id)
            items, is_more = await load_history(connection, job_id, after=after, limit=limit)
        return History(items=items, next_cursor=items[-1].sequence if is_more else None)

    async def capacity(self, *, caller: Caller) -> CapacityView:
        """What there is and who holds it. Jobs of other tenants are counted, not named."""
        async with self._read() as connection:
            seen = await load_capacity(connection)
            if seen is None:
                return CapacityView(revision=0, nodes=[], lost_nodes=[])
            held_by = sorted({member.job_id for node in seen.observed.nodes for member in node.members})
            names = await load_names(connection, held_by, tenant=caller.tenant)
        nodes = [
            NodeView(
                name=node.name,
                flavor=node.flavor,
                allocatable=node.allocatable.as_dict(),
                used_by_others=node.used_by_others.as_dict(),
                holders=[
                    NodeHolder(
                        job_id=member.job_id if member.job_id in names else "",
                        name=names.get(member.job_id, "another job"),
                        role=member.role,
                        members=member.members,
                    )
                    for member in node.members
                ],
            )
            for node in seen.observed.nodes
        ]
        return CapacityView(revision=seen.observed.revision, nodes=nodes, lost_nodes=list(seen.observed.lost_nodes))

    async def _ahead(self, connection: AsyncConnection, stored: StoredJob, queue: QueueSeen | None) -> int | None:
        """Counted only for a job that waits unexamined."""
        record, registers = stored.record, stored.registers
        waits = standing_of(record, registers).phase is JobPhase.QUEUED and registers.waiting.said is None
        if not waits or queue is None or not is_behind(record, registers, queue):
            return None
        return await count_ahead(connection, record)

    def _silence(self, seen: CapacitySeen | None, *, now: datetime) -> float | None:
        if seen is None:
            return None
        seconds = (now - seen.received_at).total_seconds()
        return seconds if seconds > self._settings.capacity_silence_seconds else None

    def _view(self, stored: StoredJob, queue: QueueSeen | None) -> JobView:
        return job_view(stored.record, stored.registers, now=self._clock.now(), queue=queue)


def unknown_job(job_id: str) -> Rejected:
    """The same for an id that never was and for a job of another tenant."""
    return Rejected(404, "unknown_job", f"there is no job {job_id[:64]}", way_out="GET /v1/jobs lists the jobs")


def _found(stored: StoredJob | None, job_id: JobId) -> StoredJob:
    if stored is None:
        raise unknown_job(job_id)
    return stored


def _answered(submission: Submission, answer: Answer | Rejected) -> Entered | Rejected:
    record = submission.record
    match answer:
        case Rejected():
            return answer
        case KeyReused():
            return _key_reused()
        case Repeated():
            return Entered(job_id=answer.job_id, name=record.spec.name, warnings=record.warnings, is_new=False)
        case Created():
            return Entered(job_id=record.job_id, name=record.spec.name, warnings=record.warnings, is_new=True)


def _key_reused() -> Rejected:
    return Rejected(
        422,
        "idempotency_key_reused",
        "this Idempotency-Key was used with another body",
        way_out="send the same body again, or a new key for a new job",
    )


def _record_of(accepted: Accepted, *, now: datetime) -> JobRecord:
    submitted = accepted.submitted
    return JobRecord(
        job_id=JobId(f"j{str(ULID()).lower()}"),
        tenant=submitted.tenant,
        user=submitted.user,
        queue=QueueName(submitted.queue),
        spec=submitted.spec,
        roles=submitted.roles,
        request=submitted.request,
        warnings=accepted.warnings,
        allow_unsatisfiable=submitted.allow_unsatisfiable,
        submitted_at=now,
    )


def _refuse_what_never_fits(record: JobRecord, request: RequestRegister, observed: CapacityObserved | None) -> None:
    verdict: NeverFits | None = never_fits(record.roles, request, observed)
    if verdict is not None:
        raise Rejected(422, WaitCode.NEVER_FITS.lower(), verdict.detail, field=verdict.field, way_out=verdict.way_out)


def _check_version(request: RequestRegister, versions: frozenset[int] | None) -> None:
    if versions is not None and request.version not in versions:
        raise Rejected(
            412,
            "version_changed",
            f"the job is at version {request.version} meanwhile",
            way_out="read the job again and decide anew",
        )
