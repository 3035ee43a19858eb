"""Looks at processes from outside: memory, descriptors and threads out of ``/proc``, all the time, in a thread."""

import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.launch.settings import LaunchSettings

SERVER: Final = ("supervisor", "process", "zygote")
"""What of ``up.json`` is the server; Postgres is watched beside it."""
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class Gone(Exception):
    """A process that was to be watched is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Of one process, or the sum of several. ``memory_bytes`` is what is resident."""

    memory_bytes: int
    descriptors: int
    threads: int

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            memory_bytes=self.memory_bytes + other.memory_bytes,
            descriptors=self.descriptors + other.descriptors,
            threads=self.threads + other.threads,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One look. ``progress``: what the load had done by then; ``shims``: children of the zygote, standbys apart."""

    seconds: float
    progress: int
    server: Usage
    parts: dict[str, Usage]
    postgres_bytes: int
    shims: int


def usage_of(pid: int) -> Usage:
    """Raises Gone."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
        descriptors = _count(Path(f"/proc/{pid}/fd"))
        threads = _count(Path(f"/proc/{pid}/task"))
    except OSError as error:
        raise Gone(f"process {pid}: {error.strerror}") from error
    return Usage(memory_bytes=int(fields[1]) * _PAGE_BYTES, descriptors=descriptors, threads=threads)


def _count(folder: Path) -> int:
    return sum(1 for _ in folder.iterdir())


def children_of(pid: int) -> list[int]:
    """Living children, zombies included. Empty if the process is gone."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(word) for word in path.read_text().split()]
        except OSError:
            continue
    return found


def proportional_bytes(pid: int) -> int:
    """PSS: shared pages counted by share. 0 for a process that has just gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


class ServerWatch:
    """Samples the processes of ``up.json`` until it is stopped. They must stay the same ones."""

    def __init__(self, state: Path, *, progress: Callable[[], int], interval_seconds: float = 0.5) -> None:
        self._record = state / "up.json"
        self._pids = self._look_up()
        self._progress = progress
        self._interval_seconds = interval_seconds
        self._standbys = LaunchSettings.load().standbys
        self._stopping = threading.Event()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="soak-watch", daemon=True)
        self.samples: list[Sample] = []
        self.failure = ""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def check(self) -> None:
        """Raises Gone if a watched process ended or was replaced."""
        if self.failure:
            raise Gone(self.failure)

    def sample(self) -> Sample:
        """Look now. Raises Gone."""
        parts = {name: usage_of(self._pids[name]) for name in SERVER}
        server = parts[SERVER[0]]
        for name in SERVER[1:]:
            server += parts[name]
        postmaster = self._pids["postgres"]
        backends = [postmaster, *children_of(postmaster)]
        return Sample(
            seconds=time.monotonic() - self._began,
            progress=self._progress(),
            server=server,
            parts=parts,
            postgres_bytes=sum(proportional_bytes(pid) for pid in backends),
            shims=max(0, len(children_of(self._pids["zygote"])) - self._standbys),
        )

    def _look_up(self) -> dict[str, int]:
        record = json.loads(self._record.read_text())
        return {name: int(record[name]["pid"]) for name in (*SERVER, "postgres")}

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_seconds):
            try:
                self.samples.append(self.sample())
            except Gone as error:
                self.failure = str(error)
                return


def windows(values: Sequence[tuple[float, float]], *, total: float) -> list[float]:
    """``[first, middle, last]``: medians of the values in three fifths of the way, from pairs (progress, value).

    The first tenth is left out, for then memory fills that is needed later on. Raises ValueError without values.
    """
    places = ((0.1, 0.3), (0.4, 0.6), (0.8, 1.01))
    found = [[value for at, value in values if low * total <= at < high * total] for low, high in places]
    if not all(found):
        raise ValueError("too few samples for three windows")
    return [float(statistics.median(each)) for each in found]


def chart(values: Sequence[float], *, width: int = 60) -> str:
    """One line of bars from the least to the greatest value, for people."""
    if not values:
        return ""
    step = max(1.0, len(values) / width)
    picked = [values[int(place * step)] for place in range(min(width, len(values)))]
    low, high = min(picked), max(picked)
    bars = "▁▂▃▄▅▆▇█"
    return "".join(bars[int((value - low) / (high - low) * 7) if high > low else 0] for value in picked)
