"""Retention: rows of the outbox that are old and behind every reader are deleted, a little at a time."""

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import ARRAY, BigInteger, DateTime, Integer, Text, bindparam, text
from sqlalchemy.ext.asyncio import AsyncEngine

from shared.clock import Clock, pause
from shared.db.errors import connecting
from shared.db.types import XID8
from shared.errors import Conflict, Unavailable
from shared.telemetry.logs import get_logger

KEEP_SECONDS: Final = 24 * 3600.0
_ROWS_MAX: Final = 5_000
_INTERVAL_SECONDS: Final = 60.0
_LOCK_KEY: Final = 0x7469_6466
_log = get_logger()

_ROLE: Final = text("set local role tide_log")
_TURN: Final = text("select pg_try_advisory_xact_lock(:key)")
_DELETE: Final = text(
    """
    with old as (
        select o.xid, o.id, o.time from log.outbox o
         where (o.xid, o.id) <= (
                   select p.xid, p.id from log.position p
                    where p.reader = any(:readers) or :readers = '{}'
                    order by p.xid, p.id limit 1
               )
         order by o.xid, o.id limit :limit
    )
    delete from log.outbox o using old
     where o.xid = old.xid and o.id = old.id and old.time < :before
    returning o.xid, o.id
    """
).bindparams(
    bindparam("before", type_=DateTime(timezone=True)),
    bindparam("limit", type_=Integer()),
    bindparam("readers", type_=ARRAY(Text())),
)
_REMEMBER: Final = text(
    "update log.identity set trimmed_xid = :xid, trimmed_id = :id where (trimmed_xid, trimmed_id) < (:xid, :id)"
).bindparams(bindparam("xid", type_=XID8()), bindparam("id", type_=BigInteger()))


async def delete_old_rows(
    engine: AsyncEngine, *, before: datetime, limit: int = _ROWS_MAX, readers: Sequence[str] = ()
) -> int:
    """Delete at most ``limit`` rows older than ``before`` that every reader has passed; gives how many.

    ``readers``: those that read the outbox itself, empty for all that have a position: where Kafka carries the
    events that is the relay alone. One process at a time; another that asks meanwhile gets 0. Without readers nothing
    is deleted.
    """
    with connecting():
        async with engine.begin() as connection:
            await connection.execute(_ROLE)
            if not (await connection.execute(_TURN, {"key": _LOCK_KEY})).scalar_one():
                return 0
            rows = (
                await connection.execute(_DELETE, {"before": before, "limit": limit, "readers": list(readers)})
            ).all()
            if rows:
                last = max((row.xid, row.id) for row in rows)
                await connection.execute(_REMEMBER, {"xid": last[0], "id": last[1]})
            return len(rows)


async def run_retention(
    engine: AsyncEngine,
    clock: Clock,
    stopping: asyncio.Event,
    *,
    keep_seconds: float = KEEP_SECONDS,
    readers: Sequence[str] = (),
) -> None:
    """Once a minute, until nothing is left to delete."""
    while not stopping.is_set():
        try:
            before = clock.now() - timedelta(seconds=keep_seconds)
            deleted = await delete_old_rows(engine, before=before, readers=readers)
        except (Unavailable, Conflict) as exc:
            _log.debug("retention_postponed", detail=str(exc))
            deleted = 0
        await pause(stopping, 1.0 if deleted == _ROWS_MAX else _INTERVAL_SECONDS)
