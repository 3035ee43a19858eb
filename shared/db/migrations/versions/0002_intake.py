"""Tables of intake."""

from alembic import op

revision = "0002_intake"
down_revision = "0001_log"
branch_labels = None
depends_on = None


def upgrade() -> None:
    pass


def downgrade() -> None:
    raise RuntimeError("migrations only go forward: restore a backup instead")
