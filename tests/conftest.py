"""Fixtures for every kind of test: state folders, and real Postgres where a test asks for it."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from shared.telemetry.logs import configure_logging
from shared.testing.clock import FakeClock
from shared.testing.kafka import EmbeddedKafka, running_kafka
from shared.testing.postgres import DatabaseServer, FreshDatabase, database_server, temporary_state_directory

if not os.environ.get("CI"):  # where it is set, the library's own profile for it does this and more
    settings.register_profile("any-machine", deadline=None)
    settings.load_profile("any-machine")


def pytest_configure() -> None:
    """Who starts the tests in the background of a shell leaves Ctrl-C ignored, here and in all that tests start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def logs() -> None:
    """As in production: plain lines, quick to write (the library's default formats local variables)."""
    configure_logging(level="info", log_format="json")


@pytest.fixture(scope="session")
def postgres() -> Iterator[DatabaseServer]:
    """One embedded server for the whole session."""
    with database_server() as server:
        yield server


@pytest.fixture
def database(postgres: DatabaseServer) -> Iterator[FreshDatabase]:
    """A fresh, migrated database for one test."""
    with postgres.database() as database:
        yield database


@pytest.fixture(scope="session")
def kafka() -> Iterator[EmbeddedKafka]:
    """One broker for the whole session (a process of xdist has its own). Tests take a prefix of their own."""
    with running_kafka() as broker:
        yield broker


@pytest.fixture
def state_directory() -> Iterator[Path]:
    """An empty state folder that an embedded server can live in; a server in it is stopped at the end."""
    with temporary_state_directory() as path:
        yield path


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()
