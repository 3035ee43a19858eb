"""How far a workload has got, and how often the platform ended it without getting further."""

from alembic import op

revision = "0007_progress"
down_revision = "0006_execution"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        """
        alter table queueing.workloads
            add column best_step bigint not null default 0,
            add column fruitless integer not null default 0
        """
    )


def downgrade() -> None:
    raise RuntimeError("migrations only go forward: restore a backup instead")
