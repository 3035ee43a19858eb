"""The claims that hold over the whole run: nothing twice, nothing missing, nothing above the room, nothing left."""

import re
from typing import Any, Final

from demo.claims import (
    CAPACITY,
    CLOSED,
    ENDED,
    EVICTED,
    FIRST,
    FREED,
    GRANTED,
    JOB_ENDED,
    PARTS,
    RESIZED,
    URGENT,
)
from demo.record import Event, Record
from demo.verdict import Verdict, failed, held, not_reached
from tidewright.elastic.proof import read_training

ACCURACY_MIN: Final = 0.95
_ACCURACY: Final = re.compile(r"^held-out accuracy ([0-9.]+)", re.MULTILINE)
_ACCELERATORS: Final = ("tidewright.io/slot", "nvidia.com/gpu")


def once(record: Record) -> Verdict:
    """Every step was applied in exactly one generation, and every sample used exactly once per data epoch."""
    told = []
    for part in PARTS:
        job = record.job(part)
        if job is None:
            continue
        training = read_training(record.ledgers.get(job, ()), finished=_succeeded(record, job))
        if training.faults:
            more = f" (and {len(training.faults) - 1} more faults)" if len(training.faults) > 1 else ""
            return failed(f"{part} job: {training.faults[0]}{more}")
        if not training.steps:
            continue
        generations = len({s.generation for s in training.steps})
        told.append(
            f"{part} job: {len(training.steps)} steps in {generations} generations,"
            f" {training.samples} samples in {training.data_epochs} data epochs, {training.repeated} steps repeated"
        )
    return held("; ".join(told)) if told else not_reached("no step was applied")


def within_slots(record: Record) -> Verdict:
    """At no event did the jobs together hold more than the slots, room that is being left included.

    A shrink or an eviction counts as held until the word that it is free (room_freed of that epoch, group_ended).
    """
    capacity = 0
    granted: dict[str, int] = {}
    held_by: dict[str, int] = {}
    epochs: dict[str, int] = {}
    highest = 0
    for event in record.events:
        job, data = event.subject, event.data
        if event.type == CAPACITY:
            capacity = sum(_accelerators(node["allocatable"]) for node in data["nodes"])
        elif event.type in (GRANTED, RESIZED):
            granted[job] = sum(role["members"] * _accelerators(role["resources"]) for role in data["roles"])
            held_by[job] = max(held_by.get(job, 0), granted[job])
            epochs[job] = data["epoch"]
        elif event.type == EVICTED:
            granted[job], epochs[job] = 0, data["epoch"]
        elif event.type == FREED and data["epoch"] == epochs.get(job):
            held_by[job] = granted.get(job, 0)
        elif event.type in (ENDED, CLOSED):
            granted[job] = held_by[job] = 0
        total = sum(held_by.values())
        highest = max(highest, total)
        if total > capacity:
            return failed(f"{total / 1000:g} slots held of {capacity / 1000:g} at {event.type} of {job}")
    if not highest:
        return not_reached("nothing was granted")
    return held(
        f"at most {highest / 1000:g} of {capacity / 1000:g} slots held at each of {len(record.events)} events"
    )


def epochs_rise(record: Record) -> Verdict:
    """Per job: epochs rise at every change of the grant, attempts never fall, started generations rise."""
    seen: dict[str, list[int]] = {}
    attempts: dict[str, int] = {}
    generations: dict[str, int] = {}
    for event in record.events:
        job, data = event.subject, event.data
        if event.type in (GRANTED, RESIZED, EVICTED):
            if seen.get(job) and data["epoch"] <= seen[job][-1]:
                return failed(f"epoch {data['epoch']} after {seen[job][-1]} ({event.type} of {job})")
            seen.setdefault(job, []).append(data["epoch"])
            if data["attempt"] < attempts.get(job, 0):
                return failed(f"attempt {data['attempt']} after {attempts[job]} ({event.type} of {job})")
            attempts[job] = data["attempt"]
        if event.type in ("tide.worker.group_started.v1", "tide.worker.group_changed.v1"):
            if data["generation"] <= generations.get(job, 0):
                return failed(f"generation {data['generation']} started after {generations[job]} ({job})")
            generations[job] = data["generation"]
    if not seen:
        return not_reached("nothing was granted")
    return held("; ".join(f"…{job[-6:]}: {', '.join(map(str, epochs))}" for job, epochs in sorted(seen.items())))


def closed_once(record: Record) -> Verdict:
    """Each job was closed exactly once, with success, and ended exactly once."""
    jobs = [job for part in PARTS if (job := record.job(part)) is not None]
    unfinished = []
    for job in jobs:
        for kind in (CLOSED, JOB_ENDED):
            events = record.events_of(job, kind)
            if len(events) > 1:
                return failed(f"{len(events)} times {kind} of {job}")
            if events and events[0].data["outcome"] != "succeeded" and not _cut_before(record, events[0]):
                return failed(f"{job} {events[0].data['outcome']}")
            if not events:
                unfinished.append(job)
    if record.mark("cut") is not None:
        return not_reached("the story was cut short; no job was closed twice")
    if unfinished or {record.job(FIRST), record.job(URGENT)} - set(jobs):
        return failed(f"never closed: {', '.join(sorted(set(unfinished))) or 'a job that was never submitted'}")
    return held(f"all {len(jobs)} jobs were closed once and ended once, as succeeded")


def accurate(record: Record) -> Verdict:
    """The first job's own log ends with at least 95 % held-out accuracy."""
    job = record.job(FIRST)
    found = [float(match) for text in record.logs.get(job or "", {}).values() for match in _ACCURACY.findall(text)]
    if not found:
        cut = record.mark("cut") is not None
        return (not_reached if cut else failed)("the first job's log names no held-out accuracy")
    if min(found) < ACCURACY_MIN:
        return failed(f"held-out accuracy {min(found):.3f}, below {ACCURACY_MIN}")
    return held(f"held-out accuracy {min(found):.3f}")


def nothing_left(record: Record) -> Verdict:
    """After ``tide down`` no process that was ever part of the run is alive."""
    final = next((s for s in record.samples if s.final), None)
    if final is None:
        return failed("no sample was taken after the end")
    known = {process for sample in record.samples for process in sample.alive}
    if not known:
        return failed("no process of the run was ever seen")
    left = sorted(process for process, state in final.alive.items() if state not in "ZX")
    if left:
        named = ", ".join(f"{p.pid} ({record.commands.get(p, '?')[:60]})" for p in left[:3])
        return failed(f"{len(left)} processes outlive the run: {named}")
    return held(f"none of {len(known)} processes is alive")


def _succeeded(record: Record, job: str) -> bool:
    return any(e.data["outcome"] == "succeeded" for e in record.events_of(job, CLOSED))


def _cut_before(record: Record, event: Event) -> bool:
    cut = record.mark("cut")
    return cut is not None and cut.at <= event.time


def _accelerators(resources: dict[str, Any]) -> int:
    """Thousandths of an accelerator, or of the slot that stands for one."""
    return sum(int(resources.get(name, 0)) for name in _ACCELERATORS)
