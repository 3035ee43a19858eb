"""What the API reads: jobs, lists, places in queues, history, capacity."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import ColumnElement, Select, Text, and_, bindparam, cast, func, not_, or_, select, tuple_
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.engine import Row
from sqlalchemy.ext.asyncio import AsyncConnection

from schemas.api.jobs import HistoryEntry
from schemas.envelope import Sequence as LogSequence
from schemas.events.capacity import CapacityObserved
from schemas.vocabulary import JobId, JobPhase, PriorityClass, QueueName, TenantName
from services.intake.codecs import CAPACITY, QUEUE
from services.intake.core.readmodel import JobRecord, QueueSeen
from services.intake.store import JOBS, ONE_JOB, StoredJob, to_stored_job
from services.intake.tables import capacity, history, jobs, queues, registers


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """Which jobs of a tenant to list, newest first. ``labels``: key to value, None for any value."""

    tenant: TenantName
    phases: tuple[JobPhase, ...] = ()
    queue: str | None = None
    priority: PriorityClass | None = None
    labels: tuple[tuple[str, str | None], ...] = ()
    before: str | None = None
    limit: int = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacitySeen:
    """The last capacity report and when it was taken in, by this service's clock."""

    observed: CapacityObserved
    received_at: datetime


async def find_job(connection: AsyncConnection, job_id: JobId, *, tenant: TenantName) -> StoredJob | None:
    row = (await connection.execute(ONE_JOB, {"id": job_id, "of_tenant": tenant})).one_or_none()
    return None if row is None else to_stored_job(row)


_EXISTS: Final = select(jobs.c.job_id).where(
    jobs.c.job_id == bindparam("id"), jobs.c.tenant == bindparam("of_tenant")
)


async def is_known(connection: AsyncConnection, job_id: JobId, *, tenant: TenantName) -> bool:
    return (await connection.execute(_EXISTS, {"id": job_id, "of_tenant": tenant})).one_or_none() is not None


async def list_jobs(connection: AsyncConnection, wanted: JobFilter) -> tuple[list[StoredJob], bool]:
    """One page, and whether another one follows."""
    statement = JOBS.where(jobs.c.tenant == wanted.tenant, *_conditions(wanted))
    statement = statement.order_by(jobs.c.job_id.desc()).limit(wanted.limit + 1)
    rows = (await connection.execute(statement)).all()
    return [to_stored_job(row) for row in rows[: wanted.limit]], len(rows) > wanted.limit


def _conditions(wanted: JobFilter) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    if wanted.phases:
        conditions.append(or_(*(_is_in(phase) for phase in wanted.phases)))
    if wanted.queue is not None:
        conditions.append(jobs.c.queue == wanted.queue)
    if wanted.priority is not None:
        conditions.append(jobs.c.priority == wanted.priority.value)
    if wanted.before is not None:
        conditions.append(jobs.c.job_id < wanted.before)
    exact = {key: value for key, value in wanted.labels if value is not None}
    if exact:
        conditions.append(jobs.c.labels.contains(exact))
    keys = [key for key, value in wanted.labels if value is None]
    if keys:
        conditions.append(jobs.c.labels.has_all(cast(keys, ARRAY(Text))))
    return conditions


_OPEN: Final = tuple(phase for phase in JobPhase if not phase.is_terminal and phase is not JobPhase.HELD)
_OPEN_JOBS: Final = (
    select(registers.c.filed_under, func.count())
    .where(registers.c.filed_under.in_([phase.value for phase in _OPEN]))
    .group_by(registers.c.filed_under)
)


async def count_open_jobs(connection: AsyncConnection) -> dict[JobPhase, int]:
    """Of all tenants; held ones are counted as Queued. Cost: that of the open jobs in an index, not of the ended."""
    counted = dict.fromkeys(_OPEN, 0)
    return counted | {JobPhase(phase): jobs for phase, jobs in await connection.execute(_OPEN_JOBS)}


_WAITS: Final = func.coalesce(registers.c.filed_under, JobPhase.QUEUED.value) == JobPhase.QUEUED.value


def _is_in(phase: JobPhase) -> ColumnElement[bool]:
    """The registers know all but the hold, which only the request register has."""
    match phase:
        case JobPhase.QUEUED:
            return and_(_WAITS, not_(jobs.c.held))
        case JobPhase.HELD:
            return and_(_WAITS, jobs.c.held)
        case _:
            return registers.c.filed_under == phase.value


_AHEAD: Final = (
    select(func.count())
    .select_from(jobs.outerjoin(registers, registers.c.job_id == jobs.c.job_id))
    .where(
        jobs.c.tenant == bindparam("of_tenant"),
        jobs.c.queue == bindparam("of_queue"),
        not_(jobs.c.held),
        not_(jobs.c.cancelled),
        _WAITS,
        or_(
            jobs.c.urgency > bindparam("than_urgency"),
            and_(jobs.c.urgency == bindparam("than_urgency"), jobs.c.job_id < bindparam("than_id")),
        ),
    )
)


async def count_ahead(connection: AsyncConnection, record: JobRecord) -> int:
    """Waiting jobs of the same queue that are more urgent, or as urgent and older. Cost: the jobs of the queue."""
    result = await connection.execute(
        _AHEAD,
        {
            "of_tenant": record.tenant,
            "of_queue": record.queue,
            "than_urgency": record.request.priority.urgency,
            "than_id": record.job_id,
        },
    )
    return int(result.scalar_one())


_QUEUES: Final = select(queues.c.queue, queues.c.xid, queues.c.id, cast(queues.c.observed, Text)).where(
    queues.c.tenant == bindparam("of_tenant")
)


async def load_queues(connection: AsyncConnection, *, tenant: TenantName) -> Mapping[QueueName, QueueSeen]:
    rows = await connection.execute(_QUEUES, {"of_tenant": tenant})
    return {
        QueueName(row.queue): QueueSeen(
            tenant=tenant,
            queue=QueueName(row.queue),
            observed=QUEUE.validate_json(row.observed),
            sequence=LogSequence(row.xid, row.id),
        )
        for row in rows
    }


_CAPACITY: Final = select(cast(capacity.c.observed, Text).label("observed"), capacity.c.received_at)


async def load_capacity(connection: AsyncConnection) -> CapacitySeen | None:
    """None before the first report: unknown is not zero."""
    row = (await connection.execute(_CAPACITY)).one_or_none()
    if row is None:
        return None
    return CapacitySeen(observed=CAPACITY.validate_json(row.observed), received_at=row.received_at)


_NAMES: Final = select(jobs.c.job_id, jobs.c.name).where(
    jobs.c.tenant == bindparam("of_tenant"), jobs.c.job_id == bindparam("ids", type_=ARRAY(Text)).any_()
)


async def load_names(
    connection: AsyncConnection, job_ids: Sequence[JobId], *, tenant: TenantName
) -> Mapping[JobId, str]:
    """Names of the tenant's own jobs; others are missing."""
    rows = await connection.execute(_NAMES, {"of_tenant": tenant, "ids": list(job_ids)})
    return {JobId(row.job_id): row.name for row in rows}


_ENTRY: Final[Select[Any]] = select(
    history.c.xid,
    history.c.id,
    history.c.time,
    history.c.type,
    history.c.summary,
    history.c.epoch,
    history.c.attempt,
    history.c.generation,
    history.c.workers,
    history.c.data,
)


def _page_statement() -> Select[Any]:
    after = tuple_(bindparam("after_xid"), bindparam("after_id"))
    return (
        _ENTRY.where(history.c.job_id == bindparam("id_of"), tuple_(history.c.xid, history.c.id) > after)
        .order_by(history.c.xid, history.c.id)
        .limit(bindparam("rows"))
    )


_PAGE: Final = _page_statement()
_LAST: Final[Select[Any]] = (
    _ENTRY.where(
        history.c.job_id == bindparam("id_of"), history.c.type == bindparam("types", type_=ARRAY(Text)).any_()
    )
    .order_by(history.c.xid.desc(), history.c.id.desc())
    .limit(1)
)


async def load_history(
    connection: AsyncConnection, job_id: JobId, *, after: LogSequence, limit: int
) -> tuple[list[HistoryEntry], bool]:
    """One page, oldest first, and whether another one follows."""
    parameters = {"id_of": job_id, "after_xid": after.xid, "after_id": after.id, "rows": limit + 1}
    rows = (await connection.execute(_PAGE, parameters)).all()
    return [_to_entry(row) for row in rows[:limit]], len(rows) > limit


async def load_last(connection: AsyncConnection, job_id: JobId, types: Sequence[str]) -> HistoryEntry | None:
    """The latest event of these types."""
    row = (await connection.execute(_LAST, {"id_of": job_id, "types": list(types)})).one_or_none()
    return None if row is None else _to_entry(row)


def _to_entry(row: Row[Any]) -> HistoryEntry:
    return HistoryEntry(
        sequence=str(LogSequence(row.xid, row.id)),
        time=row.time,
        type=row.type,
        summary=row.summary,
        epoch=row.epoch,
        attempt=row.attempt,
        generation=row.generation,
        workers=row.workers,
        data=row.data,
    )
