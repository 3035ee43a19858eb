"""Pauses in what a job's ledgers prove, and who took part."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tidewright.elastic.proof import Entry, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The longest time in which no step was applied."""

    seconds: float
    after_step: int
    steps: int


def pids_of(entries: Iterable[Entry], generation: int) -> tuple[int, ...]:
    """Who applied at least one step in that generation."""
    return tuple(sorted({e.pid for e in entries if e.kind == "applied" and e.generation == generation}))


def largest_gap(steps: Sequence[Step], *, since: float, until: float) -> Gap:
    """The longest pause that touches the interval, from the last step before it to the first one after it.

    Infinite where no step was applied on one side: training did not go on. ``steps`` counts those inside.
    """
    inside = [s for s in steps if since <= s.at <= until]
    before = [s for s in steps if s.at < since][-1:]
    after = [s for s in steps if s.at > until][:1]
    if not before or not after:
        last = (before + inside)[-1:]
        return Gap(seconds=float("inf"), after_step=last[0].step if last else -1, steps=len(inside))
    line = before + inside + after
    seconds, step = max(((b.at - a.at, a.step) for a, b in pairwise(line)), key=lambda pair: pair[0])
    return Gap(seconds=seconds, after_step=step, steps=len(inside))
