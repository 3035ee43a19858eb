"""What each word does to one workload: requests, proposals, answers of execution, failures."""

from dataclasses import replace
from typing import Any

import pytest

from schemas.events.allocation import (
    AllocationClosed,
    AllocationEvicted,
    AllocationGranted,
    AllocationResized,
    AllocationWaiting,
)
from schemas.events.job import RestartPolicy
from schemas.events.scaling import ScalingProposed
from schemas.events.worker import GroupEnded, RoleCount, RoomFreed, RoomOverdue, StartFailed
from schemas.vocabulary import (
    DEFAULT_FLAVOR,
    WORKER_ROLE,
    AttemptOutcome,
    Attribution,
    DecisionCode,
    MemberName,
    Mode,
    NodeName,
    Outcome,
    PriorityClass,
    RestartPolicyKind,
    StartFailure,
    WaitCode,
)
from services.queueing.core import ledger, retry, words
from services.queueing.core.ledger import Step
from services.queueing.core.values import Rules, Standing, Workload
from tests.simulation.builders import SERVER_ROLE, make_submitted, make_workload

RULES = Rules(back_off_first_seconds=5.0, back_off_limit_seconds=60.0, steady_seconds=100.0)
REASON = ledger.to_reason(DecisionCode.ADMITTED_IDLE, "before")


def running(workers: int, **job: Any) -> Workload:
    waiting = make_workload(1, make_submitted(**{"workers_max": workers, **job}))
    step = ledger.grant(waiting, workers=workers, flavor=DEFAULT_FLAVOR, order=1, revision=1, reason=REASON)
    return step.workload


def change(workload: Workload, **changes: Any) -> Step:
    version = workload.request.version + 1
    return words.on_changed(workload, replace(workload.request, version=version, **changes))


def ended(
    workload: Workload,
    outcome: AttemptOutcome = AttemptOutcome.FAILED,
    blame: Attribution | None = Attribution.JOB,
    *,
    now: float = 0.0,
    exit_code: int | None = 1,
    attempt: int | None = None,
) -> Step:
    word = GroupEnded(
        attempt=attempt if attempt is not None else workload.attempt,
        outcome=outcome,
        exit_code=exit_code,
        attributed_to=blame,
        reason="it said so",
        step=3,
        capacity_revision=1,
    )
    return words.on_group_ended(workload, word, revision=1, now=now, rules=RULES)


def start_failed(workload: Workload, missing: int, *, failure: StartFailure, role: str = WORKER_ROLE) -> Step:
    counts = (RoleCount(role=role, members=missing),)
    word = StartFailed(epoch=workload.epoch, missing=counts, failure=failure, detail="no node")
    return words.on_start_failed(workload, word, now=10.0, rules=RULES)


# -- requests -----------------------------------------------------------------------------------------------------
def test_a_lowered_maximum_shrinks_at_once_and_what_leaves_stays_charged() -> None:
    step = change(running(4), workers_max=2, workers=2)
    (event,) = step.events
    assert isinstance(event, AllocationResized)
    assert (event.workers_from, event.workers_to, event.epoch) == (4, 2, 2)
    assert (step.workload.granted, step.workload.held) == ((2,), (4,))
    assert ledger.charge_of(step.workload) == (4,)


def test_a_lowered_minimum_is_an_epoch_of_its_own() -> None:
    (event,) = change(running(3, workers_min=3), workers_min=1).events
    assert isinstance(event, AllocationResized)
    assert (event.workers_from, event.workers_to, event.roles[0].minimum) == (3, 3, 1)
    assert event.reason.code is DecisionCode.LIMITS_CHANGED


def test_a_raised_minimum_waits_for_the_next_admission() -> None:
    step = change(running(1, workers_max=4), workers_min=3, workers=3)
    assert step.events == ()
    assert (step.workload.floor, step.workload.workers, step.workload.wanted) == (1, 1, 3)


def test_a_smaller_wish_shrinks_and_a_larger_one_waits_for_room() -> None:
    (event,) = change(running(4), workers=2).events
    assert isinstance(event, AllocationResized)
    assert (event.workers_to, event.reason.code) == (2, DecisionCode.SHRANK_REQUESTED)
    assert change(running(2, workers_max=4), workers=4).events == ()


@pytest.mark.parametrize("mode", [Mode.FIXED, Mode.RESTART])
def test_a_job_that_cannot_be_resized_keeps_its_size(mode: Mode) -> None:
    job = running(4, workers_min=2, mode=mode)
    assert not job.is_resizable
    assert change(job, workers=2, workers_max=3).workload.workers == 4
    proposal = ScalingProposed(epoch=job.epoch, workers=2, gain_per_worker=None, reason="idle")
    assert words.on_proposed(job, proposal).events == ()


def test_restart_mode_with_a_checkpoint_path_may_be_resized() -> None:
    job = running(4, mode=Mode.RESTART, checkpoint_path="/data/ckpt")
    assert job.is_resizable
    assert job.loses_work_when_resized


def test_an_older_register_changes_nothing() -> None:
    job = running(2)
    assert words.on_changed(job, replace(job.request, cancelled=True)).workload is job


def test_cancel_of_a_waiting_job_closes_it_at_once() -> None:
    (event,) = change(make_workload(1), cancelled=True).events
    assert isinstance(event, AllocationClosed)
    assert (event.outcome, event.epoch, event.attempt) == (Outcome.CANCELLED, 1, 0)


def test_cancel_of_a_running_job_evicts_and_closes_at_the_end() -> None:
    step = change(running(2), cancelled=True)
    (event,) = step.events
    assert isinstance(event, AllocationEvicted)
    assert not event.requeue
    (closed,) = ended(step.workload, AttemptOutcome.EVICTED, None).events
    assert isinstance(closed, AllocationClosed)
    assert closed.outcome is Outcome.CANCELLED


def test_a_job_that_succeeds_while_it_is_cancelled_has_succeeded() -> None:
    step = change(running(2), cancelled=True)
    (closed,) = ended(step.workload, AttemptOutcome.SUCCEEDED, None, exit_code=0).events
    assert isinstance(closed, AllocationClosed)
    assert (closed.outcome, closed.exit_code) == (Outcome.SUCCEEDED, 0)


def test_hold_evicts_and_release_before_the_end_requeues() -> None:
    held = change(running(2), held=True).workload
    assert held.standing is Standing.DRAINING
    waits = ended(held, AttemptOutcome.EVICTED, None)
    assert [type(e) for e in waits.events] == [AllocationWaiting]
    assert not waits.workload.claims
    released = change(held, held=False).workload
    assert ended(released, AttemptOutcome.EVICTED, None).workload.claims


# -- proposals ----------------------------------------------------------------------------------------------------
def test_a_proposal_of_the_present_epoch_is_the_new_wish() -> None:
    job = running(2, workers_max=8)
    step = words.on_proposed(job, ScalingProposed(epoch=1, workers=16, gain_per_worker=None, reason="busy"))
    assert (step.workload.wanted, step.workload.wanted_because, step.events) == (8, "busy", ())


def test_a_proposal_of_another_epoch_moves_nothing() -> None:
    job = running(2, workers_max=8)
    proposal = ScalingProposed(epoch=0, workers=8, gain_per_worker=None, reason="busy")
    assert words.on_proposed(job, proposal).workload is job


def test_a_smaller_proposal_shrinks_but_not_below_the_floor() -> None:
    job = running(4, workers_min=2)
    step = words.on_proposed(job, ScalingProposed(epoch=1, workers=1, gain_per_worker=None, reason="idle"))
    (event,) = step.events
    assert isinstance(event, AllocationResized)
    assert (event.workers_to, event.reason.code, event.reason.detail) == (2, DecisionCode.SHRANK_PROPOSED, "idle")


# -- answers ------------------------------------------------------------------------------------------------------
def test_room_freed_lowers_the_charge_of_the_present_epoch_only() -> None:
    shrunk = change(running(4), workers=2).workload
    held = (RoleCount(role=WORKER_ROLE, members=2),)
    old = RoomFreed(epoch=1, held=held, capacity_revision=1)
    assert words.on_room_freed(shrunk, old).workload is shrunk
    freed = words.on_room_freed(shrunk, replace(old, epoch=2)).workload
    assert ledger.charge_of(freed) == (2,)


def test_room_overdue_is_told_and_frees_nothing() -> None:
    shrunk = change(running(4), workers=2).workload
    word = RoomOverdue(
        epoch=2,
        members=(MemberName("j0001/worker/3/1"),),
        node=NodeName("n7"),
        overdue_seconds=40.0,
        capacity_revision=1,
    )
    after = words.on_room_overdue(shrunk, word).workload
    assert "n7" in after.overdue
    assert ledger.charge_of(after) == ledger.charge_of(shrunk)


def test_a_failed_start_above_the_minimum_gives_back_what_is_missing() -> None:
    step = start_failed(running(3), 2, failure=StartFailure.UNSCHEDULABLE)
    (event,) = step.events
    assert isinstance(event, AllocationResized)
    assert (event.workers_to, event.reason.code) == (1, DecisionCode.START_FAILED)
    assert (step.workload.back_off_seconds, step.workload.back_off_until) == (5.0, 15.0)
    assert ledger.charge_of(step.workload) == (3,)


@pytest.mark.parametrize(("role", "missing"), [(WORKER_ROLE, 2), (SERVER_ROLE, 1)])
def test_a_failed_start_below_the_minimum_evicts_with_a_growing_pause(role: str, missing: int) -> None:
    job = running(3, workers_min=2, servers=1)
    first = start_failed(job, missing, failure=StartFailure.UNSCHEDULABLE, role=role)
    assert [type(e) for e in first.events] == [AllocationEvicted]
    assert first.workload.back_off_seconds == 5.0
    again = start_failed(replace(job, platform_failures=1), missing, failure=StartFailure.UNSCHEDULABLE, role=role)
    assert again.workload.back_off_seconds == 10.0
    assert not first.workload.job_failures


def test_image_errors_are_failures_of_the_job() -> None:
    job = running(1, policy=RestartPolicy(limit=0))
    evicted = start_failed(job, 1, failure=StartFailure.IMAGE).workload
    (closed,) = ended(evicted, AttemptOutcome.EVICTED, None, exit_code=None).events
    assert isinstance(closed, AllocationClosed)
    assert closed.outcome is Outcome.FAILED


# -- the end of an attempt ----------------------------------------------------------------------------------------
def test_a_failure_of_the_job_is_retried_in_place_as_a_new_attempt() -> None:
    step = ended(running(2, policy=RestartPolicy(limit=1)))
    (event,) = step.events
    assert isinstance(event, AllocationGranted)
    assert (event.epoch, event.attempt, event.roles[0].members) == (2, 2, 2)
    assert ledger.charge_of(step.workload) == (2,)
    (closed,) = ended(step.workload).events
    assert isinstance(closed, AllocationClosed)
    assert (closed.outcome, closed.exit_code, closed.attributed_to) == (Outcome.FAILED, 1, Attribution.JOB)


def test_a_word_about_an_earlier_attempt_changes_nothing() -> None:
    job = running(2)
    assert ended(job, attempt=0).workload is job


def test_failures_of_the_platform_never_count_but_pause_from_the_second_on() -> None:
    job = running(2, policy=RestartPolicy(limit=0))
    first = ended(job, blame=Attribution.PLATFORM)
    assert [type(e) for e in first.events] == [AllocationGranted]
    second = ended(first.workload, blame=Attribution.PLATFORM, now=20.0)
    assert [type(e) for e in second.events] == [AllocationEvicted, AllocationWaiting]
    assert second.workload.standing is Standing.WAITING
    assert ledger.charge_of(second.workload) == (0,)
    assert (second.workload.back_off_until, second.workload.claims) == (25.0, False)
    assert second.workload.waiting is not None
    assert second.workload.waiting.code is WaitCode.BACK_OFF
    assert words.on_pause_over(second.workload).workload.claims


def test_an_attempt_that_ran_for_long_ends_a_row_of_platform_failures() -> None:
    job = words.on_group_started(replace(running(2), platform_failures=7), 1, now=0.0).workload
    assert ended(job, blame=Attribution.PLATFORM, now=100.0).workload.platform_failures == 1
    assert ended(job, blame=Attribution.PLATFORM, now=99.0).workload.platform_failures == 8


def test_an_end_by_nobodys_word_while_running_is_the_platforms() -> None:
    step = ended(running(2, policy=RestartPolicy(limit=0)), AttemptOutcome.EVICTED, None)
    assert [type(e) for e in step.events] == [AllocationGranted]


# -- the restart policy -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("policy", "failures", "exit_code", "expected"),
    [
        (RestartPolicy(kind=RestartPolicyKind.NEVER, limit=9), 1, 1, False),
        (RestartPolicy(limit=0), 1, 1, False),
        (RestartPolicy(limit=2), 2, None, True),
        (RestartPolicy(limit=2), 3, 1, False),
        (RestartPolicy(kind=RestartPolicyKind.EXIT_CODES, exit_codes=(3, 4)), 1, 3, True),
        (RestartPolicy(kind=RestartPolicyKind.EXIT_CODES, exit_codes=(3, 4)), 1, 1, False),
        (RestartPolicy(kind=RestartPolicyKind.EXIT_CODES, exit_codes=(3, 4)), 1, None, False),
        (RestartPolicy(kind=RestartPolicyKind.EXIT_CODES, limit=1, exit_codes=(3,)), 2, 3, False),
    ],
)
def test_restart_policy(policy: RestartPolicy, failures: int, exit_code: int | None, expected: bool) -> None:
    assert retry.may_retry(policy, failures=failures, exit_code=exit_code) is expected


def test_pauses_double_up_to_a_limit() -> None:
    assert [retry.pause_after_platform_failure(n, RULES) for n in (0, 1, 2, 3, 4, 5, 6, 9_999)] == [
        0.0,
        0.0,
        5.0,
        10.0,
        20.0,
        40.0,
        60.0,
        60.0,
    ]


def test_priority_changes_without_touching_the_grant() -> None:
    step = change(running(2), priority=PriorityClass.CRITICAL)
    assert step.events == ()
    assert step.workload.urgency == 3
