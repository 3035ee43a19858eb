"""Embedded PostgreSQL: start, stop, a killed postmaster, permissions; migrations, roles and grants."""

import asyncio
import importlib
import os
import signal
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, MetaData, text
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.ext.asyncio import AsyncConnection

import services
from schemas.vocabulary import ServiceName
from shared.db import tables
from shared.db.embedded import EmbeddedPostgres
from shared.db.errors import connecting
from shared.db.migrate import current_revision, head_revision, migrate
from shared.errors import Unavailable
from shared.settings import SettingsError
from shared.testing.postgres import DatabaseServer, FreshDatabase

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root runs the server as another account")


def modes_of(path: Path) -> dict[Path, tuple[int, int, int]]:
    return {p: (stat.S_IMODE(p.stat().st_mode), p.stat().st_uid, p.stat().st_gid) for p in (path, *path.parents)}


def test_start_is_repeatable_and_the_server_outlives_its_starter(state_directory: Path) -> None:
    server = EmbeddedPostgres(state=state_directory)
    outside = modes_of(state_directory.parent)
    server.start()
    pid = server.postmaster_pid()
    assert pid is not None
    assert os.getsid(pid) != os.getsid(0), "a terminal that closes must not end it"
    assert server.start() == server.url
    assert server.postmaster_pid() == pid
    assert server.psql("show fsync") == "on\n"
    assert server.psql("show listen_addresses").strip() == ""
    assert modes_of(state_directory.parent) == outside
    server.stop()
    assert not server.is_running()
    server.stop()


def test_a_killed_postmaster_with_a_busy_backend_is_replaced_and_nothing_committed_is_lost(
    state_directory: Path,
) -> None:
    server = EmbeddedPostgres(state=state_directory)
    server.start()
    server.psql("create table t (n int); insert into t values (1)")
    ended = threading.Event()

    def busy() -> None:
        with pytest.raises(Unavailable):
            server.psql("insert into t select 2 from generate_series(1, 200000000)")
        ended.set()

    thread = threading.Thread(target=busy)
    thread.start()
    while server.psql("select count(*) from pg_stat_activity where query like 'insert%series%'") != "1\n":
        pass
    pid = server.postmaster_pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    while server.is_running():
        pass
    server.start()
    assert server.psql("select n from t") == "1\n"
    thread.join()
    assert ended.is_set()


def test_a_lock_file_whose_pid_was_used_again_does_not_block_the_start(state_directory: Path) -> None:
    server = EmbeddedPostgres(state=state_directory)
    server.start()
    lines = (server.data / "postmaster.pid").read_text().splitlines()
    server.stop()
    (server.data / "postmaster.pid").write_text("\n".join([str(os.getpid()), *lines[1:]]) + "\n")
    server.start()
    assert server.psql("select 1") == "1\n"


@as_root
def test_a_closed_parent_is_refused_and_left_alone(state_directory: Path) -> None:
    state_directory.chmod(0o700)
    inner = state_directory / "home" / "tidewright"
    before = modes_of(state_directory)
    with pytest.raises(SettingsError, match=f"may not pass through {state_directory}: choose another state folder"):
        EmbeddedPostgres(state=inner).start()
    assert modes_of(state_directory) == before
    assert not (inner / "postgres").exists()


@as_root
def test_programs_that_the_account_cannot_reach_are_copied_into_the_state_folder(
    state_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.db.embedded.may_run", lambda path, account: state_directory in path.parents)
    server = EmbeddedPostgres(state=state_directory)
    server.start()
    pid = server.postmaster_pid()
    assert pid is not None
    assert state_directory in Path("/proc", str(pid), "exe").readlink().parents


def test_a_path_too_long_for_a_socket_is_one_clear_line(state_directory: Path) -> None:
    with pytest.raises(SettingsError, match="too long for a unix socket"):
        EmbeddedPostgres(state=state_directory / ("x" * 90)).start()


async def test_a_server_that_is_not_there_is_unavailable(state_directory: Path) -> None:
    with pytest.raises(Unavailable):
        await migrate(f"postgresql://postgres@/x?host={state_directory}")


async def test_migrating_again_and_at_once_changes_nothing(database: FreshDatabase) -> None:
    before = database.psql("select log_id from log.identity")
    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(migrate(database.url))
    async with database.engine() as engine, engine.connect() as connection:
        assert await connection.run_sync(current_revision) == head_revision()
    assert database.psql("select log_id from log.identity") == before


def metadata_of_services() -> dict[str, MetaData]:
    """Schema -> what its ``tables.py`` says; the log's own included."""
    found = {tables.SCHEMA: tables.METADATA}
    for service in ServiceName:
        if (Path(services.__file__).parent / service / "tables.py").exists():
            module = importlib.import_module(f"services.{service}.tables")
            (metadata,) = {id(v): v for v in vars(module).values() if isinstance(v, MetaData)}.values()
            assert metadata.schema == service, f"tables of {service} belong into its own schema"
            found[service] = metadata
    return found


@pytest.mark.parametrize("schema", sorted(metadata_of_services()))
async def test_migrations_equal_the_tables(database: FreshDatabase, schema: str) -> None:
    metadata = metadata_of_services()[schema]

    def differences(connection: Connection) -> list[Any]:
        def included(name: str | None, kind: str, _: object) -> bool:
            return name == schema if kind == "schema" else name != "alembic_version"

        options = {"include_schemas": True, "include_name": included, "compare_type": True}
        context = MigrationContext.configure(connection, opts=options)
        return list(compare_metadata(context, metadata))

    async with database.engine() as engine, engine.connect() as connection:
        assert await connection.run_sync(differences) == []


@pytest.mark.parametrize("service", list(ServiceName))
async def test_each_service_writes_its_own_schema_and_no_other(database: FreshDatabase, service: ServiceName) -> None:
    for schema in ServiceName:
        database.psql(f"create table {schema}.probe (n int)")
    async with database.engine(service) as engine:
        for schema in ServiceName:
            allowed = schema is service
            for statement in (
                f"insert into {schema}.probe values (1)",
                f"update {schema}.probe set n = 2",
                f"delete from {schema}.probe",
                f"select n from {schema}.probe",
            ):
                with connecting():
                    async with engine.connect() as connection:
                        assert await may(connection_of=connection, statement=statement) is allowed, statement
        for statement in (
            "delete from log.outbox",
            "update log.outbox set key = ''",
            "update log.identity set log_id=''",
        ):
            async with engine.connect() as connection:
                assert not await may(connection_of=connection, statement=statement), statement


async def may(*, connection_of: AsyncConnection, statement: str) -> bool:
    try:
        await connection_of.execute(text(statement))
    except ProgrammingError as exc:
        if "permission denied" not in str(exc):
            raise
        return False
    return True


async def test_a_database_of_ones_own_needs_no_superuser(postgres: DatabaseServer) -> None:
    """A login that may create roles owns a database: it migrates, and its services work under their roles."""
    server = postgres.server
    server.psql("create role landlord login createrole", "postgres")
    server.psql("create database rented owner landlord", "postgres")
    url = server.url_of("rented").replace("postgres@", "landlord@")
    rented = FreshDatabase(name="rented", url=url, server=server)
    # The session's template has made the roles already; as on a new server, they are the landlord's here.
    for service in (*ServiceName, "log"):
        server.psql(f"grant tide_{service} to landlord with admin option", "postgres")
    try:
        await migrate(url)
        rented.psql("create table scaling.probe (n int); alter table scaling.probe owner to landlord")
        server.psql("grant insert on scaling.probe to tide_scaling", "rented")
        async with rented.engine(ServiceName.SCALING) as engine, engine.connect() as connection:
            assert await may(connection_of=connection, statement="insert into scaling.probe values (1)")
            assert (await connection.execute(text("select current_user"))).scalar() == "tide_scaling"
            assert not await may(connection_of=connection, statement="insert into queueing.nowhere values (1)")
    finally:
        server.psql("drop database rented with (force)", "postgres")
        server.psql("drop role landlord", "postgres")
