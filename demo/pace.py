"""How long the first job must be, so that the story fits into it on a machine of any speed."""

import math
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Final

from demo.record import Entry

EPOCHS_MIN: Final = 8
"""Fewer would not reach the accuracy."""
EPOCHS_MAX: Final = 150
SAMPLES_PER_EPOCH: Final = 4000
_WARM_UP_STEPS: Final = 5
_SCENES: Final[tuple[tuple[float, int, float], ...]] = (
    (6, 1, 0),  # one worker, until the window is full and a second one has started
    (6, 2, 0),
    (2, 4, 0),
    (8, 2, 2),  # beside the urgent job's two workers
    (7, 4, 0),  # taking back, a worker killed and replaced
    (12, 4, 0.5),  # the services away and starting again
    (12, 4, 0),  # to spare
)
"""(seconds, workers of the first job, others that use a core beside it)."""


def plan_epochs(*, samples_per_second: float, cores: float) -> int:
    """Epochs that keep the first job busy through all scenes; ``samples_per_second``: of one worker alone."""
    work = sum(seconds * _speedup(workers, others, cores) for seconds, workers, others in _SCENES)
    return max(EPOCHS_MIN, min(EPOCHS_MAX, math.ceil(work * samples_per_second / SAMPLES_PER_EPOCH)))


def samples_per_second(entries: Sequence[Entry]) -> float:
    """Of the median step in the ledger of a job of one worker, without its first steps; 0 if it took too few."""
    applied = [e for e in entries if e.kind == "applied"][_WARM_UP_STEPS:]
    samples = max((len(e.ids) for e in entries if e.kind == "begun"), default=0)
    return samples / median(b.at - a.at for a, b in pairwise(applied)) if len(applied) > 1 else 0.0


def usable_cores() -> float:
    """Cores that this process may use: its affinity, or the quota of its control group if that is less."""
    cores = float(len(os.sched_getaffinity(0)))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else min(cores, int(quota) / int(period))


def _speedup(workers: int, others: float, cores: float) -> float:
    """Against one worker alone: cores are shared evenly, and a tenth of each further one is lost to synchronising."""
    share = min(1.0, cores / (workers + others))
    return workers * share if workers * share <= 1 else 1 + (workers * share - 1) * 0.9
