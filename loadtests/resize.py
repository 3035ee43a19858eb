"""How long a running job takes to change size, and to go on after a SIGKILL: real services, real trainers.

``python -m loadtests.resize [--quick] [--repeats N] [--json FILE]``. A ``tide up`` of four slots in a fresh state
folder trains a small net as fast as it can; every change goes through HTTP. A step counts once all ranks of its group
have applied it; its instant, like that of every ledger line and log line, is of this machine's wall clock. Beside it,
in the same run: the same net stopped and started anew from a checkpoint (``loadtests.cold_restart``).
"""

import argparse
import json
import os
import platform
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from demo.installation import Installation
from loadtests import cold_restart
from loadtests.installation import client_of, installation, until
from loadtests.resize_ledger import Ledgers, Step, first_step, last_applied
from tidewright.client import Client

SLOTS: Final = 4
SMALL: Final = 2
QUIET_SECONDS: Final = 3.0
"""Between two measurements, so that none has to do with the one before."""
STEPS_BETWEEN: Final = 5
STEP_SECONDS_MAX: Final = 60.0
SETTINGS: Final = {"scaling.window_seconds": 3600.0}
"""Nobody but the benchmark changes the job's size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of size, in seconds: since the request, since execution got the event, and between the steps."""

    http: float
    live: float
    gap: float
    stages: dict[str, float]
    pids: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class Measured:
    """Everything that was measured."""

    grown: list[Change] = field(default_factory=list)
    shrunk: list[Change] = field(default_factory=list)
    killed_first: list[float] = field(default_factory=list)
    """rank 0"""
    killed_other: list[float] = field(default_factory=list)
    restarts: list[cold_restart.Restart] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two repeats of each, one restart")
    parser.add_argument("--repeats", type=int, help="resizes each way and kills of each kind (11)")
    parser.add_argument("--restarts", type=int, help="cold restarts (5); 0: none")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    options = parser.parse_args(arguments)
    repeats = options.repeats or (2 if options.quick else 11)
    restarts = options.restarts if options.restarts is not None else (1 if options.quick else 5)
    measured = measure(repeats=repeats, restarts=restarts)
    print(report(measured))
    if options.json is not None:
        options.json.write_text(json.dumps(to_json(measured), indent=1) + "\n")


def measure(*, repeats: int, restarts: int) -> Measured:
    """Resizes, then kills, then, when nothing else runs any more, the restarts."""
    measured = Measured()
    with installation(slots=SLOTS, settings=SETTINGS) as found, training(found) as bed:
        for _ in range(repeats):
            measured.grown.append(bed.resize(SLOTS))
            measured.shrunk.append(bed.resize(SMALL))
        bed.resize(SLOTS)
        for _ in range(repeats):
            measured.killed_first.append(bed.kill(0))
            measured.killed_other.append(bed.kill(SLOTS - 1))
    if restarts:
        measured.restarts = cold_restart.measure(before=SMALL, after=SLOTS, repeats=restarts)
    return measured


# -- the bed --------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Bed:
    """One job that trains, seen through HTTP, its ledgers and the services' log."""

    client: Client
    job: str
    ledgers: Ledgers
    log: Path

    def resize(self, workers: int) -> Change:
        """Ask for another size; wait until the group of that size is under way."""
        before = self._at_rest()
        asked = time.time()
        self.client.patch(self.job, {"workers": workers})
        first = self._first_step(since=asked, above=before.generation, world=workers)
        self._wait_for_steps(first)
        entries = self.ledgers.entries
        adopted = [e.at for e in entries if e.kind == "adopted" and e.generation == first.generation]
        log = LogLines(self.log, job=self.job, since=asked)
        stages = {
            "queueing has decided": log.first("allocation_decided"),
            "execution has the event": log.first("allocation_received"),
            "the newcomers are committed": log.last("member_committed"),
            "their processes exist": self._recorded(since=asked),
            "they are admitted": log.last("member_admitted"),
            "the group is offered": log.first("generation_offered"),
            "all have changed to it": max(adopted),
            "its first step is applied": first.at,
        }
        received = stages["execution has the event"]
        assert received is not None, "execution has noted no receipt"
        return Change(
            http=first.at - asked,
            live=first.at - received,
            gap=first.at - last_applied(entries, up_to=before.generation, before=first.at),
            stages={name: at - asked for name, at in stages.items() if at is not None},
            pids=first.pids,
        )

    def kill(self, rank: int) -> float:
        """SIGKILL one worker: seconds to the next step of the rest. Returns when the group is whole again."""
        before = self._at_rest()
        killed = time.time()
        os.kill(before.pids[rank], signal.SIGKILL)
        first = self._first_step(since=killed, above=before.generation)
        assert before.pids[rank] not in first.pids
        self._wait_for_steps(self._first_step(since=killed, above=before.generation, world=before.world))
        return first.at - killed

    def _steps(self, since: float) -> list[Step]:
        return self.ledgers.follow().steps(since=since)

    def _first_step(self, *, since: float, above: int, world: int | None = None) -> Step:
        found = until(
            f"a step of {world or 'the remaining'} workers",
            lambda: first_step(self._steps(since), above=above, world=world),
            seconds=STEP_SECONDS_MAX,
        )
        assert found is not None
        return found

    def _at_rest(self) -> Step:
        """The last step, once nothing has happened for a moment."""
        time.sleep(QUIET_SECONDS)
        return self._steps(time.time() - QUIET_SECONDS - STEP_SECONDS_MAX)[-1]

    def _wait_for_steps(self, first: Step) -> None:
        """The group has started, and is not about to fall back."""

        def under_way() -> bool:
            later = self._steps(first.at)
            return sum(step.generation == first.generation for step in later) >= STEPS_BETWEEN

        until(f"more steps of generation {first.generation}", under_way)

    def _recorded(self, *, since: float) -> float | None:
        """When the last process that was started since then stood in its record."""
        times = [path.stat().st_mtime for path in self.ledgers.folder.glob("*/pid.json")]
        return max((at for at in times if at > since), default=None)


class LogLines:
    """The lines of the services' log about one job, since an instant."""

    def __init__(self, path: Path, *, job: str, since: float) -> None:
        self._found: list[tuple[str, float]] = []
        for line in path.read_text().splitlines():
            if job in line:
                value = json.loads(line)
                at = datetime.fromisoformat(value["time"]).timestamp()
                if at >= since:
                    self._found.append((value["event"], at))

    def first(self, event: str) -> float | None:
        return min((at for name, at in self._found if name == event), default=None)

    def last(self, event: str) -> float | None:
        return max((at for name, at in self._found if name == event), default=None)


@contextmanager
def training(found: Installation) -> Iterator[Bed]:
    """A job of two workers that is under way."""
    with client_of(found) as client:
        script = Path(__file__).with_name("resize_training.py")
        job = client.submit(
            {"name": "resize", "script": str(script), "workers": SMALL, "workers_min": SMALL, "workers_max": SLOTS}
        )["id"]
        ledgers = Ledgers(folder=found.state / "run" / job)
        bed = Bed(client=client, job=job, ledgers=ledgers, log=found.state / "log" / "services.log")
        until("it trains", lambda: len(ledgers.follow().steps(since=0.0)) > 2 * STEPS_BETWEEN)
        yield bed
        client.cancel(job)
        until("it has ended", lambda: client.job(job)["phase"] == "Cancelled")


# -- the report -----------------------------------------------------------------------------------------------


def results(measured: Measured) -> dict[str, float]:
    """The figures by their names, medians, in seconds."""
    found = {
        "http_to_first_step_seconds": [each.http for each in measured.grown],
        "live_2_4_seconds": [each.live for each in measured.grown],
        "live_4_2_seconds": [each.live for each in measured.shrunk],
        "gap_2_4_seconds": [each.gap for each in measured.grown],
        "kill_to_next_step_seconds": [*measured.killed_first, *measured.killed_other],
        "restart_2_4_seconds": [each.first_step for each in measured.restarts],
    }
    return {name: round(statistics.median(values), 4) for name, values in found.items() if values}


def to_json(measured: Measured) -> dict[str, Any]:
    """``results``, and every single measurement beside them."""
    return {
        "results": results(measured),
        "machine": machine(),
        "pids": {"2": [list(c.pids) for c in measured.shrunk], "4": [list(c.pids) for c in measured.grown]},
        "grown": [{"http": c.http, "live": c.live, "gap": c.gap, "stages": c.stages} for c in measured.grown],
        "shrunk": [{"http": c.http, "live": c.live, "gap": c.gap, "stages": c.stages} for c in measured.shrunk],
        "killed": {"rank 0": measured.killed_first, "another": measured.killed_other},
        "restarts": [each.first_step for each in measured.restarts],
    }


def machine() -> str:
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, load {load:.1f}"


def report(measured: Measured) -> str:
    """A table for people."""
    rows = [
        ("2 -> 4, HTTP request to first step", [each.http for each in measured.grown]),
        ("2 -> 4, execution's receipt to first step", [each.live for each in measured.grown]),
        ("2 -> 4, last old to first new step", [each.gap for each in measured.grown]),
        ("4 -> 2, HTTP request to first step", [each.http for each in measured.shrunk]),
        ("4 -> 2, execution's receipt to first step", [each.live for each in measured.shrunk]),
        ("4 -> 2, last old to first new step", [each.gap for each in measured.shrunk]),
        ("SIGKILL of rank 0 to the rest's next step", measured.killed_first),
        ("SIGKILL of rank 3 to the rest's next step", measured.killed_other),
        ("2 -> 4, all restarted from a checkpoint", [each.first_step for each in measured.restarts]),
    ]
    lines = [machine(), "", f"{'seconds':44} {'median':>8} {'least':>8} {'most':>8}   repeats"]
    lines += [
        f"{name:44} {statistics.median(values):8.3f} {min(values):8.3f} {max(values):8.3f}   {len(values)}"
        for name, values in rows
        if values
    ]
    figures = results(measured)
    if "restart_2_4_seconds" in figures:
        restart = figures["restart_2_4_seconds"]
        lines += [
            "",
            f"restart / live: {restart / figures['live_2_4_seconds']:.1f}",
            f"restart / through HTTP: {restart / figures['http_to_first_step_seconds']:.1f}",
        ]
    return "\n".join([*lines, "", *_stages("2 -> 4", measured.grown), "", *_stages("4 -> 2", measured.shrunk)])


def _stages(name: str, changes: Sequence[Change]) -> list[str]:
    """Where the time goes: medians, since the request and since the stage before."""
    lines = [f"{name + ', seconds since the request':44} {'median':>8} {'stage':>8}"]
    before = 0.0
    for stage in changes[0].stages:
        at = statistics.median(change.stages[stage] for change in changes if stage in change.stages)
        lines.append(f"  {stage:42} {at:8.3f} {at - before:8.3f}")
        before = at
    return lines


if __name__ == "__main__":
    main()
