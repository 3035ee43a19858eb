"""What the tests of zygote, shim and trainer stand on: a real zygote, and members' folders."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tidewright import shim


def wait_until(condition: Callable[[], Any], seconds: float = 10.0, what: str = "") -> Any:
    """The first true value of ``condition``. Raises AssertionError when the time is over."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {seconds} s: {what or condition}"
        time.sleep(0.01)


def read_json(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def is_alive(pid: int) -> bool:
    stat = shim.process_stat(pid)
    return stat is not None and stat[0] not in "ZX"


@dataclass
class Member:
    """One worker that the zygote was asked for."""

    directory: Path
    answer: dict[str, Any]

    @property
    def record(self) -> dict[str, Any]:
        return wait_until(lambda: read_json(self.directory / "pid.json"), what="pid.json")

    @property
    def worker_pid(self) -> int:
        return self.record["worker_pid"]

    @property
    def shim_pid(self) -> int:
        return self.record["shim_pid"]

    @property
    def log(self) -> str:
        path = self.directory / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def exit(self, seconds: float = 15.0) -> dict[str, Any]:
        return wait_until(lambda: read_json(self.directory / "exit.json"), seconds, f"exit.json; log: {self.log}")

    def gone(self, seconds: float = 15.0) -> None:
        wait_until((self.directory / "gone").exists, seconds, "gone")

    def ledger(self) -> list[dict[str, Any]]:
        path = self.directory / "ledger.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines()]


@dataclass
class ZygoteBed:
    """A zygote of its own and the folders of the members that it starts."""

    base: Path
    preload: tuple[str, ...] = ()
    standbys: int = 0
    process: subprocess.Popen[bytes] | None = None
    members: list[Member] = field(default_factory=list)
    undisturbed: dict[tuple[tuple[str, Any], ...], list[Any]] = field(default_factory=dict)
    """results of runs that tests compare theirs with, by the options of the run"""

    @property
    def socket_path(self) -> Path:
        return self.base / "zygote.sock"

    def start(self) -> None:
        self.launch()
        wait_until(lambda: self.process.poll() is not None or self.answers(), 60, "zygote listens")
        assert self.process.poll() is None, (self.base / "zygote.log").read_text()

    def launch(self) -> None:
        (self.base / "run").mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "tidewright.elastic.zygote",
            "--socket",
            str(self.socket_path),
        ]
        command += ["--standbys", str(self.standbys)]
        for name in self.preload:
            command += ["--preload", name]
        with open(self.base / "zygote.log", "ab") as log:
            clean = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=clean)

    def answers(self) -> bool:
        try:
            return bool(self.ask({"op": "ping"})["ok"])
        except OSError:
            return False

    def send(self, line: bytes) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(20)
            connection.connect(str(self.socket_path))
            connection.sendall(line)
            return json.loads(connection.makefile().readline())

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        return self.send(json.dumps(request).encode() + b"\n")

    def run(self, name: str, **request: Any) -> Member:
        directory = self.base / "run" / name
        answer = self.ask(
            {"op": "start", "directory": str(directory), "member": name, "nonce": f"nonce-{name}", **request}
        )
        member = Member(directory, answer)
        self.members.append(member)
        return member

    def script(self, name: str, text: str, **request: Any) -> Member:
        path = self.base / f"{name}.py"
        path.write_text(text)
        return self.run(name, script=str(path), **request)

    def shell(self, name: str, text: str, **request: Any) -> Member:
        return self.run(name, command=["/bin/sh", "-c", text], **request)

    def stop(self) -> None:
        """End every process that this bed started, by its recorded pid and start time."""
        for member in self.members:
            record = read_json(member.directory / "pid.json")
            for kind in ("worker", "shim") if record else ():
                stat = shim.process_stat(record[f"{kind}_pid"])
                if stat is not None and stat[2] == record[f"{kind}_start"]:
                    with suppress(ProcessLookupError):
                        os.kill(record[f"{kind}_pid"], signal.SIGCONT)
                        if kind == "worker":
                            os.kill(record["worker_pid"], signal.SIGKILL)
        for member in self.members:
            record = read_json(member.directory / "pid.json")
            if record and record["shim_start"] == (shim.process_stat(record["shim_pid"]) or (0, 0, 0))[2]:
                wait_until(lambda pid=record["shim_pid"]: not is_alive(pid), 10, "shim ends")
        if self.process is not None:
            self.process.terminate()
            self.process.wait(10)
