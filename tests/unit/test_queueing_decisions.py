"""Single decisions of ``plan`` and the reasons that people read."""

from dataclasses import replace
from typing import Any

from schemas.events.allocation import (
    AllocationEvicted,
    AllocationGranted,
    AllocationResized,
    AllocationWaiting,
)
from schemas.events.capacity import CapacityObserved, Node
from schemas.events.job import JobChanged, JobSubmitted
from schemas.events.scaling import ScalingProposed
from schemas.events.worker import Checkpointed, GroupStarted, RoleCount, RoomFreed
from schemas.registry import EventData
from schemas.resources import CPU, MEMORY, SLOT, Resources
from schemas.vocabulary import (
    CLUSTER_KEY,
    DEFAULT_USER,
    WORKER_ROLE,
    DecisionCode,
    FlavorName,
    JobId,
    Mode,
    NodeName,
    PriorityClass,
    QueueName,
    TenantName,
    WaitCode,
)
from services.queueing.core.book import Book
from services.queueing.core.cycle import apply_word, end_pauses, next_pause_seconds, settle
from services.queueing.core.observing import observe_queues
from services.queueing.core.values import Rules, Standing, Workload
from services.queueing.core.wording import amount_text
from tests.simulation.builders import job_id, make_capacity, make_node, make_submitted

LOW, MEDIUM, HIGH, CRITICAL = (
    PriorityClass.LOW,
    PriorityClass.MEDIUM,
    PriorityClass.HIGH,
    PriorityClass.CRITICAL,
)


class Turns:
    """A book that hears one word after the other; ``told`` is everything that was published, by job."""

    def __init__(self, *nodes: Node, rules: Rules = Rules(explain_seconds=0.0)) -> None:  # noqa: B008
        self.book = Book()
        self.rules = rules
        self.now = 0.0
        self.told: list[tuple[JobId, EventData]] = []
        self.due: float | None = None
        if nodes:
            self.hear(0, CapacityObserved(revision=1, nodes=nodes), key=JobId(CLUSTER_KEY))

    def hear(self, number: int, data: EventData | None = None, *, key: JobId | None = None) -> None:
        job = key or job_id(number)
        tenant = data.tenant if isinstance(data, JobSubmitted) else TenantName("default")
        drafts = []
        if data is not None:
            drafts = apply_word(self.book, job, tenant, data, now=self.now, rules=self.rules)
        end_pauses(self.book, now=self.now)
        planned, self.due = settle(self.book, now=self.now, rules=self.rules)
        self.told += [(JobId(d.key), d.data) for d in (*drafts, *planned)]

    def submit(self, number: int, **job: Any) -> None:
        self.hear(number, make_submitted(**job))

    def started(self, number: int) -> None:
        w = self.job(number)
        word = GroupStarted(
            epoch=w.epoch, attempt=w.attempt, generation=1, workers=1, resumed_from=None, steps_dropped=0
        )
        self.hear(number, word)

    def freed(self, number: int) -> None:
        """Execution's answer to the present resize."""
        w = self.job(number)
        held = (RoleCount(role=WORKER_ROLE, members=w.workers),)
        self.hear(number, RoomFreed(epoch=w.epoch, held=held, capacity_revision=1))

    def job(self, number: int) -> Workload:
        return self.book.workloads[job_id(number)]

    def last(self, number: int) -> Any:
        return [data for key, data in self.told if key == job_id(number)][-1]

    def waiting(self, number: int) -> AllocationWaiting:
        return [d for k, d in self.told if k == job_id(number) and isinstance(d, AllocationWaiting)][-1]


# -- sizes --------------------------------------------------------------------------------------------------------
def test_a_job_starts_at_the_size_it_wishes_if_there_is_room() -> None:
    turns = Turns(make_node("n0", 4))
    turns.submit(1, workers_min=1, workers_max=4, workers=3)
    assert turns.last(1).roles[0].members == 3
    assert "3 workers" in turns.last(1).reason.detail


def test_minimums_of_a_class_come_before_anybodys_wish() -> None:
    turns = Turns()
    turns.submit(1, workers_min=1, workers_max=4, workers=4)
    turns.submit(2, workers_min=2)
    turns.hear(0, make_capacity(4), key=JobId(CLUSTER_KEY))
    assert [turns.job(n).workers for n in (1, 2)] == [2, 2]


def test_a_wish_of_a_higher_class_comes_before_minimums_of_a_lower_one() -> None:
    turns = Turns()
    turns.submit(1, priority=HIGH, workers_min=1, workers_max=4, workers=4)
    turns.submit(2, priority=LOW, workers_min=2)
    turns.hear(0, make_capacity(4), key=JobId(CLUSTER_KEY))
    assert turns.job(1).workers == 4
    assert turns.waiting(2).code is WaitCode.NO_ROOM


def test_idle_room_is_shared_evenly_among_equals() -> None:
    turns = Turns()
    for number in (1, 2):
        turns.submit(number, workers_min=1, workers_max=4, workers=4)
    turns.hear(0, make_capacity(6), key=JobId(CLUSTER_KEY))
    assert [turns.job(n).workers for n in (1, 2)] == [3, 3]


def test_room_that_others_needed_is_given_back_without_a_new_proposal() -> None:
    turns = Turns(make_node("n0", 4))
    turns.submit(1, priority=LOW, workers_min=1, workers_max=8, workers=1)
    turns.hear(1, ScalingProposed(epoch=1, workers=8, gain_per_worker=None, reason="utilisation 93 %"))
    assert (turns.last(1).workers_to, turns.last(1).reason.code) == (4, DecisionCode.GREW_PROPOSED)
    turns.submit(2, priority=HIGH, workers_min=3)
    assert (turns.last(1).workers_to, turns.last(1).reason.code) == (1, DecisionCode.SHRANK_FOR_CLAIMANT)
    turns.freed(1)
    assert turns.job(2).standing is Standing.RUNNING
    turns.hear(0, make_capacity(9, revision=2), key=JobId(CLUSTER_KEY))
    assert (turns.last(1).workers_to, turns.last(1).reason.code) == (6, DecisionCode.GAVE_BACK)
    assert turns.job(1).wanted == 8


def test_a_resize_that_is_not_answered_keeps_its_charge_and_the_claimant_waits() -> None:
    turns = Turns(make_node("n0", 4))
    turns.submit(1, priority=LOW, workers_min=1, workers_max=4, workers=4)
    turns.submit(2, priority=HIGH, workers_min=3)
    told = len(turns.told)
    for turns.now in (1.0, 1_000.0, 100_000.0):
        turns.hear(0)
    assert len(turns.told) == told
    assert turns.job(2).standing is Standing.WAITING


def test_restart_jobs_without_a_checkpoint_are_preempted_but_not_shrunk() -> None:
    turns = Turns(make_node("n0", 4))
    turns.submit(1, priority=LOW, workers_min=2, workers_max=4, workers=4, mode=Mode.RESTART)
    assert turns.job(1).workers == 4
    turns.submit(2, priority=LOW, workers_min=1)
    assert turns.job(1).standing is Standing.RUNNING
    turns.submit(3, priority=HIGH, workers_min=1)
    assert isinstance(turns.last(1), AllocationEvicted)


# -- victims ------------------------------------------------------------------------------------------------------
def test_the_cheapest_to_lose_goes_first() -> None:
    """Of two low jobs the one with less work since its checkpoint, though it is the older one."""
    turns = Turns(make_node("n0", 2))
    for number in (1, 2):
        turns.submit(number, priority=LOW)
        turns.started(number)
    turns.now = 500.0
    turns.hear(1, Checkpointed(generation=1, step=9, location="somewhere"))
    turns.now = 501.0
    turns.submit(3, priority=HIGH)
    assert isinstance(turns.last(1), AllocationEvicted)
    assert turns.job(2).standing is Standing.RUNNING


def test_of_equal_work_the_youngest_goes_first() -> None:
    turns = Turns(make_node("n0", 2))
    for number in (1, 2):
        turns.submit(number, priority=LOW)
    turns.submit(3, priority=HIGH)
    assert isinstance(turns.last(2), AllocationEvicted)
    assert turns.job(1).standing is Standing.RUNNING


def test_nobody_is_preempted_before_the_minimum_run_time() -> None:
    turns = Turns(make_node("n0", 1), rules=Rules(minimum_run_seconds=60.0, explain_seconds=0.0))
    turns.submit(1, priority=LOW)
    turns.started(1)
    turns.now = 10.0
    turns.submit(2, priority=CRITICAL)
    assert turns.job(1).standing is Standing.RUNNING
    assert turns.due == 50.0
    turns.now = 60.0
    turns.hear(0)
    assert isinstance(turns.last(1), AllocationEvicted)


def test_equals_are_shrunk_but_never_preempted() -> None:
    turns = Turns(make_node("n0", 3))
    turns.submit(1, workers_min=2, workers_max=3, workers=3)
    turns.submit(2, workers_min=2)
    assert turns.job(1).workers == 3, "one worker would not do"
    turns.submit(3, workers_min=1)
    assert turns.last(1).workers_to == 2


def test_other_tenants_are_not_named() -> None:
    turns = Turns(make_node("n0", 1))
    turns.submit(1, priority=LOW, name="mine")
    turns.submit(2, priority=HIGH, name="theirs", tenant=TenantName("other"))
    assert "theirs" not in turns.last(1).reason.detail
    assert "another job" in turns.last(1).reason.detail
    assert "mine" not in turns.waiting(2).detail
    turns.submit(3, priority=CRITICAL, name="urgent")
    turns.hear(0)
    assert job_id(1) not in turns.waiting(2).detail


def test_members_go_only_where_they_fit() -> None:
    """Two nodes have one slot each left: the sum is enough for two slots on one node, the nodes are not."""
    turns = Turns(make_node("n0", 3), make_node("n1", 3))
    turns.submit(1, workers_min=2, slots_each=2)
    turns.submit(2, workers_min=1, slots_each=2)
    assert turns.waiting(2).code is WaitCode.PLACEMENT
    turns.submit(3, workers_min=2)
    assert turns.job(3).standing is Standing.RUNNING


# -- flavors ------------------------------------------------------------------------------------------------------
def test_all_members_of_a_job_are_on_one_flavor() -> None:
    big, small = FlavorName("big"), FlavorName("small")
    turns = Turns(make_node("a", 4, flavor=big), make_node("b", 2, flavor=small))
    turns.submit(1, workers_min=3)
    turns.submit(2, workers_min=2)
    turns.submit(3, workers_min=2)
    assert [turns.job(n).flavor for n in (1, 2)] == [big, small]
    assert turns.job(3).standing is Standing.WAITING


def test_the_flavor_where_fewest_are_preempted_is_chosen() -> None:
    big, small = FlavorName("big"), FlavorName("small")
    turns = Turns(make_node("a", 2, flavor=big), make_node("b", 2, flavor=small))
    turns.submit(1, priority=LOW, workers_min=1)
    turns.submit(2, priority=LOW, workers_min=1)
    turns.submit(3, priority=LOW, workers_min=2)
    assert [turns.job(n).flavor for n in (1, 2, 3)] == [big, big, small]
    turns.submit(4, priority=HIGH, workers_min=2)
    assert isinstance(turns.last(3), AllocationEvicted)
    assert turns.book.promises[job_id(4)].flavor == small


def test_a_job_keeps_its_flavor_when_that_has_lost_all_its_nodes() -> None:
    big, small = FlavorName("big"), FlavorName("small")
    turns = Turns(make_node("a", 2, flavor=big), make_node("b", 2, flavor=small))
    turns.submit(1, workers_min=2)
    report = CapacityObserved(revision=2, nodes=(make_node("b", 2, flavor=small),), lost_nodes=(NodeName("a"),))
    turns.hear(0, report, key=JobId(CLUSTER_KEY))
    assert (turns.last(1).reason.code, turns.job(1).standing) == (
        DecisionCode.PREEMPTED_FOR_SHORTAGE,
        Standing.DRAINING,
    )


def test_cpu_and_memory_count_where_a_job_states_them() -> None:
    node = replace(make_node("n0", 8), allocatable=Resources({SLOT: 8_000, CPU: 4_000, MEMORY: 2**33}))
    turns = Turns(node)
    job = make_submitted()
    needs = Resources({SLOT: 1_000, CPU: 3_000})
    turns.hear(1, replace(job, roles=(replace(job.roles[0], resources=needs),)))
    turns.hear(2, replace(job, roles=(replace(job.roles[0], resources=needs),)))
    turns.hear(3, job)
    assert [turns.job(n).standing for n in (1, 2, 3)] == [Standing.RUNNING, Standing.WAITING, Standing.RUNNING]


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
