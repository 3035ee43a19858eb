"""Decides which training group is offered next, whose state it takes, or why none can be offered now.

1. While the running group is whole, offer only if its members should change: leavers go, newcomers come.
2. While some of a group step and others hold a cut group, wait: the rest will raise, or finish what it does.
3. When all that hold state wait, offer them (and newcomers that are ready) as soon as they reach the minimum; the
   most advanced is the source.
4. When nobody holds state, go on from the newest whole checkpoint, which the one who loads it finds; from step 0 only
   in a new attempt, if there is none or all of them are damaged.
5. Whatever is offered shares a live member with the last started generation and with every one offered since, unless
   their members are all gone or written off.
6. Newcomers of a resize take the places of worn members (``exchange``) rather than come beside them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from schemas.vocabulary import MemberName, Mode
from services.execution.core.checkpoints import plan_candidates, trouble_of
from services.execution.core.exchange import plan_exchange
from services.execution.core.seen import Report, Seen
from services.execution.core.state import Desired, Ending, Generation, GenerationState, Job, Member


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """``members`` by rank; ``source`` is a rank, -1 for a checkpoint (``checkpoint`` "" means step 0).

    ``older``: names of folders beside it, to be tried next. ``may_begin_anew``: at step 0 if all are damaged.
    ``above``: no number up to this one may be used, for it stands in the folder.
    """

    members: tuple[MemberName, ...]
    leavers: tuple[MemberName, ...]
    source: int
    checkpoint: str = ""
    older: tuple[str, ...] = ()
    may_begin_anew: bool = False
    above: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Nothing to offer now. ``gathering``: only because members that start would be left out."""

    reason: str
    gathering: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLost:
    """Steps were applied, nobody holds them, and there is no checkpoint: the attempt cannot go on."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """Whether there are checkpoints cannot be seen now: wait for a while, and never begin anew because of it."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """The running group is as it should be."""


Plan: TypeAlias = Offer | Hold | StateLost | Unreadable | Whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Who is where, among the members of the elastic role that are there and admitted."""

    stepping: tuple[Member, ...]
    waiting: tuple[Member, ...]
    ready: tuple[Member, ...]
    """connected and without state that counts: newcomers"""
    starting: tuple[Member, ...]
    """held, and not yet connected for the first time"""
    unheard: tuple[Member, ...]
    """held, and without a connection at present: what they hold is not known"""


def standing_of(job: Job, seen: Seen) -> Standing:
    """Sort the job's elastic members. Who is left over from a generation that others fell back from is a newcomer."""
    role = job.workers.role
    held = sorted(job.held(role), key=lambda m: (m.index, m.incarnation))
    reports = {m.name: seen.reports[m.name] for m in held if m.name in seen.reports}
    present = [m for m in held if m.name in reports and reports[m.name].connected]
    stepping = [m for m in present if reports[m.name].is_stepping]
    in_use = {reports[m.name].generation for m in stepping}
    waiting = [m for m in present if reports[m.name].holds_state and reports[m.name].waiting]
    left_over = [m for m in waiting if in_use and reports[m.name].generation not in in_use]
    holders = [m for m in waiting if m not in left_over]
    ready = [m for m in present if (not reports[m.name].holds_state or m in left_over) and m.may_work]
    return Standing(
        stepping=tuple(stepping),
        waiting=tuple(holders),
        ready=tuple(ready),
        starting=tuple(m for m in held if m.name not in reports and m.ending is None),
        unheard=tuple(m for m in held if m.name not in reports or not reports[m.name].connected),
    )


def plan_offer(job: Job, seen: Seen, *, gathered: bool, worn: Sequence[MemberName] = ()) -> Plan:
    """What to offer next, while no offer is out. ``gathered``: enough time was given to members that start.

    ``worn``: members that newcomers of a resize should replace, most worn first.
    """
    here = standing_of(job, seen)
    line = members_of_line(job)
    if any(member.name in line for member in here.unheard):
        return Hold(reason="a member of the group has no connection")
    if here.stepping:
        plan = _change_running(job, seen, here, gathered=gathered, worn=worn)
    elif here.waiting:
        plan = _mend_cut(job, seen, here)
    else:
        plan = _begin(job, seen, here, gathered=gathered)
    if isinstance(plan, Offer) and not shares_a_member(job, plan.members):
        return Hold(reason="the offer would share no member with a generation that may be running")
    return plan


def members_of_line(job: Job) -> tuple[MemberName, ...]:
    """Who may hold the state: held members of the last started generation, and of those offered since."""
    named = frozenset(name for generation in job.line for name in generation.members)
    return tuple(member.name for member in job.held() if member.name in named)


def shares_a_member(job: Job, members: Sequence[MemberName]) -> bool:
    """Rule 5. Without it two groups could step side by side, neither knowing of the other."""
    held = frozenset(member.name for member in job.held())
    return all(
        any(name in members for name in generation.members if name in held)
        or not any(name in held for name in generation.members)
        for generation in job.line
    )


def _change_running(job: Job, seen: Seen, here: Standing, *, gathered: bool, worn: Sequence[MemberName]) -> Plan:
    numbers = {seen.reports[m.name].generation for m in here.stepping}
    if len(numbers) > 1 or here.waiting:
        return Hold(reason="the group is changing or breaking: the others follow")
    number = next(iter(numbers))
    group = next((g for g in job.generations if g.number == number), None)
    if group is None:
        return Hold(reason="members step in a generation that is not known")
    stepping = {m.name: m for m in here.stepping}
    if any(name not in stepping for name in group.members):
        return Hold(reason="the group has lost a member and is about to notice")
    staying = [name for name in group.members if stepping[name].ending is None]
    leavers = [name for name in group.members if stepping[name].ending is Ending.LEAVER]
    if len(staying) + len(leavers) < len(group.members):
        return Hold(reason="a member of the group is being ended")
    newcomers = [m.name for m in here.ready][: max(0, job.workers.members - len(staying))]
    if not leavers and not newcomers:
        return Whole()
    if not staying:
        return Hold(reason="nobody would stay")
    if newcomers and not leavers and here.starting and not gathered:
        return Hold(reason="other newcomers are on their way", gathering=True)
    is_resize = job.epoch > group.epoch
    exchanged = plan_exchange(staying=staying, newcomers=len(newcomers), worn=worn) if is_resize else ()
    members = (*(name for name in staying if name not in exchanged), *newcomers)
    return Offer(members=members, leavers=(*leavers, *exchanged), source=0)


def _mend_cut(job: Job, seen: Seen, here: Standing) -> Plan:
    running = job.running
    counted = frozenset(running.members) if running is not None else frozenset(m.name for m in here.waiting)
    holders = [m for m in here.waiting if m.name in counted]
    if not holders:
        # All of the started group are gone. What later offers left behind never got through: from the checkpoint.
        return _begin(job, seen, here, gathered=True)
    ahead = max(seen.reports[m.name].step for m in here.waiting)
    staying = [m for m in here.waiting if m.ending is None]
    if not any(seen.reports[m.name].step == ahead for m in staying):
        # Only leavers hold the last step: they come along once more, and leave from the next group.
        staying = list(here.waiting)
    ranked = sorted(staying, key=lambda m: (m.name not in counted, m.index, m.incarnation))
    newcomers = list(here.ready)[: max(0, job.workers.members - len(ranked))]
    members = [m.name for m in (*ranked, *newcomers)]
    if len(members) < job.workers.minimum:
        return Hold(reason="fewer members than the minimum")
    source = next(rank for rank, m in enumerate(ranked) if seen.reports[m.name].step == ahead)
    leavers = tuple(m.name for m in here.waiting if m not in ranked)
    return Offer(members=tuple(members), leavers=leavers, source=source)


def _begin(job: Job, seen: Seen, here: Standing, *, gathered: bool) -> Plan:
    held = frozenset(m.name for m in job.held())
    running = job.running
    if running is not None and any(name in held for name in running.members):
        return Hold(reason="a member of the group has not said what it holds")
    if seen.shelf is None:
        return Hold(reason="the checkpoints are being looked at")
    trouble = trouble_of(job, seen.shelf)
    if trouble:
        return Unreadable(reason=trouble)
    checkpoints = plan_candidates(job, seen.shelf)
    may_begin_anew = running is None and applied_in_attempt(job, seen) == 0
    if not checkpoints and not may_begin_anew:
        return StateLost(reason="every worker that held the state is gone, and there is no checkpoint")
    candidates = (*here.ready, *(m for m in here.waiting if m.may_work))[: job.workers.members]
    if len(candidates) < job.workers.minimum or not candidates:
        return Hold(reason="fewer members than the minimum")
    if len(candidates) < job.workers.members and not gathered:
        return Hold(reason="members are on their way", gathering=True)
    return Offer(
        members=tuple(m.name for m in candidates),
        leavers=(),
        source=-1,
        checkpoint=checkpoints[0].location if checkpoints else "",
        older=tuple(each.location.rpartition("/")[2] for each in checkpoints[1:]),
        may_begin_anew=may_begin_anew,
        above=seen.shelf.youngest,
    )


def applied_in_attempt(job: Job, seen: Seen) -> int:
    """The highest step that any member of this attempt is known to have applied, by its reports or its ledger."""
    return _applied_by([m.name for m in job.members if m.attempt == job.attempt], seen)


def applied_on_line(job: Job, seen: Seen) -> int:
    """The same of the last group that has started, as long as there is one: an earlier one may have been further
    when its state was lost, and whether a later one goes on from it is not known yet.
    """
    running = job.running
    return _applied_by(running.members, seen) if running is not None else applied_in_attempt(job, seen)


def _applied_by(names: Sequence[MemberName], seen: Seen) -> int:
    reported = [seen.reports[name].step for name in names if name in seen.reports]
    written = [seen.process(name).ledger_step for name in names]
    return max((*reported, *written), default=0)


def started_by(generation: Generation, seen: Seen, job: Job, *, settled: bool) -> Report | None:
    """The report that proves that ``generation`` has started: its second all-reduce has passed.

    Any member's word is proof, since a collective passes for all. A member of the group before is asked first, for it
    alone knows the pause, or else the one who loaded the checkpoint, for it knows which were not whole; the others'
    word counts after a moment (``settled``). A word that was lost with this process is made good by two steps applied
    in the generation.
    """
    before = job.running
    if generation.source < 0:
        veterans = frozenset(generation.members[:1])
    else:
        veterans = frozenset(before.members) if before is not None else frozenset(generation.members)
    told = [
        (name not in veterans, rank, report)
        for rank, name in enumerate(generation.members)
        if (report := seen.reports.get(name)) is not None and _proves(report, generation.number)
    ]
    if not told:
        return None
    is_newcomer, _, report = min(told, key=lambda entry: entry[:2])
    held = frozenset(m.name for m in job.held())
    expecting = any(name in veterans and name in held for name in generation.members)
    return report if settled or not is_newcomer or not expecting else None


def _proves(report: Report, number: int) -> bool:
    word = report.started is not None and report.started.generation == number
    return word or (report.generation == number and report.step - report.generation_step >= 2)


def is_newer(generation: Generation, job: Job) -> bool:
    """Offered after the last started one: it may still prove to have started, even if it was called off."""
    running = job.running
    return generation.state is not GenerationState.STARTED and (running is None or generation.number > running.number)


def needs_checkpoint(job: Job, reports: Mapping[MemberName, Report]) -> bool:
    """Whether the next group may have to begin from a checkpoint: nobody holds state that counts."""
    if job.spec is None or job.spec.mode is not Mode.LIVE or job.desired is not Desired.GRANTED or job.is_over:
        return False
    if job.verdict is not None or job.offered is not None or job.finished_step is not None:
        return False
    counted = frozenset(job.running.members) if job.running is not None else None
    holders = [m for m in job.held(job.workers.role) if m.name in reports and reports[m.name].holds_state]
    return not any(counted is None or m.name in counted for m in holders)
