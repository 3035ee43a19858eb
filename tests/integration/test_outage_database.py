"""Postgres is killed while execution lives: nothing is decided meanwhile, and no clock on workers runs."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from integration.execution_bed import ExecutionBed, running_bed
from integration.gated_training import GatedJob

from schemas.events.worker import GroupEnded, StartFailed
from shared.testing.postgres import DatabaseServer, database_server

RECOVER_SECONDS = 8.0
START_SECONDS = 8.0
LEASE_SECONDS = 1.0
LONG_SECONDS = 10.0
"""Longer than the lease, and than each of the clocks above."""


@pytest.fixture(scope="module")
def server() -> Iterator[DatabaseServer]:
    """A server of this file's own, since it is killed."""
    with database_server() as server:
        yield server


@pytest.fixture(scope="module")
def bed(server: DatabaseServer) -> Iterator[ExecutionBed]:
    limits = {
        "recover_seconds": str(RECOVER_SECONDS),
        "start_seconds": str(START_SECONDS),
        "lease_seconds": str(LEASE_SECONDS),
        "lease_renew_seconds": "0.3",
        "slots": "64",
    }
    with running_bed(server, limits) as bed:
        yield bed


async def kill_postgres(server: DatabaseServer) -> None:
    pid = server.server.postmaster_pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await asyncio.sleep(0.3)  # a backend that was at work ends when it is done


async def test_who_dies_while_postgres_is_away_alone_is_replaced(
    server: DatabaseServer, bed: ExecutionBed, tmp_path: Path
) -> None:
    job = GatedJob(bed, tmp_path, workers=3)
    await job.begin(minimum=3)
    pids = job.pids(0, 2)
    await kill_postgres(server)
    os.kill(job.pid(1), signal.SIGKILL)
    await asyncio.sleep(1.0)
    assert job.pid(1, 2) is None, "nothing is started before its intent is committed"
    server.server.start()
    await mended(job, pids)
    await job.end()


async def test_no_deadline_runs_while_nothing_can_be_committed(
    server: DatabaseServer, bed: ExecutionBed, tmp_path: Path
) -> None:
    """One is below its minimum for longer than it may be, one starts for too long: but not by execution's time."""
    dies, below = GatedJob(bed, tmp_path / "dies", workers=3), GatedJob(bed, tmp_path / "below")
    starting = GatedJob(bed, tmp_path / "starting", workers=1)
    await dies.begin(minimum=3)
    await below.begin(minimum=2)
    below.close("join-1-2")
    os.kill(below.pid(1), signal.SIGKILL)
    await below.at("join-1-2", "1-2")  # the clock of the minimum runs from here on
    await starting.begin_without_admission()
    pids, execution = dies.pids(0, 2), bed.process.pid
    began = time.monotonic()
    await kill_postgres(server)
    os.kill(dies.pid(1), signal.SIGKILL)
    await asyncio.sleep(LONG_SECONDS)
    server.server.start()
    await bed.ready()
    assert time.monotonic() - began > max(RECOVER_SECONDS, START_SECONDS)
    assert await bed.events(StartFailed, starting.name) == []
    below.open("join-1-2")
    await below.is_whole(2)
    assert await bed.events(GroupEnded, below.name) == []
    assert await below.incarnations() == {0: 1, 1: 2}
    below.assert_each_step_once()
    await mended(dies, pids)
    assert bed.process.pid == execution
    await bed.event(StartFailed, starting.name, seconds=3 * START_SECONDS)  # the clock goes on from where it stood


async def mended(job: GatedJob, pids: dict[int, int | None]) -> None:
    """Worker 1 of three was replaced, and nobody else."""
    await job.is_whole(3)
    job.assert_alive(pids)
    assert await job.incarnations() == {0: 1, 1: 2, 2: 1}
    assert await job.lost() == [f"{job.name}/worker/1/1"]
    job.assert_each_step_once()
