"""A cancel meets something else on its way: the job's own end, a retry, the death of the services or of Postgres."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import asyncpg
import pytest
from integration.cancel_bed import BEYOND_SECONDS, GRACE_SECONDS, CancelBed, cancel_bed
from integration.launched import is_alive, until

from tidewright.client import Client


@pytest.fixture(scope="module")
def module_bed() -> Iterator[CancelBed]:
    with cancel_bed() as bed:
        yield bed


@pytest.fixture
def bed(module_bed: CancelBed) -> Iterator[CancelBed]:
    yield module_bed
    module_bed.tidy()


@contextmanager
def queueing_held(bed: CancelBed) -> Iterator[None]:
    """Queueing commits nothing: its lease row is locked. What is told meanwhile is one batch to it afterwards."""
    with asyncio.Runner() as runner:
        connection = runner.run(asyncpg.connect(bed.database.url))
        runner.run(connection.execute("begin; select 1 from log.lease where service = 'queueing' for update"))
        try:
            yield
        finally:
            runner.run(connection.execute("rollback"))
            runner.run(connection.close())


@contextmanager
def unsupervised(bed: CancelBed) -> Iterator[None]:
    """Nobody starts again what dies."""
    supervisor = bed.up.pid("supervisor")
    os.kill(supervisor, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(supervisor, signal.SIGCONT)


def waits_for(bed: CancelBed, go: Path, code: int, **body: object) -> str:
    """A running job that ends with ``code`` once ``go`` is there."""
    job = bed.shell(f"while [ ! -e {go} ]; do sleep 0.05; done; exit {code}", **body)
    bed.comes_to(job, "Running")
    return job


def has_ended(bed: CancelBed, job: str) -> None:
    """Execution has said so, and queueing has not read it."""
    until("group_ended", lambda: "tide.worker.group_ended.v1" in bed.events(job))
    assert "tide.allocation.closed.v1" not in bed.events(job)


def answered_at(bed: CancelBed, job: str) -> float:
    """When the services were back: no clock on workers runs before that."""
    assert bed.phase(job)
    return time.monotonic()


@pytest.mark.parametrize("first", ["end", "cancel"])
def test_just_succeeded(bed: CancelBed, tmp_path: Path, first: str) -> None:
    """It has succeeded whichever was told first, since nobody saw its end before the cancel was carried out."""
    job = waits_for(bed, tmp_path / "go", 0)
    bed.wait_behind()
    processes, since = bed.tree(job), time.monotonic()
    with queueing_held(bed):
        if first == "cancel":
            bed.client.cancel(job)
        (tmp_path / "go").touch()
        has_ended(bed, job)
        if first == "end":
            bed.client.cancel(job)
    view = bed.ends(job, processes=processes, since=since, phase="Succeeded")
    assert view["exit_code"] == 0


def test_just_failed_with_a_retry_left(bed: CancelBed, tmp_path: Path) -> None:
    """The retry is decided and taken back in one batch: its attempt ends, too, and runs nothing."""
    ran = tmp_path / "ran"
    job = bed.shell(
        f"echo once >> {ran}; while [ ! -e {tmp_path}/go ]; do sleep 0.05; done; exit 3",
        restart_policy={"kind": "on_failure", "limit": 3},
    )
    bed.comes_to(job, "Running")
    bed.wait_behind()
    processes, since = bed.tree(job), time.monotonic()
    with queueing_held(bed):
        (tmp_path / "go").touch()
        has_ended(bed, job)
        bed.client.cancel(job)
    bed.ends(job, processes=processes, since=since, attempts=2)
    assert ran.read_text() == "once\n"


def test_no_service_is_there(bed: CancelBed) -> None:
    """They die right after they have accepted one, and another is asked for, again and again, until they are back."""
    accepted, asked = (bed.shell("trap '' TERM; while true; do sleep 0.1; done") for _ in range(2))
    for job in (accepted, asked):
        bed.comes_to(job, "Running")
    bed.wait_behind()
    processes = {job: bed.tree(job) for job in (accepted, asked)}

    def ask() -> None:
        with Client(bed.up.url, retry_seconds=60) as client:
            client.cancel(asked)

    asking = threading.Thread(target=ask)
    with unsupervised(bed):
        bed.client.cancel(accepted)
        os.kill(bed.up.pid("process"), signal.SIGKILL)
        asking.start()
        time.sleep(2.0)
        assert is_alive(bed.pid(accepted)), "nobody is there to end it"
    asking.join()
    since = answered_at(bed, accepted)
    bed.comes_to(accepted, "Cancelled", seconds=GRACE_SECONDS + BEYOND_SECONDS)
    bed.ends(asked, processes=processes[accepted] | processes[asked], since=since)
    bed.told_once(accepted, attempts=1)


def test_postgres_dies_right_after_it_was_stored(bed: CancelBed) -> None:
    job = bed.shell("trap '' TERM; while true; do sleep 0.1; done")
    bed.comes_to(job, "Running")
    bed.wait_behind()
    processes = bed.tree(job)
    bed.client.cancel(job)
    os.kill(bed.up.pid("postgres"), signal.SIGKILL)
    until("it is started again", bed.database.is_running)
    bed.ends(job, processes=processes, since=answered_at(bed, job))
