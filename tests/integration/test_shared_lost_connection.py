"""A connection between the server's last word and its end: the driver then knows no better than an internal error."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from sqlalchemy import text

from schemas.vocabulary import ServiceName
from shared.bus.wakeups import Wakeups
from shared.db.engine import parse_database_url, service_engine
from shared.db.errors import connecting
from shared.errors import Unavailable
from shared.settings import ServiceSettings
from shared.testing.postgres import FreshDatabase


@asynccontextmanager
async def held_open(database: FreshDatabase, directory: Path) -> AsyncIterator[str]:
    """A URL through which the server's words come, but not the end of its connections."""
    url = parse_database_url(database.url)
    folder, port = str(url.query["host"]), url.port or 5432
    writers: list[asyncio.StreamWriter] = []

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65_536):
                writer.write(data)
        except ConnectionError:
            return

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_unix_connection(f"{folder}/.s.PGSQL.{port}")
        writers.extend((writer, server_writer))
        async with asyncio.TaskGroup() as group:
            group.create_task(carry(reader, server_writer))
            group.create_task(carry(server_reader, writer))

    relay = await asyncio.start_unix_server(accept, directory / f".s.PGSQL.{port}")
    try:
        yield url.update_query_dict({"host": str(directory)}).render_as_string(hide_password=False)
    finally:
        for writer in writers:
            writer.close()
        relay.close()


def end_connections(database: FreshDatabase) -> None:
    database.psql(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where datname = current_database() and pid <> pg_backend_pid()"
    )


async def test_a_statement_then_finds_the_database_unavailable(database: FreshDatabase, tmp_path: Path) -> None:
    async with held_open(database, tmp_path) as url:
        engine = service_engine(url, ServiceName.SCALING, ServiceSettings.of(ServiceName.SCALING))

        async def use() -> None:
            with connecting():
                async with engine.connect() as connection:
                    await connection.execute(text("select 1"))

        await use()
        end_connections(database)
        await asyncio.sleep(0.2)
        with pytest.raises(Unavailable):
            await use()
        await use()
        await engine.dispose(close=False)


async def test_wake_ups_then_connect_again(database: FreshDatabase, tmp_path: Path) -> None:
    stopping = asyncio.Event()
    async with held_open(database, tmp_path) as url, asyncio.TaskGroup() as group:
        wakeups = Wakeups(url)
        run = group.create_task(wakeups.run(stopping))
        seen = await wakeups.wait(seen=0, seconds=10)
        end_connections(database)
        await asyncio.sleep(0.2)
        wakeups.published()
        seen = await wakeups.wait(seen=seen, seconds=10)
        assert await wakeups.wait(seen=seen, seconds=10) > seen, "the new connection wakes everybody once"
        assert not run.done()
        stopping.set()
