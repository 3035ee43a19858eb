"""Members that have been in too many groups: who goes, when, and how that is told."""

from dataclasses import replace

import pytest

from schemas.events.allocation import AllocationResized
from schemas.events.worker import GroupChanged
from schemas.vocabulary import Attribution, GroupChangeCause
from services.execution.core.desired import apply_event
from services.execution.core.exchange import plan_exchange
from services.execution.core.placement import choose_leavers
from services.execution.core.seen import Limits, Process, StartedWord
from services.execution.core.state import Ending, GenerationState, Job, MemberState
from services.execution.core.turn import OfferGeneration
from tests.unit.execution_builders import (
    NOON,
    RUNS,
    look,
    make_generation,
    make_grant,
    make_job,
    make_member,
    make_report,
    make_seen,
    name,
)
from tests.unit.test_execution_core import resized

LIMITS = Limits(member_generations_max=3)
NEWCOMER = name(2)


def grown(workers: int = 3) -> Job:
    """Two members step in generation 1, a third is ready, and the epoch asks for so many."""
    job = make_job(2)
    job = replace(job, members=(*job.members, make_member(2)), ordinal=3)
    event = resized(2, workers)
    assert isinstance(event, AllocationResized)
    return apply_event(job, event, now=NOON)


def seen_with(generations: dict[int, int], **changes):
    reports = {name(index): make_report(generations=number) for index, number in generations.items()}
    ready = {NEWCOMER: make_report(generation=0, step=0)}
    return make_seen(3, reports={**reports, **ready}, stores=frozenset({2}), **changes)


def offer_of(decision):
    found = [effect.generation for effect in decision.effects if isinstance(effect, OfferGeneration)]
    return (found[0].members, found[0].leavers) if found else None


@pytest.mark.parametrize(
    ("staying", "newcomers", "worn", "exchanged"),
    [
        ("ab", 1, "a", "a"),
        ("ab", 1, "ba", "b"),
        ("ab", 2, "ba", "b"),  # one stays
        ("abc", 2, "cab", "ca"),
        ("abc", 0, "a", ""),
        ("a", 3, "a", ""),
        ("ab", 1, "xa", "a"),  # x is not in the group
    ],
)
def test_who_is_exchanged(staying: str, newcomers: int, worn: str, exchanged: str) -> None:
    assert plan_exchange(staying=tuple(staying), newcomers=newcomers, worn=tuple(worn)) == tuple(exchanged)


def test_a_newcomer_takes_the_place_of_a_worn_member() -> None:
    decision = look(grown(), seen_with({0: 4, 1: 3}), limits=LIMITS)
    assert offer_of(decision) == ((name(1), NEWCOMER), (name(0),))
    assert decision.job.members[0].ending is None, "until the group has started it may come back to the old one"


def test_nobody_is_exchanged_without_a_resize() -> None:
    job = grown()
    same_epoch = job.with_generation(replace(job.generations[0], epoch=job.epoch))
    assert offer_of(look(same_epoch, seen_with({0: 4, 1: 4}), limits=LIMITS)) == ((name(0), name(1), NEWCOMER), ())


def test_at_the_limit_nobody_is_worn() -> None:
    assert offer_of(look(grown(), seen_with({0: 3, 1: 3}), limits=LIMITS)) == ((name(0), name(1), NEWCOMER), ())


def test_worn_members_leave_first_when_the_job_shrinks() -> None:
    job = make_job(3)
    assert [m.index for m in choose_leavers(job, make_grant(2), worn=(name(1), name(0)))] == [1]
    assert [m.index for m in choose_leavers(job, make_grant(1), worn=(name(1),))] == [1, 2]
    idle = replace(job, members=(*job.members, make_member(3)))
    assert [m.index for m in choose_leavers(idle, make_grant(3), worn=(name(1),))] == [3]


def test_who_is_about_to_be_exchanged_is_not_counted_as_staying() -> None:
    """Else a shrink would take the very newcomer that was started in its place."""
    job = grown()
    offered = make_generation(
        2, (name(1), NEWCOMER), leavers=(name(0),), epoch=job.epoch, state=GenerationState.OFFERED
    )
    job = replace(job, generations=(*job.generations, offered))
    assert choose_leavers(job, make_grant(2), worn=(name(0),)) == ()


@pytest.mark.parametrize("has_left", [False, True])
def test_it_is_told_once_the_group_has_started(has_left: bool) -> None:
    first = look(grown(), seen_with({0: 4, 1: 3}), limits=LIMITS)
    left = {name(0): Process(recorded=True, ended=True, gone=True, exit_code=0)} if has_left else {name(0): RUNS}
    processes = {**left, name(1): RUNS, NEWCOMER: RUNS}
    if has_left:
        first = look(first.job, seen_with({0: 4, 1: 3}, processes=processes), limits=LIMITS)
    word = StartedWord(generation=2, step=12, pause_seconds=0.1)
    reports = {
        name(0): make_report(generations=4),
        name(1): make_report(generation=2, step=12, started=word),
        NEWCOMER: make_report(generation=2, step=12, started=word),
    }
    seen = make_seen(3, reports=reports, processes=processes, stores=frozenset({2}))
    decision = look(first.job, seen, limits=LIMITS)
    (changed,) = [event for event in decision.events if isinstance(event, GroupChanged)]
    assert (changed.exchanged, changed.cause, changed.lost) == ((name(0),), GroupChangeCause.RESIZED, ())
    member = decision.job.member(name(0))
    assert member is not None
    assert member.ending is Ending.LEAVER
    assert "more than 3 generations" in member.ending_reason


@pytest.mark.parametrize(
    ("process", "is_asked"),
    [(Process(recorded=True, ended=True, gone=True, exit_code=0), True), (RUNS, None)]
    + [(Process(recorded=True, ended=True, gone=True, exit_code=code), False) for code in (-9, 1)],
)
def test_it_may_leave_before_it_is_known_that_the_group_has_started(process: Process, is_asked: bool | None) -> None:
    first = look(grown(), seen_with({0: 4, 1: 3}), limits=LIMITS)
    seen = seen_with({0: 4, 1: 3}, processes={name(0): process, name(1): RUNS, NEWCOMER: RUNS})
    decision = look(first.job, seen, limits=LIMITS)
    member = decision.job.member(name(0))
    assert member is not None
    if is_asked is None:
        assert member.state is MemberState.ADMITTED
        return
    assert member.state is MemberState.GONE
    assert (member.ending is Ending.LEAVER) is is_asked
    assert (decision.job.verdict is None) is (process.exit_code != 1)
    assert bool(decision.job.losses) is (process.exit_code == -9)
    assert (member.attributed_to is Attribution.JOB) is (process.exit_code == 1)
