"""Single decisions of ``plan``."""

from dataclasses import replace

import pytest

from schemas.events.allocation import (
    AllocationEvicted,
)
from schemas.events.capacity import CapacityObserved
from schemas.events.job import JobChanged
from schemas.events.scaling import ScalingProposed
from schemas.events.worker import Checkpointed
from schemas.resources import CPU, MEMORY, SLOT, Resources
from schemas.vocabulary import (
    CLUSTER_KEY,
    DEFAULT_FLAVOR,
    DEFAULT_USER,
    WORKER_ROLE,
    DecisionCode,
    FlavorName,
    JobId,
    Mode,
    NodeName,
    PriorityClass,
    TenantName,
    WaitCode,
)
from services.queueing.core.desk import Desk
from services.queueing.core.values import Rules, Standing
from tests.simulation.builders import job_id, make_capacity, make_node, make_submitted, make_workload
from tests.unit.queueing_turns import Turns, failed_by_itself

LOW, MEDIUM, HIGH, CRITICAL = (
    PriorityClass.LOW,
    PriorityClass.MEDIUM,
    PriorityClass.HIGH,
    PriorityClass.CRITICAL,
)


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


def test_what_is_given_back_ends_at_the_new_maximum() -> None:
    turns = Turns(make_node("n0", 4))
    turns.submit(1, priority=LOW, workers_min=2, workers_max=4, workers=4)
    turns.submit(2, priority=HIGH, workers_min=2)
    limits = replace(turns.job(1).request, version=2, workers_min=1, workers_max=3)
    turns.hear(1, JobChanged(request=limits, by=DEFAULT_USER))
    turns.freed(1)
    turns.hear(0, make_capacity(9, revision=2), key=JobId(CLUSTER_KEY))
    assert (turns.last(1).workers_to, turns.last(1).reason.code) == (3, DecisionCode.GAVE_BACK)


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


def test_a_job_that_cannot_be_resized_does_not_grow_either() -> None:
    turns = Turns(make_node("n0", 4))
    turns.submit(1, workers_min=1, workers_max=4, workers=1, mode=Mode.RESTART)
    turns.hear(1, JobChanged(request=replace(turns.job(1).request, version=2, workers=4), by=DEFAULT_USER))
    assert (turns.job(1).wanted, turns.job(1).workers) == (4, 1)


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


def test_a_victim_that_the_next_claimant_makes_redundant_is_spared() -> None:
    """The first takes job 2 and a worker of job 1; the second needs all of job 1, and that does for both."""
    turns = Turns(make_node("n0", 4))
    turns.submit(1, workers_min=2, workers_max=3, workers=3)
    turns.submit(2)
    turns.book.put(make_workload(3, make_submitted(priority=HIGH, workers_min=2)))
    turns.submit(4, priority=HIGH)
    assert turns.job(1).standing is Standing.DRAINING
    assert turns.job(2).standing is Standing.RUNNING
    assert [turns.book.promises[job_id(n)].origins for n in (3, 4)] == [(job_id(1),), (job_id(1),)]


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


def test_members_of_a_run_that_is_over_stand_in_nobodys_way() -> None:
    """The report still names them; those of the next run have not been seen, and are packed where they fit best."""
    turns = Turns(make_node("n0", 2), make_node("n1", 1))
    turns.submit(1)
    there = make_node("n0", 2, members=((1, WORKER_ROLE, 1),))
    turns.hear(0, CapacityObserved(revision=2, nodes=(there, make_node("n1", 1))), key=JobId(CLUSTER_KEY))
    turns.submit(2, slots_each=2)
    assert turns.waiting(2).code is WaitCode.PLACEMENT
    turns.hear(1, failed_by_itself(attempt=1))
    assert turns.job(1).attempt == 2
    assert turns.job(2).standing is Standing.RUNNING


@pytest.mark.parametrize("grows", [False, True])
def test_nothing_is_granted_that_the_next_plan_could_not_place(grows: bool) -> None:
    """One more of three slots fits beside the others as they are packed now, but not if all are packed anew."""
    turns = Turns(*(make_node(f"n{index}", count) for index, count in enumerate((5, 4, 4, 4))))
    turns.submit(1)
    turns.submit(2, workers_min=2, workers_max=3, slots_each=3)
    turns.submit(3, workers_min=3, slots_each=2)
    if grows:
        turns.hear(2, JobChanged(request=replace(turns.job(2).request, version=2, workers=3), by=DEFAULT_USER))
    else:
        turns.submit(4, slots_each=3)
    assert turns.book.capacity is not None
    desk = Desk(turns.book.view(turns.rules), turns.book.capacity, now=0.0)
    assert desk.room_now(DEFAULT_FLAVOR).homeless == 0


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
