"""Execution's decisions, one rule at a time."""

from dataclasses import replace
from datetime import timedelta

import pytest
from unit.execution_builders import (
    JOB,
    LIMITS,
    NODE,
    NOON,
    RUNS,
    look,
    make_generation,
    make_grant,
    make_job,
    make_member,
    make_report,
    make_seen,
    make_spec,
    name,
)

from schemas.events.allocation import (
    AllocationClosed,
    AllocationEvicted,
    AllocationGranted,
    AllocationResized,
    Reason,
)
from schemas.events.worker import GroupChanged, GroupEnded, RoomFreed, RoomOverdue, StartFailed
from schemas.vocabulary import (
    DEFAULT_FLAVOR,
    DEFAULT_TENANT,
    AttemptOutcome,
    Attribution,
    DecisionCode,
    GroupChangeCause,
    MemberName,
    MemberPhase,
    Mode,
    Outcome,
)
from services.execution.core.capacity import observe_node
from services.execution.core.checkpoints import Shelf, on_applied_line
from services.execution.core.desired import apply_event
from services.execution.core.environment import Places, member_environment
from services.execution.core.live import change_cause
from services.execution.core.placement import choose_leavers, free_devices, free_indices
from services.execution.core.seen import Process, StartedWord, StartError
from services.execution.core.state import (
    Checkpoint,
    Desired,
    Ending,
    GenerationState,
    Job,
    MemberState,
)
from services.execution.core.turn import AnswerAdmission, AskToStop, Kill, OfferGeneration, StartMember, Terminate
from services.execution.membership.words import apply_message
from tidewright import protocol

WHY = Reason(code=DecisionCode.ADMITTED_IDLE, detail="for a test")
GONE = Process(recorded=True, pid=100, ended=True, gone=True)


# -- exits ----------------------------------------------------------------------------------------------------


def ends(job: Job, index: int, code: int | None, **changes: object) -> Job:
    """The job after one member was seen gone with this code."""
    seen = make_seen(len(job.members))
    processes = dict(seen.processes) | {name(index): replace(GONE, exit_code=code, **changes)}
    return look(job, replace(seen, processes=processes)).job


def test_exception_ends_the_attempt_and_a_kill_does_not() -> None:
    failed = ends(make_job(), 1, 1)
    assert failed.verdict is not None
    assert (failed.verdict.exit_code, failed.verdict.attributed_to) == (1, Attribution.JOB)
    lost = ends(make_job(), 1, -9)
    assert lost.verdict is None
    assert [each.member for each in lost.losses] == [name(1)]
    # Its place is filled by another incarnation.
    assert [(m.index, m.incarnation) for m in lost.held()] == [(0, 1), (1, 2)]


def test_failure_in_the_burst_of_a_lost_peer_is_the_platforms() -> None:
    job = ends(make_job(3), 2, -9)
    seen = make_seen(3)
    processes = {name(0): RUNS, name(1): replace(GONE, exit_code=1), name(2): replace(GONE, exit_code=-9)}
    after = look(job, replace(seen, processes=processes)).job
    assert after.verdict is None
    assert len(after.losses) == 2


def test_exit_0_without_the_groups_word_is_no_success() -> None:
    verdict = ends(make_job(), 1, 0).verdict
    assert verdict is not None
    assert verdict.attributed_to is Attribution.JOB
    assert "before the group had finished" in verdict.reason


def test_repeated_crashes_become_the_jobs_failure() -> None:
    assert ends(make_job(crashes=1, fruitless_step=0), 0, -11).verdict is None
    verdict = ends(make_job(crashes=LIMITS.crashes_max - 1), 0, -11).verdict
    assert verdict is not None
    assert (verdict.exit_code, verdict.attributed_to) == (139, Attribution.JOB)


def test_losses_without_a_step_between_them_end_the_attempt() -> None:
    job = make_job(fruitless=LIMITS.fruitless_losses_max, fruitless_step=10)
    verdict = ends(job, 0, -9).verdict
    assert verdict is not None
    assert verdict.attributed_to is Attribution.PLATFORM
    assert ends(replace(job, fruitless_step=9), 0, -9).verdict is None


# -- the end --------------------------------------------------------------------------------------------------


def test_finished_group_succeeds_when_all_have_exited_with_0() -> None:
    seen = make_seen()
    reports = {name(i): make_report(finished_step=50, step=50) for i in range(2)}
    job = look(make_job(), replace(seen, reports=reports)).job
    assert job.finished_step == 50
    one_left = {name(0): RUNS, name(1): replace(GONE, exit_code=0)}
    waiting = look(job, replace(seen, reports=reports, processes=one_left))
    assert not waiting.events
    assert not waiting.job.held("worker")[1:]  # nobody is started any more
    done = {name(i): replace(GONE, exit_code=0) for i in range(2)}
    ended = look(waiting.job, replace(seen, reports=reports, processes=done))
    (event,) = ended.events
    assert isinstance(event, GroupEnded)
    assert (event.outcome, event.exit_code, event.step) == (AttemptOutcome.SUCCEEDED, 0, 50)
    assert not look(ended.job, replace(seen, reports=reports, processes=done)).events


def test_word_of_the_ledger_counts_when_nobody_heard_the_members() -> None:
    done = {name(i): replace(GONE, exit_code=0, ledger_finished=True, ledger_step=50) for i in range(2)}
    ended = look(make_job(), make_seen(processes=done, reports={}))
    assert [event.outcome for event in ended.events if isinstance(event, GroupEnded)] == [AttemptOutcome.SUCCEEDED]


def test_failure_after_the_training_is_a_failure() -> None:
    reports = {name(i): make_report(finished_step=50) for i in range(2)}
    job = look(make_job(), make_seen(reports=reports)).job
    codes = {name(0): replace(GONE, exit_code=5), name(1): replace(GONE, exit_code=0)}
    event = look(job, make_seen(reports=reports, processes=codes)).events[-1]
    assert isinstance(event, GroupEnded)
    assert (event.outcome, event.exit_code) == (AttemptOutcome.FAILED, 5)


def test_member_cut_off_in_the_last_step_is_stopped() -> None:
    reports = {name(0): make_report(finished_step=50, step=50), name(1): make_report(waiting=True, step=49)}
    decision = look(make_job(), make_seen(reports=reports))
    asked = [effect.member for effect in decision.effects if isinstance(effect, AskToStop)]
    assert asked == [name(1)]
    done = {name(i): replace(GONE, exit_code=0) for i in range(2)}
    event = look(decision.job, make_seen(reports=reports, processes=done)).events[-1]
    assert isinstance(event, GroupEnded)
    assert event.outcome is AttemptOutcome.SUCCEEDED


def test_newcomer_after_the_end_gets_no_group_and_is_stopped() -> None:
    job = make_job(2, roles=(make_grant(3),), members=tuple(make_member(i) for i in range(3)))
    reports = {name(i): make_report(finished_step=50) for i in range(2)} | {
        name(2): make_report(generation=0, step=0)
    }
    decision = look(job, make_seen(3, reports=reports))
    assert not [effect for effect in decision.effects if isinstance(effect, OfferGeneration)]
    assert [effect.member for effect in decision.effects if isinstance(effect, AskToStop)] == [name(2)]


def test_eviction_asks_then_kills_and_ends_once() -> None:
    job = apply_event(
        make_job(),
        AllocationEvicted(epoch=2, attempt=1, grace_seconds=30, reason=WHY, requeue=True),
        now=NOON,
    )
    first = look(job, make_seen())
    assert [effect.member for effect in first.effects if isinstance(effect, AskToStop)] == [name(0), name(1)]
    assert not [effect for effect in first.effects if isinstance(effect, Kill)]
    late = look(first.job, make_seen(), now=1031.0, since=dict(first.since))
    assert {effect.member for effect in late.effects if isinstance(effect, Kill)} == {name(0), name(1)}
    gone = {name(i): replace(GONE, exit_code=0) for i in range(2)}
    ended = look(first.job, make_seen(processes=gone))
    assert [event.outcome for event in ended.events] == [AttemptOutcome.EVICTED]
    assert ended.job.attempt_ended == 1


def test_attempt_that_never_started_ends_too() -> None:
    job = apply_event(
        Job(job_id=JOB, tenant=DEFAULT_TENANT),
        AllocationEvicted(epoch=2, attempt=1, grace_seconds=30, reason=WHY, requeue=True),
        now=NOON,
    )
    assert [event.outcome for event in look(job, make_seen(0)).events] == [AttemptOutcome.EVICTED]


def test_closed_job_says_nothing_more() -> None:
    closed = AllocationClosed(
        epoch=2, attempt=1, outcome=Outcome.CANCELLED, exit_code=None, attributed_to=None, reason=WHY
    )
    job = apply_event(make_job(0), closed, now=NOON)
    assert not look(job, make_seen(0)).events
    granted = AllocationGranted(epoch=3, attempt=2, roles=(make_grant(),), flavor=DEFAULT_FLAVOR, reason=WHY)
    assert apply_event(job, granted, now=NOON) == job


def test_run_time_limit_counts_what_ran_before() -> None:
    job = make_job(spec=make_spec(run_time_limit_seconds=100.0), run_seconds=60.0)
    assert look(job, make_seen(), wall=NOON + timedelta(seconds=39)).job.verdict is None
    verdict = look(job, make_seen(), wall=NOON + timedelta(seconds=41)).job.verdict
    assert verdict is not None
    assert verdict.attributed_to is Attribution.JOB


# -- what is wanted -------------------------------------------------------------------------------------------


def resized(epoch: int, workers: int) -> AllocationResized:
    return AllocationResized(
        epoch=epoch,
        attempt=1,
        workers_from=2,
        workers_to=workers,
        roles=(make_grant(workers),),
        grace_seconds=30,
        reason=WHY,
    )


def test_older_epochs_change_nothing() -> None:
    job = apply_event(make_job(), resized(5, 4), now=NOON)
    assert job.unanswered == (5,)
    assert apply_event(job, resized(4, 1), now=NOON) == job
    assert apply_event(job, resized(5, 1), now=NOON) == job


def test_growth_is_answered_at_once_and_every_epoch_once() -> None:
    job = apply_event(apply_event(make_job(), resized(2, 3), now=NOON), resized(3, 2), now=NOON)
    decision = look(job, make_seen())
    assert [event.epoch for event in decision.events if isinstance(event, RoomFreed)] == [2, 3]
    assert not look(decision.job, make_seen()).events


def test_after_its_end_nothing_is_started_for_an_attempt() -> None:
    job = replace(make_job(0), attempt_ended=1, desired=Desired.NOTHING)
    late = AllocationGranted(epoch=9, attempt=1, roles=(make_grant(),), flavor=DEFAULT_FLAVOR, reason=WHY)
    assert not look(apply_event(job, late, now=NOON), make_seen(0)).effects


def test_leavers_are_the_idle_first_then_the_highest_index() -> None:
    job = make_job(2, members=tuple(make_member(i) for i in range(4)))
    assert [m.index for m in choose_leavers(job, make_grant(3))] == [3]
    assert [m.index for m in choose_leavers(job, make_grant(1))] == [3, 2, 1]
    elsewhere = replace(job, members=(replace(job.members[0], node="lost"), *job.members[1:]))
    assert [m.index for m in choose_leavers(elsewhere, make_grant(3), lost_nodes=("lost",))] == [0]


def test_leaver_waits_for_the_next_group_and_is_killed_after_the_grace() -> None:
    job = apply_event(make_job(), resized(2, 1), now=NOON)
    first = look(job, make_seen(stores=frozenset({2})))
    (offer,) = [effect.generation for effect in first.effects if isinstance(effect, OfferGeneration)]
    assert (offer.members, offer.leavers, offer.source) == ((name(0),), (name(1),), 0)
    assert not [effect for effect in first.effects if isinstance(effect, Kill)]
    assert not [event for event in first.events if isinstance(event, RoomFreed)]
    late = look(first.job, make_seen(stores=frozenset({2})), now=1031.0, since=dict(first.since))
    assert [effect.member for effect in late.effects if isinstance(effect, Kill)] == [name(1)]


def test_indices_and_devices_fill_gaps() -> None:
    job = make_job(members=(make_member(0), make_member(2)))
    assert free_indices(job, "worker", 3) == (1, 3, 4)
    assert free_devices({0, 2}, 4, 4) == (1, 3)


# -- starts ---------------------------------------------------------------------------------------------------


def test_nothing_is_started_before_the_spec_is_known() -> None:
    assert not look(make_job(0, roles=(make_grant(2),), spec=None), make_seen(0)).effects


def test_written_off_members_make_room_for_a_start_and_held_ones_do_not() -> None:
    stuck = make_member(1, ending=Ending.ABNORMAL)
    held = look(make_job(members=(make_member(0), stuck)), make_seen())
    assert not [effect for effect in held.effects if isinstance(effect, StartMember)]
    off = replace(stuck, state=MemberState.WRITTEN_OFF)
    freed = look(make_job(members=(make_member(0), off)), make_seen())
    assert [effect.member for effect in freed.effects if isinstance(effect, StartMember)] == [name(1, 2)]
    assert [effect.member for effect in freed.effects if isinstance(effect, Kill)] == [name(1)]


def test_admission_is_for_the_committed_process_alone() -> None:
    def answer(nonce: str, **changes: object) -> str:
        job = make_job(1, members=(make_member(0, **{"state": MemberState.COMMITTED, **changes}),))
        decision = look(job, make_seen(1, reports={}, asking={name(0): nonce}))
        (effect,) = [effect for effect in decision.effects if isinstance(effect, AnswerAdmission)]
        admitted = decision.job.members[0].state is MemberState.ADMITTED
        assert admitted == (not effect.refusal)
        return effect.refusal

    assert answer("nonce0") == ""
    assert "another process" in answer("other")
    assert "leaving" in answer("nonce0", ending=Ending.LEAVER)
    gone = look(make_job(0), make_seen(0, asking={name(0): "nonce0"}))
    assert [effect.refusal for effect in gone.effects if isinstance(effect, AnswerAdmission)] == [
        "this member is gone"
    ]


def test_start_limit_is_told_once_an_epoch_and_another_is_tried() -> None:
    job = make_job(1, members=(make_member(0, state=MemberState.COMMITTED),), generations=(), generation=0)
    errors = {name(0): StartError(detail="the zygote does not answer")}
    seen = make_seen(1, reports={}, processes={}, start_errors=errors)
    since = {f"start:{name(0)}": 900.0}
    late = look(job, seen, since=since)
    (event,) = late.events
    assert isinstance(event, StartFailed)
    assert (event.epoch, event.missing[0].members, event.detail) == (1, 1, "the zygote does not answer")
    again = look(late.job, seen)
    assert [(m.index, m.incarnation) for m in again.job.held()] == [(0, 2)]
    later = look(again.job, seen, since={f"start:{name(0, 2)}": 900.0})
    assert not later.events


def test_what_the_job_named_wrongly_is_its_failure_at_once() -> None:
    job = make_job(1, members=(make_member(0, state=MemberState.COMMITTED),), generations=(), generation=0)
    errors = {name(0): StartError(detail="there is no script", attributed_to=Attribution.JOB)}
    verdict = look(job, make_seen(1, reports={}, processes={}, start_errors=errors)).job.verdict
    assert verdict is not None
    assert verdict.attributed_to is Attribution.JOB


# -- stuck members --------------------------------------------------------------------------------------------


def killed(decision: object) -> list[str]:
    return [effect.member for effect in decision.effects if isinstance(effect, Kill)]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changes", "process", "is_stuck"),
    [
        ({"heard_at": 984.0}, {"stopped": True}, True),
        ({"heard_at": 986.0}, {"stopped": True}, False),
        ({"heard_at": 984.0}, {"still_seconds": 16.0}, True),
        ({"heard_at": 984.0}, {"still_seconds": 1.0}, False),
        ({"heard_at": 939.0}, {"still_seconds": 1.0}, True),
        ({"progressed_at": 939.0}, {}, True),
        ({"progressed_at": 939.0, "sync_seconds": 61.0}, {}, False),
        ({"progressed_at": 880.0, "phase": MemberPhase.CHECKPOINTING}, {}, False),
        ({"progressed_at": 880.0, "phase": MemberPhase.COMPILING}, {}, False),
        ({"progressed_at": 880.0, "phase": MemberPhase.EVALUATING}, {}, False),
        ({"progressed_at": 99.0, "phase": MemberPhase.CHECKPOINTING}, {}, True),
    ],
)
def test_stuck_member_is_replaced_and_a_busy_one_is_not(
    changes: dict[str, object], process: dict[str, object], is_stuck: bool
) -> None:
    reports = {name(0): make_report(sync_seconds=1.0), name(1): make_report(**changes)}
    processes = {name(0): RUNS, name(1): replace(RUNS, **process)}
    decision = look(make_job(), make_seen(reports=reports, processes=processes))
    assert killed(decision) == ([name(1)] if is_stuck else [])


def test_peers_wait_60_seconds_also_after_gloo_gave_up() -> None:
    """Sync time counts from the marks; when the survivors hold a cut group, the clock goes on."""
    syncing = {name(0): make_report(sync_seconds=29.0), name(1): make_report()}
    first = look(make_job(), make_seen(reports=syncing))
    holding = {name(0): make_report(waiting=True), name(1): make_report(heard_at=1031.0, progressed_at=1000.0)}
    early = look(first.job, make_seen(reports=holding), now=1030.0, since=dict(first.since))
    assert killed(early) == []
    fresh = {
        name(0): make_report(waiting=True, heard_at=1032.0),
        name(1): make_report(heard_at=1032.0, progressed_at=972.0),
    }
    late = look(early.job, make_seen(reports=fresh), now=1032.0, since=dict(early.since))
    assert killed(late) == [name(1)]
    patient = {**fresh, name(1): replace(fresh[name(1)], phase=MemberPhase.EVALUATING)}
    assert killed(look(early.job, make_seen(reports=patient), now=1032.0, since=dict(early.since))) == []
    just_back = {**fresh, name(1): replace(fresh[name(1)], phase_seconds=0.1)}
    assert killed(look(early.job, make_seen(reports=just_back), now=1032.0, since=dict(early.since))) == []
    marked_first = {**fresh, name(1): replace(fresh[name(1)], progressed_at=1031.9)}
    assert killed(look(early.job, make_seen(reports=marked_first), now=1032.0, since=dict(early.since))) == []


def test_nobody_is_called_lost_before_execution_has_settled() -> None:
    reports = {name(0): make_report(heard_at=900.0), name(1): make_report(heard_at=900.0)}
    processes = {name(i): replace(RUNS, stopped=True) for i in range(2)}
    assert killed(look(make_job(), make_seen(reports=reports, processes=processes, settled=False))) == []


def test_script_that_does_not_join_is_the_jobs_failure() -> None:
    job = make_job(1, generations=(), generation=0, group_started=False)
    seen = make_seen(1, reports={}, processes={name(0): replace(RUNS, still_seconds=500.0)})
    since = {f"join:{name(0)}": 399.0}
    verdict = look(job, seen, since=since).job.verdict
    assert verdict is not None
    assert "tidewright.elastic.join" in verdict.reason
    assert look(job, seen, since={f"join:{name(0)}": 401.0}).job.verdict is None


def test_kill_that_does_not_end_it_is_told_then_written_off_and_capacity_shrinks() -> None:
    job = make_job(members=(make_member(0), make_member(1, ending=Ending.ABNORMAL)))
    told = look(job, make_seen(), since={f"kill:{name(1)}": 980.0})
    assert [type(event) for event in told.events] == [RoomOverdue]
    assert not look(told.job, make_seen(), since={f"kill:{name(1)}": 980.0}).events
    off = look(told.job, make_seen(), since={f"kill:{name(1)}": 690.0}).job
    assert off.members[1].state is MemberState.WRITTEN_OFF
    size = make_grant().resources * 4
    node = observe_node([off], name=NODE, flavor=DEFAULT_FLAVOR, size=size)
    assert node.allocatable == make_grant().resources * 3
    # Seen gone after all: it comes back as capacity, its exit counts for nothing.
    seen = make_seen(processes={name(0): RUNS, name(1): replace(GONE, exit_code=3)})
    back = look(off, seen).job
    assert back.members[1].state is MemberState.GONE
    assert back.verdict is None
    assert observe_node([back], name=NODE, flavor=DEFAULT_FLAVOR, size=size).allocatable == size


def test_words_wait_for_the_capacity_that_lacks_who_was_written_off() -> None:
    job = apply_event(make_job(), resized(2, 3), now=NOON)
    assert not look(job, make_seen(), capacity_tells_all=False).events
    assert look(job, make_seen(), capacity_revision=7).events[0].capacity_revision == 7


def test_group_below_its_minimum_is_given_time_and_then_up() -> None:
    job = make_job(2, roles=(make_grant(2, 2),))
    reports = {name(0): make_report(waiting=True)}
    processes = {name(0): RUNS, name(1): replace(GONE, exit_code=-9)}
    seen = make_seen(reports=reports, processes=processes)
    early = look(job, seen)
    assert early.job.verdict is None
    assert not [effect for effect in early.effects if isinstance(effect, OfferGeneration)]
    late = look(early.job, seen, now=1000.0 + LIMITS.recover_seconds + 1, since=dict(early.since))
    assert late.job.verdict is not None
    assert late.job.verdict.attributed_to is Attribution.PLATFORM


# -- groups ---------------------------------------------------------------------------------------------------


def test_survivors_go_on_at_once_from_the_most_advanced() -> None:
    reports = {name(0): make_report(waiting=True, step=10), name(1): make_report(waiting=True, step=11)}
    processes = {name(0): RUNS, name(1): RUNS, name(2): replace(GONE, exit_code=-9)}
    decision = look(make_job(3), make_seen(reports=reports, processes=processes))
    (offer,) = [effect.generation for effect in decision.effects if isinstance(effect, OfferGeneration)]
    assert (offer.number, offer.members, offer.source) == (2, (name(0), name(1)), 1)


def test_nothing_is_offered_while_a_member_of_the_group_has_no_connection() -> None:
    reports = {name(0): make_report(waiting=True), name(1): make_report(connected=False)}
    decision = look(make_job(), make_seen(reports=reports))
    assert not [effect for effect in decision.effects if isinstance(effect, OfferGeneration)]


def test_leaver_that_has_not_come_back_since_a_restart_may_hold_the_last_step() -> None:
    job = make_job(2, members=(make_member(0), make_member(1, ending=Ending.LEAVER)), roles=(make_grant(1),))
    decision = look(job, make_seen(reports={name(0): make_report(waiting=True)}))
    assert not [effect for effect in decision.effects if isinstance(effect, OfferGeneration)]


@pytest.mark.parametrize(("has_started", "asked"), [(True, [name(1)]), (False, [])])
def test_leaver_that_holds_its_state_is_stopped_once_the_group_without_it_has_started(
    has_started: bool, asked: list[MemberName]
) -> None:
    """It was cut off before it was told. Until that start it may be the only one that holds the state."""
    state = GenerationState.STARTED if has_started else GenerationState.OFFERED
    job = make_job(
        2,
        members=(make_member(0), make_member(1, ending=Ending.LEAVER)),
        roles=(make_grant(1),),
        generation=2,
        generations=(make_generation(1, (name(0), name(1))), make_generation(2, (name(0),), state=state)),
    )
    reports = {name(0): make_report(generation=2, step=12, generation_step=11), name(1): make_report(waiting=True)}
    decision = look(job, make_seen(reports=reports))
    assert [effect.member for effect in decision.effects if isinstance(effect, AskToStop)] == asked


def test_offer_number_is_above_what_any_member_knows() -> None:
    reports = {name(0): make_report(generation=0, step=0, formed=7)}
    job = make_job(1, generations=(), generation=3, group_started=False)
    decision = look(job, make_seen(1, reports=reports))
    assert decision.job.generation == 8


def test_lost_state_goes_on_from_the_checkpoint_or_ends_the_attempt() -> None:
    gone = {name(i): replace(GONE, exit_code=-9) for i in range(2)}
    job = make_job(
        2,
        members=(*(make_member(i) for i in range(2)), make_member(0, incarnation=2, ordinal=3)),
        incarnations=(("worker", 0, 2), ("worker", 1, 1)),
    )
    reports = {name(0, 2): make_report(generation=0, step=0)}
    seen = make_seen(reports=reports, processes={**gone, name(0, 2): RUNS})
    ended = look(job, seen)
    assert ended.job.verdict is not None
    assert ended.job.verdict.attributed_to is Attribution.PLATFORM
    checkpoint = Checkpoint(generation=1, step=8, location="/there/g1-s8")
    first = look(job, replace(seen, shelf=Shelf(found=(checkpoint,))))
    assert first.job.verdict is None
    later = look(first.job, replace(seen, shelf=Shelf(found=(checkpoint,))), now=1010.0, since=dict(first.since))
    (offer,) = [effect.generation for effect in later.effects if isinstance(effect, OfferGeneration)]
    assert (offer.source, offer.checkpoint) == (-1, "/there/g1-s8")


def test_checkpoint_of_a_group_that_was_passed_by_does_not_count() -> None:
    line = [make_generation(2, from_step=50), make_generation(4, from_step=80)]
    found = [Checkpoint(generation=g, step=s, location="") for g, s in ((1, 50), (1, 60), (2, 80), (2, 90), (4, 95))]
    assert [on_applied_line(c, line) for c in found] == [True, False, True, False, True]


def test_newcomers_word_counts_after_a_moment_and_the_pause_is_a_veterans() -> None:
    job = make_job(
        2,
        members=tuple(make_member(i) for i in range(3)),
        roles=(make_grant(3),),
        generations=(
            make_generation(1, (name(0), name(1))),
            make_generation(2, (name(0), name(1), name(2)), state=GenerationState.OFFERED, epoch=2),
        ),
        generation=2,
    )
    word = StartedWord(generation=2, step=12, pause_seconds=0.0)
    told = replace(word, pause_seconds=0.3)
    reports = {name(i): make_report(generation=2, step=11, generation_step=11) for i in range(3)}
    newcomer = {**reports, name(2): replace(reports[name(2)], started=word)}
    seen = make_seen(3, stores=frozenset({2}), reports=newcomer)
    early = look(job, seen)
    assert not early.events
    (late,) = look(job, seen, now=1001.0, since=dict(early.since)).events
    assert isinstance(late, GroupChanged)
    veteran = {**newcomer, name(1): replace(reports[name(1)], started=told)}
    (event,) = look(job, replace(seen, reports=veteran)).events
    assert isinstance(event, GroupChanged)
    assert (event.pause_seconds, event.workers, event.cause) == (0.3, 3, GroupChangeCause.RESIZED)


def test_start_that_was_not_heard_is_proven_by_two_steps() -> None:
    job = make_job(
        generations=(make_generation(1, (name(0), name(1)), state=GenerationState.OFFERED),), group_started=False
    )
    reports = {name(i): make_report(step=12, generation_step=10) for i in range(2)}
    assert look(job, make_seen(reports=reports)).job.running is not None
    younger = {name(i): make_report(step=11, generation_step=10) for i in range(2)}
    assert look(job, make_seen(reports=younger)).job.running is None


@pytest.mark.parametrize(
    ("after", "epoch", "lost", "cause"),
    [
        ((name(0), name(1), name(2)), 2, False, GroupChangeCause.RESIZED),
        ((name(0),), 2, False, GroupChangeCause.RESIZED),
        ((name(0),), 1, True, GroupChangeCause.MEMBER_LOST),
        ((name(0), name(1, 2)), 1, True, GroupChangeCause.MEMBER_REPLACED),
        ((name(0), name(1, 2)), 1, False, GroupChangeCause.MEMBER_REPLACED),
        ((name(0), name(1)), 1, False, GroupChangeCause.RESYNCED),
    ],
)
def test_cause_of_a_change(after: tuple[str, ...], epoch: int, lost: bool, cause: GroupChangeCause) -> None:
    before = make_generation(1, (name(0), name(1)))
    assert change_cause(before, make_generation(2, after, epoch=epoch), lost=lost) is cause


# -- restart and fixed mode -----------------------------------------------------------------------------------


def whole(workers: int = 2, **changes: object) -> Job:
    spec = make_spec(mode=Mode.RESTART, script=None, command=("x",))
    return make_job(workers, **{"spec": spec, **changes})


def test_whole_starts_all_or_none() -> None:
    none = whole(0, roles=(make_grant(9),), generations=(), group_started=False)
    assert not look(none, make_seen(0)).job.members  # eight devices are free
    some = look(replace(none, roles=(make_grant(8),)), make_seen(0)).job
    assert len(some.members) == 8
    assert some.offered is not None


def test_whole_is_ended_with_grace_for_another_size() -> None:
    job = apply_event(whole(), resized(2, 3), now=NOON)
    first = look(job, make_seen(reports={}))
    assert [effect.member for effect in first.effects if isinstance(effect, Terminate)] == [name(0), name(1)]
    assert not first.events
    late = look(first.job, make_seen(reports={}), now=1031.0, since=dict(first.since))
    assert killed(late) == [name(0), name(1)]
    gone = {name(i): replace(GONE, exit_code=-15) for i in range(2)}
    anew = look(first.job, make_seen(reports={}, processes=gone))
    assert [(m.index, m.incarnation) for m in anew.job.held()] == [(0, 2), (1, 2), (2, 1)]
    assert [event.epoch for event in anew.events if isinstance(event, RoomFreed)] == [2]


@pytest.mark.parametrize(
    ("code", "whose"), [(-6, Attribution.JOB), (-10, Attribution.JOB), (-9, Attribution.PLATFORM)]
)
def test_whole_that_ends_itself_by_a_signal_has_failed_by_itself(code: int, whose: Attribution) -> None:
    ended = {name(0): RUNS, name(1): replace(GONE, exit_code=code)}
    verdict = look(whole(), make_seen(reports={}, processes=ended)).job.verdict
    assert verdict is not None
    assert verdict.attributed_to is whose


def test_whole_succeeds_when_all_have_exited_with_0() -> None:
    half = look(whole(), make_seen(reports={}, processes={name(0): RUNS, name(1): replace(GONE, exit_code=0)}))
    assert half.job.verdict is None
    assert len(half.job.held()) == 1
    gone = {name(i): replace(GONE, exit_code=0) for i in range(2)}
    event = look(half.job, make_seen(reports={}, processes=gone)).events[-1]
    assert isinstance(event, GroupEnded)
    assert event.outcome is AttemptOutcome.SUCCEEDED


def test_whole_without_output_and_cpu_is_ended() -> None:
    quiet = replace(RUNS, quiet_seconds=LIMITS.quiet_seconds + 1)
    first = look(whole(1), make_seen(1, reports={}, processes={name(0): quiet}))
    then = look(first.job, make_seen(1, reports={}, processes={name(0): quiet}))
    assert killed(then) == [name(0)]
    ended = look(then.job, make_seen(1, reports={}, processes={name(0): replace(GONE, exit_code=-9)})).events[-1]
    assert isinstance(ended, GroupEnded)
    assert ended.attributed_to is Attribution.PLATFORM


# -- environment ----------------------------------------------------------------------------------------------


def environment(job: Job, index: int, *, has_gpus: bool = False) -> dict[str, str]:
    places = Places(
        address="127.0.0.1:9",
        token="t",
        member_directory="/m",
        checkpoint_directory="/c",
        output_directory="/o",
        host="127.0.0.1",
        has_gpus=has_gpus,
    )
    variables = {"TIDE_TOKEN": "stolen", "MINE": "1"}
    return member_environment(job, job.members[index], places=places, variables=variables)


def test_environment_names_the_member_and_its_devices() -> None:
    live = environment(make_job(), 1, has_gpus=True)
    assert (live["TIDE_MEMBER"], live["TIDE_NONCE"], live["TIDE_TOKEN"]) == (name(1), "nonce1", "t")
    assert (live["CUDA_VISIBLE_DEVICES"], live["MINE"]) == ("1", "1")
    assert "PADDLE_TRAINER_ID" not in live
    assert "CUDA_VISIBLE_DEVICES" not in environment(make_job(), 1)


def test_environment_of_a_whole_is_that_of_paddles_launcher() -> None:
    job = whole(generations=(make_generation(1, (name(0), name(1)), ports=(7001, 7002)),))
    found = environment(job, 1)
    assert found["PADDLE_TRAINER_ID"] == "1"
    assert found["PADDLE_TRAINERS_NUM"] == "2"
    assert found["PADDLE_TRAINER_ENDPOINTS"] == "127.0.0.1:7001,127.0.0.1:7002"
    assert (found["PADDLE_CURRENT_ENDPOINT"], found["PADDLE_MASTER"]) == ("127.0.0.1:7002", "127.0.0.1:7001")
    assert found["PADDLE_DISTRI_BACKEND"] == "gloo"


def test_who_was_held_up_by_others_has_its_own_time_after_that() -> None:
    """A peer is replaced after a minute: those that waited for it have not stood still themselves."""
    mark = protocol.Mark(generation=1, step=10, phase="stepping", phase_seconds=70, sync_seconds=0, waiting=False)
    waits = apply_message(make_report(), replace(mark, sync_seconds=61.0), now=1061.0)
    freed = apply_message(waits, mark, now=1061.3)
    assert freed.progressed_at == 1061.3
    assert apply_message(freed, mark, now=1062.0).progressed_at == 1061.3
