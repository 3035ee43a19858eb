"""Tables of queueing."""

from alembic import op

revision = "0003_queueing"
down_revision = "0002_intake"
branch_labels = None
depends_on = None

TABLES = (
    # A job's request as queueing sees it, and its counters. Closed ones move to queueing.tombstones.
    """
    create table queueing.workloads (
        job_id text collate "C" primary key,
        name text not null,
        tenant text not null,
        user_name text not null,
        queue text not null,
        roles jsonb not null,
        is_resizable boolean not null,
        loses_work_when_resized boolean not null,
        grace_seconds double precision not null,
        restart_policy jsonb not null,
        request jsonb not null,
        wanted integer not null,
        wanted_because text not null,
        standing text not null,
        epoch integer not null,
        attempt integer not null,
        started_attempt integer not null,
        flavor text,
        floor integer not null,
        size_before integer not null,
        admission_order bigint not null,
        granted_at_revision bigint not null,
        job_failures integer not null,
        platform_failures integer not null,
        back_off_seconds double precision not null,
        overdue text not null,
        constraint workloads_standing_check check (standing in ('waiting', 'running', 'draining'))
    ) with (fillfactor = 70)
    """,
    # The ledger: charged per role is the larger of the two. No row: charged for nothing.
    """
    create table queueing.charges (
        job_id text collate "C" not null,
        role text not null,
        granted integer not null,
        held integer not null,
        primary key (job_id, role),
        constraint charges_sign_check check (granted >= 0 and held >= 0)
    ) with (fillfactor = 70)
    """,
    """
    create table queueing.promises (
        job_id text collate "C" primary key,
        flavor text not null,
        members integer[] not null,
        origins text[] not null
    )
    """,
    # Why an examined workload waits.
    """
    create table queueing.waiting (
        job_id text collate "C" primary key,
        code text not null,
        detail text not null,
        unblocked_by text not null,
        estimate_seconds double precision,
        estimate_basis text
    ) with (fillfactor = 70)
    """,
    # Words of execution that wait for the capacity revision they speak of.
    """
    create table queueing.parked (
        ordinal bigint primary key,
        job_id text collate "C" not null,
        type text not null,
        payload bytea not null
    )
    """,
    """
    create table queueing.capacity (
        single boolean primary key default true,
        revision bigint not null,
        report jsonb not null,
        constraint capacity_single_check check (single)
    )
    """,
    # What is left of a closed workload, so that late words about it change nothing.
    """
    create table queueing.tombstones (
        job_id text collate "C" primary key,
        epoch integer not null,
        attempt integer not null,
        closed_at timestamptz not null
    )
    """,
    "create index tombstones_by_age on queueing.tombstones (closed_at)",
)


def upgrade() -> None:
    for statement in TABLES:
        op.execute(statement)


def downgrade() -> None:
    raise RuntimeError("migrations only go forward: restore a backup instead")
