"""Tables of intake (schema ``intake``); mirrors migration 0002."""

from typing import Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    SmallInteger,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

SCHEMA: Final = "intake"
METADATA: Final = MetaData(schema=SCHEMA)
JOB_ID: Final = Text(collation="C")

jobs = Table(
    "jobs",
    METADATA,
    Column("job_id", JOB_ID, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("user_name", Text, nullable=False),
    Column("queue", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("spec", JSONB, nullable=False),
    Column("roles", JSONB, nullable=False),
    Column("labels", JSONB, nullable=False),
    Column("warnings", JSONB, nullable=False),
    Column("allow_unsatisfiable", Boolean, nullable=False),
    Column("submitted_at", DateTime(timezone=True), nullable=False),
    Column("version", Integer, nullable=False),
    Column("priority", Text, nullable=False),
    Column("urgency", SmallInteger, nullable=False),
    Column("workers_min", Integer, nullable=False),
    Column("workers_max", Integer, nullable=False),
    Column("workers", Integer, nullable=False),
    Column("held", Boolean, nullable=False),
    Column("cancelled", Boolean, nullable=False),
    Index("jobs_by_tenant", "tenant", "job_id"),
    Index("jobs_by_queue", "tenant", "queue", "urgency", "job_id"),
)
"""What users asked for; from ``version`` on the request register."""

environments = Table(
    "environments",
    METADATA,
    Column("job_id", JOB_ID, primary_key=True),
    Column("variables", JSONB, nullable=False),
)
"""Values of environment variables. Execution may select; no event carries them."""

idempotency = Table(
    "idempotency",
    METADATA,
    Column("tenant", Text, nullable=False),
    Column("key", Text, nullable=False),
    Column("body_hash", LargeBinary, nullable=False),
    Column("job_id", JOB_ID, nullable=False),
    Column("expires_at", DateTime(timezone=True), nullable=False),
    PrimaryKeyConstraint("tenant", "key"),
    Index("idempotency_by_expiry", "expires_at"),
)

registers = Table(
    "registers",
    METADATA,
    Column("job_id", JOB_ID, primary_key=True),
    Column("filed_under", Text, nullable=False),
    Column("submitted_xid", BigInteger, nullable=False),
    Column("allocation", JSONB, nullable=False),
    Column("waiting", JSONB, nullable=False),
    Column("worker", JSONB, nullable=False),
    Column("metric", JSONB, nullable=False),
    Column("scaling", JSONB, nullable=False),
    Index("registers_by_phase", "filed_under", "job_id"),
)
"""What the other services said. ``filed_under``: the phase without the hold, for lists only."""

history = Table(
    "history",
    METADATA,
    Column("job_id", JOB_ID, nullable=False),
    Column("xid", BigInteger, nullable=False),
    Column("id", BigInteger, nullable=False),
    Column("time", DateTime(timezone=True), nullable=False),
    Column("type", Text, nullable=False),
    Column("summary", Text, nullable=False),
    Column("epoch", Integer),
    Column("attempt", Integer),
    Column("generation", Integer),
    Column("workers", Integer),
    Column("data", JSONB, nullable=False),
    PrimaryKeyConstraint("job_id", "xid", "id"),
)

queues = Table(
    "queues",
    METADATA,
    Column("tenant", Text, nullable=False),
    Column("queue", Text, nullable=False),
    Column("xid", BigInteger, nullable=False),
    Column("id", BigInteger, nullable=False),
    Column("observed", JSONB, nullable=False),
    PrimaryKeyConstraint("tenant", "queue"),
)

capacity = Table(
    "capacity",
    METADATA,
    Column("single", Boolean, primary_key=True, server_default=text("true")),
    Column("revision", BigInteger, nullable=False),
    Column("received_at", DateTime(timezone=True), nullable=False),
    Column("observed", JSONB, nullable=False),
    CheckConstraint("single", name="capacity_single_check"),
)
"""One row: the last capacity report, and when this service took it in."""
