"""Tables of intake."""

from alembic import op

revision = "0002_intake"
down_revision = "0001_log"
branch_labels = None
depends_on = None

TABLES = (
    # What users asked for. Written by requests; the columns from version on are the request register.
    """
    create table intake.jobs (
        job_id text collate "C" primary key,
        tenant text not null,
        user_name text not null,
        queue text not null,
        name text not null,
        spec jsonb not null,
        roles jsonb not null,
        labels jsonb not null,
        warnings jsonb not null,
        allow_unsatisfiable boolean not null,
        submitted_at timestamptz not null,
        version integer not null,
        priority text not null,
        urgency smallint not null,
        workers_min integer not null,
        workers_max integer not null,
        workers integer not null,
        held boolean not null,
        cancelled boolean not null
    ) with (fillfactor = 90)
    """,
    "create index jobs_by_tenant on intake.jobs (tenant, job_id)",
    "create index jobs_by_queue on intake.jobs (tenant, queue, urgency, job_id)",
    # Values of environment variables: they never travel in events. Rows go with the job.
    """
    create table intake.environments (
        job_id text collate "C" primary key,
        variables jsonb not null
    )
    """,
    """
    create table intake.idempotency (
        tenant text not null,
        key text not null,
        body_hash bytea not null,
        job_id text collate "C" not null,
        expires_at timestamptz not null,
        primary key (tenant, key)
    )
    """,
    "create index idempotency_by_expiry on intake.idempotency (expires_at)",
    # What the other services said: one register per topic. Written by the projection alone.
    """
    create table intake.registers (
        job_id text collate "C" primary key,
        filed_under text not null,
        submitted_xid bigint not null,
        allocation jsonb not null,
        waiting jsonb not null,
        worker jsonb not null,
        metric jsonb not null,
        scaling jsonb not null
    ) with (fillfactor = 70)
    """,
    "create index registers_by_phase on intake.registers (filed_under, job_id)",
    """
    create table intake.history (
        job_id text collate "C" not null,
        xid bigint not null,
        id bigint not null,
        time timestamptz not null,
        type text not null,
        summary text not null,
        epoch integer,
        attempt integer,
        generation integer,
        workers integer,
        data jsonb not null,
        primary key (job_id, xid, id)
    )
    """,
    """
    create table intake.queues (
        tenant text not null,
        queue text not null,
        xid bigint not null,
        id bigint not null,
        observed jsonb not null,
        primary key (tenant, queue)
    )
    """,
    """
    create table intake.capacity (
        single boolean primary key default true,
        revision bigint not null,
        received_at timestamptz not null,
        observed jsonb not null,
        constraint capacity_single_check check (single)
    )
    """,
)


def upgrade() -> None:
    for statement in TABLES:
        op.execute(statement)
    op.execute("grant usage on schema intake to tide_execution")
    op.execute("grant select on intake.environments to tide_execution")


def downgrade() -> None:
    raise RuntimeError("migrations only go forward: restore a backup instead")
