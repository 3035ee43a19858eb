"""Where a reader stands in Kafka, and records set aside that have no place in the log."""

from alembic import op

revision = "0008_kafka"
down_revision = "0007_progress"
branch_labels = None
depends_on = None

STATEMENTS = (
    'alter table log.position add column "offset" bigint',
    """
    alter table log.quarantine drop constraint quarantine_pkey,
        add primary key (reader, topic, partition, xid, id)
    """,
    """
    alter table log.failure
        add column topic text not null default '',
        add column partition integer not null default 0,
        drop constraint failure_pkey,
        add primary key (reader, topic, partition, xid, id)
    """,
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)


def downgrade() -> None:
    raise RuntimeError("migrations only go forward: restore a backup instead")
