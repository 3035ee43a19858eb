"""A real ``tide up`` in a state folder of its own, for tests that look at it from outside."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.testing.postgres import temporary_state_directory

TIDE = str(Path(sys.executable).with_name("tide"))
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Launched:
    """One installation. ``tide`` runs the real command against it."""

    state: Path

    @property
    def record(self) -> dict[str, Any]:
        return json.loads((self.state / "up.json").read_text())

    @property
    def url(self) -> str:
        return self.record["url"]

    def pid(self, name: str) -> int:
        """``supervisor``, ``process``, ``zygote`` or ``postgres``."""
        return self.record[name]["pid"]

    def environment(self) -> dict[str, str]:
        outer = {name: value for name, value in os.environ.items() if not name.startswith("TIDE_")}
        server = {"TIDE_SERVER": self.url} if (self.state / "up.json").exists() else {}
        return {**outer, "TIDE_STATE": str(self.state), **server}

    def tide(self, *words: str, timeout: float = 60, **more: Any) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [TIDE, *words],
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            **more,
        )

    def job(self, job: str) -> dict[str, Any]:
        done = self.tide("get", job, "-o", "json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def submit(self, *words: str) -> str:
        """The id."""
        done = self.tide("submit", "-o", "name", *words)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def members(self, job: str) -> list[dict[str, Any]]:
        done = self.tide("members", job, "-o", "json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def up(self, *words: str, slots: int = 4) -> "subprocess.CompletedProcess[str]":
        """In the background. Nothing inherits our pipes: what is detached must not hold them open."""
        command = [TIDE, "up", "--detach", "--slots", str(slots), "--port", "0", *words]
        with (self.state / "test-up.log").open("w+") as log:
            done = subprocess.run(
                command,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=150,
                check=False,
            )
            log.seek(0)
            return subprocess.CompletedProcess(command, done.returncode, log.read(), "")

    def down(self, *words: str) -> "subprocess.CompletedProcess[str]":
        return self.tide("down", *words, timeout=200)

    def told(self) -> str:
        """What the supervisor has said."""
        return (self.state / "log" / "up.log").read_text()


def until(what: str, found: Any, *, seconds: float = 30.0) -> Any:
    """Poll until ``found()`` is true; gives it. Fails naming what did not happen."""
    deadline = time.monotonic() + seconds
    while True:
        value = found()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.1)


def is_alive(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


def processes_of(state: Path) -> dict[int, str]:
    """Living processes that have to do with a state folder: by command line, environment, or working folder."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid() or not is_alive(int(entry.name)):
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            environment = (entry / "environ").read_bytes()
            folder = str((entry / "cwd").readlink())
        except OSError:
            continue
        if str(state) in command or str(state).encode() in environment or folder.startswith(str(state)):
            found[int(entry.name)] = command
    return found


def workers_of(state: Path) -> dict[int, str]:
    """Living workers and their command lines, by their shims' records."""
    found = {}
    for path in (state / "run").glob("*/*/pid.json"):
        pid = json.loads(path.read_text())["worker_pid"]
        if is_alive(pid):
            found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found


@contextmanager
def launched(*words: str, slots: int = 4) -> Iterator[Launched]:
    """Up, and down at the end whatever happens."""
    with temporary_state_directory() as state:
        installation = Launched(state=state)
        done = installation.up(*words, slots=slots)
        try:
            assert done.returncode == 0, done.stdout
            yield installation
        finally:
            installation.down("--keep-jobs")
            end_workers(state)


def end_workers(state: Path) -> None:
    """Kill what a test left running on purpose."""
    for pid in processes_of(state):
        subprocess.run(["kill", "-9", str(pid)], capture_output=True, check=False)
