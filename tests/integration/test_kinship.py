"""Whatever a worker has started is found and ended, also when neither its shim nor the zygote is left to do so."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from integration.elastic_bed import Member, ZygoteBed, is_alive, wait_until

from services.execution.local import proc
from services.execution.local.watched import Watched
from services.launch.members import end_members
from tidewright import kinship

SCRIPT = """
import os, subprocess, sys, time
def name(pid):
    with open(os.environ["KIN"], "a") as file:
        file.write(f"{pid}\\n")
own_session = subprocess.Popen(["sleep", "600"], start_new_session=True)
name(own_session.pid)
for empty in (True, False):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            name(os.getpid())
            os.chdir("/")
            os.closerange(0, 1024)
            if empty:
                os.execve("/bin/sleep", ["sleep", "600"], {})
            time.sleep(600)
        os._exit(0)
time.sleep(600)
"""


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[ZygoteBed]:
    bed = ZygoteBed(tmp_path / "state")
    bed.start()
    yield bed
    kinship.end_marked([kinship.mark_of(name, f"nonce-{name}") for name in ("j/a", "j/b")])
    bed.stop()


def family(bed: ZygoteBed, name: str) -> tuple[Member, list[int]]:
    """A worker and its three descendants, two of which are no longer below it."""
    kin = bed.base / f"kin-{Path(name).name}"
    (bed.base / "j").mkdir(exist_ok=True)
    member = bed.script(name, SCRIPT, environment={"KIN": str(kin)})
    pids = wait_until(lambda: kin.exists() and len(found := kin.read_text().split()) == 3 and found)
    return member, [int(pid) for pid in pids]


def kill(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(is_alive(pid) for pid in pids))


async def test_execution_ends_what_a_worker_without_shim_and_zygote_leaves_behind(bed: ZygoteBed) -> None:
    member, kin = family(bed, "j/a")
    _, others = family(bed, "j/b")
    watched = Watched(member.directory, nonce="nonce-j/a", boot_id=proc.boot_id(), on_end=lambda: None)
    assert not watched.look(0.0, watch_activity=False, unseen_end_seconds=0.0).ended
    kill(bed.process.pid, member.shim_pid)
    assert not watched.look(1.0, watch_activity=False, unseen_end_seconds=0.0).ended
    kill(member.worker_pid)
    assert all(is_alive(pid) for pid in kin)
    seen = watched.look(2.0, watch_activity=False, unseen_end_seconds=0.0)
    assert (seen.ended, seen.gone) == (True, False), "not gone before nothing of it is left"
    await asyncio.sleep(0.1)
    assert watched.look(3.0, watch_activity=False, unseen_end_seconds=0.0).gone
    assert not any(is_alive(pid) for pid in kin)
    assert all(is_alive(pid) for pid in others)


def test_down_ends_what_a_worker_without_shim_and_zygote_leaves_behind(bed: ZygoteBed) -> None:
    (member, kin), (other, others) = family(bed, "j/a"), family(bed, "j/b")
    kill(bed.process.pid, member.shim_pid, member.worker_pid)
    assert all(is_alive(pid) for pid in kin)
    assert end_members(bed.base, grace_seconds=5.0) == ("j/b",)
    assert not is_alive(other.worker_pid)
    assert not any(is_alive(pid) for pid in [*kin, *others])


def test_a_mark_is_handed_on_over_everything_and_names_nobody_else() -> None:
    mark, other = kinship.mark_of("j/worker/0/1", "n"), kinship.mark_of("j/worker/0/1", "m")
    text = f"""
import os, sys
sys.path[:0] = {sys.path!r}
from tidewright import kinship
assert kinship.put_mark({mark})
if os.fork():
    os._exit(0)
os.setsid()
os.execve("/bin/sleep", ["sleep", "60"], {{}})
"""
    subprocess.run([sys.executable, "-c", text], check=True)
    found = wait_until(lambda: list(kinship.find_marked((mark,))))
    wait_until(lambda: [Path(f"/proc/{pid}/comm").read_text() for pid in found] == ["sleep\n"])
    assert list(kinship.find_marked((other,))) == []
    assert kinship.end_marked((other, mark)) == 1
    wait_until(lambda: not is_alive(found[0]))
    assert kinship.end_marked((other, mark)) == 0


def test_a_zombie_is_nobody_that_has_to_be_ended() -> None:
    mark = kinship.mark_of("j/worker/0/2", "n")
    child = subprocess.Popen(["sleep", "60"])
    resource.prlimit(child.pid, resource.RLIMIT_RTTIME, (mark, mark))
    try:
        assert kinship.end_marked((mark,)) == 1
        wait_until(lambda: not is_alive(child.pid))
        assert kinship.end_marked((mark,)) == 0
    finally:
        child.kill()
        child.wait()


def test_the_mark_of_another_users_process_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = kinship.mark_of("j/worker/0/3", "n")
    child = subprocess.Popen(["sleep", "60"])
    resource.prlimit(child.pid, resource.RLIMIT_RTTIME, (mark, mark))

    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(kinship.resource, "prlimit", refused)
    try:
        assert list(kinship.find_marked((mark,))) == [child.pid]
    finally:
        child.kill()
        child.wait()


def test_a_mark_bounds_nothing() -> None:
    years = kinship.mark_of("j/worker/0/1", "n") / 1e6 / 3600 / 24 / 365
    assert years > 70_000
    assert kinship.mark_of("j/worker/0/1", "n") < 1 << 62
