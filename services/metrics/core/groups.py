"""Which report counts, fenced by what worker events say of a job's groups, and when windows open and close."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from schemas.events.metric import MetricWindow
from schemas.vocabulary import JobId, TenantName
from services.metrics.core.curves import CurveCursor, CurvePoint, plan_point
from services.metrics.core.signals import Sample
from services.metrics.core.window import (
    Closed,
    StepRate,
    Totals,
    Window,
    WindowRules,
    close_us,
    close_window,
)


class Verdict(StrEnum):
    """What became of a report."""

    COUNTED = "counted"
    AHEAD = "ahead"
    REPEATED = "repeated"
    OLDER = "older"
    LATE = "late"
    INCONSISTENT = "inconsistent"
    CROWDED = "crowded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """``aside_max``: reports of one job that may wait for their group's event; they wait ``window.reach_us``."""

    window: WindowRules
    aside_max: int
    points_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Who reports under a rank of the present generation, and how far."""

    member: str
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A report of a group that is not known yet."""

    received_us: int
    sample: Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """One job as metrics sees it: the newest group that has started, its open window, its curve.

    ``attempt`` 0: no group has started yet. ``window`` is None before the first group and after the attempt's end.
    ``is_quiet``: the last window was silent, and said so; the next one begins with the next report. A job that
    never reports costs one event and nothing more.
    """

    job_id: JobId
    tenant: TenantName
    attempt: int = 0
    generation: int = 0
    workers: int = 0
    ended_attempt: int = 0
    window: Window | None = None
    is_quiet: bool = False
    seen: Mapping[int, Seen] = field(default_factory=dict)
    rate: StepRate = field(default_factory=StepRate)
    curve: CurveCursor = field(default_factory=CurveCursor)
    aside: tuple[Waiting, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The track after a step, what is published, what the curve gains, and whether it was halved."""

    track: Track
    windows: tuple[MetricWindow, ...] = ()
    points: tuple[CurvePoint, ...] = ()
    thinned: bool = False


def absorb(
    track: Track, samples: Sequence[Sample], *, now_us: int, rules: Rules
) -> tuple[Track, tuple[Verdict, ...]]:
    """Count the reports of one job; a verdict for each, in their order. Cost: O(reports + members)."""
    before, track = track, _roused(track, now_us=now_us)
    totals = dict(track.window.totals) if track.window else {}
    seen = dict(track.seen)
    aside = [waiting for waiting in track.aside if now_us - waiting.received_us <= rules.window.reach_us]
    ahead = {waiting.sample.member: waiting.sample.sequence for waiting in aside}
    verdicts = []
    for sample in samples:
        verdict = _verdict(track, sample, seen=seen, ahead=ahead, now_us=now_us, rules=rules)
        if verdict is Verdict.AHEAD and len(aside) >= rules.aside_max:
            verdict = Verdict.CROWDED
        if verdict is Verdict.AHEAD:
            aside.append(Waiting(received_us=now_us, sample=sample))
            ahead[sample.member] = sample.sequence
        if verdict in (Verdict.COUNTED, Verdict.LATE):
            seen[sample.rank] = Seen(member=sample.member, sequence=sample.sequence)
        if verdict is Verdict.COUNTED:
            totals[sample.rank] = totals.get(sample.rank, Totals()).plus(sample)
        verdicts.append(verdict)
    if Verdict.COUNTED not in verdicts:
        return replace(before, seen=seen, aside=tuple(aside)), tuple(verdicts)
    assert track.window is not None
    window = replace(track.window, totals=totals)
    return replace(track, window=window, seen=seen, aside=tuple(aside)), tuple(verdicts)


def _roused(track: Track, *, now_us: int) -> Track:
    """A quiet track whose window begins now; what a window counts is received after its beginning."""
    if not track.is_quiet or track.window is None:
        return track
    return replace(track, is_quiet=False, window=Window(opened_us=max(track.window.opened_us, now_us - 1)))


def _verdict(
    track: Track,
    sample: Sample,
    *,
    seen: Mapping[int, Seen],
    ahead: Mapping[str, int],
    now_us: int,
    rules: Rules,
) -> Verdict:
    if sample.attempt <= track.ended_attempt:
        return Verdict.OLDER
    if (sample.attempt, sample.generation) > (track.attempt, track.generation):
        return Verdict.REPEATED if sample.sequence <= ahead.get(sample.member, -1) else Verdict.AHEAD
    if (sample.attempt, sample.generation) < (track.attempt, track.generation) or track.window is None:
        return Verdict.OLDER
    holder = seen.get(sample.rank)
    if sample.world != track.workers or (holder is not None and holder.member != sample.member):
        return Verdict.INCONSISTENT
    if holder is not None and sample.sequence <= holder.sequence:
        return Verdict.REPEATED
    return Verdict.COUNTED if track.window.reaches(sample, now_us=now_us, rules=rules.window) else Verdict.LATE


def start_group(track: Track, *, attempt: int, generation: int, workers: int, now_us: int, rules: Rules) -> Outcome:
    """A generation has started: the window of the one before closes, and the reports that waited are counted.

    The new window begins just before the first of them, else now: what a window counts was received after its
    beginning, so that rows tell. What is no news (an older group) changes nothing.
    """
    if attempt <= track.ended_attempt or (attempt, generation) <= (track.attempt, track.generation):
        return Outcome(track=track)
    before = _close(track, now_us=now_us, rules=rules, last=False) if _has_reports(track) else Outcome(track=track)
    fresh = [w for w in track.aside if now_us - w.received_us <= rules.window.reach_us]
    mine = [w for w in fresh if (w.sample.attempt, w.sample.generation) == (attempt, generation)]
    later = tuple(w for w in fresh if (w.sample.attempt, w.sample.generation) > (attempt, generation))
    opened = replace(
        before.track,
        attempt=attempt,
        generation=generation,
        workers=workers,
        window=Window(opened_us=min([now_us, *(w.received_us - 1 for w in mine)])),
        is_quiet=False,
        seen={},
        rate=StepRate(),
        aside=later,
    )
    for waiting in mine:
        opened, _ = absorb(opened, [waiting.sample], now_us=waiting.received_us, rules=rules)
    return replace(before, track=opened)


def end_attempt(track: Track, *, attempt: int, now_us: int, rules: Rules) -> Outcome:
    """The attempt is over: what was reported since the last window is the last one."""
    if attempt <= track.ended_attempt:
        return Outcome(track=track)
    closing = track.attempt <= attempt and _has_reports(track)
    outcome = _close(track, now_us=now_us, rules=rules, last=True) if closing else Outcome(track=track)
    window = None if track.attempt <= attempt else outcome.track.window
    return replace(outcome, track=replace(outcome.track, ended_attempt=attempt, window=window))


def due_us(track: Track, *, now_us: int, rules: Rules) -> int | None:
    """When the open window of this track closes, as far as is known now; None if none is open, or all is quiet."""
    if track.window is None or track.is_quiet:
        return None
    return close_us(track.window, workers=track.workers, now_us=now_us, rules=rules.window)


def close_due(track: Track, *, now_us: int, rules: Rules) -> Outcome:
    """Close the window if its time has come, also when nobody reported: silence is told as silence, once."""
    due = due_us(track, now_us=now_us, rules=rules)
    if due is None or due > now_us:
        return Outcome(track=track)
    return _close(track, now_us=now_us, rules=rules, last=False)


def _has_reports(track: Track) -> bool:
    return track.window is not None and bool(track.window.totals)


def _close(track: Track, *, now_us: int, rules: Rules, last: bool) -> Outcome:
    assert track.window is not None
    closed: Closed = close_window(
        track.window,
        attempt=track.attempt,
        generation=track.generation,
        workers=track.workers,
        rate=track.rate,
        now_us=now_us,
        rules=rules.window,
    )
    plan = plan_point(track.curve, closed.event, points_max=rules.points_max, last=last)
    return Outcome(
        track=replace(
            track,
            window=Window(opened_us=now_us),
            is_quiet=not track.window.totals,
            rate=closed.rate,
            curve=plan.cursor,
        ),
        windows=(closed.event,),
        points=() if plan.point is None else (plan.point,),
        thinned=plan.thinned,
    )


def merge(outcomes: Iterable[Outcome], *, start: Track) -> Outcome:
    """One outcome of several steps of one track, in their order."""
    track, thinned = start, False
    windows: list[MetricWindow] = []
    points: list[CurvePoint] = []
    for outcome in outcomes:
        track, thinned = outcome.track, thinned or outcome.thinned
        windows.extend(outcome.windows)
        points.extend(outcome.points)
    return Outcome(track=track, windows=tuple(windows), points=tuple(points), thinned=thinned)
