"""Jobs, members, generations and checkpoints in Postgres: loaded by id or as a whole, saved as differences."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from hashlib import sha256
from typing import Any, Final

from pydantic import TypeAdapter
from sqlalchemy import Row, TextClause, and_, cast, delete, exists, func, or_, select, text
from sqlalchemy.dialects.postgresql import JSONB, insert
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.types import Text

from schemas.events.capacity import CapacityObserved
from schemas.vocabulary import JobId
from services.execution.core.desired import GENERATIONS_KEPT
from services.execution.core.recent import RECENT
from services.execution.core.state import Checkpoint, Desired, Generation, GenerationState, Job, Member, MemberState
from services.execution.tables import capacity, checkpoints, generations, jobs, members
from shared.runtime.service import Transaction
from shared.signing import trainer_token

_REGISTER: Final = TypeAdapter(Job)
_MEMBER: Final = TypeAdapter(Member)
_GENERATION: Final = TypeAdapter(Generation)
_CAPACITY: Final = TypeAdapter(CapacityObserved)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredJob:
    job: Job
    token_hash: bytes


def token_hash(signing_key: bytes, job_id: JobId) -> bytes:
    """What is stored of a job's token."""
    return sha256(trainer_token(signing_key, job_id).encode()).digest()


def is_active(job: Job) -> bool:
    """It has an attempt under way, or members that were not seen gone: it is kept in memory and looked after."""
    under_way = job.desired in (Desired.GRANTED, Desired.EVICTED) and not job.is_over
    return under_way or any(member.state is not MemberState.GONE for member in job.members)


# -- loading --------------------------------------------------------------------------------------------------


async def load_jobs(connection: AsyncConnection, ids: Sequence[JobId] | None = None) -> dict[JobId, StoredJob]:
    """The jobs with these ids, or all that are active; of members that are gone, those of the present attempt."""
    chosen = jobs.c.is_active if ids is None else jobs.c.job_id.in_(ids)
    rows = (
        await connection.execute(
            select(
                jobs.c.job_id,
                cast(jobs.c.register, Text).label("register"),
                cast(jobs.c.spec, Text).label("spec"),
                jobs.c.token_hash,
            ).where(chosen)
        )
    ).all()
    found = {JobId(row.job_id): row for row in rows}
    if not found:
        return {}
    own_members = await _load_members(connection, list(found))
    own_generations = await _load_generations(connection, list(found))
    return {
        job_id: StoredJob(
            job=_to_job(row, own_members.get(job_id, []), own_generations.get(job_id, [])),
            token_hash=bytes(row.token_hash),
        )
        for job_id, row in sorted(found.items())
    }


def _to_job(row: Row[Any], own_members: list[Member], own_generations: list[Generation]) -> Job:
    value = json.loads(row.register)
    value["spec"] = json.loads(row.spec) if row.spec is not None else None
    job = _REGISTER.validate_python(value)
    kept = [g for g in own_generations if g.attempt == job.attempt]
    line = [g for g in own_generations if g.attempt < job.attempt and g.state is GenerationState.STARTED]
    return replace(
        job,
        members=tuple(m for m in own_members if m.state is not MemberState.GONE or m.attempt == job.attempt),
        generations=(*line[-GENERATIONS_KEPT:], *kept),
    )


async def _load_members(connection: AsyncConnection, ids: Sequence[JobId]) -> dict[JobId, list[Member]]:
    newest = func.row_number().over(partition_by=members.c.job_id, order_by=members.c.ordinal.desc())
    ranked = select(members, newest.label("place")).where(members.c.job_id.in_(ids)).subquery()
    of_attempt = and_(ranked.c.attempt == jobs.c.attempt, ranked.c.place <= RECENT)
    rows = await connection.execute(
        select(ranked)
        .join(jobs, jobs.c.job_id == ranked.c.job_id)
        .where(or_(ranked.c.state != MemberState.GONE.value, of_attempt))
        .order_by(ranked.c.job_id, ranked.c.ordinal)
    )
    found: dict[JobId, list[Member]] = {}
    for row in rows.mappings():
        found.setdefault(JobId(row["job_id"]), []).append(_MEMBER.validate_python(dict(row)))
    return found


async def load_all_members(connection: AsyncConnection, job_id: JobId) -> list[Member]:
    """Every member that a job ever had, in the order in which they were committed."""
    rows = await connection.execute(select(members).where(members.c.job_id == job_id).order_by(members.c.ordinal))
    return [_MEMBER.validate_python(dict(row)) for row in rows.mappings()]


async def _load_generations(connection: AsyncConnection, ids: Sequence[JobId]) -> dict[JobId, list[Generation]]:
    newest = func.row_number().over(partition_by=generations.c.job_id, order_by=generations.c.number.desc())
    ranked = select(generations, newest.label("place")).where(generations.c.job_id.in_(ids)).subquery()
    rows = await connection.execute(
        select(ranked).where(ranked.c.place <= RECENT).order_by(ranked.c.job_id, ranked.c.number)
    )
    found: dict[JobId, list[Generation]] = {}
    for row in rows.mappings():
        found.setdefault(JobId(row["job_id"]), []).append(_GENERATION.validate_python(dict(row)))
    return found


async def load_capacity(connection: AsyncConnection) -> CapacityObserved | None:
    row = (await connection.execute(select(cast(capacity.c.observed, Text).label("observed")))).one_or_none()
    return _CAPACITY.validate_json(row.observed) if row is not None else None


async def job_exists(connection: AsyncConnection, job_id: JobId) -> bool:
    return (await connection.execute(select(jobs.c.job_id).where(jobs.c.job_id == job_id))).first() is not None


async def load_ended(connection: AsyncConnection, *, before: datetime, with_members: bool, limit: int) -> list[JobId]:
    """Jobs that ended before an instant and need nobody's care, oldest first; only those that still have members."""
    statement = select(jobs.c.job_id).where(jobs.c.ended_at < before, ~jobs.c.is_active)
    if with_members:
        statement = statement.where(exists().where(members.c.job_id == jobs.c.job_id))
    rows = await connection.execute(statement.order_by(jobs.c.ended_at, jobs.c.job_id).limit(limit))
    return [JobId(row.job_id) for row in rows]


# -- saving ---------------------------------------------------------------------------------------------------


def _upsert(table: str, columns: Mapping[str, str], key: Sequence[str]) -> TextClause:
    """Rows come as one array of objects: a batch is one statement with one parameter."""
    names = ", ".join(f'"{name}"' for name in columns)
    typed = ", ".join(f'"{name}" {kind}' for name, kind in columns.items())
    values = ", ".join(f"decode(\"{n}\", 'hex')" if n == "token_hash" else f'"{n}"' for n in columns)
    changes = ", ".join(f'"{name}" = excluded."{name}"' for name in columns if name not in key)
    keys = ", ".join(f'"{name}"' for name in key)
    return text(
        f"insert into execution.{table} ({names}) "  # noqa: S608 - names of our own columns
        f"select {values} from jsonb_to_recordset(cast(:rows as jsonb)) as r({typed}) "
        f"on conflict ({keys}) do update set {changes}"
    )


_SAVE_JOBS: Final = _upsert(
    "jobs",
    {
        "job_id": "text",
        "tenant": "text",
        "spec": "jsonb",
        "token_hash": "text",
        "desired": "text",
        "epoch": "integer",
        "attempt": "integer",
        "is_active": "boolean",
        "register": "jsonb",
        "ended_at": "timestamptz",
    },
    ("job_id",),
)
_SAVE_MEMBERS: Final = _upsert(
    "members",
    {
        "job_id": "text",
        "role": "text",
        "index": "integer",
        "incarnation": "integer",
        "ordinal": "integer",
        "attempt": "integer",
        "node": "text",
        "nonce": "text",
        "devices": "jsonb",
        "state": "text",
        "ending": "text",
        "ending_reason": "text",
        "finished": "boolean",
        "exit_code": "integer",
        "attributed_to": "text",
        "exit_reason": "text",
    },
    ("job_id", "role", "index", "incarnation"),
)
_SAVE_GENERATIONS: Final = _upsert(
    "generations",
    {
        "job_id": "text",
        "number": "integer",
        "attempt": "integer",
        "epoch": "integer",
        "members": "jsonb",
        "leavers": "jsonb",
        "source": "integer",
        "checkpoint": "text",
        "state": "text",
        "from_step": "bigint",
        "ports": "jsonb",
    },
    ("job_id", "number"),
)


async def save_jobs(tx: Transaction, changes: Iterable[tuple[StoredJob | None, StoredJob]]) -> None:
    """Write what differs between each pair (before, after), in a fixed order. Nothing is deleted."""
    changed = [(old, new) for old, new in changes if old is None or old.job != new.job]
    pairs = sorted(changed, key=lambda pair: pair[1].job.job_id)
    await _run(tx, _SAVE_JOBS, [_job_row(new) for old, new in pairs if old is None or _differs(old.job, new.job)])
    new_members: list[dict[str, Any]] = []
    new_generations: list[dict[str, Any]] = []
    for old, new in pairs:
        known_members = {m.name: m for m in old.job.members} if old is not None else {}
        new_members += [_member_row(m) for m in new.job.members if known_members.get(m.name) != m]
        known = {g.number: g for g in old.job.generations} if old is not None else {}
        for generation in new.job.generations:
            if known.get(generation.number) != generation:
                new_generations.append(_generation_row(new.job.job_id, generation))
    await _run(tx, _SAVE_MEMBERS, new_members)
    await _run(tx, _SAVE_GENERATIONS, new_generations)


def _differs(old: Job, new: Job) -> bool:
    """Whether the job's own row differs; members and generations have rows of their own."""
    return any(getattr(old, name) != getattr(new, name) for name in _REGISTER_FIELDS) or (
        is_active(old) != is_active(new)
    )


_REGISTER_FIELDS: Final = tuple(f.name for f in fields(Job) if f.name not in ("members", "generations"))


def _register_of(job: Job) -> Job:
    return replace(job, members=(), generations=())


def _job_row(stored: StoredJob) -> dict[str, Any]:
    job = stored.job
    register = json.loads(_REGISTER.dump_json(_register_of(job)))
    return {
        "job_id": job.job_id,
        "tenant": job.tenant,
        "spec": register.pop("spec"),
        "token_hash": stored.token_hash.hex(),
        "desired": job.desired.value,
        "epoch": job.epoch,
        "attempt": job.attempt,
        "is_active": is_active(job),
        "register": register,
        "ended_at": job.ended_at.isoformat() if job.ended_at is not None else None,
    }


def _member_row(member: Member) -> dict[str, Any]:
    row: dict[str, Any] = _MEMBER.dump_python(member, mode="json")
    return row


def _generation_row(job_id: JobId, generation: Generation) -> dict[str, Any]:
    row: dict[str, Any] = _GENERATION.dump_python(generation, mode="json")
    return {"job_id": job_id, **row}


async def _run(tx: Transaction, statement: TextClause, rows: Sequence[Mapping[str, Any]]) -> None:
    if rows:
        await tx.execute(statement, {"rows": _json(rows)})


def _json(value: object) -> str:
    r"""Postgres refuses ``\u0000`` in jsonb: what a trainer or a user wrote with it is kept with U+FFFD instead."""
    return json.dumps(value, separators=(",", ":")).replace("\\u0000", "\\ufffd")


async def save_checkpoints(tx: Transaction, written: Iterable[tuple[JobId, Checkpoint]], *, now: datetime) -> None:
    rows = [
        {
            "job_id": job_id,
            "generation": checkpoint.generation,
            "step": checkpoint.step,
            "location": checkpoint.location.replace("\x00", "\ufffd"),
            "written_at": now,
        }
        for job_id, checkpoint in sorted(written, key=lambda entry: (entry[0], entry[1].generation, entry[1].step))
    ]
    if rows:
        await tx.execute(insert(checkpoints).on_conflict_do_nothing(), rows)


async def save_capacity(tx: Transaction, observed: CapacityObserved) -> None:
    document = json.loads(_CAPACITY.dump_json(observed))
    statement = insert(capacity).values(single=True, revision=observed.revision, observed=cast(document, JSONB))
    await tx.execute(
        statement.on_conflict_do_update(
            index_elements=["single"],
            set_={"revision": statement.excluded.revision, "observed": statement.excluded.observed},
        )
    )


async def delete_jobs(tx: Transaction, ids: Sequence[JobId], *, keep_jobs: bool) -> None:
    """Forget the members of jobs, or the jobs with all that belongs to them."""
    for table in (members,) if keep_jobs else (members, generations, checkpoints, jobs):
        await tx.execute(delete(table).where(table.c.job_id.in_(ids)))
