"""What a job's ledgers prove: which generation applied each step, which samples it used, and who took part."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from demo.record import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step as it counts. ``at`` is when its first rank had applied it, in seconds of wall time."""

    step: int
    generation: int
    world: int
    at: float
    loss: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A whole job: its steps in order, and what is wrong with them (empty: every step and sample once)."""

    steps: tuple[Step, ...]
    faults: tuple[str, ...]
    repeated: int
    """steps done again because whoever had applied them died before anyone else had"""
    samples: int
    data_epochs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The longest time in which no step was applied."""

    seconds: float
    after_step: int
    steps: int


def read_training(entries: Sequence[Entry], *, finished: bool) -> Training:
    """Follow the line of steps that counts, and name everything in it that was done twice or not at all.

    1. A step counts in the one generation that applied it. Two are a fault, unless everyone who applied it in the
       older one died with it and the younger one went on from a member that had not (``_abandoned``).
    2. In that generation every rank has begun it, once, and no rank has applied it twice.
    3. Steps follow each other from 0, and no data epoch uses a sample twice.
    4. With ``finished``: every data epoch used the same samples, 0..n-1.
    """
    faults: list[str] = []
    applied: dict[int, dict[int, list[Entry]]] = defaultdict(lambda: defaultdict(list))
    for entry in entries:
        if entry.kind == "applied":
            applied[entry.step][entry.generation].append(entry)
    begun: dict[tuple[int, int], list[Entry]] = defaultdict(list)
    for entry in entries:
        if entry.kind == "begun":
            begun[entry.step, entry.generation].append(entry)
    steps: list[Step] = []
    used: dict[int, Counter[int]] = defaultdict(Counter)
    repeated = 0
    for number in sorted(applied):
        generations = applied[number]
        abandoned = [g for g in generations if _abandoned(number, g, generations, entries)]
        repeated += len(abandoned)
        counting = sorted(set(generations) - set(abandoned))
        if len(counting) > 1:
            faults.append(f"step {number} was applied in generations {_listed(counting)}")
        generation = counting[-1]
        done = generations[generation]
        faults += _twice(number, done)
        shares = begun[number, generation]
        faults += _incomplete(number, shares, world=done[0].world)
        for share in {e.rank: e for e in shares}.values():
            used[share.data_epoch].update(share.ids)
        losses = [e.loss for e in done if e.loss is not None]
        steps.append(
            Step(
                step=number,
                generation=generation,
                world=done[0].world,
                at=min(e.at for e in done),
                loss=losses[0] if losses else None,
            )
        )
    faults += _missing(sorted(applied))
    faults += _samples(used, finished=finished)
    return Training(
        steps=tuple(steps),
        faults=tuple(faults),
        repeated=repeated,
        samples=sum(c.total() for c in used.values()),
        data_epochs=len(used),
    )


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


def _abandoned(number: int, generation: int, generations: dict[int, list[Entry]], entries: Sequence[Entry]) -> bool:
    """Nobody who applied it there lived on, and a younger generation took its state from one who had not."""
    doers = {e.pid for e in generations[generation]}
    for younger in generations:
        if younger <= generation:
            continue
        adopted = [e for e in entries if e.kind == "adopted" and e.generation == younger]
        went_on = {e.pid for e in entries if e.generation == younger}
        from_member = bool(adopted) and all(e.source == "member" and e.step <= number for e in adopted)
        if from_member and not doers & went_on:
            return True
    return False


def _twice(number: int, done: Sequence[Entry]) -> list[str]:
    ranks = Counter(e.rank for e in done)
    return [
        f"step {number} was applied {count} times as rank {rank} of generation {done[0].generation}"
        for rank, count in sorted(ranks.items())
        if count > 1
    ]


def _incomplete(number: int, shares: Sequence[Entry], *, world: int) -> list[str]:
    faults = []
    ranks = sorted({e.rank for e in shares})
    if ranks != list(range(world)):
        faults.append(f"step {number} was begun by ranks {_listed(ranks)} of a world of {world}")
    if len({e.pid for e in shares}) > len(ranks):
        faults.append(f"step {number} was begun by {len({e.pid for e in shares})} processes for {len(ranks)} ranks")
    return faults


def _missing(numbers: Sequence[int]) -> list[str]:
    missing = sorted(set(range(numbers[-1] + 1)) - set(numbers)) if numbers else []
    return [f"steps {_listed(missing)} were never applied"] if missing else []


def _samples(used: dict[int, Counter[int]], *, finished: bool) -> list[str]:
    faults = []
    everything = sorted({sample for counts in used.values() for sample in counts})
    if everything and everything != list(range(len(everything))):
        faults.append(f"sample ids are not 0..n-1: {len(everything)} different ones, the last is {everything[-1]}")
    for epoch, counts in sorted(used.items()):
        again = sorted(sample for sample, count in counts.items() if count > 1)
        if again:
            faults.append(f"data epoch {epoch} used {len(again)} samples more than once: {_listed(again)}")
        left_out = len(everything) - len(counts)
        if finished and left_out:
            faults.append(f"data epoch {epoch} left out {left_out} of {len(everything)} samples")
    return faults


def _listed(values: Sequence[int]) -> str:
    shown = ", ".join(str(v) for v in values[:4])
    return shown + (f" and {len(values) - 4} more" if len(values) > 4 else "")
