"""Where the time of a worker goes, reported to metrics about once a second."""

import http.client
import importlib
import json
import os
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

REPORT_SECONDS: Final = 1.0
POST_SECONDS: Final = 2.0


class Section(StrEnum):
    """What the main thread does; what is none of the first three is idle: forming, holding, receiving."""

    STEP = "step"
    SYNC = "sync"
    INPUT = "input_wait"
    IDLE = "idle"


class Stopwatch:
    """Seconds in each section, also of the one that is under way; any thread may read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._section = Section.IDLE
        self._since = clock()
        self._seconds = dict.fromkeys(Section, 0.0)

    def enter(self, section: Section) -> None:
        with self._lock:
            self._settle()
            self._section = section

    @contextmanager
    def within(self, section: Section) -> Iterator[None]:
        with self._lock:
            before = self._section
        self.enter(section)
        try:
            yield
        finally:
            self.enter(before)

    def take(self) -> dict[Section, float]:
        """Seconds since the last call."""
        with self._lock:
            self._settle()
            taken, self._seconds = self._seconds, dict.fromkeys(Section, 0.0)
            return taken

    def _settle(self) -> None:
        now = self._clock()
        self._seconds[self._section] += now - self._since
        self._since = now


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Where metrics takes samples; ``url`` empty: not known yet."""

    url: str
    token: str


class Sampler:
    """A daemon thread. While metrics is away reports are dropped: they are measurements, not facts."""

    def __init__(self, stopwatch: Stopwatch, describe: Callable[[], dict[str, Any]], *, on_gpu: bool) -> None:
        self._stopwatch = stopwatch
        self._describe = describe
        self._where = Where(url="", token="")
        self._stopping = threading.Event()
        self._connection: http.client.HTTPConnection | None = None
        self._connected_to = ""
        self._sequence = 0
        self._gpu = _open_nvml() if on_gpu else None

    def start(self) -> None:
        threading.Thread(target=self._run, name="tide-samples", daemon=True).start()

    def stop(self) -> None:
        self._stopping.set()

    def send_to(self, where: Where) -> None:
        self._where = where

    def _run(self) -> None:
        before = time.monotonic()
        while not self._stopping.wait(REPORT_SECONDS):
            now = time.monotonic()
            report = self._report(now - before)
            before = now
            if self._where.url and report is not None:
                self._post(report)
        self._disconnect()

    def _report(self, wall_seconds: float) -> dict[str, Any] | None:
        seconds = self._stopwatch.take()
        described = self._describe()
        if described["generation"] == 0:
            return None
        self._sequence += 1
        utilisation = self._gpu() if self._gpu is not None else None
        return {
            **described,
            "sequence": self._sequence,
            "wall_seconds": max(wall_seconds, sum(seconds.values())),
            "step_seconds": seconds[Section.STEP],
            "sync_seconds": seconds[Section.SYNC],
            "input_wait_seconds": seconds[Section.INPUT],
            "utilisation": utilisation,
            "measure": "wall" if utilisation is None else "nvml",
        }

    def _post(self, report: dict[str, Any]) -> None:
        where = self._where
        try:
            connection = self._connect(where.url)
            connection.request(
                "POST",
                "/v1/samples",
                json.dumps(report),
                {"Authorization": f"Bearer {where.token}", "Content-Type": "application/json"},
            )
            connection.getresponse().read()
        except (OSError, http.client.HTTPException, ValueError):
            self._disconnect()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _connect(self, url: str) -> http.client.HTTPConnection:
        if self._connection is None or self._connected_to != url:
            self._disconnect()
            parts = urllib.parse.urlsplit(url)
            kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
            self._connection = kind(parts.hostname or "", parts.port, timeout=POST_SECONDS)
            self._connected_to = url
        return self._connection


def _open_nvml() -> Callable[[], float | None] | None:
    """A reader of the first visible GPU's utilisation, 0 to 1; None without NVML."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"

    def read() -> float | None:
        with suppress(nvml.NVMLError):
            device = (
                nvml.nvmlDeviceGetHandleByIndex(int(visible))
                if visible.isdigit()
                else nvml.nvmlDeviceGetHandleByUUID(visible)
            )
            return float(nvml.nvmlDeviceGetUtilizationRates(device).gpu) / 100
        return None

    return read
