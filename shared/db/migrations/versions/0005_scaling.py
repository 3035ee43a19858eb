"""Tables of scaling."""

from alembic import op

revision = "0005_scaling"
down_revision = "0004_metrics"
branch_labels = None
depends_on = None


def upgrade() -> None:
    pass


def downgrade() -> None:
    raise RuntimeError("migrations only go forward: restore a backup instead")
