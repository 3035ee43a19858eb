"""What is kept of an attempt that goes through very many resizes."""

from dataclasses import replace

from services.execution.core.recent import RECENT, forget_old
from services.execution.core.state import GenerationState, Job, MemberState
from tests.unit.execution_builders import look, make_generation, make_job, make_member, make_seen, name

RESIZES = 3 * RECENT


def long_job() -> Job:
    """Worker 0 has seen all groups; worker 1 comes with every second and is gone with the next."""
    job = make_job(1)
    came = [
        make_member(1, incarnation=number, ordinal=number + 1, state=MemberState.GONE) for number in range(1, RESIZES)
    ]
    groups = [
        make_generation(number, (name(0), name(1, number)) if number % 2 else (name(0),))
        for number in range(1, RESIZES)
    ]
    return replace(job, members=(*job.members, *came), generations=tuple(groups), generation=RESIZES - 1)


def test_only_what_is_recent_is_kept() -> None:
    kept = forget_old(long_job())
    assert [g.number for g in kept.generations] == list(range(RESIZES - RECENT, RESIZES))
    assert kept.members[0].name == name(0), "who is held stays, however old"
    assert len(kept.members) <= 2 + RECENT
    assert {m.incarnation for m in kept.members[1:]} >= set(range(RESIZES - RECENT, RESIZES))
    assert forget_old(kept) == kept


def test_who_belongs_to_the_present_line_stays() -> None:
    job = long_job()
    offered = make_generation(RESIZES, (name(0),), leavers=(name(1, 1),), state=GenerationState.OFFERED)
    kept = forget_old(replace(job, generations=(*job.generations, offered)))
    assert kept.member(name(1, 1)) is not None
    assert kept.member(name(1, 2)) is None
    assert kept.offered == offered


def test_a_short_attempt_is_kept_whole_and_a_turn_forgets() -> None:
    job = make_job(3)
    assert forget_old(job) is job
    assert len(look(long_job(), make_seen(1)).job.generations) == RECENT
