"""A real Prometheus for tests: Debian's package, unpacked into a cache; nothing is installed by it."""

import fcntl
import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from shared.testing.kafka import die_with_parent, free_ports

_PACKAGE: Final = "prometheus"


class PrometheusMissing(Exception):
    """Why it cannot be had on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedPrometheus:
    url: str
    log: Path


@contextmanager
def running_prometheus(
    configuration: Path, folder: Path, *, start_seconds: float = 20.0
) -> Iterator[EmbeddedPrometheus]:
    """With its data in ``folder``, on a port of its own; ended at the end. Raises PrometheusMissing, TimeoutError."""
    (port,) = free_ports(1)
    found = EmbeddedPrometheus(url=f"http://127.0.0.1:{port}", log=folder / "prometheus.log")
    command = [
        str(prometheus_program("prometheus")),
        f"--config.file={configuration}",
        f"--storage.tsdb.path={folder / 'prometheus'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with found.log.open("ab") as log:
        process = subprocess.Popen(  # noqa: S603 - our own command
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - one system call
        )
    try:
        deadline = time.monotonic() + start_seconds
        while not _answers(f"{found.url}/-/ready"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError(f"Prometheus did not start: {found.log.read_text(errors='replace')[-1_000:]}")
            time.sleep(0.05)
        yield found
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


@cache
def prometheus_program(name: str) -> Path:
    """``prometheus`` or ``promtool``; the first time on a machine it is fetched: 19 MB. Raises PrometheusMissing."""
    if found := shutil.which(name):
        return Path(found)
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tidewright" / "prometheus"
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "unpacked" / "usr" / "bin" / name
    with (folder / "lock").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)  # several test processes ask at once
        if not program.exists():
            _unpack(folder)
    return program


def _unpack(folder: Path) -> None:
    if not shutil.which("apt-get"):
        raise PrometheusMissing("neither prometheus nor apt-get is on this machine")
    if _run(["apt-get", "download", _PACKAGE], folder):
        _run(["apt-get", "update", "--quiet=2"], folder)
        if error := _run(["apt-get", "download", _PACKAGE], folder):
            raise PrometheusMissing(f"Debian's package {_PACKAGE} could not be fetched: {error}")
    (package,) = sorted(folder.glob(f"{_PACKAGE}_*.deb"))[-1:]
    draft = folder / "draft"
    shutil.rmtree(draft, ignore_errors=True)
    if error := _run(["dpkg-deb", "--extract", str(package), str(draft)], folder):
        raise PrometheusMissing(f"{package.name} could not be unpacked: {error}")
    package.unlink()
    draft.rename(folder / "unpacked")


def _run(command: list[str], folder: Path) -> str:
    """What it complained of, or ""."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)  # noqa: S603
    return "" if done.returncode == 0 else done.stderr.strip()[-500:] or f"code {done.returncode}"


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:  # noqa: S310 - our own server
            return int(answer.status) == 200
    except (urllib.error.URLError, OSError):
        return False
