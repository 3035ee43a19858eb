"""Tables of scaling."""

from alembic import op

revision = "0005_scaling"
down_revision = "0004_metrics"
branch_labels = None
depends_on = None

TABLES = (
    # One row a job: a register per topic, the streak so far, the last proposal. Updated with every metric window.
    """
    create table scaling.jobs (
        job_id text collate "C" primary key,
        tenant text not null,
        mode text,
        has_checkpoint_path boolean not null,
        request_version integer not null,
        workers_min integer not null,
        workers_max integer not null,
        held boolean not null,
        cancelled boolean not null,
        epoch integer not null,
        attempt integer not null,
        workers integer not null,
        group_attempt integer not null,
        group_generation integer not null,
        group_workers integer not null,
        ended_attempt integer not null,
        disturbed_at timestamptz,
        streak_attempt integer,
        streak_generation integer,
        streak_side text,
        streak_measure text,
        streak_covered_us bigint,
        streak_utilisation_ppm integer,
        streak_last_at timestamptz,
        proposed_epoch integer,
        proposed_workers integer,
        closed_at timestamptz
    ) with (fillfactor = 70)
    """,
    "create index jobs_active on scaling.jobs (job_id) where closed_at is null and workers > 0",
    "create index jobs_by_close on scaling.jobs (closed_at) where closed_at is not null",
)


def upgrade() -> None:
    for statement in TABLES:
        op.execute(statement)


def downgrade() -> None:
    raise RuntimeError("migrations only go forward: restore a backup instead")
