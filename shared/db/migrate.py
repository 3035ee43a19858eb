"""Bring a database to the newest migration; safe to run from many processes at once."""

from pathlib import Path
from typing import Final

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from shared.db.engine import Session, plain_engine
from shared.db.errors import connecting

MIGRATIONS: Final = Path(__file__).parent / "migrations"
_LOCK_KEY: Final = 0x7469_6465
_LOCK_SECONDS: Final = 4
_TURN_SECONDS: Final = 120
"""Longest wait for another process that is migrating."""


async def migrate(url: str) -> None:
    """Run what has not been run. Raises Unavailable if the server or a lock cannot be had in time."""
    waiting = plain_engine(url, Session(application="tidewright-migrate", lock_seconds=_TURN_SECONDS))
    working = plain_engine(url, Session(application="tidewright-migrate", lock_seconds=_LOCK_SECONDS))
    with connecting():
        async with waiting.connect() as turn, working.connect() as connection:
            await turn.execute(text("select pg_advisory_xact_lock(:key)"), {"key": _LOCK_KEY})
            await connection.run_sync(_upgrade)


def head_revision() -> str:
    """The newest migration of this release."""
    head = ScriptDirectory(str(MIGRATIONS)).get_current_head()
    assert head is not None
    return head


def _upgrade(connection: Connection) -> None:
    connection.execute(text("create schema if not exists log"))
    connection.commit()
    if current_revision(connection) == head_revision():
        return
    connection.rollback()
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
    connection.commit()


async def is_migrated(url: str) -> bool:
    """Whether the database is at this release's newest migration, or at a later release's. Raises Unavailable."""
    engine = plain_engine(url, Session(application="tidewright-migrate", statement_seconds=10))
    with connecting():
        async with engine.connect() as connection:
            current = await connection.run_sync(current_revision)
    script = ScriptDirectory(str(MIGRATIONS))
    earlier = {revision.revision for revision in script.walk_revisions()} - {script.get_current_head()}
    return current is not None and current not in earlier


def current_revision(connection: Connection) -> str | None:
    """The migration that the database is at; None before the first."""
    context = MigrationContext.configure(connection, opts={"version_table_schema": "log"})
    return context.get_current_revision()
