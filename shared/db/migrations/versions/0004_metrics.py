"""Tables of metrics."""

from alembic import op

revision = "0004_metrics"
down_revision = "0003_queueing"
branch_labels = None
depends_on = None

TABLES = (
    # One row a job: its newest started group, its open window, its curve. Updated with every window.
    """
    create table metrics.jobs (
        job_id text collate "C" primary key,
        tenant text not null,
        attempt integer not null,
        generation integer not null,
        workers integer not null,
        ended_attempt integer not null,
        window_opened_at timestamptz,
        curve_next bigint not null,
        curve_stride bigint not null,
        started_at timestamptz,
        ended_at timestamptz
    ) with (fillfactor = 70)
    """,
    "create index jobs_by_end on metrics.jobs (ended_at) where ended_at is not null",
    "create index jobs_open on metrics.jobs (job_id) where window_opened_at is not null",
    # Kept for minutes: what an open window is rebuilt from, and what tells a repeat from news.
    """
    create table metrics.samples (
        job_id text collate "C" not null,
        member text collate "C" not null,
        sequence bigint not null,
        received_at timestamptz not null,
        attempt integer not null,
        generation integer not null,
        rank integer not null,
        world integer not null,
        wall_us bigint not null,
        step_us bigint not null,
        sync_us bigint not null,
        input_wait_us bigint not null,
        steps bigint not null,
        samples bigint not null,
        loss double precision,
        step bigint not null,
        total_steps bigint,
        utilisation_ppm integer,
        measure text not null,
        primary key (job_id, member, sequence)
    ) with (autovacuum_vacuum_scale_factor = 0.05)
    """,
    "create index samples_by_receipt on metrics.samples (received_at)",
    """
    create table metrics.curves (
        job_id text collate "C" not null,
        point bigint not null,
        at timestamptz not null,
        attempt integer not null,
        generation integer not null,
        workers integer not null,
        step bigint not null,
        loss double precision,
        samples_per_second double precision,
        utilisation double precision,
        window_seconds double precision not null,
        primary key (job_id, point)
    )
    """,
)


def upgrade() -> None:
    for statement in TABLES:
        op.execute(statement)


def downgrade() -> None:
    raise RuntimeError("migrations only go forward: restore a backup instead")
