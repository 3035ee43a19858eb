"""Tables of queueing (schema ``queueing``); mirrors migrations 0003 and 0007."""

from typing import Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

SCHEMA: Final = "queueing"
METADATA: Final = MetaData(schema=SCHEMA)
JOB_ID: Final = Text(collation="C")

workloads = Table(
    "workloads",
    METADATA,
    Column("job_id", JOB_ID, primary_key=True),
    Column("name", Text, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("user_name", Text, nullable=False),
    Column("queue", Text, nullable=False),
    Column("roles", JSONB, nullable=False),
    Column("is_resizable", Boolean, nullable=False),
    Column("loses_work_when_resized", Boolean, nullable=False),
    Column("grace_seconds", Double, nullable=False),
    Column("restart_policy", JSONB, nullable=False),
    Column("request", JSONB, nullable=False),
    Column("wanted", Integer, nullable=False),
    Column("wanted_because", Text, nullable=False),
    Column("standing", Text, nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("started_attempt", Integer, nullable=False),
    Column("flavor", Text),
    Column("floor", Integer, nullable=False),
    Column("size_before", Integer, nullable=False),
    Column("admission_order", BigInteger, nullable=False),
    Column("granted_at_revision", BigInteger, nullable=False),
    Column("job_failures", Integer, nullable=False),
    Column("platform_failures", Integer, nullable=False),
    Column("best_step", BigInteger, nullable=False),
    Column("fruitless", Integer, nullable=False),
    Column("back_off_seconds", Double, nullable=False),
    Column("overdue", Text, nullable=False),
    CheckConstraint("standing in ('waiting', 'running', 'draining')", name="workloads_standing_check"),
)
"""Open workloads: the job's request as queueing sees it, and its counters."""

charges = Table(
    "charges",
    METADATA,
    Column("job_id", JOB_ID, nullable=False),
    Column("role", Text, nullable=False),
    Column("granted", Integer, nullable=False),
    Column("held", Integer, nullable=False),
    PrimaryKeyConstraint("job_id", "role"),
    CheckConstraint("granted >= 0 and held >= 0", name="charges_sign_check"),
)
"""The ledger: charged per role is the larger of the two. No row: charged for nothing."""

promises = Table(
    "promises",
    METADATA,
    Column("job_id", JOB_ID, primary_key=True),
    Column("flavor", Text, nullable=False),
    Column("members", ARRAY(Integer), nullable=False),
    Column("origins", ARRAY(Text), nullable=False),
)

waiting = Table(
    "waiting",
    METADATA,
    Column("job_id", JOB_ID, primary_key=True),
    Column("code", Text, nullable=False),
    Column("detail", Text, nullable=False),
    Column("unblocked_by", Text, nullable=False),
    Column("estimate_seconds", Double),
    Column("estimate_basis", Text),
)
"""Why an examined workload waits."""

parked = Table(
    "parked",
    METADATA,
    Column("ordinal", BigInteger, primary_key=True, autoincrement=False),
    Column("job_id", JOB_ID, nullable=False),
    Column("type", Text, nullable=False),
    Column("payload", LargeBinary, nullable=False),
)
"""Words of execution that wait for the capacity revision they speak of."""

capacity = Table(
    "capacity",
    METADATA,
    Column("single", Boolean, primary_key=True, server_default=text("true")),
    Column("revision", BigInteger, nullable=False),
    Column("report", JSONB, nullable=False),
    CheckConstraint("single", name="capacity_single_check"),
)
"""One row: the last capacity report."""

tombstones = Table(
    "tombstones",
    METADATA,
    Column("job_id", JOB_ID, primary_key=True),
    Column("epoch", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("closed_at", DateTime(timezone=True), nullable=False),
    Index("tombstones_by_age", "closed_at"),
)
"""What is left of a closed workload, so that late words about it change nothing."""
