"""What a job's ledgers prove: which group applied each step, that each sample was used once, what was done again.

``python -m tidewright.elastic.proof FOLDER`` reads ``FOLDER/<member>/ledger.jsonl`` and says it. Nothing of the
trainer is used here, so that a fault there cannot hide itself.

A killed process leaves a ledger that ends anywhere, a group may fall back to an older one, and a step may have been
applied by a part of its group only. So neither the highest generation nor the number of records says what counts;
descent does:

1. A state is named (generation, step): what the members of that group held after so many steps. All hold the same.
2. It comes from (generation, step - 1) if the group applied that step. Else the group received it when it was adopted
   or fallen back to, and that record names the generation in which it was made.
3. What counts is the line from which the last state descends: that of those who finished last, else of the last step
   begun and applied. (A group whose end nobody saw may have finished, and is tried again from its last checkpoint.)
4. A step of the line needs one record that it was applied, and of every rank that it was begun: a rank's part of the
   sum is fixed by then. Who was killed or fell back between the sum and the record held the state or had it sent.
5. What was applied beside the line was done again. That is right if those who held it were gone, or were newcomers
   whose group had not started; wrong if a process that held it took an older state, or went on with it after the
   line had gone another way (by the wall clock of their machine).
6. On the line every data epoch uses each sample once.
"""

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

STARTED_AFTER_STEPS: Final = 2
State: TypeAlias = tuple[int, int]
"""Generation and step."""
FRESH: Final[State] = (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of a trainer's ledger. ``at`` is wall time in seconds, ``ids`` the samples of this rank."""

    kind: str
    member: str
    step: int
    generation: int
    rank: int
    world: int
    pid: int
    at: float
    data_epoch: int = 0
    ids: tuple[int, ...] = ()
    loss: float | None = None
    parent: int = 0
    source: str = ""


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
    missing: tuple[str, ...]
    """those of the faults that say what was not done; the others say what was done twice, or by too few"""
    repeated: int
    """steps done again because nobody who had applied them was left, counted once for each group that had"""
    samples: int
    data_epochs: int


def read_training(entries: Iterable[Entry], *, finished: bool) -> Training:
    """Follow the line of steps that counts, and name everything in it that was done twice or not at all.

    ``entries``: those of one process in the order in which it wrote them, of several in any order. With ``finished``
    every data epoch must have used the same samples, 0..n-1; else the last one may be incomplete. Cost: O(n log n).
    """
    told = _Told()
    for process in _by_process(entries):
        _follow(process, told)
    line = _line(told)
    faults = [*told.faults, *line.faults, *_twice(told), *_beside(told, line)]
    used: dict[int, Counter[int]] = defaultdict(Counter)
    for number in range(line.first, line.end):
        shares = told.begun[line.generations[number], number]
        faults += _incomplete(number, shares)
        for share in {e.rank: e for e in shares}.values():
            used[share.data_epoch].update(share.ids)
    faults += _again(used)
    missing = [*told.missing, *line.missing, *_left_out(used, finished=finished)]
    return Training(
        steps=tuple(_step(told.applied[g, number], number) for number, g in sorted(line.generations.items())),
        faults=(*faults, *missing),
        missing=tuple(missing),
        repeated=sum(1 for generation, step in told.applied if line.generations.get(step) != generation),
        samples=sum(counts.total() for counts in used.values()),
        data_epochs=len(used),
    )


# -- each process by itself -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Told:
    """What all processes say together. Keys of ``begun`` and ``applied``: (generation, the step that was done)."""

    begun: dict[State, list[Entry]] = field(default_factory=lambda: defaultdict(list))
    applied: dict[State, list[Entry]] = field(default_factory=lambda: defaultdict(list))
    begun_at: dict[State, float] = field(default_factory=dict)
    """when the last of those who applied it had begun it"""
    origins: dict[State, State] = field(default_factory=dict)
    finished: dict[State, float] = field(default_factory=dict)
    """when it was said"""
    faults: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def before(self, state: State) -> State | None:
        """The state that this one comes from (2); None if no ledger says so."""
        generation, step = state
        if (generation, step - 1) in self.applied:
            return generation, step - 1
        return self.origins.get(state)


def _by_process(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    processes: dict[tuple[str, int], list[Entry]] = defaultdict(list)
    for entry in entries:
        processes[entry.member, entry.pid].append(entry)
    return iter(processes.values())


def _follow(process: Sequence[Entry], told: _Told) -> None:
    """Go with one process from state to state, and note where it lost one (5)."""
    held: State | None = None
    began_at = 0.0
    confirmed, steps_in_group = False, 0
    for entry in process:
        place = entry.generation, entry.step
        match entry.kind:
            case "adopted" | "fell_back":
                if held is not None and entry.step < held[1] and confirmed:
                    told.faults.append(
                        f"pid {entry.pid} held step {held[1]} of generation {held[0]} and went back to step "
                        f"{entry.step} in generation {entry.generation}"
                    )
                _hand_over(entry, told)
                held, steps_in_group = place, 0
                confirmed = confirmed and entry.source in ("", "member")
            case "begun":
                began_at = entry.at
                told.begun[place].append(entry)
            case "applied":
                if held != place:
                    is_ahead = held is not None and held[1] < entry.step
                    (told.missing if is_ahead else told.faults).append(
                        f"step {entry.step} was applied in generation {entry.generation} by pid {entry.pid}, which "
                        + ("held no state" if held is None else f"held step {held[1]} of generation {held[0]}")
                    )
                told.applied[place].append(entry)
                told.begun_at[place] = max(began_at, told.begun_at.get(place, 0.0))
                held, steps_in_group = (entry.generation, entry.step + 1), steps_in_group + 1
                confirmed = confirmed or steps_in_group == STARTED_AFTER_STEPS
            case "finished" if held is not None:
                told.finished[held] = max(entry.at, told.finished.get(held, 0.0))


def _hand_over(entry: Entry, told: _Told) -> None:
    """A group received its state, all its members the same."""
    here, origin = (entry.generation, entry.step), (entry.parent, entry.step)
    if origin == here:
        return
    if told.origins.setdefault(here, origin) != origin:
        told.faults.append(
            f"generation {here[0]} went on at step {here[1]} from generation {told.origins[here][0]} and from "
            f"generation {origin[0]}"
        )


# -- the line -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Line:
    """``generations``: step -> the generation in which it counts; ``states``: all that the last one descends from."""

    generations: dict[int, int] = field(default_factory=dict)
    states: set[State] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def first(self) -> int:
        return min(self.generations, default=0)

    @property
    def end(self) -> int:
        return max(self.generations, default=-1) + 1


def _line(told: _Told) -> _Line:
    line = _Line()
    if not told.applied:
        return line
    generation, step = max(told.applied, key=lambda place: (told.begun_at[place], place))
    last = max(told.finished, key=lambda state: (told.finished[state], state), default=(generation, step + 1))
    _descend(last, told, line)
    done = (e.at for (group, _), entries in told.applied.items() if group == last[0] for e in entries)
    began = min(done, default=told.finished.get(last, 0.0))
    for other, at in sorted(told.finished.items()):
        is_the_same = other in line.states or _made_in(other, told) == _made_in(last, told)
        if not is_the_same and at > began:
            line.faults.append(f"generation {other[0]} finished at step {other[1]}, generation {last[0]} otherwise")
    return line


def _descend(last: State, told: _Told, line: _Line) -> None:
    state: State | None = last
    while state is not None and state not in line.states:
        line.states.add(state)
        before = told.before(state)
        if before is not None and before[1] < state[1]:
            line.generations[before[1]] = before[0]
        if before is None and state != FRESH:
            line.missing.append(f"what generation {state[0]} held at step {state[1]} comes from nowhere")
        state = before


def _made_in(state: State, told: _Told) -> State:
    """The same state by the name of the group that stepped last."""
    while (before := told.before(state)) is not None and before[1] == state[1]:
        state = before
    return state


def _beside(told: _Told, line: _Line) -> Iterator[str]:
    """Steps of a group that went on after the line had gone another way: one fault for each generation."""
    named: set[int] = set()
    forks: dict[State, int] = {}
    for place in sorted(told.applied):
        generation, number = place
        if line.generations.get(number) == generation or generation in named:
            continue
        fork = _fork(place, told, line, forks)
        other = line.generations.get(fork)
        if other is None:
            continue
        if told.begun_at[place] > min(e.at for e in told.applied[other, fork]):
            named.add(generation)
            yield (
                f"step {number} was applied in generation {generation} after generation {other} had gone another way "
                f"at step {fork}"
            )


def _fork(state: State, told: _Told, line: _Line, known: dict[State, int]) -> int:
    """The step at which the descent of ``state`` leaves the line; 0 if it never was on it."""
    passed: list[State] = []
    at: State | None = state
    while at is not None and at not in line.states and at not in known:
        passed.append(at)
        at = told.before(at)
    fork = 0 if at is None else known.get(at, at[1])
    known.update(dict.fromkeys(passed, fork))
    return fork


# -- each step of it ------------------------------------------------------------------------------------------------


def _step(done: Sequence[Entry], number: int) -> Step:
    losses = [e.loss for e in done if e.loss is not None]
    return Step(
        step=number,
        generation=done[0].generation,
        world=done[0].world,
        at=min(e.at for e in done),
        loss=losses[0] if losses else None,
    )


def _twice(told: _Told) -> Iterator[str]:
    for (generation, number), done in sorted(told.applied.items()):
        for rank, count in sorted(Counter(e.rank for e in done).items()):
            if count > 1:
                yield f"step {number} was applied {count} times as rank {rank} of generation {generation}"


def _incomplete(number: int, shares: Sequence[Entry]) -> Iterator[str]:
    ranks = sorted({e.rank for e in shares})
    worlds = sorted({e.world for e in shares})
    if not worlds or len(worlds) > 1 or ranks != list(range(worlds[0])):
        yield f"step {number} was begun by ranks {_listed(ranks)} of a world of {_listed(worlds)}"
    processes = {(e.member, e.pid) for e in shares}
    if len(processes) != len(ranks):
        yield f"step {number} was begun by {len(processes)} processes for {len(ranks)} ranks"


def _again(used: dict[int, Counter[int]]) -> Iterator[str]:
    for epoch, counts in sorted(used.items()):
        again = sorted(sample for sample, count in counts.items() if count > 1)
        if again:
            yield f"data epoch {epoch} used {len(again)} samples more than once: {_listed(again)}"


def _left_out(used: dict[int, Counter[int]], *, finished: bool) -> Iterator[str]:
    everything = sorted({sample for counts in used.values() for sample in counts})
    is_whole = finished or len(used) > 1  # until then nobody knows how many there are
    if everything and is_whole and everything != list(range(len(everything))):
        yield f"sample ids are not 0..n-1: {len(everything)} different ones, the last is {everything[-1]}"
    last = max(used, default=0)
    for epoch, counts in sorted(used.items()):
        left_out = len(everything) - len(counts)
        if left_out and (finished or epoch != last):
            yield f"data epoch {epoch} left out {left_out} of {len(everything)} samples"


def _listed(values: Sequence[int]) -> str:
    shown = ", ".join(str(v) for v in values[:4])
    return shown + (f" and {len(values) - 4} more" if len(values) > 4 else "")


# -- files ----------------------------------------------------------------------------------------------------------


def to_entry(member: str, line: dict[str, Any]) -> Entry:
    """One ledger line; fields that this kind of line does not have are 0 or empty. Raises KeyError."""
    return Entry(
        kind=line["k"],
        member=member,
        step=line.get("step", 0),
        generation=line.get("generation", 0),
        rank=line.get("rank", 0),
        world=line.get("world", 0),
        pid=line.get("pid", 0),
        at=line["t"],
        data_epoch=line.get("data_epoch", 0),
        ids=tuple(line.get("ids", ())),
        loss=line.get("loss"),
        parent=line.get("parent_generation", 0),
        source=line.get("source", ""),
    )


def read_ledgers(folder: Path) -> list[Entry]:
    """Entries of all members of one job. What a killed process or a full disk left half written is no record."""
    entries: list[Entry] = []
    for path in sorted(folder.glob("*/ledger.jsonl")):
        for line in path.read_bytes().split(b"\n"):
            try:
                entries.append(to_entry(path.parent.name, json.loads(line)))
            except (ValueError, TypeError, KeyError):
                continue
    return entries


def main(arguments: Sequence[str]) -> int:
    """0: every step and every sample once; 1: not so; 2: there is no ledger."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m tidewright.elastic.proof FOLDER  (a job's folder below run/)\n")
        return 2
    entries = read_ledgers(Path(arguments[0]))
    if not entries:
        sys.stderr.write(f"no member's ledger is in {arguments[0]}\n")
        return 2
    training = read_training(entries, finished=any(e.kind == "finished" for e in entries))
    generations = len({s.generation for s in training.steps})
    sys.stdout.write(
        f"{len(training.steps)} steps in {generations} generations, {training.samples} samples in "
        f"{training.data_epochs} data epochs, {training.repeated} steps done again\n"
    )
    sys.stdout.writelines(f"FAULT: {fault}\n" for fault in training.faults)
    return 1 if training.faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
