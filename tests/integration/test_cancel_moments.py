"""A job is cancelled at every moment of its life, over real HTTP, on a real ``tide up`` with two slots."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from integration.cancel_bed import GRACE_SECONDS, CancelBed, cancel_bed
from integration.launched import until

IGNORES_SIGTERM = "trap '' TERM; (setsid sleep 600 &); while true; do sleep 0.2; done"
"""With a grandchild in a session of its own."""


@pytest.fixture(scope="module")
def module_bed() -> Iterator[CancelBed]:
    with cancel_bed() as bed:
        yield bed


@pytest.fixture
def bed(module_bed: CancelBed) -> Iterator[CancelBed]:
    yield module_bed
    module_bed.tidy()


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_pending(bed: CancelBed) -> None:
    running = bed.shell("sleep 600", workers_min=2, workers_max=2)
    bed.comes_to(running, "Running")
    job = bed.shell("sleep 600")
    since = time.monotonic()
    bed.client.cancel(job)
    bed.ends(job, processes=set(), since=since, grace_seconds=0, attempts=0)
    assert bed.charges() == {running: 2}
    assert bed.phase(running) == "Running"


def test_held_and_never_granted(bed: CancelBed) -> None:
    job = bed.shell("sleep 600", held=True)
    bed.comes_to(job, "Held")
    since = time.monotonic()
    bed.client.cancel(job)
    bed.ends(job, processes=set(), since=since, grace_seconds=0, attempts=0)


def test_granted_without_processes(bed: CancelBed) -> None:
    """The zygote stands still; what it forks when it goes on finds no admission, and runs nothing."""
    with stopped(bed.up.pid("zygote")):
        job = bed.shell("echo it runs; sleep 600")
        bed.comes_to(job, "Starting")
        bed.wait_behind()
        time.sleep(0.5)  # the request lies with the zygote
        since = time.monotonic()
        bed.client.cancel(job)
        bed.comes_to(job, "Cancelled", seconds=GRACE_SECONDS + 10)
    until("the late process is there", (bed.folder(job) / "pid.json").exists)
    bed.ends(job, processes=bed.tree(job), since=since)
    assert "it runs" not in (bed.folder(job) / "log").read_text()


def test_starting_forked_and_not_admitted(bed: CancelBed) -> None:
    """Its log is a pipe that nobody reads: there it waits, before it asks for admission."""
    job = bed.shell("sleep 600", held=True)
    bed.folder(job).mkdir(parents=True)
    os.mkfifo(bed.folder(job) / "log")
    bed.client.patch(job, {"held": False})
    bed.forked(job)
    bed.wait_behind()
    assert bed.phase(job) == "Starting"
    since = time.monotonic()
    bed.client.cancel(job)
    bed.ends(job, processes=bed.tree(job), since=since)


def test_first_group_forming(bed: CancelBed, tmp_path: Path) -> None:
    """One of two stands still in the formation: it is killed after the grace, the other leaves by itself."""
    (tmp_path / "forming-1-1").touch()
    job = bed.gated(tmp_path, workers=2)
    stuck = bed.forked(job, 1)
    until("it stands still in the formation", lambda: state_of(stuck) == "T", seconds=40)
    bed.wait_behind()
    since = time.monotonic()
    bed.client.cancel(job)
    bed.ends(job, processes=bed.tree(job), since=since)


def test_resize_forming(bed: CancelBed, tmp_path: Path) -> None:
    (tmp_path / "forming-1-1").touch()
    job = bed.gated(tmp_path, workers_max=2)
    bed.comes_to(job, "Running")
    bed.client.patch(job, {"workers": 2})
    stuck = bed.forked(job, 1)
    until("it stands still in the formation", lambda: state_of(stuck) == "T", seconds=40)
    bed.wait_behind()
    since = time.monotonic()
    bed.client.cancel(job)
    bed.ends(job, processes=bed.tree(job), since=since)
    told = bed.events(job)
    assert "tide.allocation.resized.v1" in told
    assert told.count("tide.worker.room_freed.v1") <= 1


def test_recovering(bed: CancelBed, tmp_path: Path) -> None:
    """Below its minimum: one holds the state and waits, the other one's replacement is on its way."""
    (tmp_path / "join-1-2").touch()
    job = bed.gated(tmp_path, workers=2)
    bed.comes_to(job, "Running")
    os.kill(bed.pid(job, 1), signal.SIGKILL)
    until("the replacement is on its way", (tmp_path / "join-1-2.at.1-2").exists)
    bed.wait_behind()
    since = time.monotonic()
    bed.client.cancel(job)
    bed.ends(job, processes=bed.tree(job), since=since)
    assert bed.events(job).count("tide.worker.checkpointed.v1") == 1, "who holds the state leaves it on the disk"


def test_draining_for_another(bed: CancelBed) -> None:
    """The grace of an eviction runs: the job would have been queued again, and is not."""
    job = bed.shell(IGNORES_SIGTERM)
    bed.comes_to(job, "Running")
    urgent = bed.shell("sleep 600", workers_min=2, workers_max=2, priority="critical")
    bed.comes_to(job, "Draining")
    since = time.monotonic()
    bed.client.cancel(job)
    assert bed.phase(job) == "Draining"
    bed.ends(job, processes=bed.tree(job), since=since)
    bed.comes_to(urgent, "Running")
    assert bed.charges() == {urgent: 2}


def test_three_times_and_a_script_that_ignores_sigterm(bed: CancelBed) -> None:
    """Killed with all that is below it when its grace is over, counted from the first time."""
    job = bed.shell(IGNORES_SIGTERM)
    bed.comes_to(job, "Running")
    until("its grandchild is there", lambda: len(bed.tree(job)) >= 4)
    bed.wait_behind()
    processes, since = bed.tree(job), time.monotonic()
    for _ in range(2):
        bed.client.cancel(job)
    done = bed.up.tide("cancel", job)
    assert done.returncode == 0, done.stderr
    bed.ends(job, processes=processes, since=since)
    assert time.monotonic() - since >= GRACE_SECONDS, "it had its grace"
    assert bed.client.cancel(job)["phase"] == "Cancelled", "once more, after the end"
    bed.told_once(job, attempts=1)


def test_a_checkpoint_is_written_in_the_grace(bed: CancelBed, tmp_path: Path) -> None:
    """The script's own, which takes a second; and that of a live job, at its next boundary."""
    saved = tmp_path / "saved"
    own = bed.shell(f"trap 'sleep 1; echo whole > {saved}; exit 0' TERM; while true; do sleep 0.1; done")
    live = bed.gated(tmp_path / "live")
    bed.comes_to(own, "Running")
    bed.comes_to(live, "Running")
    bed.wait_behind()
    processes, since = bed.tree(own) | bed.tree(live), time.monotonic()
    bed.client.cancel(own)
    bed.client.cancel(live)
    bed.comes_to(own, "Cancelled", seconds=GRACE_SECONDS + 10)
    bed.ends(live, processes=processes, since=since)
    assert saved.read_text() == "whole\n"
    bed.told_once(own, attempts=1)
    assert bed.events(live).count("tide.worker.checkpointed.v1") >= 1
