"""Tables of metrics."""

from alembic import op

revision = "0004_metrics"
down_revision = "0003_queueing"
branch_labels = None
depends_on = None


def upgrade() -> None:
    pass


def downgrade() -> None:
    raise RuntimeError("migrations only go forward: restore a backup instead")
