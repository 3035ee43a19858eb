"""Tables of execution."""

from alembic import op

revision = "0006_execution"
down_revision = "0005_scaling"
branch_labels = None
depends_on = None

TABLES = (
    # What queueing wants with a job, and where its attempt stands. The register holds what only the core reads.
    """
    create table execution.jobs (
        job_id text collate "C" primary key,
        tenant text not null,
        spec jsonb,
        token_hash bytea not null,
        desired text not null,
        epoch integer not null,
        attempt integer not null,
        is_active boolean not null,
        register jsonb not null,
        ended_at timestamptz
    ) with (fillfactor = 80)
    """,
    "create index jobs_active on execution.jobs (job_id) where is_active",
    "create index jobs_by_end on execution.jobs (ended_at) where ended_at is not null",
    # Every process that was ever meant to be. Rows are kept until it is seen gone, and then until retention.
    """
    create table execution.members (
        job_id text collate "C" not null,
        role text not null,
        index integer not null,
        incarnation integer not null,
        ordinal integer not null,
        attempt integer not null,
        node text not null,
        nonce text not null,
        devices jsonb not null,
        state text not null,
        ending text,
        ending_reason text not null,
        finished boolean not null,
        exit_code integer,
        attributed_to text,
        exit_reason text not null,
        committed_at timestamptz not null default now(),
        primary key (job_id, role, index, incarnation)
    ) with (fillfactor = 80)
    """,
    # Every training group that was offered: a number is never used again.
    """
    create table execution.generations (
        job_id text collate "C" not null,
        number integer not null,
        attempt integer not null,
        epoch integer not null,
        members jsonb not null,
        leavers jsonb not null,
        source integer not null,
        checkpoint text not null,
        state text not null,
        from_step bigint not null,
        ports jsonb not null,
        offered_at timestamptz not null default now(),
        primary key (job_id, number)
    ) with (fillfactor = 80)
    """,
    """
    create table execution.checkpoints (
        job_id text collate "C" not null,
        generation integer not null,
        step bigint not null,
        location text not null,
        written_at timestamptz not null,
        primary key (job_id, generation, step)
    )
    """,
    """
    create table execution.capacity (
        single boolean primary key default true,
        revision bigint not null,
        observed jsonb not null,
        constraint capacity_single_check check (single)
    )
    """,
)


def upgrade() -> None:
    for statement in TABLES:
        op.execute(statement)


def downgrade() -> None:
    raise RuntimeError("migrations only go forward: restore a backup instead")
