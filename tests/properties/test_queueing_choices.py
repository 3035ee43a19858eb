"""Laws of the two choices inside ``plan``: who gives room, and where members stand."""

from collections import Counter
from collections.abc import Iterator
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.events.capacity import NodeMembers
from schemas.resources import MILLI, SLOT
from schemas.vocabulary import DEFAULT_FLAVOR, WORKER_ROLE, DecisionCode
from services.queueing.core import ledger
from services.queueing.core.placement import Claim, Members, Room, Site, can_never_hold, place
from services.queueing.core.preemption import Taking, plan_preemption
from services.queueing.core.values import Capacity, Workload
from tests.simulation.builders import job_id, make_node, make_submitted, make_workload, slots

LAWFUL = settings(max_examples=60, deadline=None)
REASON = ledger.to_reason(DecisionCode.ADMITTED_IDLE, "before")


@st.composite
def running(draw: st.DrawFn, number: int) -> Workload:
    low = draw(st.integers(1, 3))
    workers = low + draw(st.integers(0, 3))
    data = make_submitted(workers_min=low, workers_max=workers, workers=workers)
    granted = ledger.grant(
        make_workload(number, data),
        workers=workers,
        flavor=DEFAULT_FLAVOR,
        order=number,
        revision=0,
        reason=REASON,
    )
    return granted.workload


victims = st.integers(0, 5).flatmap(lambda n: st.tuples(*[running(i) for i in range(n)]))


def _room_of(taking: Taking, jobs: tuple[Workload, ...]) -> int:
    shrunk = sum(w.workers - taking.shrunk.get(w.job_id, w.workers) for w in jobs if w.job_id not in taking.evicted)
    return shrunk + sum(w.workers for w in jobs if w.job_id in taking.evicted)


@LAWFUL
@given(victims, st.integers(1, 12), st.integers(0, 5))
def test_victims_are_enough_and_none_is_redundant(jobs: tuple[Workload, ...], short: int, evictable: int) -> None:
    shrinkable = tuple(w for w in jobs if w.workers > w.floor)
    taking = plan_preemption(
        shrinkable=shrinkable,
        evictable=jobs[:evictable],
        is_enough=lambda t: _room_of(t, jobs) >= short,
    )
    everything = Taking(
        shrunk={w.job_id: w.floor for w in shrinkable}, evicted=tuple(w.job_id for w in jobs[:evictable])
    )
    if taking is None:
        assert _room_of(everything, jobs) < short
        return
    assert _room_of(taking, jobs) >= short
    assert all(taking.shrunk[j] >= w.floor for w in jobs if (j := w.job_id) in taking.shrunk)
    for smaller in _smaller(taking, jobs):
        assert _room_of(smaller, jobs) < short
    if taking.evicted:
        shrunk_only = Taking(shrunk=everything.shrunk)
        assert _room_of(shrunk_only, jobs) < short, "nobody is preempted where shrinking does"


def _smaller(taking: Taking, jobs: tuple[Workload, ...]) -> Iterator[Taking]:
    """Without one eviction; with one worker given back."""
    for job in taking.evicted:
        yield Taking(shrunk=taking.shrunk, evicted=tuple(j for j in taking.evicted if j != job))
    for job, left in taking.shrunk.items():
        assert left < next(w.workers for w in jobs if w.job_id == job)
        yield Taking(shrunk={**taking.shrunk, job: left + 1}, evicted=taking.evicted)


def _packs(free: list[int], sizes: list[int]) -> bool:
    """Tries everything."""
    if not sizes:
        return True
    return any(
        _packs([f - sizes[0] if i == j else f for j, f in enumerate(free)], sizes[1:])
        for i, f in enumerate(free)
        if f >= sizes[0]
    )


def _room(free: list[int]) -> Room:
    return Room(bins=Counter((f,) for f in free), spare=(sum(free),))


nodes = st.lists(st.integers(0, 4), min_size=1, max_size=4)
gangs = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=3)


@LAWFUL
@given(nodes, gangs)
def test_what_is_placed_can_be_placed(free: list[int], gang: list[tuple[int, int]]) -> None:
    members: Members = tuple(((size,), count) for size, count in gang)
    sizes = sorted((size for size, count in gang for _ in range(count)), reverse=True)
    after = place(_room(free), members)
    if after is None:
        assert len(gang) > 1 or not _packs(free, sizes), "for members of one size packing is exact"
    else:
        assert _packs(free, sizes)
        assert sum(b * n for (b,), n in after.bins.items()) == after.spare[0] == sum(free) - sum(sizes)


@LAWFUL
@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), gangs, st.data())
def test_leavers_count_for_no_more_than_they_turn_out_to_free(
    counts: list[int], gang: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Of a job that stands on several nodes some members leave, nobody knows which: what fits, fits whichever."""
    size = 1
    standing = [data.draw(st.integers(0, c), label="standing") for c in counts]
    staying = data.draw(st.integers(0, sum(standing)), label="staying")
    report = tuple(
        make_node(f"n{i}", c, members=((1, WORKER_ROLE, s),) if s else ())
        for i, (c, s) in enumerate(zip(counts, standing, strict=True))
    )
    site = Site(DEFAULT_FLAVOR, Capacity(revision=1, nodes=report), names=(SLOT,))
    claim = Claim(job_id=job_id(1), role=WORKER_ROLE, size=slots(size), count=staying)
    members: Members = tuple(((s * MILLI,), n) for s, n in gang)
    if place(site.layout([claim]).room(), members) is None:
        return
    sizes = sorted((s for s, n in gang for _ in range(n)), reverse=True)
    stand = [i for i, s in enumerate(standing) for _ in range(s)]
    for gone in {tuple(sorted(c)) for c in combinations(stand, sum(standing) - staying)}:
        free = [c - s + gone.count(i) for i, (c, s) in enumerate(zip(counts, standing, strict=True))]
        assert _packs(free, sizes), gone


@LAWFUL
@given(nodes, gangs)
def test_what_can_never_be_held_cannot_be_packed(counts: list[int], gang: list[tuple[int, int]]) -> None:
    report = tuple(make_node(f"n{i}", c) for i, c in enumerate(counts))
    site = Site(DEFAULT_FLAVOR, Capacity(revision=1, nodes=report), names=(SLOT,))
    never = can_never_hold(site, [(slots(size), count) for size, count in gang])
    sizes = sorted((size for size, count in gang for _ in range(count)), reverse=True)
    if never:
        assert not _packs(counts, sizes)
    elif len(gang) == 1:
        assert _packs(counts, sizes)


def test_members_that_stand_on_one_node_leave_it() -> None:
    report = (make_node("n0", 4, members=((1, WORKER_ROLE, 3),)), make_node("n1", 1))
    assert report[0].members == (NodeMembers(job_id=job_id(1), role=WORKER_ROLE, members=3),)
    site = Site(DEFAULT_FLAVOR, Capacity(revision=1, nodes=report), names=(SLOT,))
    room = site.layout([Claim(job_id=job_id(1), role=WORKER_ROLE, size=slots(1), count=1)]).room()
    assert room.bins == {(3 * MILLI,): 1, (MILLI,): 1}


def test_another_order_of_the_roles_is_tried() -> None:
    """The largest first fills the smaller node; then the others do not fit."""
    assert place(_room([5, 4]), (((3,), 1), ((2,), 3))) is not None
