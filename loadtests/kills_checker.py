"""Judges the record of a kill test: ``python -m loadtests.kills_checker RECORD_FOLDER``.

It stands on the demo's checker and imports nothing of the product but the reader of ledgers: those, /proc and the
event stream decide.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from textwrap import shorten
from typing import Final

from demo.claims import CLOSED, ENDED, EVICTED, JOB_ENDED
from demo.laws import epochs_rise, within_slots
from demo.record import BrokenRecord, Mark, Process, Record, Sample, read_record
from demo.verdict import Status, Verdict, failed, held, not_reached
from tidewright.elastic.proof import Training, read_training

GAP_SECONDS_MAX: Final = 2.0
SUBMITTED: Final = "tide.job.submitted.v1"
UNNOTICED: Final = ("services", "postgres")
"""Victims whose loss no trainer may notice."""
_STOPPING: Final = ("finished", "stopped", "left")
"""Ledger lines after which a worker ends because it was asked to, or is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """One kill, from SIGKILL until everything was whole again (wall time), and the longest pause of a job in it."""

    number: int
    victim: str
    since: float
    until: float
    gap_seconds: float
    told: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a run comes to. Every text is one thing that is wrong; ``laws`` are those that have no number."""

    kills: int
    lost: tuple[str, ...]
    run_twice: tuple[str, ...]
    left_over: tuple[str, ...]
    outages: tuple[Outage, ...]
    laws: dict[str, Verdict]
    jobs: int
    steps: int
    repeated: int

    @property
    def longest_step_gap_seconds(self) -> float:
        return max((o.gap_seconds for o in self.outages if o.victim in UNNOTICED), default=0.0)

    @property
    def results(self) -> dict[str, float]:
        """Under the names that others know."""
        return {
            "kills": self.kills,
            "lost": len(self.lost),
            "run_twice": len(self.run_twice),
            "left_over": len(self.left_over),
            "longest_step_gap_seconds": round(self.longest_step_gap_seconds, 3),
        }

    @property
    def is_good(self) -> bool:
        nothing_wrong = not (self.lost or self.run_twice or self.left_over)
        laws_hold = all(verdict.status is Status.OK for verdict in self.laws.values())
        return nothing_wrong and laws_hold and self.longest_step_gap_seconds <= GAP_SECONDS_MAX


def find(record: Record) -> Findings:
    jobs = [str(mark.data["job"]) for mark in record.marks if mark.name == "submitted"]
    trainings = {job: read_training(record.ledgers.get(job, ()), finished=_succeeded(record, job)) for job in jobs}
    outages = tuple(_outages(record, trainings))
    return Findings(
        kills=sum(mark.name == "killed" for mark in record.marks),
        lost=tuple(_lost(record, jobs, trainings)),
        run_twice=tuple(_run_twice(record, jobs, trainings)),
        left_over=tuple(_left_over(record)),
        outages=outages,
        laws={
            "came-back": came_back(record),
            "pids-stay": pids_stay(record, outages, trainings),
            "within-slots": within_slots(record),
            "epochs-rise": epochs_rise(record),
        },
        jobs=len(jobs),
        steps=sum(len(t.steps) for t in trainings.values()),
        repeated=sum(t.repeated for t in trainings.values()),
    )


# -- jobs -----------------------------------------------------------------------------------------------------------


def _lost(record: Record, jobs: Sequence[str], trainings: dict[str, Training]) -> list[str]:
    """Accepted jobs that are not in the log, did not end as they should have, or left work out; one text each."""
    found = ((job, list(_missing(record, job, trainings[job]))) for job in jobs)
    return [f"{job}: {'; '.join(told)}" for job, told in found if told]


def _missing(record: Record, job: str, training: Training) -> Iterator[str]:
    cancelled = any(m.name == "cancelling" and m.data["job"] == job for m in record.marks)
    allowed = {"succeeded", "cancelled"} if cancelled else {"succeeded"}
    if not record.events_of(job, SUBMITTED):
        yield "it was accepted and is not in the log"
    for kind in (CLOSED, JOB_ENDED):
        events = record.events_of(job, kind)
        if not events:
            yield f"no {kind}"
        elif events[0].data["outcome"] not in allowed:
            yield f"{events[0].data['outcome']} by {kind} ({events[0].data.get('reason')})"
    yield from training.missing


def _run_twice(record: Record, jobs: Sequence[str], trainings: dict[str, Training]) -> list[str]:
    """Two jobs from one submission; jobs with two ends, or with steps or samples that count twice; one text each."""
    names = Counter(str(e.data["spec"]["name"]) for e in record.events if e.type == SUBMITTED)
    twins = [f"{name}: submitted once, and {count} jobs" for name, count in sorted(names.items()) if count > 1]
    found = ((job, list(_twice(record, job, trainings[job]))) for job in jobs)
    return twins + [f"{job}: {'; '.join(told)}" for job, told in found if told]


def _twice(record: Record, job: str, training: Training) -> Iterator[str]:
    for kind in (SUBMITTED, CLOSED, JOB_ENDED):
        count = len(record.events_of(job, kind))
        if count > 1:
            yield f"{count} times {kind}"
    yield from (fault for fault in training.faults if fault not in training.missing)


def _succeeded(record: Record, job: str) -> bool:
    return any(e.data["outcome"] == "succeeded" for e in record.events_of(job, CLOSED))


# -- processes ------------------------------------------------------------------------------------------------------


def _left_over(record: Record) -> list[str]:
    """Whoever is alive once every job has ended, the installation's own parts apart, or after ``tide down``."""
    left: dict[Process, str] = {}
    quiet = record.mark("quiet")
    if quiet is not None:
        parts = {Process(*each) for each in quiet.data["parts"]}
        sample = next((s for s in record.samples if s.at >= quiet.at), None)
        for process in _alive(sample):
            if process not in parts and "postgres" not in record.commands.get(process, ""):
                left[process] = "once every job had ended"
    for process in _alive(next((s for s in record.samples if s.final), None)):
        left.setdefault(process, "after `tide down`")
    return [f"{p.pid} ({record.commands.get(p, '?')[:80]}) {when}" for p, when in sorted(left.items())]


def _alive(sample: Sample | None) -> list[Process]:
    return [p for p, state in sample.alive.items() if state not in "ZX"] if sample is not None else []


def pids_stay(record: Record, outages: Sequence[Outage], trainings: dict[str, Training]) -> Verdict:
    """While only services or Postgres were away no worker ended, but those that were done or asked to go."""
    watched = 0
    for outage in outages:
        if outage.victim not in UNNOTICED:
            continue
        inside = [s for s in record.samples if outage.since < s.at < outage.until]
        for job, training in trainings.items():
            for process, worker in _workers_at(record, job, training, outage.since).items():
                watched += 1
                ends = _ends_of(record, job, worker)
                gone = next((s for s in inside if s.alive.get(process, "Z") in "ZX"), None)
                if gone is not None and not any(at <= gone.at for at in ends):
                    return failed(
                        f"worker {worker[0]} of {job} (pid {process.pid}) was gone {gone.at - outage.since:.1f} s"
                        f" after kill {outage.number} ({outage.victim})"
                    )
    return held(f"{watched} workers kept their processes") if watched else not_reached("nobody trained in an outage")


def _workers_at(record: Record, job: str, training: Training, at: float) -> dict[Process, tuple[str, int]]:
    """Those of the generation that had applied the last step before, if the job was training then."""
    before = [s for s in training.steps if s.at < at][-1:]
    if not before or _end_between(record, job, before[0].at, at):
        return {}
    workers = {(e.member, e.pid) for e in record.entries(job, "applied") if e.generation == before[0].generation}
    return {
        process: worker
        for process, member in record.members.items()
        for worker in workers
        if (process.pid, member) == (worker[1], f"{job}/{worker[0]}")
        and not any(end < at for end in _ends_of(record, job, worker))
    }


def _ends_of(record: Record, job: str, worker: tuple[str, int]) -> list[float]:
    own = [e.at for e in record.ledgers.get(job, ()) if e.kind in _STOPPING and (e.member, e.pid) == worker]
    return own + _job_ends(record, job)


def _job_ends(record: Record, job: str) -> list[float]:
    """When it was evicted, its group had ended, it was closed, or its training was complete."""
    return [e.time for e in record.events_of(job, EVICTED, ENDED, CLOSED)] + [
        e.at for e in record.ledgers.get(job, ()) if e.kind in ("finished", "stopped")
    ]


def _end_between(record: Record, job: str, since: float, until: float) -> bool:
    return any(since <= at <= until for at in _job_ends(record, job))


# -- outages --------------------------------------------------------------------------------------------------------


def came_back(record: Record) -> Verdict:
    killed = [m for m in record.marks if m.name == "killed"]
    whole = [float(m.data["seconds"]) for m in record.marks if m.name == "whole"]
    if not killed:
        return not_reached("nothing was killed")
    given_up = record.mark("given_up")
    if given_up is not None or len(whole) < len(killed):
        return failed(str(given_up.data["why"]) if given_up else "the run was cut short")
    return held(f"all whole again after each of {len(whole)} kills, at most {max(whole):.1f} s later")


def _outages(record: Record, trainings: dict[str, Training]) -> list[Outage]:
    """Every kill that was followed by everything whole again."""
    found = []
    for killed in (m for m in record.marks if m.name == "killed"):
        whole = _mark_of(record, "whole", killed)
        if whole is None:
            continue
        gaps = [(_gap(record, job, t, killed.at, whole.at), job) for job, t in trainings.items()]
        seconds, job = max(gaps, default=(0.0, ""))
        found.append(
            Outage(
                number=int(killed.data["number"]),
                victim=str(killed.data["victim"]),
                since=killed.at,
                until=whole.at,
                gap_seconds=seconds,
                told=f"{job} stood for {seconds:.2f} s",
            )
        )
    return found


def _mark_of(record: Record, name: str, killed: Mark) -> Mark | None:
    number = killed.data["number"]
    return next((m for m in record.marks if m.name == name and m.data["number"] == number), None)


def _gap(record: Record, job: str, training: Training, since: float, until: float) -> float:
    """Longest pause of a job that trained at ``since``, until it ended or the outage was over; infinite if neither.

    0 if it did not train then.
    """
    before = [s.at for s in training.steps if s.at < since][-1:]
    if not before or _end_between(record, job, before[0], since):
        return 0.0
    end = min((at for at in _job_ends(record, job) if at >= since), default=float("inf"))
    line = [*before, *(s.at for s in training.steps if since <= s.at <= end)]
    line = [at for at in line if at <= until] + [at for at in line if at > until][:1]
    if line[-1] <= until:
        line.append(end)
    return max(b - a for a, b in pairwise(line))


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0 nothing is wrong, 1 something is, 2 the record cannot be read."""
    if len(arguments) != 1:
        print("usage: python -m loadtests.kills_checker RECORD_FOLDER", file=sys.stderr)
        return 2
    try:
        findings = find(read_record(Path(arguments[0])))
    except BrokenRecord as exc:
        print(f"the record cannot be read: {exc}", file=sys.stderr)
        return 2
    for line in told(findings):
        print(line)
    return 0 if findings.is_good else 1


def told(findings: Findings) -> list[str]:
    """Everything that is wrong, and every law with what it rests on."""
    lines = [f"{name:26s}{value:g}" for name, value in findings.results.items()]
    for name in ("lost", "run_twice", "left_over"):
        lines += [f"   {name}: {text}" for text in getattr(findings, name)]
    for outage in findings.outages:
        if outage.victim in UNNOTICED and outage.gap_seconds > GAP_SECONDS_MAX:
            lines.append(f"   gap: kill {outage.number} ({outage.victim}): {outage.told}")
    lines += [f"{v.status:<12}{name:<14}{shorten(v.detail, 200)}" for name, v in findings.laws.items()]
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
