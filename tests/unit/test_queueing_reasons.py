"""What people are told: why a job waits, how a queue stands, what was granted."""

from dataclasses import replace

from schemas.events.allocation import (
    AllocationGranted,
    AllocationResized,
)
from schemas.events.capacity import CapacityObserved
from schemas.events.job import JobChanged
from schemas.events.scaling import ScalingProposed
from schemas.resources import CPU, MEMORY, SLOT, Resources
from schemas.vocabulary import (
    CLUSTER_KEY,
    DEFAULT_USER,
    WORKER_ROLE,
    JobId,
    NodeName,
    PriorityClass,
    QueueName,
    TenantName,
    WaitCode,
)
from services.queueing.core.book import Book
from services.queueing.core.cycle import next_pause_seconds
from services.queueing.core.observing import observe_queues
from services.queueing.core.values import Rules
from services.queueing.core.wording import amount_text
from tests.simulation.builders import job_id, make_capacity, make_node
from tests.unit.queueing_turns import Turns

LOW, MEDIUM, HIGH, CRITICAL = (
    PriorityClass.LOW,
    PriorityClass.MEDIUM,
    PriorityClass.HIGH,
    PriorityClass.CRITICAL,
)


# -- why ----------------------------------------------------------------------------------------------------------
def test_what_can_never_fit_says_so_with_numbers() -> None:
    turns = Turns(make_node("n0", 4))
    turns.submit(1, workers_min=5)
    wait = turns.waiting(1)
    assert wait.code is WaitCode.NEVER_FITS
    assert "5 slots" in wait.detail
    assert "4 slots" in wait.detail


def test_lost_nodes_are_not_called_never() -> None:
    turns = Turns()
    turns.submit(1, workers_min=5)
    report = CapacityObserved(revision=1, nodes=(make_node("n0", 4),), lost_nodes=(NodeName("n1"),))
    turns.hear(0, report, key=JobId(CLUSTER_KEY))
    assert turns.waiting(1).code is WaitCode.NO_ROOM
    turns.hear(0, CapacityObserved(revision=2, nodes=(), lost_nodes=(NodeName("n0"),)), key=JobId(CLUSTER_KEY))
    assert "no node answers" in turns.waiting(1).detail


def test_a_promise_is_told_with_an_estimate_and_what_makes_it_late() -> None:
    turns = Turns(make_node("n0", 1))
    turns.submit(1, priority=LOW, grace_seconds=7.0)
    turns.submit(2, priority=HIGH)
    wait = turns.waiting(2)
    assert wait.code is WaitCode.ROOM_COMING
    assert wait.estimate is not None
    assert wait.estimate.seconds == 7.0


def test_those_behind_the_first_without_room_are_not_looked_at() -> None:
    turns = Turns(make_node("n0", 1))
    for number in range(1, 5):
        turns.submit(number)
    assert turns.waiting(2).code is WaitCode.NO_ROOM
    assert not any(key == job_id(4) for key, _ in turns.told)


def test_who_was_first_and_is_overtaken_is_told() -> None:
    turns = Turns(make_node("n0", 1))
    turns.submit(1, priority=HIGH)
    turns.submit(3)
    assert turns.waiting(3).code is WaitCode.NO_ROOM
    turns.submit(2)
    assert turns.waiting(2).code is WaitCode.NO_ROOM
    assert turns.waiting(3).code is WaitCode.BEHIND_IN_QUEUE


def test_moving_numbers_are_not_told_all_the_time() -> None:
    turns = Turns(make_node("n0", 4), rules=Rules(explain_seconds=1.0))
    turns.submit(1, priority=HIGH, workers_min=2)
    turns.submit(9, workers_min=3)
    first = turns.waiting(9)
    turns.now = 0.5
    turns.submit(2, priority=HIGH, workers_min=1)
    assert turns.waiting(9) == first
    assert turns.due == 0.5
    turns.now = 1.0
    turns.hear(0)
    assert turns.waiting(9) != first
    assert turns.waiting(9).code is first.code


def test_released_jobs_are_told_why_they_wait() -> None:
    turns = Turns(make_node("n0", 1))
    turns.submit(1)
    turns.submit(2)
    turns.submit(3, held=True)
    assert turns.waiting(3).code is WaitCode.HELD
    request = replace(turns.job(3).request, version=2, held=False)
    turns.hear(3, JobChanged(request=request, by=DEFAULT_USER))
    assert turns.waiting(3).code is WaitCode.BEHIND_IN_QUEUE


def test_nothing_is_decided_before_the_first_report() -> None:
    turns = Turns()
    turns.submit(1)
    turns.submit(2, workers_min=2)
    assert turns.waiting(1).code is WaitCode.NO_CAPACITY_REPORT
    assert not turns.book.promises


def test_a_change_of_capacity_ends_every_pause() -> None:
    turns = Turns(make_node("n0", 1))
    turns.submit(1)
    paused = replace(turns.job(1), back_off_seconds=9.0, back_off_until=9.0)
    turns.book.put(paused)
    assert next_pause_seconds(turns.book, now=4.0) == 5.0
    members = make_node("n0", 1, members=((1, WORKER_ROLE, 1),))
    turns.hear(0, CapacityObserved(revision=2, nodes=(members,)), key=JobId(CLUSTER_KEY))
    assert turns.job(1).back_off_seconds == 9.0, "members that come and go are no change of capacity"
    turns.hear(0, make_capacity(2, revision=3), key=JobId(CLUSTER_KEY))
    assert turns.job(1).back_off_seconds == 0.0


def test_an_older_report_changes_nothing() -> None:
    turns = Turns()
    turns.hear(0, make_capacity(4, revision=2), key=JobId(CLUSTER_KEY))
    turns.hear(0, make_capacity(9, revision=1), key=JobId(CLUSTER_KEY))
    turns.submit(1, workers_min=5)
    assert turns.waiting(1).code is WaitCode.NEVER_FITS


def test_after_a_restart_a_pause_begins_anew() -> None:
    turns = Turns(make_node("n0", 1))
    turns.submit(1)
    paused = replace(turns.job(1), back_off_seconds=9.0, back_off_until=3.0)
    restored = Book.restored(workloads=[paused], promises=(), capacity=None, parked=(), now=100.0)
    assert next_pause_seconds(restored, now=101.0) == 8.0


# -- queues -------------------------------------------------------------------------------------------------------
def test_queues_are_observed_by_class_with_their_head() -> None:
    turns = Turns(make_node("n0", 1))
    turns.submit(1, queue=QueueName("night"))
    turns.submit(2, queue=QueueName("night"))
    turns.submit(3, priority=LOW, queue=QueueName("night"))
    turns.submit(4, queue=QueueName("day"))
    seen = {queue: s for (_, queue), s in observe_queues(turns.book, now=1.0).items()}
    night = seen[QueueName("night")]
    assert [(p.priority, p.jobs) for p in night.pending] == [(MEDIUM, 1), (LOW, 1)]
    assert (night.head, night.head_code, night.starts_per_minute) == (job_id(2), WaitCode.NO_ROOM, 1.0)
    assert (seen[QueueName("day")].head, seen[QueueName("day")].starts_per_minute) == (job_id(4), 0.0)
    assert observe_queues(turns.book, now=62.0)[TenantName("default"), QueueName("night")].starts_per_minute == 0.0


def test_what_a_commit_saves_is_what_changed() -> None:
    turns = Turns(make_node("n0", 2))
    turns.submit(1)
    turns.book.take_changes()
    turns.submit(2, workers_min=2)
    changes = turns.book.take_changes()
    assert [w.job_id for w in changes.workloads] == [job_id(2)]
    assert (changes.promises, changes.capacity, changes.closed) == (None, None, ())


def test_grants_name_every_role_with_its_minimum() -> None:
    turns = Turns(make_node("n0", 8))
    turns.submit(1, workers_min=1, workers_max=4, workers=2, servers=2)
    granted = turns.last(1)
    assert isinstance(granted, AllocationGranted)
    assert [(r.role, r.elastic, r.members, r.minimum) for r in granted.roles] == [
        (WORKER_ROLE, True, 2, 1),
        ("server", False, 2, 2),
    ]
    resize = ScalingProposed(epoch=1, workers=4, gain_per_worker=None, reason="busy")
    turns.hear(1, resize)
    assert isinstance(turns.last(1), AllocationResized)
    assert [(r.members, r.minimum) for r in turns.last(1).roles] == [(4, 1), (2, 2)]


def test_amounts_read_like_sentences() -> None:
    assert amount_text(Resources({SLOT: 1_000})) == "1 slot"
    assert amount_text(Resources({CPU: 1_500, MEMORY: 5 * 2**29})) == "1.5 cpu, 2.5 GiB memory"
    assert amount_text(Resources({SLOT: -1_000})) == "nothing"
    assert amount_text(Resources({CPU: 50, MEMORY: 2**20})) == "0.05 cpu, 1 MiB memory"
