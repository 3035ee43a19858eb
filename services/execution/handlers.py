"""Applies events of job and allocation: specs, and what queueing wants with each job."""

from collections.abc import Callable, Sequence
from datetime import datetime

from schemas.envelope import Event
from schemas.events.allocation import AllocationClosed, AllocationEvicted, AllocationGranted, AllocationResized
from schemas.events.job import JobEnded, JobSubmitted
from schemas.registry import EventData
from schemas.vocabulary import JobId
from services.execution.core.desired import apply_event
from services.execution.core.state import Job
from services.execution.memory import Memory
from services.execution.store import StoredJob, load_jobs, save_jobs
from shared.runtime.service import Transaction
from shared.telemetry.logs import get_logger


class ExecutionHandler:
    """Jobs that wait are rows only; those with an attempt under way are in memory, too."""

    def __init__(self, memory: Memory, *, token_hash: Callable[[JobId], bytes]) -> None:
        self._memory = memory
        self._token_hash = token_hash
        self._uncommitted: dict[JobId, StoredJob] = {}
        self._log = get_logger(part="handler")

    def has_uncommitted(self) -> bool:
        """A batch was handled and is not known to be committed: the memory is behind."""
        return bool(self._uncommitted)

    async def load(self, tx: Transaction) -> None:
        self._uncommitted = {}
        self._memory.reload((await load_jobs(tx.connection)).values())

    async def on_events(self, batch: Sequence[Event[EventData]], *, tx: Transaction, now: datetime) -> None:
        ids = sorted({JobId(event.key) for event in batch if isinstance(event.data, _WANTED)})
        before = await self._before(tx, ids)
        after = dict(before)
        for event in batch:
            if isinstance(event.data, _WANTED):
                job_id = JobId(event.key)
                self._note_receipt(event)
                stored = after.get(job_id) or self._new(job_id, event)
                after[job_id] = StoredJob(
                    job=apply_event(stored.job, event.data, now=now), token_hash=stored.token_hash
                )
        self._uncommitted = after
        await save_jobs(tx, ((before.get(job_id), stored) for job_id, stored in after.items()))

    def _note_receipt(self, event: Event[EventData]) -> None:
        """The instant from which on a change of size is execution's to carry out; again if its commit fails."""
        if isinstance(event.data, AllocationGranted | AllocationResized | AllocationEvicted):
            kind = event.data.TYPE.removeprefix("tide.allocation.").removesuffix(".v1")
            self._log.info("allocation_received", job_id=event.key, epoch=event.data.epoch, kind=kind)

    def on_committed(self) -> None:
        for stored in self._uncommitted.values():
            self._memory.commit(stored)
        self._uncommitted = {}
        self._memory.wake.set()

    def due_seconds(self) -> float | None:
        return None

    async def _before(self, tx: Transaction, ids: Sequence[JobId]) -> dict[JobId, StoredJob]:
        known = {job_id: self._memory.jobs[job_id].stored for job_id in ids if job_id in self._memory.jobs}
        missing = [job_id for job_id in ids if job_id not in known]
        return known | (await load_jobs(tx.connection, missing) if missing else {})

    def _new(self, job_id: JobId, event: Event[EventData]) -> StoredJob:
        return StoredJob(job=Job(job_id=job_id, tenant=event.tenant), token_hash=self._token_hash(job_id))


_WANTED = (
    JobSubmitted,
    JobEnded,
    AllocationGranted,
    AllocationResized,
    AllocationEvicted,
    AllocationClosed,
)
