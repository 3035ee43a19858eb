"""Reads a record folder: what the demo did, the event stream, samples of /proc, and the trainers' own ledgers.

Standard library only, and nothing of the product but the reader of ledgers: the checker rests on this module.

```
marks.jsonl          what the demo did, and when (the story writes it)
events.jsonl         the server-sent events, in the order of their ids
processes.jsonl      every process of the run, and who was alive at each sample
run/<job>/<member>/  the member's ledger.jsonl and log, copied while it ran
```
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from tidewright.elastic.proof import Entry, to_entry

MARKS = "marks.jsonl"
EVENTS = "events.jsonl"
PROCESSES = "processes.jsonl"
RUN = "run"
KIN = "kin.jsonl"
"""In a member's folder: processes that its script has started, named by themselves."""


class BrokenRecord(ValueError):
    """The record itself is damaged or incomplete: nothing can be said from it."""


class Process(NamedTuple):
    """One process, whatever becomes of its pid: start time in clock ticks since boot."""

    pid: int
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event of the log. ``time`` is the publisher's wall clock in seconds, ``sequence`` orders."""

    sequence: tuple[int, int]
    type: str
    subject: str
    time: float
    data: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something the demo did at wall time ``at`` (seconds)."""

    name: str
    at: float
    data: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Who of the run was alive at wall time ``at``, and whether the public API answered."""

    at: float
    alive: dict[Process, str]
    """process -> state letter of /proc"""
    api: bool
    final: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Everything that is known about one run."""

    marks: tuple[Mark, ...]
    events: tuple[Event, ...]
    ledgers: dict[str, tuple[Entry, ...]]
    """job -> its entries by wall time"""
    logs: dict[str, dict[str, str]]
    """job -> member folder -> text"""
    samples: tuple[Sample, ...]
    commands: dict[Process, str] = field(default_factory=dict)
    members: dict[Process, str] = field(default_factory=dict)
    """worker -> ``<job>/<member folder>``"""

    def mark(self, name: str, **wanted: str) -> Mark | None:
        """The first mark of that name whose data agree with ``wanted``."""
        found = (m for m in self.marks if m.name == name and wanted.items() <= m.data.items())
        return next(found, None)

    def job(self, part: str) -> str | None:
        """The id of the job that plays ``part`` in the story, or None if it was never submitted."""
        mark = self.mark("submitted", part=part)
        return None if mark is None else str(mark.data["job"])

    def events_of(self, job: str, *types: str) -> list[Event]:
        return [e for e in self.events if e.subject == job and (not types or e.type in types)]

    def entries(self, job: str, kind: str) -> list[Entry]:
        return [e for e in self.ledgers.get(job, ()) if e.kind == kind]


def read_record(folder: Path) -> Record:
    """Read a whole record. Raises BrokenRecord if a file is missing or a complete line cannot be read."""
    processes = list(_lines(folder / PROCESSES))
    commands, members = _processes(processes)
    return Record(
        marks=tuple(to_mark(line) for line in _lines(folder / MARKS)),
        events=tuple(sorted((to_event(line) for line in _lines(folder / EVENTS)), key=lambda e: e.sequence)),
        ledgers=read_ledgers(folder),
        logs=_logs(folder / RUN),
        samples=tuple(_sample(line) for line in processes if line["k"] == "sample"),
        commands=commands,
        members=members,
    )


def to_event(line: dict[str, Any]) -> Event:
    xid, _, row = str(line["sequence"]).partition("-")
    at = datetime.fromisoformat(line["time"]).timestamp()
    return Event(
        sequence=(int(xid), int(row)), type=line["type"], subject=line["subject"], time=at, data=line["data"]
    )


def to_mark(line: dict[str, Any]) -> Mark:
    return Mark(name=line["mark"], at=line["t"], data={k: v for k, v in line.items() if k not in ("mark", "t")})


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Complete lines only: what a killed writer left half written is no record."""
    try:
        text = path.read_bytes()
    except OSError as exc:
        raise BrokenRecord(f"{path.name} cannot be read: {exc.strerror}") from exc
    for number, line in enumerate(text.split(b"\n")[:-1], start=1):
        try:
            value = json.loads(line)
        except ValueError as exc:
            raise BrokenRecord(f"{path.name} line {number} is no JSON") from exc
        if not isinstance(value, dict):
            raise BrokenRecord(f"{path.name} line {number} is no object")
        yield value


def read_processes(folder: Path) -> tuple[dict[Process, str], dict[Process, str]]:
    """(process -> command line, worker -> ``<job>/<member folder>``) of everyone seen so far."""
    return _processes(list(_lines(folder / PROCESSES)))


def _processes(lines: list[dict[str, Any]]) -> tuple[dict[Process, str], dict[Process, str]]:
    known = [line for line in lines if line["k"] == "process"]
    commands = {Process(line["pid"], line["start"]): str(line["command"]) for line in known}
    members = {Process(line["pid"], line["start"]): str(line["member"]) for line in known if line.get("member")}
    return commands, members


def _sample(line: dict[str, Any]) -> Sample:
    alive = {Process(pid, start): state for pid, start, state in line["alive"]}
    return Sample(at=line["t"], alive=alive, api=line["api"], final=line.get("final", False))


def read_ledgers(folder: Path, *, job: str = "*") -> dict[str, tuple[Entry, ...]]:
    """Entries of each job, or of one, by wall time; of equal ones, the order inside a file is kept.

    ``folder``: a record, or a state folder while its trainers write.
    """
    entries: dict[str, list[Entry]] = {}
    for path in sorted((folder / RUN).glob(f"{job}/*/ledger.jsonl")):
        entries.setdefault(path.parts[-3], []).extend(to_entry(path.parts[-2], line) for line in _lines(path))
    return {job: tuple(sorted(lines, key=lambda e: e.at)) for job, lines in entries.items()}


def _logs(run: Path) -> dict[str, dict[str, str]]:
    logs: dict[str, dict[str, str]] = {}
    for path in sorted(run.glob("*/*/log")):
        logs.setdefault(path.parts[-3], {})[path.parts[-2]] = path.read_text(errors="replace")
    return logs
