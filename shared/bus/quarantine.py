"""Records set aside: what cannot be decoded or handled, and what follows it under the same key.

A parked key stays so until someone retries or drops what was set aside; other keys go on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import ARRAY, BigInteger, Boolean, DateTime, Integer, LargeBinary, Text, bindparam, text

from schemas.envelope import Sequence as LogSequence
from schemas.vocabulary import Topic
from shared.bus.log import Partition, Record
from shared.db.types import XID8
from shared.runtime.service import Transaction

REASON_CHARACTERS_MAX: Final = 2_000


class Cause(StrEnum):
    """Why a record stands in quarantine."""

    UNDECODABLE = "undecodable"
    FAILED = "failed"
    PARKED = "parked"


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside:
    """One record and why it is set aside. ``parks_key``: later records of its key follow it."""

    record: Record
    cause: Cause
    reason: str

    @property
    def parks_key(self) -> bool:
        return self.record.parks_its_key


_PLACES: Final = (
    bindparam("topics", type_=ARRAY(Text())),
    bindparam("partitions", type_=ARRAY(Integer())),
    bindparam("xids", type_=ARRAY(XID8())),
    bindparam("ids", type_=ARRAY(BigInteger())),
)
_ADD: Final = text(
    """
    insert into log.quarantine
        (reader, xid, id, time, topic, partition, key, type, headers, payload, cause, reason, parks_key, set_aside_at)
    select :reader, r.xid, r.id, r.time, r.topic, r.partition, r.key, r.type, r.headers, r.payload, r.cause, r.reason,
           r.parks_key, :now
      from unnest(:xids, :ids, :times, :topics, :partitions, :keys, :types, :headers, :payloads, :causes, :reasons,
                  :parks)
           as r(xid, id, time, topic, partition, key, type, headers, payload, cause, reason, parks_key)
    on conflict (reader, topic, partition, xid, id)
       do update set cause = excluded.cause, reason = excluded.reason, retry = false,
                     set_aside_at = excluded.set_aside_at
    """
).bindparams(
    bindparam("reader", type_=Text()),
    bindparam("now", type_=DateTime(timezone=True)),
    bindparam("xids", type_=ARRAY(XID8())),
    bindparam("ids", type_=ARRAY(BigInteger())),
    bindparam("times", type_=ARRAY(DateTime(timezone=True))),
    bindparam("topics", type_=ARRAY(Text())),
    bindparam("partitions", type_=ARRAY(Integer())),
    bindparam("keys", type_=ARRAY(Text())),
    bindparam("types", type_=ARRAY(Text())),
    bindparam("headers", type_=ARRAY(LargeBinary())),
    bindparam("payloads", type_=ARRAY(LargeBinary())),
    bindparam("causes", type_=ARRAY(Text())),
    bindparam("reasons", type_=ARRAY(Text())),
    bindparam("parks", type_=ARRAY(Boolean())),
)
_PARKED: Final = text("select distinct q.key from log.quarantine q where q.reader = :reader and q.parks_key")
_FAILED: Final = text(
    """
    insert into log.failure as f (reader, topic, partition, xid, id, attempts, reason)
    values (:reader, :topic, :partition, :xid, :id, 1, :reason)
    on conflict (reader, topic, partition, xid, id) do update set attempts = f.attempts + 1, reason = excluded.reason
    returning f.attempts
    """
).bindparams(bindparam("xid", type_=XID8()), bindparam("id", type_=BigInteger()))
_FORGET: Final = text(
    """
    delete from log.failure f
     where f.reader = :reader and f.topic = :topic and f.partition = :partition and f.xid = :xid and f.id = :id
    """
).bindparams(bindparam("xid", type_=XID8()), bindparam("id", type_=BigInteger()))
_MARK: Final = text(
    "update log.quarantine q set retry = true where q.reader = :reader and q.key = :key returning q.id"
)
_DROP: Final = text("delete from log.quarantine q where q.reader = :reader and q.key = :key returning q.id")
_MARKED: Final = text(
    """
    select q.xid, q.id, q.time, q.topic, q.partition, q.key, q.type, q.headers, q.payload
      from log.quarantine q
     where q.reader = :reader
       and q.key = (select min(m.key) from log.quarantine m where m.reader = :reader and m.retry)
     order by q.xid, q.id
    """
)
_TAKE: Final = text(
    """
    delete from log.quarantine q using unnest(:topics, :partitions, :xids, :ids) as r(topic, partition, xid, id)
     where q.reader = :reader and q.topic = r.topic and q.partition = r.partition and q.xid = r.xid and q.id = r.id
    """
).bindparams(*_PLACES)

_AGAIN: Final = text(
    """
    insert into log.outbox (time, topic, key, type, headers, payload)
    select q.time, q.topic, q.key, q.type, q.headers, q.payload
      from log.quarantine q
      join unnest(:topics, :partitions, :xids, :ids) as r(topic, partition, xid, id)
           on q.topic = r.topic and q.partition = r.partition and q.xid = r.xid and q.id = r.id
     where q.reader = :reader
     order by q.xid, q.id
    """
).bindparams(*_PLACES)


async def load_parked(tx: Transaction, reader: str) -> frozenset[str]:
    """Keys whose later records follow into quarantine."""
    return frozenset((await tx.execute(_PARKED, {"reader": reader})).scalars())


async def set_aside(tx: Transaction, reader: str, found: Sequence[SetAside], *, now: datetime) -> None:
    """Add rows, in the transaction that moves the reader past them."""
    if not found:
        return
    records = [item.record for item in found]
    parameters: dict[str, Any] = {
        "reader": reader,
        "now": now,
        "xids": [record.sequence.xid for record in records],
        "ids": [record.sequence.id for record in records],
        "times": [record.time for record in records],
        "topics": [record.partition.topic.value for record in records],
        "partitions": [record.partition.number for record in records],
        "keys": [record.key for record in records],
        "types": [record.type for record in records],
        "headers": [record.headers for record in records],
        "payloads": [record.payload for record in records],
        "causes": [item.cause.value for item in found],
        "reasons": [item.reason[:REASON_CHARACTERS_MAX].replace("\x00", "") for item in found],
        "parks": [item.parks_key for item in found],
    }
    await tx.execute(_ADD, parameters)


async def count_failure(tx: Transaction, reader: str, record: Record, reason: str) -> int:
    """How often the handler has failed on this record alone, this time included. In a transaction of its own."""
    parameters = {**_place(reader, record), "reason": reason[:REASON_CHARACTERS_MAX].replace("\x00", "")}
    return int((await tx.execute(_FAILED, parameters)).scalar_one())


async def forget_failure(tx: Transaction, reader: str, record: Record) -> None:
    await tx.execute(_FORGET, _place(reader, record))


async def retry_key(tx: Transaction, reader: str, key: str) -> int:
    """Ask the reader to handle again what was set aside of this key, in order. Gives how many records that is."""
    return len((await tx.execute(_MARK, {"reader": reader, "key": key})).all())


async def drop_key(tx: Transaction, reader: str, key: str) -> int:
    """Throw away what was set aside of this key; its reader lets the key go on within seconds.

    What it sets aside in just these seconds stays: look again.
    """
    return len((await tx.execute(_DROP, {"reader": reader, "key": key})).all())


async def load_marked(tx: Transaction, reader: str) -> tuple[Record, ...]:
    """All that is set aside of one key that is to be retried, in order; empty if there is none."""
    rows = (await tx.execute(_MARKED, {"reader": reader})).all()
    return tuple(
        Record(
            partition=Partition(Topic(row.topic), row.partition),
            sequence=LogSequence(row.xid, row.id),
            time=row.time,
            key=row.key,
            type=row.type,
            headers=row.headers,
            payload=row.payload,
        )
        for row in rows
    )


async def take_out(tx: Transaction, reader: str, records: Sequence[Record]) -> None:
    """They are handled: in the same transaction."""
    await tx.execute(_TAKE, _places(reader, records))


async def publish_again(tx: Transaction, reader: str, records: Sequence[Record]) -> None:
    """For the relay: they leave quarantine and stand at the end of the log, in their order, with new sequences.

    Sent with their old ones, readers would drop them as repeats.
    """
    await tx.execute(_AGAIN, _places(reader, records))
    await tx.execute(_TAKE, _places(reader, records))


def _places(reader: str, records: Sequence[Record]) -> dict[str, Any]:
    return {
        "reader": reader,
        "topics": [record.partition.topic.value for record in records],
        "partitions": [record.partition.number for record in records],
        "xids": [record.sequence.xid for record in records],
        "ids": [record.sequence.id for record in records],
    }


def _place(reader: str, record: Record) -> dict[str, Any]:
    return {
        "reader": reader,
        "topic": record.partition.topic.value,
        "partition": record.partition.number,
        "xid": record.sequence.xid,
        "id": record.sequence.id,
    }
