"""Real Postgres for tests: one embedded server a session, one fresh migrated database a test."""

import asyncio
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sqlalchemy.ext.asyncio import AsyncEngine

from schemas.vocabulary import ServiceName
from shared.db.embedded import EmbeddedPostgres
from shared.db.engine import Session, plain_engine, service_engine
from shared.db.migrate import migrate
from shared.settings import ServiceSettings

_TEMPLATE: Final = "tide_template"


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshDatabase:
    """A migrated database of its own, on a server that others share."""

    name: str
    url: str
    server: EmbeddedPostgres

    def psql(self, statement: str) -> str:
        """As superuser, in a process of its own: for tests that look from outside."""
        return self.server.psql(statement, self.name)

    @asynccontextmanager
    async def engine(
        self, service: ServiceName | None = None, settings: ServiceSettings | None = None
    ) -> AsyncIterator[AsyncEngine]:
        """An engine under the service's role; None: as superuser."""
        if service is None:
            engine = plain_engine(self.url, Session(application="test"))
        else:
            engine = service_engine(self.url, service, settings or ServiceSettings.of(service))
        try:
            yield engine
        finally:
            await engine.dispose()


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseServer:
    """Gives fresh databases, copied from a migrated template (about 50 ms)."""

    server: EmbeddedPostgres
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @contextmanager
    def database(self) -> Iterator[FreshDatabase]:
        name = f"tide_test_{next(self._numbers)}"
        self.server.psql(f"create database {name} template {_TEMPLATE}", "postgres")
        try:
            yield FreshDatabase(name=name, url=self.server.url_of(name), server=self.server)
        finally:
            if self.server.is_running():
                self.server.psql(f"drop database {name} with (force)", "postgres")


@contextmanager
def temporary_state_directory() -> Iterator[Path]:
    """A state folder whose parents let the database's account through (pytest's own folders do not, as root).

    Short, since a unix socket lies in it. A server started in it is stopped at the end.
    """
    path = Path(tempfile.mkdtemp(prefix="tide-"))
    try:
        yield path
    finally:
        EmbeddedPostgres(state=path).stop()
        shutil.rmtree(path)


@contextmanager
def database_server() -> Iterator[DatabaseServer]:
    """Start a server without fsync and migrate the template. Stopped and removed at the end."""
    with temporary_state_directory() as state:
        server = EmbeddedPostgres(state=state, durable=False, connections_max=200)
        server.start()
        server.psql(f"create database {_TEMPLATE}", "postgres")
        with asyncio.Runner() as runner:
            runner.run(migrate(server.url_of(_TEMPLATE)))
        yield DatabaseServer(server=server)
