"""One real trainer that grows and shrinks through HTTP, over and over; what it costs the worker that stays."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from loadtests.soak_jobs import SCRIPT
from loadtests.soak_watch import Usage, usage_of
from tidewright.client import Client

SIZES: Final = (2, 3)
"""Every group is a real one then: a worker alone has no connections that could leak."""
RESIZE_SECONDS_MAX: Final = 60.0
_STEPS: Final = 1_000_000
_POLL_SECONDS: Final = 0.05
_STEP_SECONDS: Final = 0.1
"""Long, since this is about generations."""
_SETTLED_AFTER: Final = 24
"""Generations after which what is used once has been used: the C library gives its first threads an arena each, eight
for every core."""


class ResizesWrong(Exception):
    """A resize did not happen, or the worker that stays did not stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The worker that stays, right after the group of ``generation`` had started."""

    generation: int
    usage: Usage


@dataclass(slots=True)
class ResizeLoad:
    """``run`` submits the job, resizes it so many times, and cancels it."""

    client: Client
    resizes: int
    looks: list[Look] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """from the request to the group of the new size, by one who polls every 50 ms"""
    done: int = 0

    def run(self, *, on_progress: Callable[[], None]) -> None:
        """Raises ResizesWrong."""
        job_id = self._submit()
        view = self._wait(job_id, workers=SIZES[0], after=0)
        pid = self._first_worker(job_id)
        self._look(view, pid)
        for number in range(self.resizes):
            size = SIZES[(number + 1) % 2]
            began = time.monotonic()
            self.client.patch(job_id, {"workers": size})
            view = self._wait(job_id, workers=size, after=int(view["generation"]))
            self.seconds.append(time.monotonic() - began)
            self.done += 1
            self._look(view, pid)
            on_progress()
        if self._first_worker(job_id) != pid:
            raise ResizesWrong(f"the first worker was {pid} and is {self._first_worker(job_id)}")
        self.client.cancel(job_id, reason="soak")
        self._wait_for_end(job_id)

    def _submit(self) -> str:
        job = {
            "name": "soak-resizes",
            "script": SCRIPT,
            "args": ["--steps", str(_STEPS), "--step-delay", f"{_STEP_SECONDS}"],
            "workers_min": SIZES[0],
            "workers_max": SIZES[1],
            "checkpoint_every_steps": 20,
            "grace_seconds": 10,
        }
        return str(self.client.submit(job)["id"])

    def _wait(self, job_id: str, *, workers: int, after: int) -> dict[str, Any]:
        """The job's view once a later generation with so many workers has started."""
        deadline = time.monotonic() + RESIZE_SECONDS_MAX
        while True:
            view = self.client.job(job_id)
            if view["workers"]["running"] == workers and view["generation"] > after:
                return view
            if time.monotonic() > deadline or view["phase"] in ("Failed", "Succeeded"):
                raise ResizesWrong(f"{view['phase']} with {view['workers']}, wanted {workers}: {view['reason']}")
            time.sleep(_POLL_SECONDS)

    def _first_worker(self, job_id: str) -> int:
        found = [m for m in self.client.members(job_id) if m["member"] == f"{job_id}/worker/0/1"]
        if not found or found[0]["pid"] is None:
            raise ResizesWrong("worker 0 is gone")
        return int(found[0]["pid"])

    def _look(self, view: dict[str, Any], pid: int) -> None:
        self.looks.append(Look(generation=int(view["generation"]), usage=usage_of(pid)))

    def _wait_for_end(self, job_id: str) -> None:
        deadline = time.monotonic() + RESIZE_SECONDS_MAX
        while self.client.job(job_id)["phase"] != "Cancelled":
            if time.monotonic() > deadline:
                raise ResizesWrong("not cancelled in time")
            time.sleep(_POLL_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What a generation adds to the worker that stays. ``settled``: the first ones, which cost more, are left out.

    ``memory_bytes`` is the median over generations, ``memory_bytes_mean`` the mean, which contains what the C library
    takes in rare jumps for checkpoints and keeps for the next.
    """

    generations: int
    settled: bool
    memory_bytes: float
    memory_bytes_mean: float
    descriptors: float
    threads: float


def growth_of(looks: Sequence[Look]) -> Growth:
    """By generation, from all looks but the first few. Raises ValueError with too few looks."""
    is_long = len(looks) > 3 * _SETTLED_AFTER
    counted = looks[_SETTLED_AFTER if is_long else len(looks) // 3 :]
    at = [float(each.generation) for each in counted]

    def slope(values: Sequence[float]) -> float:
        return statistics.linear_regression(at, values).slope

    return Growth(
        generations=looks[-1].generation - looks[0].generation,
        settled=is_long,
        memory_bytes=statistics.median(_steps_of_memory(counted)),
        memory_bytes_mean=statistics.fmean(_steps_of_memory(counted)),
        descriptors=slope([float(each.usage.descriptors) for each in counted]),
        threads=slope([float(each.usage.threads) for each in counted]),
    )


def _steps_of_memory(looks: Sequence[Look]) -> list[float]:
    """Bytes more than at the look before, by generation between the two."""
    return [
        (after.usage.memory_bytes - before.usage.memory_bytes) / (after.generation - before.generation)
        for before, after in pairwise(looks)
    ]
