"""Tables of scaling (schema ``scaling``); mirrors migration 0005."""

from typing import Final

from sqlalchemy import BigInteger, Boolean, Column, DateTime, Index, Integer, MetaData, Table, Text, text

SCHEMA: Final = "scaling"
METADATA: Final = MetaData(schema=SCHEMA)

jobs = Table(
    "jobs",
    METADATA,
    Column("job_id", Text(collation="C"), primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("mode", Text),
    Column("has_checkpoint_path", Boolean, nullable=False),
    Column("request_version", Integer, nullable=False),
    Column("workers_min", Integer, nullable=False),
    Column("workers_max", Integer, nullable=False),
    Column("held", Boolean, nullable=False),
    Column("cancelled", Boolean, nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("workers", Integer, nullable=False),
    Column("group_attempt", Integer, nullable=False),
    Column("group_generation", Integer, nullable=False),
    Column("group_workers", Integer, nullable=False),
    Column("ended_attempt", Integer, nullable=False),
    Column("disturbed_at", DateTime(timezone=True)),
    Column("streak_attempt", Integer),
    Column("streak_generation", Integer),
    Column("streak_side", Text),
    Column("streak_measure", Text),
    Column("streak_covered_us", BigInteger),
    Column("streak_utilisation_ppm", Integer),
    Column("streak_last_at", DateTime(timezone=True)),
    Column("proposed_epoch", Integer),
    Column("proposed_workers", Integer),
    Column("closed_at", DateTime(timezone=True)),
    Index("jobs_active", "job_id", postgresql_where=text("closed_at IS NULL AND workers > 0")),
    Index("jobs_by_close", "closed_at", postgresql_where=text("closed_at IS NOT NULL")),
)
"""What scaling knows of a job. A row with ``closed_at`` fences late words for a while."""
