"""Roles and schemas of the services, and the tables of the log."""

from alembic import op

revision = "0001_log"
down_revision = None
branch_labels = None
depends_on = None

SERVICES = ("intake", "queueing", "metrics", "scaling", "execution")
UPKEEP = "tide_log"

ROLE = """
do $$
begin
    if not exists (select from pg_roles where rolname = '{role}') then
        create role {role} nologin;
    end if;
exception when duplicate_object or unique_violation then
    null;
end $$
"""
MEMBERSHIP = """
do $$
begin
    if not pg_has_role(current_user, '{role}', 'SET') then
        execute format('grant {role} to %I', current_user);
    end if;
end $$
"""

TABLES = (
    """
    create table log.identity (
        single boolean primary key default true,
        log_id text not null,
        trimmed_xid xid8 not null default '0',
        trimmed_id bigint not null default 0,
        constraint identity_single_check check (single)
    )
    """,
    "insert into log.identity (log_id) values (replace(gen_random_uuid()::text, '-', ''))",
    """
    create table log.outbox (
        xid xid8 not null default pg_current_xact_id(),
        id bigint not null generated always as identity,
        time timestamptz not null,
        topic text not null,
        key text,
        type text not null,
        headers bytea not null,
        payload bytea not null,
        primary key (xid, id)
    ) with (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_insert_scale_factor = 0.1)
    """,
    # Updated with every batch: room on the page keeps each update in place.
    """
    create table log.position (
        reader text not null,
        topic text not null,
        partition integer not null,
        xid xid8 not null,
        id bigint not null,
        primary key (reader, topic, partition)
    ) with (fillfactor = 20, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500)
    """,
    """
    create table log.lease (
        service text not null,
        partition integer not null,
        owner text not null,
        term bigint not null,
        expires_at timestamptz not null,
        url text,
        host text not null,
        pid integer not null,
        process_start bigint not null,
        primary key (service, partition)
    ) with (fillfactor = 20, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500)
    """,
    """
    create table log.quarantine (
        reader text not null,
        xid xid8 not null,
        id bigint not null,
        time timestamptz not null,
        topic text not null,
        partition integer not null,
        key text,
        type text not null,
        headers bytea not null,
        payload bytea not null,
        cause text not null,
        reason text not null,
        parks_key boolean not null,
        retry boolean not null default false,
        set_aside_at timestamptz not null,
        primary key (reader, xid, id)
    )
    """,
    """
    create table log.failure (
        reader text not null,
        xid xid8 not null,
        id bigint not null,
        attempts integer not null,
        reason text not null,
        primary key (reader, xid, id)
    )
    """,
)


def upgrade() -> None:
    for role in (*(f"tide_{service}" for service in SERVICES), UPKEEP):
        op.execute(ROLE.format(role=role))
        op.execute(MEMBERSHIP.format(role=role))
    for statement in TABLES:
        op.execute(statement)
    for service in SERVICES:
        role = f"tide_{service}"
        op.execute(f"create schema {service}")
        op.execute(f"grant usage on schema {service}, log to {role}")
        op.execute(
            f"alter default privileges in schema {service} grant select, insert, update, delete on tables to {role}"
        )
        op.execute(f"alter default privileges in schema {service} grant usage on sequences to {role}")
        op.execute(f"grant select on log.identity to {role}")
        op.execute(f"grant select, insert on log.outbox to {role}")
        op.execute(f"grant select, insert, update on log.position, log.lease to {role}")
        op.execute(f"grant select, insert, update, delete on log.quarantine, log.failure to {role}")
    op.execute(f"grant usage on schema log to {UPKEEP}")
    op.execute(f"grant select, delete on log.outbox to {UPKEEP}")
    op.execute(f"grant select on log.position, log.lease, log.quarantine, log.failure to {UPKEEP}")
    op.execute(f"grant select, update on log.identity to {UPKEEP}")


def downgrade() -> None:
    raise RuntimeError("migrations only go forward: restore a backup instead")
