"""Where each reader stands: a row for each partition, moved in the transaction that holds what was read."""

from collections.abc import Iterable, Mapping
from typing import Final

from sqlalchemy import ARRAY, BigInteger, Integer, Text, bindparam, text

from schemas.envelope import Sequence as LogSequence
from schemas.vocabulary import Topic
from shared.bus.log import Partition
from shared.db.types import XID8
from shared.errors import LeaseLost
from shared.runtime.service import Transaction

_LOAD: Final = text(
    "select p.topic, p.partition, p.xid, p.id from log.position p where p.reader = :reader"
).bindparams(bindparam("reader", type_=Text()))
_ADD: Final = text(
    """
    insert into log.position (reader, topic, partition, xid, id)
    select :reader, r.topic, r.partition, '0', 0 from unnest(:topics, :partitions) as r(topic, partition)
    on conflict do nothing
    """
).bindparams(
    bindparam("reader", type_=Text()),
    bindparam("topics", type_=ARRAY(Text())),
    bindparam("partitions", type_=ARRAY(Integer())),
)
_ADVANCE: Final = text(
    """
    update log.position p set xid = r.xid, id = r.id
      from unnest(:topics, :partitions, :from_xids, :from_ids, :xids, :ids)
           as r(topic, partition, from_xid, from_id, xid, id)
     where p.reader = :reader and p.topic = r.topic and p.partition = r.partition
       and p.xid = r.from_xid and p.id = r.from_id
    """
).bindparams(
    bindparam("reader", type_=Text()),
    bindparam("topics", type_=ARRAY(Text())),
    bindparam("partitions", type_=ARRAY(Integer())),
    bindparam("from_xids", type_=ARRAY(XID8())),
    bindparam("from_ids", type_=ARRAY(BigInteger())),
    bindparam("xids", type_=ARRAY(XID8())),
    bindparam("ids", type_=ARRAY(BigInteger())),
)


async def load_positions(
    tx: Transaction, reader: str, partitions: Iterable[Partition]
) -> dict[Partition, LogSequence]:
    """The reader's rows; those that are missing are made and stand at the beginning of the log."""
    wanted = sorted(partitions)
    parameters = {
        "reader": reader,
        "topics": [partition.topic.value for partition in wanted],
        "partitions": [partition.number for partition in wanted],
    }
    await tx.execute(_ADD, parameters)
    rows = (await tx.execute(_LOAD, {"reader": reader})).all()
    stored = {Partition(Topic(row.topic), row.partition): LogSequence(row.xid, row.id) for row in rows}
    return {partition: stored[partition] for partition in wanted}


async def advance_positions(
    tx: Transaction,
    reader: str,
    *,
    stored: Mapping[Partition, LogSequence],
    reached: Mapping[Partition, LogSequence],
) -> None:
    """Compare and set. Raises LeaseLost if a row is not where this reader left it."""
    moves = [(partition, stored[partition], reached[partition]) for partition in sorted(reached)]
    moves = [move for move in moves if move[1] != move[2]]
    assert all(before < after for _, before, after in moves), "a reader never goes back"
    if not moves:
        return
    result = await tx.execute(
        _ADVANCE,
        {
            "reader": reader,
            "topics": [partition.topic.value for partition, _, _ in moves],
            "partitions": [partition.number for partition, _, _ in moves],
            "from_xids": [before.xid for _, before, _ in moves],
            "from_ids": [before.id for _, before, _ in moves],
            "xids": [after.xid for _, _, after in moves],
            "ids": [after.id for _, _, after in moves],
        },
    )
    if result.rowcount != len(moves):
        raise LeaseLost(f"the position of {reader} was moved by somebody else")
