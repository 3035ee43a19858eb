"""What the screen shows: the event stream folded into a few facts per job, and each event in one sentence."""

from dataclasses import dataclass, field
from typing import Any

from demo.record import Event


@dataclass(slots=True, kw_only=True)
class JobPicture:
    """One job as the events tell it. ``utilisation`` is a fraction, ``step`` counts applied steps."""

    name: str
    priority: str
    state: str = "submitted"
    granted: int = 0
    running: int = 0
    generation: int = 0
    epoch: int = 0
    step: int = 0
    loss: float | None = None
    utilisation: float | None = None


@dataclass(slots=True, kw_only=True)
class Picture:
    """Everything shown. ``now`` is what the demo does at this moment, in its own words."""

    slots: int
    now: str = ""
    jobs: dict[str, JobPicture] = field(default_factory=dict)
    lines: list[tuple[float, str]] = field(default_factory=list)
    """(wall time in seconds, sentence), oldest first"""

    def fold(self, event: Event) -> None:
        """Take one event in; those of jobs that are not of this story change nothing."""
        job = self.jobs.get(event.subject)
        if job is None:
            return
        update(job, event.type, event.data)
        sentence = tell(job, event.type, event.data)
        if sentence:
            self.lines.append((event.time, sentence))

    def say(self, at: float, sentence: str) -> None:
        self.lines.append((at, sentence))


def update(job: JobPicture, kind: str, data: dict[str, Any]) -> None:
    """What one event changes about its job."""
    match kind:
        case "tide.allocation.granted.v1":
            job.granted, job.epoch, job.state = _members(data), data["epoch"], "starting"
        case "tide.allocation.resized.v1":
            job.granted, job.epoch = data["workers_to"], data["epoch"]
        case "tide.allocation.evicted.v1":
            job.granted, job.epoch, job.state = 0, data["epoch"], "draining"
        case "tide.allocation.waiting.v1":
            job.state = "waiting"
        case "tide.allocation.closed.v1":
            job.granted = job.running = 0
            job.state = data["outcome"]
        case "tide.worker.group_started.v1" | "tide.worker.group_changed.v1":
            job.running, job.generation, job.state = data["workers"], data["generation"], "running"
        case "tide.worker.group_ended.v1":
            job.running = 0
        case "tide.metric.window.v1":
            _measure(job, data)


def tell(job: JobPicture, kind: str, data: dict[str, Any]) -> str:
    """One sentence for people, or "" for what is not worth a line."""
    match kind:
        case "tide.allocation.granted.v1":
            return f"{job.name} is granted {_workers(_members(data))}: {data['reason']['detail']}"
        case "tide.allocation.resized.v1":
            return f"{job.name} {data['workers_from']} → {data['workers_to']}: {data['reason']['detail']}"
        case "tide.allocation.evicted.v1":
            return f"{job.name} gives its room back as a whole: {data['reason']['detail']}"
        case "tide.allocation.waiting.v1":
            return f"{job.name} waits: {data['detail']}"
        case "tide.allocation.closed.v1":
            return f"{job.name} {data['outcome']}: {data['reason']['detail']}"
        case "tide.scaling.proposed.v1":
            return f"{job.name} would use {_workers(data['workers'])} well: {data['reason']}"
        case "tide.worker.group_started.v1":
            return f"{job.name} trains with {_workers(data['workers'])}"
        case "tide.worker.group_changed.v1":
            return _changed(job, data)
        case "tide.worker.start_failed.v1" | "tide.worker.checkpoint_failed.v1" | "tide.worker.room_overdue.v1":
            return f"{job.name}: {kind.split('.')[2]} {data.get('detail') or data.get('reason') or ''}".rstrip()
        case _:
            return ""


def _changed(job: JobPicture, data: dict[str, Any]) -> str:
    lost = "".join(f"; lost {m['member'].split('/', 1)[-1]}: {m['reason']}" for m in data.get("lost", ()))
    cause = str(data["cause"]).replace("_", " ")
    return (
        f"{job.name} trains with {_workers(data['workers'])} from step {data['step']}"
        f" ({cause}, pause {data['pause_seconds']:.2f} s){lost}"
    )


def _measure(job: JobPicture, data: dict[str, Any]) -> None:
    job.utilisation = data["utilisation"]
    if data["loss"] is not None:
        job.loss = data["loss"]
    if data["progress"] is not None:
        job.step = data["progress"]["step"]


def _members(data: dict[str, Any]) -> int:
    return sum(role["members"] for role in data["roles"])


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"
