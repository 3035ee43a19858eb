"""Starts Tidewright in a fresh folder, speaks to it as a user would, and takes it down without leaving anything."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from demo.record import PROCESSES, Process, read_processes
from demo.recorder import MARKER_VARIABLE, command_of

ROOT: Final = Path(__file__).resolve().parents[1]
DOWN_SECONDS: Final = 40.0
_HTTP_SECONDS: Final = 3.0


class CommandFailed(Exception):
    """A command of the CLI ended with a code other than 0."""


@dataclass(kw_only=True)
class Installation:
    """One installation with its own state folder and port, and the recorder that watches it (unless not wanted)."""

    record: Path
    slots: int
    settings: dict[str, float]
    """overrides for ``tide up --set``"""
    state: Path
    port: int
    recorded: bool = True
    """Without a recorder a measurement has the machine to itself; ``stop`` then knows no strays."""
    marker: str = field(default_factory=lambda: uuid.uuid4().hex)
    _up: subprocess.Popen[bytes] | None = None
    _recorder: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def up_command(self) -> list[str]:
        changes = [f"--set={name}={value:g}" for name, value in self.settings.items()]
        return ["up", f"--state={self.state}", f"--port={self.port}", f"--slots={self.slots}", *changes]

    @property
    def environment(self) -> dict[str, str]:
        """That of every process of the run: whoever carries it belongs to it."""
        return {**os.environ, "TIDE_SERVER": self.url, "TIDE_STATE": str(self.state), MARKER_VARIABLE: self.marker}

    def start(self) -> None:
        """Start the recorder, then ``tide up``, each in a session of its own: a Ctrl-C reaches the demo alone."""
        self.record.mkdir(parents=True, exist_ok=True)
        if self.recorded:
            self._start_recorder()
        self.start_up()

    def start_up(self) -> None:
        """``tide up`` alone: the first time, or again after its supervisor was killed."""
        if self._up is not None:
            self._up.wait()
        with (self.record / "up.log").open("ab") as log:
            self._up = subprocess.Popen(
                [tide(), *self.up_command],
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _start_recorder(self) -> None:
        recorder = [sys.executable, "-m", "demo.recorder", f"--record={self.record}", f"--state={self.state}"]
        with (self.record / "recorder.log").open("wb") as log:
            self._recorder = subprocess.Popen(
                [*recorder, f"--port={self.port}", f"--marker={self.marker}"],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def ended(self) -> str:
        """What has ended that should not have, or ""."""
        if self._up is not None and self._up.poll() is not None:
            return f"`tide up` ended with code {self._up.returncode}"
        if self._recorder is not None and self._recorder.poll() is not None:
            return f"the recorder ended with code {self._recorder.returncode}"
        return ""

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=_HTTP_SECONDS).status_code == 200
        except httpx.TransportError:
            return False

    def part(self, name: str) -> Process | None:
        """``supervisor``, ``process`` (the five services), ``zygote`` or ``postgres`` by ``up.json``, if it lives."""
        try:
            found = json.loads((self.state / "up.json").read_bytes())[name]
        except (OSError, ValueError, KeyError):
            return None
        process = Process(found["pid"], found["start"]) if found else None
        return process if process is not None and is_alive(process) else None

    def members(self, job: str) -> list[dict[str, Any]]:
        """The processes of a job as the public API tells them; empty while it cannot."""
        try:
            answer = httpx.get(f"{self.url}/v1/jobs/{job}/members", timeout=_HTTP_SECONDS)
        except httpx.TransportError:
            return []
        return list(answer.json()["items"]) if answer.status_code == 200 else []

    def tide(self, *arguments: str, seconds: float = 20.0) -> str:
        """Run one command of the CLI and return what it prints. Raises CommandFailed."""
        try:
            done = subprocess.run(
                [tide(), *arguments],
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as exc:
            raise CommandFailed(f"`tide {arguments[0]}` took longer than {seconds:g} s") from exc
        if done.returncode != 0:
            raise CommandFailed(f"`tide {arguments[0]}` ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout.strip()

    def process(self, matches: Callable[[str], bool]) -> Process | None:
        """The oldest living process of the run, no worker, whose command line matches."""
        known, members = read_processes(self.record)
        found = [p for p in known if p not in members and is_alive(p) and matches(command_of(p.pid))]
        return min(found, key=lambda p: (p.start, p.pid), default=None)

    def stop(self) -> list[str]:
        """Take everything down; what had to be killed by force is returned as command lines.

        The recorder takes its last sample after ``tide down`` and before any force, so it sees what was left over.
        """
        if self._up is None:
            return []
        try:
            self.tide("down", f"--state={self.state}", seconds=DOWN_SECONDS)
            self._up.wait(timeout=10)
        except (CommandFailed, subprocess.TimeoutExpired) as exc:
            (self.record / "down.log").write_text(f"{exc}\n")
        self._stop_recorder()
        forced = self._kill_the_rest()
        self._up.wait()
        return forced

    def remove_state(self) -> None:
        shutil.rmtree(self.state, ignore_errors=True)

    def _stop_recorder(self) -> None:
        if self._recorder is None:
            return
        self._recorder.terminate()
        try:
            self._recorder.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._recorder.kill()
            self._recorder.wait()

    def _kill_the_rest(self) -> list[str]:
        """SIGKILL whatever of the run is alive, told apart from a later owner of its pid by its start time."""
        if not (self.record / PROCESSES).exists():
            return []
        commands, _ = read_processes(self.record)
        forced = []
        for process, command in commands.items():
            if is_alive(process):
                forced.append(command)
                send(process, signal.SIGKILL)
        return forced


def send(process: Process, number: signal.Signals) -> bool:
    """Signal exactly this process; False if it is gone, also if another has its pid now."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        if not is_alive(process):
            return False
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def is_alive(process: Process) -> bool:
    """True if this very process runs; a zombie does not."""
    try:
        stat = Path("/proc", str(process.pid), "stat").read_bytes()
    except OSError:
        return False
    fields = stat[stat.rindex(b")") + 2 :].split()
    return int(fields[19]) == process.start and fields[0] not in (b"Z", b"X")


def tide() -> str:
    """The command beside this Python."""
    return str(Path(sys.executable).with_name("tide"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fresh_state() -> Path:
    """A new folder with a short path: the socket of Postgres has to fit into 107 bytes."""
    return Path(tempfile.mkdtemp(prefix="tidewright-demo-", dir="/tmp"))


def tail(path: Path, lines: int) -> Sequence[str]:
    """The last lines of a file, or none if it cannot be read."""
    try:
        return path.read_text(errors="replace").splitlines()[-lines:]
    except OSError:
        return []
