"""The request side in Postgres: submissions in batches, idempotency keys, the request register."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import BindParameter, Select, Text, bindparam, cast, delete, or_, select, update
from sqlalchemy.dialects.postgresql import ARRAY, JSONB, insert
from sqlalchemy.engine import Row

from schemas.events.job import RequestRegister
from schemas.vocabulary import JobId, PriorityClass, QueueName, TenantName, UserName
from services.intake.codecs import (
    GRANT,
    GROUP,
    MEASURED,
    PROPOSAL,
    ROLES,
    SPEC,
    STRINGS,
    WAITING,
    WARNINGS,
    to_json,
)
from services.intake.core.batches import Holder
from services.intake.core.readmodel import JobRecord, Registers
from services.intake.tables import environments, idempotency, jobs, registers
from shared.db.arrays import BOOLEAN, BYTES, INSTANT, INTEGER, TEXT, Columns, as_arrays, unnested
from shared.errors import Conflict
from shared.runtime.service import Transaction
from shared.telemetry.trace import TraceContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A job to be written. ``key``: the Idempotency-Key, with the hash of the parsed body."""

    record: JobRecord
    environment: Mapping[str, str]
    key: str | None
    body_hash: bytes | None
    trace: TraceContext | None = None

    @property
    def job_id(self) -> JobId:
        return self.record.job_id

    @property
    def tenant(self) -> TenantName:
        return self.record.tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredJob:
    record: JobRecord
    registers: Registers


# -- submissions ------------------------------------------------------------------------------------------------

_COLUMNS: Final[Columns] = (
    ("job_id", TEXT),
    ("tenant", TEXT),
    ("user_name", TEXT),
    ("queue", TEXT),
    ("name", TEXT),
    ("spec", TEXT),
    ("roles", TEXT),
    ("labels", TEXT),
    ("warnings", TEXT),
    ("allow_unsatisfiable", BOOLEAN),
    ("submitted_at", INSTANT),
    ("version", INTEGER),
    ("priority", TEXT),
    ("urgency", INTEGER),
    ("workers_min", INTEGER),
    ("workers_max", INTEGER),
    ("workers", INTEGER),
    ("held", BOOLEAN),
    ("cancelled", BOOLEAN),
    ("variables", TEXT),
    ("key", TEXT),
    ("body_hash", BYTES),
    ("expires_at", INSTANT),
)
_JSON_COLUMNS: Final = frozenset({"spec", "roles", "labels", "warnings"})


def _insert_statement() -> Select[tuple[str]]:
    """One statement for the whole batch: keys first, then the jobs whose key was free, and their variables.

    A key that has expired is taken over. Answers the ids of the jobs that are new.
    """
    source = select(unnested("source", _COLUMNS)).cte("src")
    free = insert(idempotency).from_select(
        ["tenant", "key", "body_hash", "job_id", "expires_at"],
        select(source.c.tenant, source.c.key, source.c.body_hash, source.c.job_id, source.c.expires_at)
        .where(source.c.key.is_not(None))
        .order_by(source.c.n),
    )
    keyed = (
        free.on_conflict_do_update(
            index_elements=["tenant", "key"],
            set_={name: free.excluded[name] for name in ("body_hash", "job_id", "expires_at")},
            where=idempotency.c.expires_at <= bindparam("now", type_=INSTANT),
        )
        .returning(idempotency.c.job_id)
        .cte("keyed")
    )
    fresh = (
        select(source).where(or_(source.c.key.is_(None), source.c.job_id.in_(select(keyed.c.job_id)))).cte("fresh")
    )
    names = [column.name for column in jobs.columns]
    values = [cast(fresh.c[name], JSONB) if name in _JSON_COLUMNS else fresh.c[name] for name in names]
    new = insert(jobs).from_select(names, select(*values).order_by(fresh.c.n)).returning(jobs.c.job_id).cte("new")
    values_of = insert(environments).from_select(
        ["job_id", "variables"],
        select(fresh.c.job_id, cast(fresh.c.variables, JSONB)).where(fresh.c.variables.is_not(None)),
    )
    return select(new.c.job_id).add_cte(values_of.cte("values_of"))


_INSERT: Final = _insert_statement()


async def save_submissions(
    tx: Transaction, batch: Sequence[Submission], *, now: datetime, expires_at: datetime
) -> frozenset[JobId]:
    """Write the submissions whose key is free; answers their job ids. Keys must differ inside the batch."""
    parameters = {**as_arrays(_COLUMNS, (_row_of(item, expires_at) for item in batch)), "now": now}
    result = await tx.execute(_INSERT, parameters)
    return frozenset(JobId(job_id) for job_id in result.scalars())


def _row_of(item: Submission, expires_at: datetime) -> tuple[Any, ...]:
    record, request = item.record, item.record.request
    return (
        record.job_id,
        record.tenant,
        record.user,
        record.queue,
        record.spec.name,
        to_json(SPEC, record.spec),
        to_json(ROLES, record.roles),
        to_json(STRINGS, dict(record.spec.labels)),
        to_json(WARNINGS, record.warnings),
        record.allow_unsatisfiable,
        record.submitted_at,
        request.version,
        request.priority.value,
        request.priority.urgency,
        request.workers_min,
        request.workers_max,
        request.workers,
        request.held,
        request.cancelled,
        to_json(STRINGS, dict(item.environment)) if item.environment else None,
        item.key,
        item.body_hash,
        expires_at,
    )


_KEY_COLUMNS: Final[Columns] = (("tenant", TEXT), ("key", TEXT))


def _holders_statement() -> Select[tuple[str, str, bytes, str]]:
    source = unnested("asked", _KEY_COLUMNS)
    return select(idempotency.c.tenant, idempotency.c.key, idempotency.c.body_hash, idempotency.c.job_id).join(
        source, (source.c.tenant == idempotency.c.tenant) & (source.c.key == idempotency.c.key)
    )


_HOLDERS: Final = _holders_statement()


async def load_key_holders(
    tx: Transaction, keys: Sequence[tuple[TenantName, str]]
) -> dict[tuple[TenantName, str], Holder]:
    result = await tx.execute(_HOLDERS, as_arrays(_KEY_COLUMNS, keys))
    return {
        (TenantName(row.tenant), row.key): Holder(body_hash=row.body_hash, job_id=JobId(row.job_id)) for row in result
    }


_EXPIRED: Final = delete(idempotency).where(
    idempotency.c.expires_at <= bindparam("now", type_=INSTANT),
)


async def delete_expired_keys(tx: Transaction, *, now: datetime) -> int:
    result = await tx.execute(_EXPIRED, {"now": now})
    return result.rowcount


_FORGET: Final = delete(environments).where(environments.c.job_id == bindparam("ids", type_=ARRAY(TEXT)).any_())


async def delete_environments(tx: Transaction, job_ids: Sequence[JobId]) -> None:
    """The values of jobs that have ended."""
    await tx.execute(_FORGET, {"ids": list(job_ids)})


# -- one job ----------------------------------------------------------------------------------------------------

JOB_COLUMNS: Final = (
    jobs.c.job_id,
    jobs.c.tenant,
    jobs.c.user_name,
    jobs.c.queue,
    cast(jobs.c.spec, Text).label("spec"),
    cast(jobs.c.roles, Text).label("roles"),
    cast(jobs.c.warnings, Text).label("warnings"),
    jobs.c.allow_unsatisfiable,
    jobs.c.submitted_at,
    jobs.c.version,
    jobs.c.priority,
    jobs.c.workers_min,
    jobs.c.workers_max,
    jobs.c.workers,
    jobs.c.held,
    jobs.c.cancelled,
)
REGISTER_COLUMNS: Final = (
    registers.c.submitted_xid,
    cast(registers.c.allocation, Text).label("allocation"),
    cast(registers.c.waiting, Text).label("waiting"),
    cast(registers.c.worker, Text).label("worker"),
    cast(registers.c.metric, Text).label("metric"),
    cast(registers.c.scaling, Text).label("scaling"),
)
JOBS: Final = select(*JOB_COLUMNS, *REGISTER_COLUMNS).select_from(
    jobs.outerjoin(registers, registers.c.job_id == jobs.c.job_id)
)
ONE_JOB: Final = JOBS.where(jobs.c.job_id == bindparam("id"), jobs.c.tenant == bindparam("of_tenant"))


async def load_job(tx: Transaction, job_id: JobId, *, tenant: TenantName) -> StoredJob | None:
    """None for an unknown id, and for a job of another tenant."""
    row = (await tx.execute(ONE_JOB, {"id": job_id, "of_tenant": tenant})).one_or_none()
    return None if row is None else to_stored_job(row)


def to_stored_job(row: Row[Any]) -> StoredJob:
    return StoredJob(record=_to_record(row), registers=to_registers(row))


def _to_record(row: Row[Any]) -> JobRecord:
    return JobRecord(
        job_id=JobId(row.job_id),
        tenant=TenantName(row.tenant),
        user=UserName(row.user_name),
        queue=QueueName(row.queue),
        spec=SPEC.validate_json(row.spec),
        roles=ROLES.validate_json(row.roles),
        request=RequestRegister(
            version=row.version,
            priority=PriorityClass(row.priority),
            workers_min=row.workers_min,
            workers_max=row.workers_max,
            workers=row.workers,
            held=row.held,
            cancelled=row.cancelled,
        ),
        warnings=WARNINGS.validate_json(row.warnings),
        allow_unsatisfiable=row.allow_unsatisfiable,
        submitted_at=row.submitted_at,
    )


def to_registers(row: Row[Any]) -> Registers:
    """Blank where nobody has spoken of the job yet."""
    if row.allocation is None:
        return Registers()
    return Registers(
        grant=GRANT.validate_json(row.allocation),
        waiting=WAITING.validate_json(row.waiting),
        group=GROUP.validate_json(row.worker),
        measured=MEASURED.validate_json(row.metric),
        proposal=PROPOSAL.validate_json(row.scaling),
        submitted_xid=row.submitted_xid,
    )


def _bound(name: str) -> BindParameter[Any]:
    return bindparam(f"new_{name}")


_REGISTER_FIELDS: Final = (
    "version",
    "priority",
    "urgency",
    "workers_min",
    "workers_max",
    "workers",
    "held",
    "cancelled",
)
_CHANGE: Final = (
    update(jobs)
    .where(jobs.c.job_id == bindparam("id"), jobs.c.version == bindparam("version_before"))
    .values({name: _bound(name) for name in _REGISTER_FIELDS})
)


async def save_request(tx: Transaction, job_id: JobId, request: RequestRegister) -> None:
    """Replace the register by the next version. Raises Conflict if another request was faster."""
    result = await tx.execute(
        _CHANGE,
        {
            "id": job_id,
            "version_before": request.version - 1,
            "new_version": request.version,
            "new_priority": request.priority.value,
            "new_urgency": request.priority.urgency,
            "new_workers_min": request.workers_min,
            "new_workers_max": request.workers_max,
            "new_workers": request.workers,
            "new_held": request.held,
            "new_cancelled": request.cancelled,
        },
    )
    if result.rowcount != 1:
        raise Conflict("another request changed this job at the same time")
