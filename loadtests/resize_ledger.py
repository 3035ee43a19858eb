"""Reads what trainers wrote down about their steps, while they write it: when a group of some size took a step."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of a ledger. ``at``: seconds of the machine's wall clock, which all processes share."""

    kind: str
    step: int
    generation: int
    rank: int
    world: int
    pid: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step that every rank of its group has applied. ``at``: when the last of them had; ``pids`` by rank."""

    step: int
    generation: int
    world: int
    at: float
    pids: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class Ledgers:
    """All ledgers of one job, followed from where they were read last."""

    folder: Path
    entries: list[Entry] = field(default_factory=list)
    _offsets: dict[Path, int] = field(default_factory=dict)

    def follow(self) -> "Ledgers":
        for path in sorted(self.folder.glob("*/ledger.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                text = file.read()
            whole = text.rfind(b"\n") + 1
            self._offsets[path] = self._offsets.get(path, 0) + whole
            self.entries += parse_ledger(text[:whole])
        return self

    def steps(self, *, since: float) -> list[Step]:
        """Whole steps that were applied after ``since``, in the order of their ends."""
        return whole_steps(entry for entry in self.entries if entry.at > since)


def parse_ledger(text: bytes) -> list[Entry]:
    """The lines that speak of groups and steps applied; what was begun is left out."""
    found = []
    for line in text.splitlines():
        value = json.loads(line)
        if value["k"] in ("applied", "adopted"):
            found.append(
                Entry(
                    kind=value["k"],
                    step=value["step"],
                    generation=value["generation"],
                    rank=value["rank"],
                    world=value["world"],
                    pid=value["pid"],
                    at=value["t"],
                )
            )
    return found


def whole_steps(entries: Iterable[Entry]) -> list[Step]:
    """Steps applied by all ranks of their group."""
    applied: dict[tuple[int, int], dict[int, Entry]] = {}
    for entry in entries:
        if entry.kind == "applied":
            applied.setdefault((entry.generation, entry.step), {})[entry.rank] = entry
    steps = [
        Step(
            step=step,
            generation=generation,
            world=len(ranks),
            at=max(entry.at for entry in ranks.values()),
            pids=tuple(ranks[rank].pid for rank in sorted(ranks)),
        )
        for (generation, step), ranks in applied.items()
        if len(ranks) == next(iter(ranks.values())).world
    ]
    return sorted(steps, key=lambda step: (step.at, step.generation, step.step))


def first_step(steps: Iterable[Step], *, above: int, world: int | None = None) -> Step | None:
    """The first whole step in a generation above the given one, of a group of that size if one is given."""
    return next((s for s in steps if s.generation > above and world in (None, s.world)), None)


def last_applied(entries: Iterable[Entry], *, up_to: int, before: float) -> float:
    """When anybody applied the last step of a generation not above ``up_to``, before the given instant."""
    return max(e.at for e in entries if e.kind == "applied" and e.generation <= up_to and e.at < before)
