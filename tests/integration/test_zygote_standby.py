"""Standbys: workers that are there before they are asked for, on real processes."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.elastic_bed import ZygoteBed, is_alive, wait_until
from tidewright import shim


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZygoteBed]:
    bed = ZygoteBed(tmp_path_factory.mktemp("standby"), standbys=2)
    bed.start()
    yield bed
    bed.stop()


@pytest.fixture
def mortal_bed(tmp_path: Path) -> Iterator[ZygoteBed]:
    bed = ZygoteBed(tmp_path, standbys=2)
    bed.start()
    yield bed
    bed.stop()


def standbys(bed: ZygoteBed) -> dict[int, int]:
    """Shim -> worker of every standby: the zygote's children without a member's record."""
    taken = {json.loads(path.read_text())["shim_pid"] for path in bed.base.glob("run/*/pid.json")}
    children = [pid for pid in shim.children_of(bed.process.pid) if pid not in taken]
    pairs = {pid: shim.children_of(pid) for pid in children}
    return {pid: below[0] for pid, below in pairs.items() if len(below) == 1 and is_shim(pid)}


def is_shim(pid: int) -> bool:
    return Path(f"/proc/{pid}/comm").read_text() == "tide-shim\n"


def two_standbys(bed: ZygoteBed) -> dict[int, int]:
    return wait_until(lambda: len(found := standbys(bed)) == 2 and found, 30, "two standbys")


SAY = """
import json, os, random, resource, signal, sys, threading, numpy, paddle
fds = []
for n in os.listdir("/proc/self/fd"):
    try: fds.append(os.readlink(f"/proc/self/fd/{n}"))
    except OSError: pass
json.dump({"pid": os.getpid(), "argv": sys.argv[1:], "x": os.environ["X"], "cwd": os.getcwd(),
  "sid": os.getsid(0) == os.getpid(), "fds": fds, "threads": threading.active_count(),
  "mark": resource.getrlimit(resource.RLIMIT_RTTIME)[0], "name": paddle.nn.Linear(1, 1).weight.name,
  "random": [random.random(), numpy.random.rand(), float(paddle.rand([1]))]}, sys.stdout)
"""


def test_a_start_makes_a_standby_the_member_as_if_it_had_been_forked_for_it(bed: ZygoteBed) -> None:
    ready = two_standbys(bed)
    views = []
    for name in ("one", "two", "three"):  # the third has to be forked: no standby is left
        member = bed.script(name, SAY, args=["a", name], environment={"X": name}, working_directory="/usr")
        assert member.exit()["code"] == 0, member.log
        record = json.loads((member.directory / "pid.json").read_text())
        view = json.loads(member.log)
        assert view["pid"] == record["worker_pid"] == member.worker_pid
        assert (ready.get(record["shim_pid"]) == record["worker_pid"]) is (name != "three")
        assert (view["argv"], view["x"], view["cwd"]) == (["a", name], name, "/usr")
        assert (view["sid"], view["threads"]) == (True, 1)
        assert not [target for target in view["fds"] if target.startswith(("socket:", "pipe:", "anon_inode:"))]
        views.append(view)
        member.gone()
    assert len({view["mark"] for view in views}) == 3
    assert all(len({view["random"][kind] for view in views}) == 3 for kind in range(3))
    assert len({view["name"] for view in views}) == 1, "a script saves its parameters under the same names either way"
    two_standbys(bed)


def test_a_repeated_request_takes_no_second_standby(bed: ZygoteBed) -> None:
    ready = two_standbys(bed)
    member = bed.script("once", "import time; time.sleep(1000)")
    again = bed.script("once", "import time; time.sleep(1000)")
    assert again.answer == {"ok": True, "duplicate": True}
    wait_until((member.directory / "pid.json").exists)
    left = standbys(bed)
    assert len(left) == 1
    assert left.items() <= ready.items()


@pytest.mark.parametrize("victim", ["shim", "worker", "stopped worker"])
def test_a_standby_that_is_lost_is_replaced_and_loses_no_start(bed: ZygoteBed, victim: str) -> None:
    ready = two_standbys(bed)
    for shim_pid, worker_pid in ready.items():
        if victim == "stopped worker":
            os.kill(worker_pid, signal.SIGSTOP)
        else:
            pid = shim_pid if victim == "shim" else worker_pid
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda pid=pid: not is_alive(pid), 10, "it has ended")
    large = {"X": "y" * 60_000} if victim == "stopped worker" else {}
    members = [
        bed.script(f"after-{victim.replace(' ', '-')}-{n}", "print('ran')", environment=large) for n in range(2)
    ]
    if victim == "stopped worker":  # it has got its request, and goes on once it may
        for worker_pid in ready.values():
            os.kill(worker_pid, signal.SIGCONT)
    for member in members:
        assert member.exit()["code"] == 0, member.log
        assert member.log == "ran\n"
        member.gone()
    assert not set(two_standbys(bed)) & set(ready)
    wait_until(
        lambda: not any(is_alive(pid) for pair in ready.items() for pid in pair), 10, "nothing is left of them"
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_standbys_end_with_their_zygote(mortal_bed: ZygoteBed, number: signal.Signals) -> None:
    ready = two_standbys(mortal_bed)
    os.kill(mortal_bed.process.pid, number)
    mortal_bed.process.wait(10)
    wait_until(lambda: not any(is_alive(pid) for pair in ready.items() for pid in pair), 10, "standbys end")


def test_what_a_killed_shim_leaves_behind_is_ended_and_standbys_are_not(bed: ZygoteBed) -> None:
    two_standbys(bed)
    member = bed.script("tree", "import os, time\nif os.fork() == 0: os.setsid()\ntime.sleep(1000)")
    wait_until((member.directory / "pid.json").exists)
    below = wait_until(lambda: shim.children_of(member.worker_pid), 10, "its child")
    ready = two_standbys(bed)
    os.kill(member.shim_pid, signal.SIGKILL)
    os.kill(member.worker_pid, signal.SIGKILL)
    member.gone()
    wait_until(lambda: not any(is_alive(pid) for pid in below), 10, "its child ends")
    time.sleep(0.1)
    assert standbys(bed) == ready


def test_a_start_that_needs_no_fork_takes_none(bed: ZygoteBed) -> None:
    ready = two_standbys(bed)
    assert bed.shell("command", "exit 3").exit()["code"] == 3
    assert standbys(bed) == ready
