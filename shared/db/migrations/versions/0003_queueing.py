"""Tables of queueing."""

from alembic import op

revision = "0003_queueing"
down_revision = "0002_intake"
branch_labels = None
depends_on = None


def upgrade() -> None:
    pass


def downgrade() -> None:
    raise RuntimeError("migrations only go forward: restore a backup instead")
