"""A real outage of the control plane: what trains on, what waits, who is replaced when it is back, whose clock ran.

``python -m loadtests.outage [--seconds 60] [--quick] [--json FILE]``. A ``tide up`` with default limits runs six
jobs. Its supervisor and its five services are killed and stay away for so long; workers die meanwhile, a group is
half formed, and two groups are below their minimum since before. Then ``tide up`` comes again. Ends with 1 if
anything is not as it must be. ``--quick``: 10 s, and a deadline of 20 s instead of 120.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from demo.installation import Installation, send
from loadtests.installation import client_of, installation, until
from loadtests.resize import machine
from loadtests.resize_ledger import Ledgers, Step
from services.execution.settings import ExecutionSettings
from tidewright.client import Client
from tidewright.elastic.proof import read_ledgers, read_training

SCRIPT: Final = str(Path(__file__).with_name("outage_training.py"))
SLOTS: Final = 14
WORKERS: Final = {
    "is left alone": 2,
    "one of three dies": 3,
    "falls below its minimum": 2,
    "is half formed": 2,
    "was below its minimum": 2,
    "passes its deadline": 2,
}
"""Workers of each job, which is also the minimum but of the one that loses one of three."""
GAP_SECONDS_MAX: Final = 2.0
MENDED_SECONDS_MAX: Final = 30.0
QUICK_SECONDS: Final = 10.0
QUICK_RECOVER_SECONDS: Final = 20.0
BEFORE_RATIO: Final = 0.35
"""Of the deadline, spent below the minimum before the outage, and again after it."""
_SLACK_SECONDS: Final = 10.0


@dataclass(slots=True, kw_only=True)
class Outage:
    """What was seen. Instants are of the machine's wall clock."""

    recover_seconds: float
    died_at: float = 0.0
    """the two that were below their minimum before"""
    down_at: float = 0.0
    up_at: float = 0.0
    """execution is ready again"""
    steps_in_outage: int = 0
    largest_gap_seconds: float = 0.0
    """between two steps of the job that is left alone, from before the outage until after it"""
    mended_seconds: dict[str, float] = field(default_factory=dict)
    """from ready again to the first step of the whole group"""
    replaced: dict[str, list[str]] = field(default_factory=dict)
    """members that others have taken the place of, by job"""
    ended_at: float = 0.0
    """the attempt that passes its deadline"""
    resumed_step: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def deadline_wall_seconds(self) -> float:
        return self.ended_at - self.died_at

    @property
    def deadline_counted_seconds(self) -> float:
        """Without the time in which there was no execution."""
        return self.deadline_wall_seconds - (self.up_at - self.down_at)

    def results(self) -> dict[str, Any]:
        return {
            "outage_seconds": round(self.up_at - self.down_at, 3),
            "steps_in_outage": self.steps_in_outage,
            "largest_gap_seconds": round(self.largest_gap_seconds, 3),
            "mended_seconds": {name: round(value, 3) for name, value in self.mended_seconds.items()},
            "deadline_counted_seconds": round(self.deadline_counted_seconds, 3),
        }


@dataclass(slots=True, kw_only=True)
class Played:
    """One job of the play. ``gates``: the folder in which its script looks whether it is held."""

    client: Client
    state: Path
    gates: Path
    workers: int
    job: str = ""
    ledgers: Ledgers = field(init=False)

    def submit(self, name: str, *, minimum: int, maximum: int) -> None:
        self.gates.mkdir(parents=True)
        body = {
            "name": name.replace(" ", "-"),
            "script": SCRIPT,
            "args": [str(self.gates)],
            "workers": self.workers,
            "workers_min": minimum,
            "workers_max": maximum,
            "checkpoint_every_steps": 20,
        }
        self.job = str(self.client.submit(body)["id"])
        self.ledgers = Ledgers(folder=self.state / "run" / self.job)

    def steps(self, *, since: float = 0.0) -> list[Step]:
        return self.ledgers.follow().steps(since=since)

    def is_whole(self, workers: int, *, since: float = 0.0) -> Step | None:
        """The first step of a group of so many."""
        return next((step for step in self.steps(since=since) if step.world == workers), None)

    def close(self, gate: str) -> None:
        (self.gates / gate).touch()

    def open_all(self) -> None:
        for path in self.gates.iterdir():
            if path.suffix != ".at":
                path.unlink()

    def at(self, gate: str) -> bool:
        return (self.gates / f"{gate}.at").exists()

    def kill(self, index: int) -> None:
        """SIGKILL the first process of that worker, by the record of its shim."""
        record = json.loads((self.state / "run" / self.job / f"worker-{index}-1" / "pid.json").read_text())
        os.kill(record["worker_pid"], signal.SIGKILL)

    def incarnations(self) -> dict[str, int]:
        """The highest of each worker, by its index."""
        found: dict[str, int] = {}
        for member in self.client.members(self.job):
            index, incarnation = str(member["member"]).split("/")[-2:]
            found[index] = max(found.get(index, 0), int(incarnation))
        return found


def measure(*, seconds: float, recover_seconds: float, say: Callable[[str], None] = print) -> Outage:
    """Play it on an installation of its own."""
    is_default = recover_seconds == ExecutionSettings.model_fields["recover_seconds"].default
    settings = {"scaling.window_seconds": 3600.0} | (
        {} if is_default else {"execution.recover_seconds": recover_seconds}
    )
    seen = Outage(recover_seconds=recover_seconds)
    with installation(slots=SLOTS, settings=settings) as found, client_of(found) as client:
        jobs = {
            name: Played(client=client, state=found.state, gates=found.state / "gates" / str(number), workers=workers)
            for number, (name, workers) in enumerate(WORKERS.items())
        }
        _begin(jobs, say)
        _fall_below(jobs, seen, say)
        time.sleep(BEFORE_RATIO * recover_seconds)
        _half_form(jobs["is half formed"])
        _go_down(found, jobs, seen, say)
        time.sleep(seconds)
        _come_back(found, jobs, seen, say)
        _mend(jobs, seen, say)
        _pass_deadlines(jobs, seen, say)
        _note_replaced(jobs, seen)
        for played in jobs.values():
            client.cancel(played.job)
        for name, played in jobs.items():
            until(f"{name}: it has ended", lambda played=played: client.job(played.job)["phase"] == "Cancelled")  # type: ignore[misc]
        _judge(jobs, seen)
    return seen


# -- the play -------------------------------------------------------------------------------------------------


def _begin(jobs: Mapping[str, Played], say: Callable[[str], None]) -> None:
    for name, played in jobs.items():
        minimum = 1 if name == "one of three dies" else played.workers
        maximum = 3 if name == "is half formed" else played.workers
        played.submit(name, minimum=minimum, maximum=maximum)
    for name, played in jobs.items():
        until(f"{name}: it trains", lambda played=played: played.is_whole(played.workers), seconds=60)  # type: ignore[misc]
    say(f"{len(jobs)} jobs train with {sum(played.workers for played in jobs.values())} workers")


def _fall_below(jobs: Mapping[str, Played], seen: Outage, say: Callable[[str], None]) -> None:
    """Two groups of two lose one, and whoever takes its place does not join."""
    held = [jobs["was below its minimum"], jobs["passes its deadline"]]
    for played in held:
        until("a checkpoint is due", lambda played=played: len(played.steps()) > 25)  # type: ignore[misc]
        played.close("join-1-2")
    seen.died_at = time.time()
    for played in held:
        played.kill(1)
    for played in held:
        until("the replacement waits", lambda played=played: played.at("join-1-2"))  # type: ignore[misc]
    say(f"two jobs are below their minimum; they have {seen.recover_seconds:g} s of execution's time")


def _half_form(played: Played) -> None:
    played.close("form-2-1")
    played.client.patch(played.job, {"workers": 3})
    until("the newcomer has the offer", lambda: played.at("form-2-1"))


def _go_down(found: Installation, jobs: Mapping[str, Played], seen: Outage, say: Callable[[str], None]) -> None:
    supervisor, services = found.part("supervisor"), found.part("process")
    assert supervisor is not None, "no supervisor"
    assert services is not None, "no services"
    send(supervisor, signal.SIGKILL)
    send(services, signal.SIGKILL)
    seen.down_at = time.time()
    jobs["one of three dies"].kill(0)
    jobs["falls below its minimum"].kill(1)
    jobs["is half formed"].open_all()
    say("supervisor and services are killed; two more workers too, and a group of three is half formed")


def _come_back(found: Installation, jobs: Mapping[str, Played], seen: Outage, say: Callable[[str], None]) -> None:
    alone = jobs["is left alone"]
    seen.steps_in_outage = len(alone.steps(since=seen.down_at))
    for name in ("falls below its minimum", "was below its minimum", "passes its deadline"):
        if late := jobs[name].steps(since=seen.down_at + 1.0):
            seen.faults.append(f"{name}: {len(late)} steps below the minimum")
    found.start_up()
    until("it is ready again", found.ready, seconds=60, trouble=found.ended)
    seen.up_at = time.time()
    say(f"ready again after {seen.up_at - seen.down_at:.1f} s; {seen.steps_in_outage} steps of the job left alone")


def _mend(jobs: Mapping[str, Played], seen: Outage, say: Callable[[str], None]) -> None:
    for name, workers in (("one of three dies", 3), ("falls below its minimum", 2), ("is half formed", 3)):
        step = until(
            f"{name}: its group is whole",
            lambda played=jobs[name], workers=workers: played.is_whole(workers, since=seen.down_at + 1.0),  # type: ignore[misc]
            seconds=MENDED_SECONDS_MAX,
        )
        assert step is not None
        seen.mended_seconds[name] = step.at - seen.up_at
        say(f"{name}: whole {seen.mended_seconds[name]:+.2f} s after")


def _pass_deadlines(jobs: Mapping[str, Played], seen: Outage, say: Callable[[str], None]) -> None:
    """One comes back in its time though the clock on the wall is past it; the other does not come back."""
    held, late = jobs["was below its minimum"], jobs["passes its deadline"]
    time.sleep(max(0.0, seen.up_at + BEFORE_RATIO * seen.recover_seconds - time.time()))
    wall = time.time() - seen.died_at
    if wall <= seen.recover_seconds:
        seen.faults.append(f"the outage is too short to prove anything: {wall:.0f} s")
    held.open_all()
    step = until("was below its minimum: its group is whole", lambda: held.is_whole(2, since=seen.up_at), seconds=30)
    assert step is not None
    seen.mended_seconds["was below its minimum"] = step.at - seen.up_at
    if held.client.job(held.job)["attempt"] != 1:
        seen.faults.append("was below its minimum: its group was ended though its time was not over")
    say(f"was below its minimum: whole again {wall:.0f} s after it fell below, in the same attempt")
    limit = seen.up_at + seen.recover_seconds + _SLACK_SECONDS - time.time()
    until("the deadline has ended its group", lambda: late.client.job(late.job)["attempt"] > 1, seconds=limit)
    seen.ended_at = time.time()
    late.open_all()
    again = until("passes its deadline: it trains again", lambda: late.is_whole(2, since=seen.ended_at), seconds=60)
    assert again is not None
    seen.resumed_step = again.step
    say(
        f"passes its deadline: ended {seen.deadline_wall_seconds:.1f} s after it fell below its minimum, "
        f"{seen.deadline_counted_seconds:.1f} s of them with an execution; goes on from step {again.step}"
    )


# -- the judgement --------------------------------------------------------------------------------------------


def _note_replaced(jobs: Mapping[str, Played], seen: Outage) -> None:
    wanted: dict[str, dict[str, int]] = {
        "is left alone": {"0": 1, "1": 1},
        "one of three dies": {"0": 2, "1": 1, "2": 1},
        "falls below its minimum": {"0": 1, "1": 2},
        "is half formed": {"0": 1, "1": 1, "2": 1},
        "was below its minimum": {"0": 1, "1": 2},
    }
    for name, played in jobs.items():
        incarnations = played.incarnations()
        seen.replaced[name] = [index for index, number in sorted(incarnations.items()) if number > 1]
        if name in wanted and incarnations != wanted[name]:
            seen.faults.append(f"{name}: incarnations are {incarnations}, not {wanted[name]}")


def _judge(jobs: Mapping[str, Played], seen: Outage) -> None:
    for name, played in jobs.items():
        training = read_training(read_ledgers(played.ledgers.folder), finished=False)
        seen.faults += [f"{name}: {fault}" for fault in training.faults]
        if name != "passes its deadline" and training.repeated:
            seen.faults.append(f"{name}: {training.repeated} steps were done again")
    instants = [step.at for step in jobs["is left alone"].steps(since=seen.down_at - 5.0)]
    seen.largest_gap_seconds = max(after - before for before, after in pairwise(instants))
    if seen.largest_gap_seconds > GAP_SECONDS_MAX:
        seen.faults.append(f"the job left alone paused for {seen.largest_gap_seconds:.2f} s")
    if not seen.recover_seconds - 1 < seen.deadline_counted_seconds:
        seen.faults.append(f"the deadline ended a group after {seen.deadline_counted_seconds:.1f} s that counted")
    if not seen.resumed_step:
        seen.faults.append("passes its deadline: it began anew at step 0")


def show(seen: Outage) -> None:
    print(f"\n{machine()}; outage of {seen.up_at - seen.down_at:.1f} s, limits: defaults")
    print(f"\n{'job':26}{'whole again, s after':>22}   replaced workers")
    for name in WORKERS:
        mended = f"{seen.mended_seconds[name]:.2f}" if name in seen.mended_seconds else "-"
        print(f"{name:26}{mended:>22}   {', '.join(seen.replaced.get(name, [])) or 'none'}")
    gap = seen.largest_gap_seconds
    print(f"\nthe job left alone: {seen.steps_in_outage} steps in the outage, largest gap {gap:.3f} s")
    print(
        f"the deadline of {seen.recover_seconds:g} s ended a group after {seen.deadline_wall_seconds:.1f} s by the "
        f"clock, {seen.deadline_counted_seconds:.1f} s of them with an execution"
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, help="how long nobody is there (60)")
    parser.add_argument("--quick", action="store_true", help="10 s, and a deadline of 20 s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    options = parser.parse_args(arguments)
    recover = QUICK_RECOVER_SECONDS if options.quick else ExecutionSettings.model_fields["recover_seconds"].default
    seen = measure(seconds=options.seconds or (QUICK_SECONDS if options.quick else 60.0), recover_seconds=recover)
    show(seen)
    if options.json is not None:
        document = {"results": seen.results(), "machine": machine(), "replaced": seen.replaced, "faults": seen.faults}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    for fault in seen.faults:
        print(f"FAULT: {fault}", file=sys.stderr)
    return 1 if seen.faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
