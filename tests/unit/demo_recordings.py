"""Builds the record folder of a run that never took place: a good one, which a test then damages."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

FIRST, URGENT = "j01first", "j01urgent"
SAMPLES, BATCH, STEP_SECONDS = 40, 8, 0.2
SERVICES, ZYGOTE = 50, 60


@dataclass(kw_only=True)
class Recording:
    """A run as plain lines. ``ledgers``: job -> member folder -> lines."""

    marks: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    ledgers: dict[str, dict[str, list[dict[str, Any]]]] = field(default_factory=dict)
    logs: dict[str, dict[str, str]] = field(default_factory=dict)
    clock: float = 1_000.0
    steps: dict[str, int] = field(default_factory=dict)

    def mark(self, name: str, **data: Any) -> None:
        self.marks.append({"mark": name, "t": self.clock, **data})

    def event(self, kind: str, job: str, **data: Any) -> None:
        number = len(self.events) + 1
        at = datetime.fromtimestamp(self.clock, tz=UTC).isoformat()
        line = {"sequence": f"{100 + number}-{number}", "type": kind, "subject": job, "time": at, "data": data}
        self.events.append(line)

    def resized(self, job: str, old: int, new: int, *, epoch: int, code: str) -> None:
        self.event(
            "tide.allocation.resized.v1",
            job,
            epoch=epoch,
            attempt=1,
            workers_from=old,
            workers_to=new,
            roles=roles(new),
            reason={"code": code, "detail": f"{old} to {new}"},
        )

    def freed(self, job: str, *, epoch: int, members: int) -> None:
        self.event("tide.worker.room_freed.v1", job, epoch=epoch, held=[{"role": "worker", "members": members}])

    def changed(self, job: str, *, generation: int, workers: int, cause: str = "resized") -> None:
        self.event(
            "tide.worker.group_changed.v1",
            job,
            generation=generation,
            workers=workers,
            pause_seconds=0.1,
            cause=cause,
            step=self.steps.get(job, 0),
        )

    def train(self, job: str, *, generation: int, members: dict[int, str], steps: int) -> None:
        """All members (pid -> folder) apply so many steps in that generation; windows of one second are closed."""
        world, per_epoch = len(members), SAMPLES // BATCH
        ledger = self.ledgers.setdefault(job, {})
        for number in range(steps):
            step = self.steps.get(job, 0)
            first = (step % per_epoch) * BATCH
            for rank, (pid, folder) in enumerate(sorted(members.items())):
                where = {"step": step, "generation": generation, "rank": rank, "world": world, "pid": pid}
                ids = list(range(first, first + BATCH))[rank::world]
                lines = ledger.setdefault(folder, [])
                if not any(line["generation"] == generation for line in lines):
                    came = {"source": "member" if step else "fresh", "parent_generation": generation - 1}
                    lines.append({"k": "adopted", **where, **came, "t": self.clock})
                lines.append({"k": "begun", **where, "data_epoch": step // per_epoch, "ids": ids, "t": self.clock})
                applied = {"k": "applied", **where, "loss": 2.0 / (step + 1), "t": self.clock + STEP_SECONDS * 0.9}
                lines.append(applied)
            self.steps[job] = step + 1
            self.clock += STEP_SECONDS
            if number % 5 == 4:
                self.window(job, generation=generation, workers=world)

    def window(self, job: str, *, generation: int, workers: int, utilisation: float = 0.95) -> None:
        self.event(
            "tide.metric.window.v1",
            job,
            attempt=1,
            generation=generation,
            window_seconds=1.0,
            members_reporting=workers,
            members_expected=workers,
            utilisation=utilisation,
            measure="wall",
            loss=0.5,
            progress=None,
        )

    def sample_all(self, lives: Iterable[tuple[int, float, float]], *, away: tuple[float, float]) -> None:
        """Samples every half second of who lived when; the API is away in that interval."""
        lives = list(lives)
        at = 1_000.0
        while at < self.clock:
            alive = [[pid, pid * 10, "S"] for pid, since, until in lives if since <= at < until]
            self.samples.append({"k": "sample", "t": at, "alive": alive, "api": not away[0] < at < away[1]})
            at += 0.5
        self.samples.append({"k": "sample", "t": self.clock, "alive": [], "api": False, "final": True})

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        known = [
            {"k": "process", "pid": pid, "start": pid * 10, "command": f"process {pid}", "member": None}
            for pid in sorted({p[0] for s in self.samples for p in s["alive"]})
        ]
        for job, ledger in self.ledgers.items():
            for member, lines in ledger.items():
                for line in lines:
                    if line["k"] != "begun":
                        continue
                    for process in known:
                        if process["pid"] == line["pid"]:
                            process["member"] = f"{job}/{member}"
                _write(folder / "run" / job / member / "ledger.jsonl", lines)
                text = self.logs.get(job, {}).get(member, "")
                (folder / "run" / job / member / "log").write_text(text)
        _write(folder / "marks.jsonl", self.marks)
        _write(folder / "events.jsonl", self.events)
        _write(folder / "processes.jsonl", [*known, *self.samples])
        return folder


def roles(workers: int) -> list[dict[str, Any]]:
    resources = {"tidewright.io/slot": 1000}
    return [{"role": "worker", "elastic": True, "members": workers, "minimum": 1, "resources": resources}]


def granted(run: Recording, job: str, workers: int) -> None:
    reason = {"code": "ADMITTED_IDLE", "detail": "room was free"}
    run.event("tide.allocation.granted.v1", job, epoch=1, attempt=1, roles=roles(workers), reason=reason)


def ended(run: Recording, job: str, *, epoch: int) -> None:
    run.event("tide.worker.group_ended.v1", job, attempt=1, outcome="succeeded", step=run.steps[job])
    reason = {"code": "COMPLETED", "detail": "done"}
    run.event("tide.allocation.closed.v1", job, epoch=epoch, attempt=1, outcome="succeeded", reason=reason)
    run.event("tide.job.ended.v1", job, outcome="succeeded", exit_code=0)


def proposed(run: Recording, job: str, workers: int, *, epoch: int) -> None:
    run.event("tide.scaling.proposed.v1", job, epoch=epoch, workers=workers, reason="utilisation above the band")


def member(index: int, incarnation: int = 1) -> str:
    return f"worker-{index}-{incarnation}"


def good_run() -> Recording:
    """The whole story as it should go: 75 steps of the first job, 10 of the urgent one."""
    run = Recording()
    run.mark("settings", slots=4, window_seconds=2.0, cooldown_seconds=2.0, band_low=0.75, band_high=0.85)
    slots = {"name": "here", "allocatable": {"tidewright.io/slot": 4000}, "members": []}
    run.event("tide.capacity.observed.v1", "cluster", revision=1, nodes=[slots])
    _grow(run)
    _lend(run)
    _kill_worker(run)
    _lose_services(run)
    ended(run, FIRST, epoch=5)
    run.logs[FIRST] = {member(0): "loss 0.1\nheld-out accuracy 0.968\n"}
    run.mark("down")
    _live(run)
    return run


def _grow(run: Recording) -> None:
    run.mark("submitted", part="first", job=FIRST)
    granted(run, FIRST, 1)
    run.event("tide.worker.group_started.v1", FIRST, epoch=1, attempt=1, generation=1, workers=1)
    run.train(FIRST, generation=1, members={101: member(0)}, steps=10)
    proposed(run, FIRST, 2, epoch=1)
    run.resized(FIRST, 1, 2, epoch=2, code="GREW_PROPOSED")
    run.changed(FIRST, generation=2, workers=2)
    run.train(FIRST, generation=2, members={101: member(0), 102: member(1)}, steps=10)
    proposed(run, FIRST, 4, epoch=2)
    run.resized(FIRST, 2, 4, epoch=3, code="GREW_PROPOSED")
    run.changed(FIRST, generation=3, workers=4)
    everyone = {101: member(0), 102: member(1), 103: member(2), 104: member(3)}
    run.train(FIRST, generation=3, members=everyone, steps=10)


def _lend(run: Recording) -> None:
    run.mark("submitted", part="urgent", job=URGENT)
    run.resized(FIRST, 4, 2, epoch=4, code="SHRANK_FOR_CLAIMANT")
    run.train(FIRST, generation=4, members={101: member(0), 102: member(1)}, steps=5)
    run.changed(FIRST, generation=4, workers=2)
    run.freed(FIRST, epoch=4, members=2)
    granted(run, URGENT, 2)
    run.event("tide.worker.group_started.v1", URGENT, epoch=1, attempt=1, generation=1, workers=2)
    run.train(URGENT, generation=1, members={201: member(0), 202: member(1)}, steps=10)
    ended(run, URGENT, epoch=1)
    run.resized(FIRST, 2, 4, epoch=5, code="GAVE_BACK")
    run.changed(FIRST, generation=5, workers=4)
    back = {101: member(0), 102: member(1), 105: member(2, 2), 106: member(3, 2)}
    run.train(FIRST, generation=5, members=back, steps=10)


def _kill_worker(run: Recording) -> None:
    run.mark("worker_killed", job=FIRST, member=member(1), pid=102)
    run.changed(FIRST, generation=6, workers=3, cause="member_lost")
    three = {101: member(0), 105: member(2, 2), 106: member(3, 2)}
    run.train(FIRST, generation=6, members=three, steps=5)
    run.changed(FIRST, generation=7, workers=4, cause="member_replaced")
    run.train(FIRST, generation=7, members={**three, 107: member(1, 2)}, steps=5)


def _lose_services(run: Recording) -> None:
    four = {101: member(0), 105: member(2, 2), 106: member(3, 2), 107: member(1, 2)}
    run.mark("services_killed", pid=SERVICES)
    run.train(FIRST, generation=7, members=four, steps=15)
    run.mark("services_back")
    run.train(FIRST, generation=7, members=four, steps=5)


def _live(run: Recording) -> None:
    """Samples that agree with marks and ledgers."""
    at = {mark["mark"]: mark["t"] for mark in run.marks}
    lives = [(ZYGOTE, 0.0, run.clock), (SERVICES, 0.0, at["services_killed"]), (51, at["services_back"], run.clock)]
    lines = [line for ledger in run.ledgers.values() for lines in ledger.values() for line in lines]
    for pid in sorted({line["pid"] for line in lines}):
        own = [line["t"] for line in lines if line["pid"] == pid]
        lives.append((pid, min(own), max(own) + 0.1))
    run.sample_all(lives, away=(at["services_killed"], at["services_back"]))


def _write(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


Damage = Callable[[Recording], None]
