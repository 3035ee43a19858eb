"""The claims of the story, scene by scene: each reads the record and answers with the numbers it rests on."""

from collections.abc import Sequence
from typing import Final

from demo.record import Event, Process, Record
from demo.training import largest_gap, pids_of
from demo.verdict import Status, Verdict, failed, held, not_reached
from tidewright.elastic.proof import Entry, read_training

FIRST: Final = "first"
"""Part of the long job of low priority."""
URGENT: Final = "urgent"
"""Part of the critical job that needs its room."""
PARTS: Final = (FIRST, URGENT)
GAP_SECONDS_MAX: Final = 2.0
_WINDOW_TOLERANCE: Final = 0.02
"""Windows are cut at report boundaries; their sum may miss the full window by this part of it."""
_GONE_SECONDS: Final = 1.0
"""A process killed with SIGKILL must be out of the samples by then."""

GRANTED: Final = "tide.allocation.granted.v1"
RESIZED: Final = "tide.allocation.resized.v1"
EVICTED: Final = "tide.allocation.evicted.v1"
CLOSED: Final = "tide.allocation.closed.v1"
STARTED: Final = "tide.worker.group_started.v1"
CHANGED: Final = "tide.worker.group_changed.v1"
FREED: Final = "tide.worker.room_freed.v1"
ENDED: Final = "tide.worker.group_ended.v1"
WINDOW: Final = "tide.metric.window.v1"
PROPOSED: Final = "tide.scaling.proposed.v1"
CAPACITY: Final = "tide.capacity.observed.v1"
JOB_ENDED: Final = "tide.job.ended.v1"


def grew(record: Record) -> Verdict:
    """1 → 2 → 4, each step decided after a full window with utilisation above the band."""
    job = record.job(FIRST)
    settings = record.mark("settings")
    if job is None or settings is None:
        return not_reached("the first job was never submitted")
    growth = [e for e in resizes(record, job) if e.data["reason"]["code"] == "GREW_PROPOSED"]
    sizes = [(e.data["workers_from"], e.data["workers_to"]) for e in growth[:2]]
    if sizes != [(1, 2), (2, 4)]:
        return failed(f"grew by proposal as {sizes or 'never'}, not 1 → 2 → 4")
    told = []
    for event in growth[:2]:
        seconds, lowest, highest = _window_before(record, job, event, band_high=settings.data["band_high"])
        step = f"{event.data['workers_from']} → {event.data['workers_to']}"
        if seconds < settings.data["window_seconds"] * (1 - _WINDOW_TOLERANCE):
            return failed(
                f"{step} after only {seconds:.1f} s above {settings.data['band_high']:.0%}"
                f" of a window of {settings.data['window_seconds']} s"
            )
        told.append(f"{step} after {seconds:.1f} s at {lowest:.0%}..{highest:.0%}")
    return held("; ".join(told))


def shrank_in_place(record: Record) -> Verdict:
    """4 → 2 for the urgent job, and the two that stay are the same processes before and after."""
    job = record.job(FIRST)
    if job is None or record.job(URGENT) is None:
        return not_reached("the urgent job was never submitted")
    shrink = _shrink(record, job)
    if shrink is None:
        return failed("the first job never gave room: no 4 → 2 for a claimant in the event stream")
    change = next((e for e in record.events_of(job, CHANGED) if e.sequence > shrink.sequence), None)
    if change is None or change.data["workers"] != 2:
        return failed("4 → 2 was decided, but no group of 2 started after it")
    after = change.data["generation"]
    entries = record.ledgers.get(job, ())
    before = _generation_before(entries, after)
    old, new = pids_of(entries, before), pids_of(entries, after)
    if len(old) != 4 or len(new) != 2 or not set(new) < set(old):
        return failed(f"pids {_pids(old)} in generation {before}, {_pids(new)} in generation {after}")
    broken = _restarted(record, new, since=_first(entries, before), until=_first(entries, after))
    if broken:
        return failed(f"pid {broken} is not the same process before and after")
    return held(
        f"pids {_pids(new)} of {_pids(old)} step in generations {before} and {after},"
        f" pause {change.data['pause_seconds']:.2f} s"
    )


def urgent_ran(record: Record) -> Verdict:
    """The urgent job got the room, ran, and succeeded before the first one took it back."""
    job, urgent = record.job(FIRST), record.job(URGENT)
    if job is None or urgent is None or shrank_in_place(record).status is not Status.OK:
        return not_reached("there was no room for it")
    shrink = _shrink(record, job)
    granted, closed = record.events_of(urgent, GRANTED)[:1], record.events_of(urgent, CLOSED)[:1]
    started = record.events_of(urgent, STARTED)[:1]
    if shrink is None or not granted or not started or not closed:
        return failed("it was never granted, started and closed")
    if not shrink.sequence < granted[0].sequence < closed[0].sequence:
        return failed("it was not granted after the shrink")
    if closed[0].data["outcome"] != "succeeded":
        return failed(f"it {closed[0].data['outcome']}: {closed[0].data['reason']['detail']}")
    back = _giving_back(record, job, shrink)
    if back is not None and back.sequence < closed[0].sequence:
        return failed("the first job took the room back before the urgent one had ended")
    steps = record.entries(urgent, "applied")
    pids = sorted({e.pid for e in steps})
    if len(pids) != 2:
        return failed(f"{len(pids)} processes stepped in it, not 2")
    waited = granted[0].time - _submitted_at(record, URGENT)
    return held(
        f"granted {waited:.2f} s after it was submitted, {len({e.step for e in steps})} steps"
        f" by pids {_pids(pids)} in {steps[-1].at - steps[0].at:.1f} s"
    )


def took_back(record: Record) -> Verdict:
    """2 → 4 once the urgent job had ended, with the two survivors among the four."""
    job = record.job(FIRST)
    if job is None or urgent_ran(record).status is not Status.OK:
        return not_reached("no room was lent")
    shrink = _shrink(record, job)
    back = None if shrink is None else _giving_back(record, job, shrink)
    if shrink is None or back is None:
        return failed("the room was never given back: no GAVE_BACK to 4 in the event stream")
    change = next((e for e in record.events_of(job, CHANGED) if e.sequence > back.sequence), None)
    if change is None or change.data["workers"] != 4:
        return failed("it was given back, but no group of 4 started")
    entries = record.ledgers.get(job, ())
    after = change.data["generation"]
    survivors, now = pids_of(entries, _generation_before(entries, after)), pids_of(entries, after)
    if len(now) != 4 or not set(survivors) < set(now):
        return failed(f"pids {_pids(survivors)} became {_pids(now)}")
    return held(f"pids {_pids(survivors)} became {_pids(now)}, {_first(entries, after) - back.time:.2f} s after it")


def replaced(record: Record) -> Verdict:
    """Another process took the killed one's place; the other three stayed, and went on meanwhile.

    What happens once the story is cut short is cleaning up, and proves nothing.
    """
    job, kill = record.job(FIRST), record.mark("worker_killed")
    if job is None or kill is None:
        return not_reached("no worker was killed")
    cut = record.mark("cut")
    entries = [e for e in record.ledgers.get(job, ()) if cut is None or e.at < cut.at]
    killed = int(kill.data["pid"])
    before = max((e.generation for e in entries if e.kind == "applied" and e.pid == killed), default=0)
    others = set(pids_of(entries, before)) - {killed}
    if len(others) != 3:
        return failed(f"pid {killed} was killed in a group of {len(others) + 1}, not of 4")
    late = [s for s in record.samples if s.at > kill.at + _GONE_SECONDS and _runs(s.alive, killed)]
    if late:
        return failed(f"pid {killed} still ran {late[0].at - kill.at:.1f} s after SIGKILL")
    later = [g for g in sorted({e.generation for e in entries if e.kind == "applied"}) if g > before]
    for generation in later:
        now = set(pids_of(entries, generation))
        if len(now) < 4:
            continue
        if killed in now or not others < now:
            return failed(f"pids {_pids(sorted(others))} and {killed} became {_pids(sorted(now))}")
        return held(
            f"pid {killed} became {(now - others).pop()} and {_pids(sorted(others))} stayed;"
            f" next step after {_first(entries, later[0]) - kill.at:.2f} s,"
            f" four again after {_first(entries, generation) - kill.at:.2f} s"
        )
    return failed(f"pid {killed} was never replaced: no group of 4 stepped after generation {before}")


def outlived_outage(record: Record) -> Verdict:
    """While the services were away every worker stepped on: same pids, same generation, no gap of 2 s."""
    job, kill = record.job(FIRST), record.mark("services_killed")
    if job is None or kill is None:
        return not_reached("the services were never killed")
    services, back = int(kill.data["pid"]), record.mark("services_back")
    if back is None:
        return failed("the services did not come back")
    away = [s for s in record.samples if kill.at < s.at < back.at and not s.api]
    ran_on = [s for s in record.samples if s.at > kill.at + _GONE_SECONDS and _runs(s.alive, services)]
    if not away or ran_on:
        return failed(f"there was no outage: pid {services} ran on, or the API never stopped answering")
    entries = record.ledgers.get(job, ())
    training = read_training(entries, finished=False)
    gap = largest_gap(training.steps, since=kill.at, until=back.at)
    seconds = back.at - kill.at
    if gap.seconds >= GAP_SECONDS_MAX:
        return failed(
            f"training stood for {gap.seconds:.2f} s after step {gap.after_step} (limit {GAP_SECONDS_MAX:.0f} s)"
            f" in an outage of {seconds:.1f} s"
        )
    since = [e for e in entries if e.kind == "applied" and e.at >= kill.at]
    generations = sorted({e.generation for e in since})
    if len(generations) != 1:
        return failed(f"the generation changed in the outage or after it: {', '.join(map(str, generations))}")
    everyone, inside = pids_of(entries, generations[0]), {e.pid for e in since if e.at <= back.at}
    if inside != set(everyone):
        return failed(f"of pids {_pids(everyone)} only {_pids(sorted(inside))} stepped in the outage")
    return held(
        f"{gap.steps} steps by pids {_pids(everyone)} in {seconds:.1f} s without services,"
        f" largest gap {gap.seconds:.2f} s"
    )


def resizes(record: Record, job: str) -> list[Event]:
    return [e for e in record.events_of(job, RESIZED) if e.data["workers_from"] != e.data["workers_to"]]


def _window_before(record: Record, job: str, resize: Event, *, band_high: float) -> tuple[float, float, float]:
    """Unbroken seconds above the band before the proposal that a growth rests on, lowest and highest there.

    Windows of other generations, incomplete ones and those in or below the band end the run of windows.
    """
    proposals = [
        e
        for e in record.events_of(job, PROPOSED)
        if e.sequence < resize.sequence
        and e.data["workers"] == resize.data["workers_to"]
        and e.data["epoch"] == resize.data["epoch"] - 1
    ]
    if not proposals:
        return 0.0, 0.0, 0.0
    windows = [e.data for e in record.events_of(job, WINDOW) if e.sequence < proposals[0].sequence]
    seconds, seen = 0.0, []
    for window in reversed(windows):
        whole = window["members_reporting"] == window["members_expected"]
        same = window["generation"] == windows[-1]["generation"]
        if not whole or not same or window["utilisation"] is None or window["utilisation"] <= band_high:
            break
        seconds += window["window_seconds"]
        seen.append(window["utilisation"])
    return seconds, min(seen, default=0.0), max(seen, default=0.0)


def _shrink(record: Record, job: str) -> Event | None:
    found = (
        e
        for e in resizes(record, job)
        if e.data["reason"]["code"] == "SHRANK_FOR_CLAIMANT"
        and (e.data["workers_from"], e.data["workers_to"]) == (4, 2)
    )
    return next(found, None)


def _giving_back(record: Record, job: str, shrink: Event) -> Event | None:
    found = (
        e
        for e in resizes(record, job)
        if e.sequence > shrink.sequence and e.data["reason"]["code"] == "GAVE_BACK" and e.data["workers_to"] == 4
    )
    return next(found, None)


def _generation_before(entries: Sequence[Entry], generation: int) -> int:
    """The last generation below this one that applied a step; 0 if there is none."""
    return max((e.generation for e in entries if e.kind == "applied" and e.generation < generation), default=0)


def _first(entries: Sequence[Entry], generation: int) -> float:
    """When the first step of that generation was applied."""
    return min(e.at for e in entries if e.kind == "applied" and e.generation == generation)


def _restarted(record: Record, pids: Sequence[int], *, since: float, until: float) -> int | None:
    """The first of these pids that was not one and the same living process in every sample of the interval."""
    for pid in pids:
        starts = {p.start for s in record.samples if since <= s.at <= until for p in s.alive if p.pid == pid}
        absent = any(not _runs(s.alive, pid) for s in record.samples if since <= s.at <= until)
        if absent or len(starts) > 1:
            return pid
    return None


def _runs(alive: dict[Process, str], pid: int) -> bool:
    return any(p.pid == pid and state not in "ZX" for p, state in alive.items())


def _submitted_at(record: Record, part: str) -> float:
    mark = record.mark("submitted", part=part)
    return mark.at if mark is not None else 0.0


def _pids(pids: Sequence[int]) -> str:
    return "{" + ", ".join(str(p) for p in pids) + "}" if pids else "{}"
