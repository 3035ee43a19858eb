"""The end of the demo: what every change of the group cost, measured twice, and what the checker says."""

from dataclasses import dataclass
from itertools import pairwise

from rich.console import Console
from rich.table import Table

from demo.claims import CHANGED, FIRST
from demo.record import Record
from tidewright.elastic.proof import Training, read_training


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """One change of the group. ``told`` by the event, ``gap`` between last old and first new step in the ledgers."""

    cause: str
    workers_before: int
    workers: int
    step: int
    told: float
    gap: float


def plan_pauses(record: Record, job: str) -> tuple[Pause, ...]:
    """Every change of a job's group that its ledgers show, in order. Seconds."""
    training = read_training(record.ledgers.get(job, ()), finished=False)
    pauses = []
    for event in record.events_of(job, CHANGED):
        generation = event.data["generation"]
        after = next((i for i, s in enumerate(training.steps) if s.generation == generation), 0)
        if after == 0:
            continue
        last, first = training.steps[after - 1], training.steps[after]
        pauses.append(
            Pause(
                cause=str(event.data["cause"]).replace("_", " "),
                workers_before=last.world,
                workers=event.data["workers"],
                step=first.step,
                told=event.data["pause_seconds"],
                gap=first.at - last.at,
            )
        )
    return tuple(pauses)


def print_pauses(console: Console, record: Record) -> None:
    """A table of the first job's pauses, beside what a step takes there anyway."""
    job = record.job(FIRST)
    if job is None:
        return
    training = read_training(record.ledgers.get(job, ()), finished=False)
    table = Table(title="What each change of the group cost (seconds)", title_justify="left", box=None)
    for heading in ("workers", "why", "from step", "pause as told", "gap in the ledgers", "usual step"):
        table.add_column(heading, justify="left" if heading in ("workers", "why") else "right")
    for pause in plan_pauses(record, job):
        table.add_row(
            f"{pause.workers_before} → {pause.workers}",
            pause.cause,
            str(pause.step),
            f"{pause.told:.2f}",
            f"{pause.gap:.2f}",
            f"{usual_step(training, pause.step):.2f}",
        )
    console.print(table)


def usual_step(training: Training, step: int) -> float:
    """Median seconds between steps in the generation that ``step`` belongs to; 0 if there are fewer than 2."""
    generation = next(s.generation for s in training.steps if s.step == step)
    times = [s.at for s in training.steps if s.generation == generation]
    gaps = sorted(b - a for a, b in pairwise(times))
    return gaps[len(gaps) // 2] if gaps else 0.0
