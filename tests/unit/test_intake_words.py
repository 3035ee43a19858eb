"""What people read: the sentence of every event, views, why, lateness."""

from dataclasses import replace
from datetime import timedelta

import pytest

from schemas.events.capacity import CapacityObserved
from schemas.events.job import JobChanged, JobEnded, JobSubmitted
from schemas.events.metric import MetricWindow, Progress
from schemas.events.scaling import ScalingProposed
from schemas.events.worker import (
    Checkpointed,
    CheckpointFailed,
    LostMember,
    RoleCount,
    RoomFreed,
    RoomOverdue,
    StartFailed,
)
from schemas.registry import EVENT_CLASSES
from schemas.vocabulary import (
    Attribution,
    JobPhase,
    MemberName,
    NodeName,
    Outcome,
    StartFailure,
    UtilisationMeasure,
    WaitCode,
)
from services.intake.core.progress import estimate_of, is_late
from services.intake.core.readmodel import QueueSeen, Registers, fold_event
from services.intake.core.summaries import tell
from services.intake.core.view import job_view, say_why
from tests.unit.intake_builders import (
    NOW,
    closed,
    event,
    evicted,
    granted,
    group_changed,
    group_ended,
    group_started,
    make_record,
    make_request,
    queue_observed,
    resized,
    waiting,
)

# -- summaries --------------------------------------------------------------------------------------------------

LOST = LostMember(
    member=MemberName("j1/worker/1/1"), exit_code=-9, attributed_to=Attribution.PLATFORM, reason="killed"
)
WINDOW = MetricWindow(
    attempt=1,
    generation=1,
    window_seconds=4,
    members_reporting=1,
    members_expected=1,
    utilisation=0.9,
    measure=UtilisationMeasure.WALL,
    step_seconds=1,
    sync_seconds=1,
    input_wait_seconds=1,
    idle_seconds=1,
    samples_per_second=10,
    loss=0.5,
    gradient_noise=None,
    progress=Progress(step=50, total_steps=200, remaining_seconds=30),
)
RECORD = make_record(workers_max=4)
TOLD = (
    (
        JobSubmitted(
            tenant=RECORD.tenant,
            user=RECORD.user,
            queue=RECORD.queue,
            request=RECORD.request,
            roles=RECORD.roles,
            spec=RECORD.spec,
        ),
        "Submitted to queue default with priority medium, 1..4 workers, 1 wished for.",
    ),
    (JobChanged(request=make_request(cancelled=True), by=RECORD.user, reason="enough"), "Request cancelled: enough."),
    (
        JobEnded(
            outcome=Outcome.FAILED,
            exit_code=3,
            attributed_to=Attribution.JOB,
            reason="",
            image_digest=None,
            accelerator_seconds=2.5,
        ),
        "Over: failed with exit code 3; 2.5 accelerator seconds were granted in all.",
    ),
    (granted(workers=2), "Granted 2 workers (ADMITTED_IDLE): room is free."),
    (resized(before=2, after=1), "Shrinks from 2 to 1 worker (GREW_PROPOSED): busy."),
    (evicted(), "Evicted, goes back to its queue (PREEMPTED_FOR_CLAIMANT): another job."),
    (closed(), "Succeeded (COMPLETED): the group says so."),
    (waiting(), "Waits (NO_ROOM): no room."),
    (queue_observed(), "0 jobs wait in the queue."),
    (group_started(), "Runs with 1 worker."),
    (
        group_changed(lost=(LOST,)),
        (
            "Goes on with 2 workers after a pause of 0.05 s at step 10 (resized); "
            "lost: j1/worker/1/1 by signal 9, attributed to the platform (killed)."
        ),
    ),
    (
        RoomFreed(epoch=2, held=(RoleCount(role="worker", members=1),), capacity_revision=1),
        "Nobody is left who has to go; held now: 1 worker.",
    ),
    (
        RoomOverdue(
            epoch=2,
            members=(LOST.member,),
            node=NodeName("n"),
            overdue_seconds=12.4,
            capacity_revision=1,
        ),
        "Room is overdue: j1/worker/1/1 on n not seen gone 12 s after grace and kill.",
    ),
    (
        StartFailed(
            epoch=2,
            missing=(RoleCount(role="worker", members=2),),
            failure=StartFailure.IMAGE,
            detail="no such image",
        ),
        "Could not start 2 workers in time (image): no such image.",
    ),
    (Checkpointed(generation=1, step=7, location="/x"), "Checkpoint at step 7 is complete."),
    (
        CheckpointFailed(generation=1, step=7, reason="disk full"),
        "Checkpoint at step 7 failed, training goes on: disk full.",
    ),
    (group_ended(), "The processes have ended: succeeded with exit code 0: all members are gone."),
    (WINDOW, "Utilisation 90% (wall) over 4 s, 1 of 1 workers reporting."),
    (
        ScalingProposed(epoch=1, workers=2, gain_per_worker=None, reason="above the band"),
        "Scaling proposes 2 workers: above the band.",
    ),
    (CapacityObserved(revision=3, nodes=()), "Capacity report 3: 0 nodes."),
)


@pytest.mark.parametrize(("data", "text"), TOLD, ids=[type(data).__name__ for data, _ in TOLD])
def test_every_event_is_told_in_one_sentence(data, text):
    assert tell(data).summary == text


def test_every_event_type_has_its_sentence():
    assert {type(data) for data, _ in TOLD} == set(EVENT_CLASSES)


# -- views ------------------------------------------------------------------------------------------------------


def told(*data, xid=1):
    registers = Registers()
    for number, item in enumerate(data, start=xid):
        registers = fold_event(registers, event(item, xid=number))
    return registers


def seen(xid, **fields):
    return QueueSeen(
        tenant=RECORD.tenant,
        queue=RECORD.queue,
        observed=queue_observed(**fields),
        sequence=event(WINDOW, xid=xid).sequence,
    )


SUBMITTED = TOLD[0][0]


def test_a_job_that_waits_says_why():
    fresh = job_view(RECORD, Registers(), now=NOW)
    assert fresh.waiting.code is WaitCode.NOT_YET_CONSIDERED
    held = job_view(replace(RECORD, request=replace(RECORD.request, held=True)), told(waiting()), now=NOW)
    assert (held.waiting.code, held.waiting.unblocked_by) == (WaitCode.HELD, f"tide release {RECORD.job_id}")
    examined = job_view(RECORD, told(SUBMITTED, waiting()), now=NOW, queue=seen(9, head="other"))
    assert (examined.waiting.code, examined.waiting.detail) == (WaitCode.NO_ROOM, "no room")
    assert job_view(RECORD, told(SUBMITTED, granted()), now=NOW).waiting is None


def test_an_unexamined_job_says_its_place():
    registers = told(SUBMITTED, xid=5)
    before = job_view(RECORD, registers, now=NOW, queue=seen(4, head="other"))
    assert before.waiting.code is WaitCode.NOT_YET_CONSIDERED, "the queue was seen before the job was there"
    behind = job_view(RECORD, registers, now=NOW, queue=seen(6, head="other", per_minute=2.0), ahead=412)
    assert behind.waiting.code is WaitCode.BEHIND_IN_QUEUE
    assert behind.waiting.detail == "412 jobs are ahead in queue default; the head waits: no room."
    assert behind.waiting.start_estimate_seconds == 413 * 30
    alone = job_view(RECORD, registers, now=NOW, queue=seen(6, head=RECORD.job_id))
    assert alone.waiting.code is WaitCode.NOT_YET_CONSIDERED


def test_a_requeued_job_has_forgotten_its_old_reason():
    registers = told(SUBMITTED, waiting(), granted(), evicted(), group_ended())
    view = job_view(RECORD, registers, now=NOW)
    assert (view.phase, view.waiting.code) == (JobPhase.QUEUED, WaitCode.NOT_YET_CONSIDERED)


def test_sizes_and_progress_of_a_running_job():
    registers = told(SUBMITTED, granted(workers=2), group_started(workers=2), WINDOW)
    view = job_view(RECORD, registers, now=NOW + timedelta(seconds=10))
    assert (view.workers.granted, view.workers.running) == (2, 2)
    assert (view.progress.percent, view.progress.remaining_seconds, view.progress.measure) == (25.0, 30, "wall")
    assert view.accelerator_seconds == 20
    done = job_view(RECORD, fold_event(registers, event(closed(), xid=9)), now=NOW)
    assert (done.workers.granted, done.workers.running, done.progress.remaining_seconds) == (0, 0, None)
    assert (done.outcome, done.exit_code, done.reason) == (Outcome.SUCCEEDED, 0, "the group says so")


def test_the_step_at_the_end_counts_in_the_progress():
    ended = told(SUBMITTED, granted(), group_started(), WINDOW, replace(group_ended(), step=200), closed())
    assert job_view(RECORD, ended, now=NOW).progress.percent == 100
    of_an_earlier_attempt = told(SUBMITTED, granted(), group_ended(), replace(WINDOW, attempt=2))
    assert job_view(RECORD, of_an_earlier_attempt, now=NOW).progress.step == WINDOW.progress.step


def test_progress_without_a_total():
    window = replace(WINDOW, progress=Progress(step=5, total_steps=None, remaining_seconds=None))
    assert estimate_of(window).percent is None
    assert estimate_of(replace(WINDOW, progress=None)) is None
    assert (
        estimate_of(replace(WINDOW, progress=Progress(step=500, total_steps=200, remaining_seconds=0))).percent == 100
    )


@pytest.mark.parametrize(
    ("phase", "passed", "remaining", "ended", "late"),
    [
        (JobPhase.RUNNING, -100, 99, None, False),
        (JobPhase.RUNNING, -100, 101, None, True),
        (JobPhase.RUNNING, 1, None, None, True),
        (JobPhase.QUEUED, -1, 500, None, False),
        (JobPhase.QUEUED, 1, None, None, True),
        (JobPhase.SUCCEEDED, 500, None, -1, False),
        (JobPhase.SUCCEEDED, 500, None, 1, True),
    ],
)
def test_lateness(phase, passed, remaining, ended, late):
    """``passed``: seconds since the deadline; ``ended``: seconds after it that the job ended."""
    ended_at = None if ended is None else NOW + timedelta(seconds=ended)
    now = NOW + timedelta(seconds=passed)
    assert is_late(finish_by=NOW, phase=phase, now=now, ended_at=ended_at, remaining_seconds=remaining) is late
    assert not is_late(finish_by=None, phase=phase, now=now, ended_at=ended_at, remaining_seconds=remaining)


def test_why_tells_overdue_rooms_silence_and_the_last_decision():
    overdue = TOLD[12][0]
    registers = told(SUBMITTED, granted(workers=2), group_started(workers=2), resized(before=2, after=1), overdue)
    text = say_why(RECORD, registers, waiting=None, decision="Shrinks from 2 to 1", silent_seconds=120)
    assert "Runs with 2 workers, 1 granted." in text
    assert "Last decision: Shrinks from 2 to 1." in text
    assert "Not seen gone on n: j1/worker/1/1" in text
    assert "Execution has reported nothing for 120 s" in text
    freed = fold_event(registers, event(TOLD[11][0], xid=20))
    assert "Not seen gone" not in say_why(RECORD, freed, waiting=None, decision=None)
    over = fold_event(registers, event(closed(), xid=21))
    ended = say_why(RECORD, over, waiting=None, decision=None, silent_seconds=120)
    assert ended == "Succeeded with exit code 0: the group says so."
