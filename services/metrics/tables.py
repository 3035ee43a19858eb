"""Tables of metrics (schema ``metrics``); mirrors migration 0004."""

from typing import Final

from sqlalchemy import (
    BigInteger,
    Column,
    DateTime,
    Double,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    text,
)

SCHEMA: Final = "metrics"
METADATA: Final = MetaData(schema=SCHEMA)
ID: Final = Text(collation="C")

jobs = Table(
    "jobs",
    METADATA,
    Column("job_id", ID, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("generation", Integer, nullable=False),
    Column("workers", Integer, nullable=False),
    Column("ended_attempt", Integer, nullable=False),
    Column("window_opened_at", DateTime(timezone=True)),
    Column("curve_next", BigInteger, nullable=False),
    Column("curve_stride", BigInteger, nullable=False),
    Column("started_at", DateTime(timezone=True)),
    Column("ended_at", DateTime(timezone=True)),
    Index("jobs_by_end", "ended_at", postgresql_where=text("ended_at IS NOT NULL")),
    Index("jobs_open", "job_id", postgresql_where=text("window_opened_at IS NOT NULL")),
)
"""Newest started group, open window and curve of a job. A row with ``ended_at`` fences late words."""

samples = Table(
    "samples",
    METADATA,
    Column("job_id", ID, nullable=False),
    Column("member", ID, nullable=False),
    Column("sequence", BigInteger, nullable=False),
    Column("received_at", DateTime(timezone=True), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("generation", Integer, nullable=False),
    Column("rank", Integer, nullable=False),
    Column("world", Integer, nullable=False),
    Column("wall_us", BigInteger, nullable=False),
    Column("step_us", BigInteger, nullable=False),
    Column("sync_us", BigInteger, nullable=False),
    Column("input_wait_us", BigInteger, nullable=False),
    Column("steps", BigInteger, nullable=False),
    Column("samples", BigInteger, nullable=False),
    Column("loss", Double),
    Column("step", BigInteger, nullable=False),
    Column("total_steps", BigInteger),
    Column("utilisation_ppm", Integer),
    Column("measure", Text, nullable=False),
    PrimaryKeyConstraint("job_id", "member", "sequence"),
    Index("samples_by_receipt", "received_at"),
)
"""Reports that count or wait for their group, for minutes."""

curves = Table(
    "curves",
    METADATA,
    Column("job_id", ID, nullable=False),
    Column("point", BigInteger, nullable=False),
    Column("at", DateTime(timezone=True), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("generation", Integer, nullable=False),
    Column("workers", Integer, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("loss", Double),
    Column("samples_per_second", Double),
    Column("utilisation", Double),
    Column("window_seconds", Double, nullable=False),
    PrimaryKeyConstraint("job_id", "point"),
)
