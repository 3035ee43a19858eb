"""The shim: exit status, watch record, the tree below it, and what happens when it is killed itself."""

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
    bed = ZygoteBed(tmp_path_factory.mktemp("shim"))
    bed.start()
    yield bed
    bed.stop()


TREE = """
import os, subprocess, sys, time
def daemon(name):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            open(name, "w").write(str(os.getpid()))
            while True: time.sleep(1)
        os._exit(0)
subprocess.Popen(["setsid", "sh", "-c", "echo $$ > setsid; exec env -i sleep 1000"])
subprocess.Popen(["sh", "-c", "trap '' TERM; echo $$ > stubborn; while :; do sleep 1; done"])
daemon("double")
NAMES = ("setsid", "double", "stubborn")
while not all(os.path.exists(n) and open(n).read().strip() for n in NAMES): time.sleep(0.01)
open("ready", "w").close()
"""


def pids(bed: ZygoteBed, folder: str) -> list[int]:
    return [int((bed.base / folder / name).read_text()) for name in ("setsid", "double", "stubborn")]


@pytest.mark.parametrize("ending", ["returns", "killed"])
def test_nothing_of_the_tree_is_left(bed: ZygoteBed, ending: str) -> None:
    (bed.base / ending).mkdir()
    text = TREE + ("" if ending == "returns" else "time.sleep(1000)\n")
    member = bed.script(f"tree-{ending}", text, working_directory=str(bed.base / ending))
    wait_until((bed.base / ending / "ready").exists)
    below = pids(bed, ending)
    if ending == "killed":
        assert all(is_alive(pid) for pid in below)
        os.kill(member.worker_pid, signal.SIGKILL)
    assert member.exit()["code"] == (0 if ending == "returns" else -9)
    member.gone()
    assert [pid for pid in below if is_alive(pid)] == []
    wait_until(lambda: not is_alive(member.shim_pid), what="the shim ends")


def test_sigterm_to_the_shim_reaches_the_worker(bed: ZygoteBed) -> None:
    text = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print("ready")
time.sleep(60)
"""
    member = bed.script("term", text)
    wait_until(lambda: member.log)
    os.kill(member.shim_pid, signal.SIGTERM)
    assert member.exit()["code"] == 5


def test_record_tells_pid_reuse_apart(bed: ZygoteBed) -> None:
    member = bed.shell("record", "sleep 60")
    record = member.record
    assert (record["member"], record["nonce"]) == ("record", "nonce-record")
    assert shim.process_stat(record["worker_pid"])[2] == record["worker_start"]
    assert shim.process_stat(record["shim_pid"])[2] == record["shim_start"]
    assert record["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert member.answer == {"ok": True, "shim_pid": record["shim_pid"]}
    os.kill(record["worker_pid"], signal.SIGKILL)
    member.gone()


def watch(member) -> tuple[float, str, int]:
    """It is there a moment before its first line is."""
    path = member.directory / "watch"
    wall, state, ticks = wait_until(lambda: path.exists() and path.read_bytes().split())
    return float(wall), state.decode(), int(ticks)


def test_watch_record_shows_a_busy_and_a_stopped_worker(bed: ZygoteBed) -> None:
    member = bed.script("busy", "while True: pass")
    began = time.time()
    wait_until(lambda: watch(member)[2] > 20)
    assert (member.directory / "watch").stat().st_size == 64
    os.kill(member.worker_pid, signal.SIGSTOP)
    wait_until(lambda: watch(member)[1] == "T", 3)
    assert watch(member)[0] >= began
    seen_at, _, ticks = watch(member)
    wait_until(lambda: watch(member)[0] > seen_at)
    assert watch(member)[2] == ticks
    os.kill(member.worker_pid, signal.SIGKILL)
    member.gone()


def test_a_stopped_shim_costs_the_worker_nothing(bed: ZygoteBed) -> None:
    member = bed.script("stopped-shim", "import time\nfor i in range(2000): print('x' * 100)\ntime.sleep(0.2)")
    os.kill(member.shim_pid, signal.SIGSTOP)
    wait_until(lambda: shim.process_stat(member.worker_pid)[0] == "Z")
    assert not (member.directory / "exit.json").exists()
    os.kill(member.shim_pid, signal.SIGCONT)
    assert member.exit()["code"] == 0
    assert len(member.log) == 2000 * 101


def test_a_killed_shims_worker_goes_on_and_its_status_is_kept(bed: ZygoteBed) -> None:
    (bed.base / "orphan").mkdir()
    text = TREE + "import sys\nwhile not os.path.exists('end'): time.sleep(0.01)\nsys.exit(11)"
    member = bed.script("orphan", text, working_directory=str(bed.base / "orphan"))
    wait_until((bed.base / "orphan" / "ready").exists)
    below = pids(bed, "orphan")
    bystander = bed.shell("bystander", "sleep 60")
    os.kill(member.shim_pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(member.shim_pid))
    time.sleep(0.1)
    assert is_alive(member.worker_pid)
    (bed.base / "orphan" / "end").touch()
    assert member.exit()["code"] == 11
    member.gone()
    assert [pid for pid in below if is_alive(pid)] == []
    assert is_alive(bystander.worker_pid), "another member's tree was touched"
    os.kill(bystander.worker_pid, signal.SIGKILL)
    assert bystander.exit()["code"] == -9


def test_shim_and_worker_killed_at_once(bed: ZygoteBed) -> None:
    for number in range(10):
        member = bed.shell(f"both-{number}", "sleep 60")
        record = member.record
        for pid in (record["shim_pid"], record["worker_pid"])[:: 1 if number % 2 else -1]:
            os.kill(pid, signal.SIGKILL)
        assert member.exit()["code"] == -9
        wait_until(lambda pid=record["worker_pid"]: shim.process_stat(pid) is None, what="reaped")


def test_no_byte_of_the_log_is_lost(bed: ZygoteBed) -> None:
    text = """
import os, sys
for i in range(20_000): print(i)
os.write(1, b"y" * (2 << 20))
print("last", flush=False)
os.kill(os.getpid(), 9)
"""
    member = bed.script("log", text)
    assert member.exit()["code"] == -9
    lines = member.log.split("\n")
    assert lines[:20_000] == [str(i) for i in range(20_000)]
    assert lines[20_000] == "y" * (2 << 20) + "last"


def descriptors(bed: ZygoteBed) -> int:
    return sum(1 for _ in Path(f"/proc/{bed.process.pid}/fd").iterdir())


def test_no_zombies_and_few_descriptors_remain(bed: ZygoteBed) -> None:
    for number in range(5):
        bed.shell(f"many-{number}", "exit 0").gone()
    before = descriptors(bed)
    for number in range(5, 25):
        bed.shell(f"many-{number}", "exit 0").gone()
    wait_until(lambda: not [pid for pid in shim.children_of(bed.process.pid) if not is_alive(pid)], what="reaped")
    assert descriptors(bed) == before
