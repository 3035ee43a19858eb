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
from demo.installation import is_alive
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
    commands, _ = read_processes(out / "record")
    return [command for process, command in commands.items() if is_alive(process)]


@pytest.mark.timeout(260)
def test_story_holds_within_two_minutes(tmp_path):
    began = time.monotonic()
    done = run_demo(tmp_path)
    seconds = time.monotonic() - began
    assert verdicts(done.stdout) == dict.fromkeys(CLAIMS, "ok"), done.stdout
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert still_alive(tmp_path) == []
    assert seconds < STORY_SECONDS_MAX


@pytest.mark.timeout(260)
@pytest.mark.parametrize("fault", list(Fault))
def test_fault_fails_the_claim_that_speaks_of_it(fault, tmp_path):
    done = run_demo(tmp_path, fault=fault)
    found = verdicts(done.stdout)
    assert [name for name, status in found.items() if status == "FAILED"] == [FAILS[fault]], done.stdout
    assert list(found) == list(CLAIMS)
    assert found["nothing-left"] == "ok"
    assert done.returncode == 1
    assert "Did not happen" not in done.stdout
    assert still_alive(tmp_path) == []


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_demo_leaves_nothing_running(number, tmp_path):
    demo = subprocess.Popen([sys.executable, "-m", "demo", f"--out={tmp_path}"], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        marks = tmp_path / "record" / "marks.jsonl"
        deadline = time.monotonic() + 60
        while not (marks.exists() and b'"submitted"' in marks.read_bytes()):
            assert time.monotonic() < deadline
            assert demo.poll() is None
            time.sleep(0.1)
        demo.send_signal(number)
        output, _ = demo.communicate(timeout=60)
    finally:
        demo.kill()
        demo.wait()
    assert demo.returncode == 130, output
    assert still_alive(tmp_path) == []
