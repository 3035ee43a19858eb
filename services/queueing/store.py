"""Queueing's rows in Postgres: loaded once, saved as the changes of one turn, in a handful of statements."""

import typing
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Select,
    Table,
    Text,
    any_,
    bindparam,
    cast,
    delete,
    select,
)
from sqlalchemy.dialects.postgresql import JSONB, Insert, insert

from schemas.vocabulary import JobId
from services.queueing.core.book import Book, Changes
from services.queueing.core.values import Capacity
from services.queueing.tables import capacity, charges, parked, promises, tombstones, waiting, workloads
from services.queueing.translate import (
    Row,
    capacity_row,
    charge_rows,
    parked_row,
    promise_row,
    to_capacity,
    to_parked,
    to_promise,
    to_workload,
    waiting_row,
    workload_row,
)
from shared.db.arrays import as_arrays, columns_of, upsert_rows
from shared.runtime.service import Transaction


async def load_book(tx: Transaction, *, now: float) -> Book:
    """Everything open. ``now``: seconds of this process's monotonic clock. Cost: about 30 us of CPU a job."""
    charged = _by_job(await _rows(tx, select(charges)))
    reasons = {row["job_id"]: row for row in await _rows(tx, select(waiting))}
    book = Book.restored(
        workloads=(),
        promises=(to_promise(row) for row in await _rows(tx, select(promises))),
        capacity=await _load_capacity(tx),
        parked=(to_parked(row) for row in await _rows(tx, select(parked))),
        now=now,
    )
    after = ""
    while page := await _rows(tx, _LOAD_WORKLOADS, {"after": after}):
        book.restore(
            (to_workload(row, charged.get(row["job_id"], ()), reasons.get(row["job_id"])) for row in page), now=now
        )
        after = page[-1]["job_id"]
    return book


async def load_closed(tx: Transaction, job_ids: Sequence[JobId]) -> frozenset[JobId]:
    """Which of these have closed before."""
    if not job_ids:
        return frozenset()
    found = await tx.execute(_LOAD_CLOSED, {"job_ids": list(job_ids)})
    return frozenset(JobId(row.job_id) for row in found)


async def save_changes(tx: Transaction, changes: Changes, *, now: datetime) -> None:
    """Write what changed; at most one statement a table and kind, whatever the number of rows."""
    touched = [w.job_id for w in (*changes.workloads, *changes.closed)]
    if touched:
        await _upsert(tx, _SAVE_WORKLOADS, workloads, [workload_row(w) for w in changes.workloads])
        charged = [row for w in changes.workloads for row in charge_rows(w)]
        await _replace(tx, charges, touched, _SAVE_CHARGES, charged)
        reasons = [row for w in changes.workloads if (row := waiting_row(w)) is not None]
        await _replace(tx, waiting, touched, _SAVE_WAITING, reasons)
    if changes.closed:
        closed_ids = [w.job_id for w in changes.closed]
        await tx.execute(_DELETE[workloads.name], {"job_ids": closed_ids})
        await tx.execute(
            insert(tombstones),
            [{"job_id": w.job_id, "epoch": w.epoch, "attempt": w.attempt, "closed_at": now} for w in changes.closed],
        )
    if changes.promises is not None:
        await tx.execute(delete(promises))
        if changes.promises:
            await tx.execute(insert(promises), [dict(promise_row(promise)) for promise in changes.promises])
    if changes.unparked:
        await tx.execute(_UNPARK, {"ordinals": list(changes.unparked)})
    if changes.parked:
        await tx.execute(insert(parked), [dict(parked_row(word)) for word in changes.parked])
    if changes.capacity is not None:
        await tx.execute(_SAVE_CAPACITY, capacity_row(changes.capacity))


async def delete_old_tombstones(tx: Transaction, *, before: datetime) -> None:
    await tx.execute(delete(tombstones).where(tombstones.c.closed_at < before))


async def _load_capacity(tx: Transaction) -> Capacity | None:
    rows = await _rows(tx, _LOAD_CAPACITY)
    return to_capacity(rows[0]) if rows else None


async def _rows(
    tx: Transaction, statement: Select[Any], parameters: Mapping[str, Any] | None = None
) -> Sequence[Row]:
    return typing.cast("Sequence[Row]", (await tx.execute(statement, parameters)).mappings().all())


async def _upsert(tx: Transaction, statement: Insert, table: Table, rows: Sequence[Row]) -> None:
    if rows:
        columns = _COLUMNS[table.name]
        await tx.execute(statement, as_arrays(columns, ([row[name] for name, _ in columns] for row in rows)))


async def _replace(tx: Transaction, table: Table, job_ids: list[JobId], save: Insert, rows: list[Row]) -> None:
    """Rows of these jobs become ``rows``: written first, then those that are left over are deleted."""
    await _upsert(tx, save, table, rows)
    kept = {row["job_id"] for row in rows}
    gone = [job_id for job_id in job_ids if job_id not in kept]
    if gone:
        await tx.execute(_DELETE[table.name], {"job_ids": gone})


def _by_job(rows: Iterable[Row]) -> dict[JobId, list[Row]]:
    found: dict[JobId, list[Row]] = {}
    for row in rows:
        found.setdefault(JobId(row["job_id"]), []).append(row)
    return found


_JSON: Final = frozenset(c.name for c in workloads.columns if isinstance(c.type, JSONB))
_PAGE_ROWS: Final = 2_000
_LOAD_WORKLOADS: Final = (
    select(*[cast(c, Text).label(c.name) if c.name in _JSON else c for c in workloads.columns])
    .where(workloads.c.job_id > bindparam("after", type_=Text()))
    .order_by(workloads.c.job_id)
    .limit(_PAGE_ROWS)
)
"""A page at a time: between two pages others get their turn, the renewal of the lease above all."""
_LOAD_CAPACITY: Final = select(capacity.c.revision, cast(capacity.c.report, Text).label("report"))
_COLUMNS: Final = {table.name: columns_of(table) for table in (workloads, charges, waiting)}
_SAVE_WORKLOADS: Final = upsert_rows(workloads, _COLUMNS[workloads.name])
_SAVE_CHARGES: Final = upsert_rows(charges, _COLUMNS[charges.name])
_SAVE_WAITING: Final = upsert_rows(waiting, _COLUMNS[waiting.name])
_JOB_IDS: Final = bindparam("job_ids", type_=ARRAY(Text()))
_DELETE: Final = {
    table.name: delete(table).where(table.c.job_id == any_(_JOB_IDS)) for table in (workloads, charges, waiting)
}
_LOAD_CLOSED: Final = select(tombstones.c.job_id).where(tombstones.c.job_id == any_(_JOB_IDS))
_UNPARK: Final = delete(parked).where(parked.c.ordinal == any_(bindparam("ordinals", type_=ARRAY(BigInteger()))))
_report = cast(bindparam("report", type_=Text()), JSONB)
_SAVE_CAPACITY: Final = (
    insert(capacity)
    .values(revision=bindparam("revision"), report=_report)
    .on_conflict_do_update(index_elements=["single"], set_={"revision": bindparam("revision"), "report": _report})
)
