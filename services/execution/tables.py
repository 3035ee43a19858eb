"""Tables of execution (schema ``execution``); mirrors migration 0006."""

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
    Table,
    Text,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

SCHEMA: Final = "execution"
METADATA: Final = MetaData(schema=SCHEMA)
JOB_ID: Final = Text(collation="C")

jobs = Table(
    "jobs",
    METADATA,
    Column("job_id", JOB_ID, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("spec", JSONB),
    Column("token_hash", LargeBinary, nullable=False),
    Column("desired", Text, nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("is_active", Boolean, nullable=False),
    Column("register", JSONB, nullable=False),
    Column("ended_at", DateTime(timezone=True)),
    Index("jobs_active", "job_id", postgresql_where=text("is_active")),
    Index("jobs_by_end", "ended_at", postgresql_where=text("ended_at is not null")),
)

members = Table(
    "members",
    METADATA,
    Column("job_id", JOB_ID, nullable=False),
    Column("role", Text, nullable=False),
    Column("index", Integer, nullable=False),
    Column("incarnation", Integer, nullable=False),
    Column("ordinal", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("node", Text, nullable=False),
    Column("nonce", Text, nullable=False),
    Column("devices", JSONB, nullable=False),
    Column("state", Text, nullable=False),
    Column("ending", Text),
    Column("ending_reason", Text, nullable=False),
    Column("finished", Boolean, nullable=False),
    Column("exit_code", Integer),
    Column("attributed_to", Text),
    Column("exit_reason", Text, nullable=False),
    Column("committed_at", DateTime(timezone=True), nullable=False, server_default=text("now()")),
    PrimaryKeyConstraint("job_id", "role", "index", "incarnation"),
)

generations = Table(
    "generations",
    METADATA,
    Column("job_id", JOB_ID, nullable=False),
    Column("number", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("members", JSONB, nullable=False),
    Column("leavers", JSONB, nullable=False),
    Column("source", Integer, nullable=False),
    Column("checkpoint", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("from_step", BigInteger, nullable=False),
    Column("ports", JSONB, nullable=False),
    Column("offered_at", DateTime(timezone=True), nullable=False, server_default=text("now()")),
    PrimaryKeyConstraint("job_id", "number"),
)

checkpoints = Table(
    "checkpoints",
    METADATA,
    Column("job_id", JOB_ID, nullable=False),
    Column("generation", Integer, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("location", Text, nullable=False),
    Column("written_at", DateTime(timezone=True), nullable=False),
    PrimaryKeyConstraint("job_id", "generation", "step"),
)

capacity = Table(
    "capacity",
    METADATA,
    Column("single", Boolean, primary_key=True, server_default=text("true")),
    Column("revision", BigInteger, nullable=False),
    Column("observed", JSONB, nullable=False),
    CheckConstraint("single", name="capacity_single_check"),
)
