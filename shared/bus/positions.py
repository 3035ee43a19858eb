"""Where each reader stands: a row for each partition, moved in the transaction that holds what was read."""

from collections.abc import Iterable, Mapping
from typing import Final

from sqlalchemy import ARRAY, BigInteger, Integer, Text, bindparam, text
from sqlalchemy.ext.asyncio import AsyncEngine

from schemas.envelope import Sequence as LogSequence
from schemas.vocabulary import Topic
from shared.bus.log import Partition, Position
from shared.db.errors import connecting
from shared.db.types import XID8
from shared.errors import LeaseLost
from shared.runtime.service import Transaction

_LOAD: Final = text(
    'select p.topic, p.partition, p.xid, p.id, p."offset" from log.position p where p.reader = :reader'
).bindparams(bindparam("reader", type_=Text()))
_ADD: Final = text(
    """
    insert into log.position (reader, topic, partition, xid, id)
    select :reader, r.topic, n.number, coalesce(before.xid, '0'), coalesce(before.id, 0)
      from unnest(:topics, :counts) as r(topic, count)
     cross join lateral generate_series(0, r.count - 1) as n(number)
      left join log.position before
             on before.reader = :reader and before.topic = r.topic and before.partition = 0
                and before."offset" is null
    on conflict do nothing
    """
).bindparams(
    bindparam("reader", type_=Text()),
    bindparam("topics", type_=ARRAY(Text())),
    bindparam("counts", type_=ARRAY(Integer())),
)
_ADVANCE: Final = text(
    """
    update log.position p set xid = r.xid, id = r.id, "offset" = r.at
      from unnest(:topics, :partitions, :from_xids, :from_ids, :from_offsets, :xids, :ids, :offsets)
           as r(topic, partition, from_xid, from_id, from_offset, xid, id, at)
     where p.reader = :reader and p.topic = r.topic and p.partition = r.partition
       and p.xid = r.from_xid and p.id = r.from_id and p."offset" is not distinct from r.from_offset
    """
).bindparams(
    bindparam("reader", type_=Text()),
    bindparam("topics", type_=ARRAY(Text())),
    bindparam("partitions", type_=ARRAY(Integer())),
    bindparam("from_xids", type_=ARRAY(XID8())),
    bindparam("from_ids", type_=ARRAY(BigInteger())),
    bindparam("from_offsets", type_=ARRAY(BigInteger())),
    bindparam("xids", type_=ARRAY(XID8())),
    bindparam("ids", type_=ARRAY(BigInteger())),
    bindparam("offsets", type_=ARRAY(BigInteger())),
)

_REWIND: Final = text(
    """
    update log.position r set xid = least_read.xid, id = least_read.id
      from (select distinct on (p.topic) p.topic, p.xid, p.id
              from log.position p
             where p.topic = any(:topics) and p.reader <> :reader
             order by p.topic, p.xid, p.id) least_read
     where r.reader = :reader and r.topic = least_read.topic and (r.xid, r.id) > (least_read.xid, least_read.id)
    """
).bindparams(bindparam("reader", type_=Text()), bindparam("topics", type_=ARRAY(Text())))


async def load_positions(
    tx: Transaction, reader: str, partitions: Iterable[Partition], *, counts: Mapping[Topic, int]
) -> dict[Partition, Position]:
    """The reader's rows of these partitions. ``counts``: how many each of its topics has.

    Rows that are missing are made, for every partition of the topic at once: they stand at the beginning of the log,
    or, where the topic was read as one partition on the Postgres carrier until now, where that reader stood.
    """
    wanted = sorted(partitions)
    topics = sorted(counts)
    parameters = {
        "reader": reader,
        "topics": [topic.value for topic in topics],
        "counts": [counts[topic] for topic in topics],
    }
    await tx.execute(_ADD, parameters)
    rows = (await tx.execute(_LOAD, {"reader": reader})).all()
    stored = {
        Partition(Topic(row.topic), row.partition): Position(LogSequence(row.xid, row.id), row.offset) for row in rows
    }
    return {partition: stored[partition] for partition in wanted}


async def advance_positions(
    tx: Transaction,
    reader: str,
    *,
    stored: Mapping[Partition, Position],
    reached: Mapping[Partition, Position],
) -> None:
    """Compare and set. Raises LeaseLost if a row is not where this reader left it."""
    moves = [(partition, stored[partition], reached[partition]) for partition in sorted(reached)]
    moves = [move for move in moves if move[1] != move[2]]
    assert all(before.sequence <= after.sequence for _, before, after in moves), "a reader never goes back"
    if not moves:
        return
    result = await tx.execute(
        _ADVANCE,
        {
            "reader": reader,
            "topics": [partition.topic.value for partition, _, _ in moves],
            "partitions": [partition.number for partition, _, _ in moves],
            "from_xids": [before.sequence.xid for _, before, _ in moves],
            "from_ids": [before.sequence.id for _, before, _ in moves],
            "from_offsets": [before.offset for _, before, _ in moves],
            "xids": [after.sequence.xid for _, _, after in moves],
            "ids": [after.sequence.id for _, _, after in moves],
            "offsets": [after.offset for _, _, after in moves],
        },
    )
    if result.rowcount != len(moves):
        raise LeaseLost(f"the position of {reader} was moved by somebody else")


async def rewind_position(engine: AsyncEngine, reader: str, topics: Iterable[Topic]) -> int:
    """Have ``reader`` begin again where the last of all other readers stands in each of these topics.

    Whoever holds it in memory finds out at its next commit. Gives in how many it went back. Raises Unavailable.
    """
    with connecting():
        async with engine.begin() as connection:
            parameters = {"reader": reader, "topics": [topic.value for topic in topics]}
            return (await connection.execute(_REWIND, parameters)).rowcount
