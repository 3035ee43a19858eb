"""Tables of the log (schema ``log``): outbox, positions, leases, quarantine. Mirrors migrations 0001 and 0008."""

from typing import Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Identity,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    text,
)

from shared.db.types import XID8

SCHEMA: Final = "log"
METADATA: Final = MetaData(schema=SCHEMA)

identity = Table(
    "identity",
    METADATA,
    Column("single", Boolean, primary_key=True, server_default=text("true")),
    Column("log_id", Text, nullable=False),
    Column("trimmed_xid", XID8, nullable=False, server_default=text("'0'")),
    Column("trimmed_id", BigInteger, nullable=False, server_default=text("0")),
    CheckConstraint("single", name="identity_single_check"),
)
"""One row: which log this is, and the last row that retention removed."""

outbox = Table(
    "outbox",
    METADATA,
    Column("xid", XID8, nullable=False, server_default=text("pg_current_xact_id()")),
    Column("id", BigInteger, Identity(always=True), nullable=False),
    Column("time", DateTime(timezone=True), nullable=False),
    Column("topic", Text, nullable=False),
    Column("key", Text),
    Column("type", Text, nullable=False),
    Column("headers", LargeBinary, nullable=False),
    Column("payload", LargeBinary, nullable=False),
    PrimaryKeyConstraint("xid", "id"),
)

position = Table(
    "position",
    METADATA,
    Column("reader", Text, nullable=False),
    Column("topic", Text, nullable=False),
    Column("partition", Integer, nullable=False),
    Column("xid", XID8, nullable=False),
    Column("id", BigInteger, nullable=False),
    Column("offset", BigInteger),
    PrimaryKeyConstraint("reader", "topic", "partition"),
)
"""``offset``: on Kafka, of the last record behind the position."""

lease = Table(
    "lease",
    METADATA,
    Column("service", Text, nullable=False),
    Column("partition", Integer, nullable=False),
    Column("owner", Text, nullable=False),
    Column("term", BigInteger, nullable=False),
    Column("expires_at", DateTime(timezone=True), nullable=False),
    Column("url", Text),
    Column("host", Text, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("process_start", BigInteger, nullable=False),
    PrimaryKeyConstraint("service", "partition"),
)

quarantine = Table(
    "quarantine",
    METADATA,
    Column("reader", Text, nullable=False),
    Column("xid", XID8, nullable=False),
    Column("id", BigInteger, nullable=False),
    Column("time", DateTime(timezone=True), nullable=False),
    Column("topic", Text, nullable=False),
    Column("partition", Integer, nullable=False),
    Column("key", Text),
    Column("type", Text, nullable=False),
    Column("headers", LargeBinary, nullable=False),
    Column("payload", LargeBinary, nullable=False),
    Column("cause", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("parks_key", Boolean, nullable=False),
    Column("retry", Boolean, nullable=False, server_default=text("false")),
    Column("set_aside_at", DateTime(timezone=True), nullable=False),
    PrimaryKeyConstraint("reader", "topic", "partition", "xid", "id"),
)
"""A record that has no place in the log stands under transaction id 0 and its offset in Kafka."""

failure = Table(
    "failure",
    METADATA,
    Column("reader", Text, nullable=False),
    Column("xid", XID8, nullable=False),
    Column("id", BigInteger, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("reason", Text, nullable=False),
    Column("topic", Text, nullable=False, server_default=text("''")),
    Column("partition", Integer, nullable=False, server_default=text("0")),
    PrimaryKeyConstraint("reader", "topic", "partition", "xid", "id"),
)
"""How often the handler failed on one record alone."""
