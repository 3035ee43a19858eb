"""Draws a recorded run: who held which worker and when, and the loss: ``python -m demo.timeline RECORD PNG``."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from demo.claims import CHANGED, CLOSED, FIRST, GRANTED, PARTS, RESIZED, STARTED, URGENT
from demo.record import Record, read_record
from tidewright.elastic.proof import Step, read_training

_COLOURS: Final = {FIRST: "#2a7ab9", URGENT: "#c8553d"}
_NAMES: Final = {FIRST: "low priority", URGENT: "critical"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One worker's life, in seconds of wall time, on the lane of the slot that it is drawn on."""

    lane: int
    part: str
    member: str
    pid: int
    since: float
    until: float


def plan_bars(record: Record) -> tuple[Bar, ...]:
    """Every worker as a bar on the lowest lane that was free when it started.

    A worker begins with its first sample or ledger line and ends with the last sample that saw it.
    """
    parts = {record.job(part): part for part in PARTS}
    lives = []
    for process, member in record.members.items():
        job, _, folder = member.partition("/")
        seen = [s.at for s in record.samples if s.alive.get(process, "Z") not in "ZX"]
        seen += [e.at for e in record.ledgers.get(job, ()) if (e.pid, e.member) == (process.pid, folder)]
        if seen and job in parts:
            lives.append((min(seen), max(seen), process, parts[job], folder))
    free_at: list[float] = []
    bars = []
    for since, until, process, part, folder in sorted(lives, key=lambda life: (life[0], life[2])):
        lane = next((i for i, at in enumerate(free_at) if at <= since), len(free_at))
        free_at[lane : lane + 1] = [until]
        bars.append(Bar(lane=lane, part=part, member=folder, pid=process.pid, since=since, until=until))
    return tuple(bars)


def plan_levels(record: Record, job: str) -> tuple[tuple[float, int], ...]:
    """How many workers the job was granted from when on: (wall time in seconds, workers)."""
    levels = []
    for event in record.events_of(job, GRANTED, RESIZED, CLOSED):
        match event.type:
            case "tide.allocation.granted.v1":
                workers = sum(role["members"] for role in event.data["roles"])
            case "tide.allocation.resized.v1":
                workers = event.data["workers_to"]
            case _:
                workers = 0
        levels.append((event.time, workers))
    return tuple(levels)


def draw(record: Record, path: Path) -> None:
    """Write the picture as PNG. Costs about a second, most of it loading matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (workers, granted, loss) = plt.subplots(
        3, 1, figsize=(12, 7.5), sharex=True, height_ratios=(3, 1.3, 2.2), layout="constrained"
    )
    began = min((m.at for m in record.marks), default=0.0)
    bars = plan_bars(record)
    for bar in bars:
        workers.barh(
            bar.lane, bar.until - bar.since, left=bar.since - began, height=0.72, color=_COLOURS[bar.part], alpha=0.85
        )
        label = f"{bar.member.removeprefix('worker-').replace('-', '.')}  pid {bar.pid}"
        workers.text(bar.since - began + 0.15, bar.lane, label, va="center", fontsize=7, color="white", clip_on=True)
    slots = record.mark("settings")
    lanes = max([int(slots.data["slots"]) if slots else 0, *(bar.lane + 1 for bar in bars)])
    workers.set_yticks(range(lanes), [f"slot {i + 1}" for i in range(lanes)])
    workers.set_ylim(lanes - 0.5, -0.5)
    workers.set_title("who held which worker (index.incarnation)", loc="left", fontsize=10)
    for part in PARTS:
        job = record.job(part)
        if job is None:
            continue
        levels = plan_levels(record, job)
        granted.step(
            [at - began for at, _ in levels],
            [count for _, count in levels],
            where="post",
            color=_COLOURS[part],
            label=_NAMES[part],
        )
        _draw_loss(loss, read_training(record.ledgers.get(job, ()), finished=False).steps, part, began)
    granted.set_ylabel("granted")
    granted.set_ylim(0, lanes + 0.4)
    loss.set_ylabel("loss")
    loss.set_xlabel("seconds")
    loss.set_yscale("log")
    for axis in (granted, loss):
        if axis.get_legend_handles_labels()[0]:
            axis.legend(loc="upper right", fontsize=8)
    _draw_marks(record, (workers, granted, loss), began)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_loss(axis: Any, steps: Sequence[Step], part: str, began: float) -> None:
    points = [(s.at - began, s.loss) for s in steps if s.loss is not None and s.loss > 0]
    if points:
        axis.plot(*zip(*points, strict=True), color=_COLOURS[part], linewidth=0.9, label=_NAMES[part])


def _draw_marks(record: Record, axes: Sequence[Any], began: float) -> None:
    """A line where a worker was killed, a grey band where the services were away, thin lines at each generation."""
    kill, away, back = record.mark("worker_killed"), record.mark("services_killed"), record.mark("services_back")
    for axis in axes:
        if kill is not None:
            axis.axvline(kill.at - began, color="black", linestyle="--", linewidth=1)
        if away is not None:
            end = back.at if back is not None else max(s.at for s in record.samples)
            axis.axvspan(away.at - began, end - began, color="grey", alpha=0.25)
    top = axes[0].get_ylim()[1]
    if kill is not None:
        axes[0].text(kill.at - began, top, "worker killed ", va="bottom", ha="right", fontsize=8)
    if away is not None:
        axes[0].text(away.at - began, top, " services away", va="bottom", fontsize=8)
    job = record.job(FIRST)
    for event in record.events_of(job or "", STARTED, CHANGED):
        axes[2].axvline(event.time - began, color="grey", linewidth=0.5, alpha=0.6)


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 2:
        print("usage: python -m demo.timeline RECORD_FOLDER PNG", file=sys.stderr)
        return 2
    draw(read_record(Path(arguments[0])), Path(arguments[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
