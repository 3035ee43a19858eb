"""The exit status of a worker whose shim and zygote are both gone: from whoever still knows it."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from integration.elastic_bed import Member, ZygoteBed, is_alive, wait_until

from services.execution.core.seen import Process
from services.execution.local import proc
from services.execution.local.watched import Watched

TELLS_OF_REAPED = tuple(int(part) for part in os.uname().release.split(".")[:2]) >= (6, 15)


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[ZygoteBed]:
    bed = ZygoteBed(tmp_path / "state")
    bed.start()
    yield bed
    bed.stop()


def watch(member: Member, name: str) -> Watched:
    return Watched(member.directory, nonce=f"nonce-{name}", boot_id=proc.boot_id(), on_end=lambda: None)


async def gone(watched: Watched) -> Process:
    """What is seen in the end."""
    for now in range(200):
        seen = watched.look(float(now), watch_activity=False, unseen_end_seconds=5.0)
        if seen.gone:
            return seen
        await asyncio.sleep(0.02)
    raise AssertionError("it is never called gone")


async def test_a_worker_that_nobody_waits_for_keeps_its_exit_status(bed: ZygoteBed) -> None:
    scripts = {"done": "exit 0", "failed": "exit 7", "killed": "kill -SEGV $$"}
    members = {
        name: bed.shell(name, f"while [ ! -e {bed.base}/go ]; do sleep 0.02; done; {end}")
        for name, end in scripts.items()
    }
    watches = {name: watch(member, name) for name, member in members.items()}
    for each in watches.values():
        assert not each.look(0.0, watch_activity=False, unseen_end_seconds=5.0).ended
    for pid in (bed.process.pid, *(member.shim_pid for member in members.values())):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(is_alive(member.shim_pid) for member in members.values()))
    bed.process.wait()
    (bed.base / "go").touch()
    wait_until(lambda: not any(is_alive(member.worker_pid) for member in members.values()))
    seen = {name: (await gone(each)).exit_code for name, each in watches.items()}
    if not TELLS_OF_REAPED:
        seen = {name: code for name, code in seen.items() if code is not None}
    expected = {"done": 0, "failed": 7, "killed": -11}
    assert seen == {name: expected[name] for name in seen}
    assert not any((member.directory / "exit.json").exists() for member in members.values())


async def test_a_reused_pid_says_nothing_about_who_had_it_before() -> None:
    """A descriptor whose process was reaped: what stands in ``/proc`` under its pid is somebody else."""
    child = os.fork()
    if child == 0:
        os._exit(3)
    descriptor = os.pidfd_open(child)
    wait_until(lambda: not is_alive(child))
    assert proc.exit_code_of(descriptor, child) == 3
    other = os.fork()
    if other == 0:
        os._exit(9)
    wait_until(lambda: not is_alive(other))
    os.waitpid(child, 0)
    assert proc.exit_code_of(descriptor, other) == (3 if TELLS_OF_REAPED else None)
    os.waitpid(other, 0)
    os.close(descriptor)
