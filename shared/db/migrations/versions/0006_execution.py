"""Tables of execution."""

from alembic import op

revision = "0006_execution"
down_revision = "0005_scaling"
branch_labels = None
depends_on = None


def upgrade() -> None:
    pass


def downgrade() -> None:
    raise RuntimeError("migrations only go forward: restore a backup instead")
