"""The writer: submissions that arrive together share one transaction, and are answered after its commit."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from schemas.envelope import Draft
from schemas.events.job import JobSubmitted
from services.intake.core.batches import Answer, Holder, answer_to, split_by_key
from services.intake.settings import IntakeSettings
from services.intake.store import Submission, load_key_holders, save_submissions
from shared.clock import Clock
from shared.db.transaction import PostgresTransaction
from shared.errors import Conflict, Poison, Rejected, TideError, Unavailable
from shared.runtime.service import Transaction, TransactionScope
from shared.telemetry.instruments import Instruments
from shared.telemetry.logs import get_logger

ATTEMPTS = 3
_log = get_logger()


@dataclass
class TooBusy(TideError):
    """More submissions are waiting to be written than the limit: 429."""

    retry_after_seconds: float = 1.0


@dataclass(slots=True, eq=False)
class _Waiting:
    submission: Submission
    answer: "asyncio.Future[Answer]" = field(repr=False)


class SubmissionWriter:
    """One task writes for all requests of this process. ``submit`` may be called before ``run`` has begun."""

    def __init__(
        self,
        *,
        transaction: Callable[[], TransactionScope],
        clock: Clock,
        instruments: Instruments,
        settings: IntakeSettings,
    ) -> None:
        self._transaction = transaction
        self._clock = clock
        self._settings = settings
        self._queue: deque[_Waiting] = deque()
        self._unwritten = 0
        self._wake = asyncio.Event()
        self._is_closed = False
        self._accepted = instruments.counter("submissions_total", "Submissions by their answer.", ("answer",))
        self._batch_seconds = instruments.histogram("submission_batch_seconds", "One batch of submissions.")
        self._unwritten_gauge = instruments.gauge("unwritten_submissions_info", "Submissions not yet committed.")

    async def submit(self, submission: Submission) -> Answer:
        """Returns after the commit. Raises TooBusy, Unavailable, or Rejected if the database refuses this one.

        After Unavailable nobody knows whether the job was written: repeat with the same Idempotency-Key.
        """
        if self._is_closed:
            raise Unavailable("the service is stopping")
        if self._unwritten >= self._settings.unwritten_jobs_max:
            raise TooBusy
        waiting = _Waiting(submission, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        self._unwritten += 1
        self._wake.set()
        try:
            async with asyncio.timeout(self._settings.submission_seconds_max):
                return await waiting.answer
        except TimeoutError as exc:
            raise Unavailable("the submission was not written in time") from exc
        finally:
            self._unwritten -= 1

    async def submit_many(self, submissions: Sequence[Submission]) -> list[Answer | Rejected]:
        """As ``submit``, for many at once: all are taken or, with TooBusy, none. Answers in the same order.

        Raises Unavailable if any of them was not written in time: repeat all with their keys.
        """
        if self._is_closed:
            raise Unavailable("the service is stopping")
        if self._unwritten + len(submissions) > self._settings.unwritten_jobs_max:
            raise TooBusy
        loop = asyncio.get_running_loop()
        waiting = [_Waiting(submission, loop.create_future()) for submission in submissions]
        self._queue.extend(waiting)
        self._unwritten += len(waiting)
        self._wake.set()
        try:
            async with asyncio.timeout(self._settings.submission_seconds_max):
                if waiting:
                    await asyncio.wait([each.answer for each in waiting])
        except TimeoutError as exc:
            for each in waiting:
                each.answer.cancel()
            raise Unavailable("the submissions were not written in time") from exc
        finally:
            self._unwritten -= len(waiting)
        return [_answer_of(each.answer) for each in waiting]

    async def run(self, stopping: asyncio.Event) -> None:
        """Write until stopped; what was accepted by then is written first."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._wake_at(stopping))
                while not stopping.is_set():
                    await self._wake.wait()
                    self._wake.clear()
                    while self._queue:
                        await self._write(self._take())
            self._is_closed = True
            while self._queue:
                await self._write(self._take())
        finally:
            self._is_closed = True
            self._refuse_rest()

    async def _wake_at(self, stopping: asyncio.Event) -> None:
        await stopping.wait()
        self._wake.set()

    def _take(self) -> list[_Waiting]:
        count = min(len(self._queue), self._settings.submission_batch_max)
        taken = [self._queue.popleft() for _ in range(count)]
        # Whoever has gone away meanwhile was never answered: its job need not exist.
        return [waiting for waiting in taken if not waiting.answer.done()]

    def _refuse_rest(self) -> None:
        while self._queue:
            _fail(self._queue.popleft(), Unavailable("the service is stopping"))

    async def _write(self, batch: list[_Waiting]) -> None:
        """A batch that fails is repeated row by row, so that one bad row spoils no other."""
        if not batch:
            return
        self._unwritten_gauge.set(self._unwritten)
        began = self._clock.monotonic()
        try:
            answers = await self._commit([waiting.submission for waiting in batch])
        except (Poison, Conflict) as exc:
            if len(batch) == 1:
                _fail(batch[0], _refusal(exc))
                return
            _log.warning("submission_batch_split", jobs=len(batch), error=type(exc).__name__)
            for waiting in batch:
                await self._write([waiting])
            return
        except Unavailable as exc:
            for waiting in batch:
                _fail(waiting, exc)
            return
        self._batch_seconds.observe(self._clock.monotonic() - began)
        for waiting, answer in zip(batch, answers, strict=True):
            self._accepted.labels(type(answer).__name__.lower()).inc()
            if not waiting.answer.done():
                waiting.answer.set_result(answer)

    async def _commit(self, batch: Sequence[Submission]) -> list[Answer]:
        for _ in range(ATTEMPTS - 1):
            try:
                return await self._commit_once(batch)
            except Conflict:
                continue
        return await self._commit_once(batch)

    async def _commit_once(self, batch: Sequence[Submission]) -> list[Answer]:
        now = self._clock.now()
        leaders = split_by_key(batch).leaders
        expires_at = now + timedelta(seconds=self._settings.idempotency_seconds)
        async with self._transaction() as tx:
            new = await save_submissions(tx, leaders, now=now, expires_at=expires_at)
            known = {
                (item.tenant, item.key): Holder(body_hash=item.body_hash, job_id=item.job_id)
                for item in leaders
                if item.key is not None and item.body_hash is not None and item.job_id in new
            }
            missing = [(item.tenant, item.key) for item in leaders if item.key is not None and item.job_id not in new]
            if missing:
                known |= await load_key_holders(tx, missing)
            _publish(tx, [item for item in leaders if item.job_id in new])
        return [answer_to(item, known) for item in batch]


def _publish(tx: Transaction, new: Sequence[Submission]) -> None:
    """Each event carries the trace of its own request, although they share a transaction."""
    if isinstance(tx, PostgresTransaction):
        tx.traces = {item.job_id: None if item.trace is None else str(item.trace) for item in new}
    tx.publish(*(Draft(key=item.job_id, tenant=item.tenant, data=to_submitted(item)) for item in new))


def to_submitted(item: Submission) -> JobSubmitted:
    record = item.record
    return JobSubmitted(
        tenant=record.tenant,
        user=record.user,
        queue=record.queue,
        request=record.request,
        roles=record.roles,
        spec=record.spec,
        allow_unsatisfiable=record.allow_unsatisfiable,
    )


def _answer_of(answer: "asyncio.Future[Answer]") -> Answer | Rejected:
    """Raises Unavailable."""
    try:
        return answer.result()
    except Rejected as refused:
        return refused


def _fail(waiting: _Waiting, error: TideError) -> None:
    if not waiting.answer.done():
        waiting.answer.set_exception(error)


def _refusal(exc: Poison | Conflict) -> TideError:
    if isinstance(exc, Conflict):
        return Unavailable("the submission lost a race several times")
    return Rejected(422, "unstorable", "the database cannot store this job", way_out="look for unusual characters")
