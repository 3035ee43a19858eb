"""The demo as a newcomer runs it: it holds, each fault fails it for its own reason, and nothing is left running."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from demo.checker import CLAIMS
from demo.faults import FAILS, Fault
from demo.installation import is_alive, send
from demo.record import read_processes

ROOT = Path(__file__).parents[2]
STORY_SECONDS_MAX = 120
_VERDICT = re.compile(r"^(ok|FAILED|not reached) +([a-z-]+) ", re.MULTILINE)


def run_demo(out: Path, *, fault: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "demo", f"--out={out}"]
    environment = {**os.environ, "DEMO_FAULT": fault, "COLUMNS": "160"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def verdicts(output: str) -> dict[str, str]:
    return {name: status for status, name in _VERDICT.findall(output)}


def still_alive(out: Path) -> list[str]:
    """What of the run lives on; it is killed here, so that a failing test leaves nothing either."""
    commands, _ = read_processes(out / "record")
    left = {process: command for process, command in commands.items() if is_alive(process)}
    for process in left:
        send(process, signal.SIGKILL)
    return list(left.values())


@pytest.mark.timeout(260)
def test_story_holds_within_two_minutes(tmp_path):
    began = time.monotonic()
    done = run_demo(tmp_path)
    seconds = time.monotonic() - began
    assert still_alive(tmp_path) == []
    assert verdicts(done.stdout) == dict.fromkeys(CLAIMS, "ok"), done.stdout
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert seconds < STORY_SECONDS_MAX


@pytest.mark.timeout(260)
@pytest.mark.parametrize("fault", list(Fault))
def test_fault_fails_the_claim_that_speaks_of_it(fault, tmp_path):
    done = run_demo(tmp_path, fault=fault)
    assert still_alive(tmp_path) == []
    found = verdicts(done.stdout)
    assert [name for name, status in found.items() if status == "FAILED"] == [FAILS[fault]], done.stdout
    assert list(found) == list(CLAIMS)
    assert found["nothing-left"] == "ok"
    assert done.returncode == 1
    assert "Did not happen" not in done.stdout


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("number", "seen"),
    [(signal.SIGINT, ("marks.jsonl", b'"submitted"')), (signal.SIGTERM, ("processes.jsonl", b"postgres"))],
    ids=["Ctrl-C while a job trains", "SIGTERM while it starts"],
)
def test_interrupted_demo_leaves_nothing_running(number, seen, tmp_path):
    demo = subprocess.Popen([sys.executable, "-m", "demo", f"--out={tmp_path}"], cwd=ROOT, stdout=subprocess.PIPE)
    file, text = tmp_path / "record" / seen[0], seen[1]
    try:
        deadline = time.monotonic() + 60
        while not (file.exists() and text in file.read_bytes()):
            assert time.monotonic() < deadline
            assert demo.poll() is None
            time.sleep(0.1)
        demo.send_signal(number)
        output, _ = demo.communicate(timeout=90)
    finally:
        demo.kill()
        demo.wait()
        left = still_alive(tmp_path)
    assert demo.returncode == 130, output
    assert b"had to be killed by force" not in output
    assert left == []
