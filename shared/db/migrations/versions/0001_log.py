"""Tables of log."""

from alembic import op

revision = "0001_log"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    pass


def downgrade() -> None:
    raise RuntimeError("migrations only go forward: restore a backup instead")
