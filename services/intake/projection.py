"""The read model in Postgres: registers, history, queues and capacity, written a batch at a time."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Select, select
from sqlalchemy.dialects.postgresql import Insert

from schemas.vocabulary import JobId
from services.intake.codecs import (
    CAPACITY,
    GRANT,
    GROUP,
    MEASURED,
    PROPOSAL,
    QUEUE,
    WAITING,
    event_json,
    storable_text,
    to_storable_json,
)
from services.intake.core.readmodel import Folded, HistoryRow, QueueSeen, Registers, filed_under
from services.intake.store import REGISTER_COLUMNS, to_registers
from services.intake.tables import capacity, history, queues, registers
from shared.db.arrays import BIGINT, INSTANT, INTEGER, TEXT, Columns, as_arrays, insert_rows, unnested, upsert_rows
from shared.runtime.service import Transaction

_IDS: Final[Columns] = (("job_id", TEXT),)


def _load_statement() -> Select[Any]:
    source = unnested("asked", _IDS)
    return select(registers.c.job_id, *REGISTER_COLUMNS).join(source, source.c.job_id == registers.c.job_id)


_LOAD: Final = _load_statement()


async def load_registers(tx: Transaction, job_ids: Sequence[JobId]) -> dict[JobId, Registers]:
    """Jobs of which nobody has spoken yet are missing."""
    if not job_ids:
        return {}
    result = await tx.execute(_LOAD, as_arrays(_IDS, ((job_id,) for job_id in job_ids)))
    return {JobId(row.job_id): to_registers(row) for row in result}


async def save_folded(tx: Transaction, folded: Folded, *, now: datetime) -> None:
    if folded.jobs:
        rows = (_register_row(job_id, job) for job_id, job in folded.jobs)
        await tx.execute(_SAVE_REGISTERS, as_arrays(_REGISTERS, rows))
    if folded.history:
        await tx.execute(_SAVE_HISTORY, as_arrays(_HISTORY, map(_history_row, folded.history)))
    if folded.queues:
        await tx.execute(_SAVE_QUEUES, as_arrays(_QUEUES, map(_queue_row, folded.queues)))
    if folded.capacity is not None:
        row = (folded.capacity.revision, now, to_storable_json(CAPACITY, folded.capacity))
        await tx.execute(_SAVE_CAPACITY, as_arrays(_CAPACITY, [row]))


_REGISTERS: Final[Columns] = (
    ("job_id", TEXT),
    ("filed_under", TEXT),
    ("submitted_xid", BIGINT),
    ("allocation", TEXT),
    ("waiting", TEXT),
    ("worker", TEXT),
    ("metric", TEXT),
    ("scaling", TEXT),
)
_HISTORY: Final[Columns] = (
    ("job_id", TEXT),
    ("xid", BIGINT),
    ("id", BIGINT),
    ("time", INSTANT),
    ("type", TEXT),
    ("summary", TEXT),
    ("epoch", INTEGER),
    ("attempt", INTEGER),
    ("generation", INTEGER),
    ("workers", INTEGER),
    ("data", TEXT),
)
_QUEUES: Final[Columns] = (
    ("tenant", TEXT),
    ("queue", TEXT),
    ("xid", BIGINT),
    ("id", BIGINT),
    ("observed", TEXT),
)
_CAPACITY: Final[Columns] = (("revision", BIGINT), ("received_at", INSTANT), ("observed", TEXT))
_SAVE_REGISTERS: Final = upsert_rows(registers, _REGISTERS)
_SAVE_HISTORY: Final = insert_rows(history, _HISTORY).on_conflict_do_nothing()
"""A repeated event is the same row."""


def _save_queues() -> Insert:
    statement = insert_rows(queues, _QUEUES)
    excluded = statement.excluded
    return statement.on_conflict_do_update(
        index_elements=["tenant", "queue"],
        set_={name: excluded[name] for name in ("xid", "id", "observed")},
        where=(queues.c.xid < excluded.xid) | ((queues.c.xid == excluded.xid) & (queues.c.id < excluded.id)),
    )


def _save_capacity() -> Insert:
    statement = insert_rows(capacity, _CAPACITY)
    excluded = statement.excluded
    return statement.on_conflict_do_update(
        index_elements=["single"],
        set_={name: excluded[name] for name in ("revision", "received_at", "observed")},
        where=capacity.c.revision <= excluded.revision,
    )


_SAVE_QUEUES: Final = _save_queues()
_SAVE_CAPACITY: Final = _save_capacity()


def _register_row(job_id: JobId, job: Registers) -> tuple[Any, ...]:
    return (
        job_id,
        filed_under(job).value,
        job.submitted_xid,
        to_storable_json(GRANT, job.grant),
        to_storable_json(WAITING, job.waiting),
        to_storable_json(GROUP, job.group),
        to_storable_json(MEASURED, job.measured),
        to_storable_json(PROPOSAL, job.proposal),
    )


def _history_row(row: HistoryRow) -> tuple[Any, ...]:
    told = row.told
    return (
        row.job_id,
        row.sequence.xid,
        row.sequence.id,
        row.time,
        row.type,
        storable_text(told.summary),
        told.epoch,
        told.attempt,
        told.generation,
        told.workers,
        event_json(row.data),
    )


def _queue_row(row: QueueSeen) -> tuple[Any, ...]:
    return (row.tenant, row.queue, row.sequence.xid, row.sequence.id, to_storable_json(QUEUE, row.observed))
