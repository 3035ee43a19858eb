"""Laws of ``plan`` over drawn states: ties, elastic ranges, several classes, several nodes and fixed roles meet."""

from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas.events.capacity import CapacityObserved, Node, NodeMembers
from schemas.vocabulary import CLUSTER_KEY, DEFAULT_FLAVOR, DEFAULT_TENANT, DecisionCode, JobId, PriorityClass
from services.queueing.core import ledger
from services.queueing.core.book import Book
from services.queueing.core.cycle import apply_word, settle
from services.queueing.core.plan import plan
from services.queueing.core.values import Evict, Grant, Plan, Resize, Standing, View, Workload
from tests.simulation import laws
from tests.simulation.builders import job_id, make_node, make_submitted, make_workload
from tests.simulation.laws import RULES, Books, Commit

LAWFUL = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
REASON = ledger.to_reason(DecisionCode.ADMITTED_IDLE, "before")
CLASSES = (PriorityClass.CRITICAL, PriorityClass.HIGH, PriorityClass.LOW)


@st.composite
def workloads(draw: st.DrawFn, number: int, *, slots_max: int = 1) -> Workload:
    low = draw(st.integers(1, 3))
    high = low + draw(st.integers(0, 2))
    submitted = make_submitted(
        priority=draw(st.sampled_from(CLASSES)),
        workers_min=low,
        workers_max=high,
        workers=draw(st.integers(low, high)),
        slots_each=draw(st.integers(1, slots_max)),
        servers=draw(st.sampled_from((0, 0, 1))),
        server_slots=draw(st.integers(1, slots_max)),
    )
    return make_workload(number, submitted)


@st.composite
def books(draw: st.DrawFn, *, slots_max: int = 1) -> Book:
    """A cluster, jobs that run, shrink or leave there, and jobs that wait; charges within capacity."""
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    free = list(counts)
    standing: list[dict[tuple[JobId, str], int]] = [{} for _ in counts]
    book = Book()
    for number in range(draw(st.integers(1, 5))):
        w = draw(workloads(number, slots_max=slots_max))
        if draw(st.booleans()):
            w = _run(draw, w, number, free, standing)
        book.put(w)
    nodes = tuple(_node(i, counts[i], standing[i]) for i in range(len(counts)))
    _hear(book, CapacityObserved(revision=2, nodes=nodes))
    book.take_changes()
    return book


def _run(
    draw: st.DrawFn, w: Workload, number: int, free: list[int], standing: list[dict[tuple[JobId, str], int]]
) -> Workload:
    """Granted some size if its members find places, then perhaps shrunk or told to go; else it waits."""
    workers = draw(st.integers(w.request.workers_min, w.request.workers_max))
    members = tuple(workers if role.elastic else role.count for role in w.roles)
    left, places = list(free), [dict(one) for one in standing]
    for role, count in zip(w.roles, members, strict=True):
        size = laws.size(w, [1 if r is role else 0 for r in w.roles])
        for _ in range(count):
            fitting = [i for i, f in enumerate(left) if f >= size]
            if not fitting:
                return w
            node = draw(st.sampled_from(fitting))
            left[node] -= size
            places[node][w.job_id, role.name] = places[node].get((w.job_id, role.name), 0) + 1
    free[:], standing[:] = left, places
    w = ledger.grant(w, workers=workers, flavor=DEFAULT_FLAVOR, order=number + 1, revision=1, reason=REASON).workload
    what = draw(st.sampled_from(("runs", "runs", "shrinks", "goes")))
    if what == "shrinks" and workers > w.floor:
        return ledger.resize(w, workers=w.floor, reason=REASON).workload
    return ledger.evict(w, reason=REASON, requeue=True).workload if what == "goes" else w


def _node(index: int, count: int, standing: dict[tuple[JobId, str], int]) -> Node:
    members = tuple(NodeMembers(job_id=j, role=role, members=n) for (j, role), n in sorted(standing.items()))
    return replace(make_node(f"n{index}", count), members=members)


def _hear(book: Book, report: CapacityObserved) -> None:
    apply_word(book, JobId(CLUSTER_KEY), DEFAULT_TENANT, report, now=0.0, rules=RULES)


def _state(book: Book) -> Books:
    return Books(workloads=dict(book.workloads), promises=dict(book.promises), capacity=book.capacity)


def _settle(book: Book) -> Commit:
    before = _state(book)
    drafts, _ = settle(book, now=0.0, rules=RULES)
    return Commit(before=before, after=_state(book), events=[(JobId(d.key), d.data) for d in drafts])


def _fates(decided: Plan) -> dict[JobId, object]:
    """What happens to each job, without the words for it."""
    return {d.job_id: (type(d), None if isinstance(d, Evict) else d.workers) for d in decided.decisions}


@LAWFUL
@given(books())
def test_every_law_of_the_ledger_holds(book: Book) -> None:
    laws.check_commit(_settle(book))


@LAWFUL
@given(books(slots_max=2))
def test_laws_hold_for_members_of_different_sizes(book: Book) -> None:
    laws.check_commit(_settle(book))
    assert book.capacity is not None
    free, sizes = [], []
    for node in book.capacity.nodes:
        there = [(book.workloads[m.job_id], m) for m in node.members]
        taken = sum(m.members * laws.size_of_role(w, m.role) for w, m in there if any(ledger.charge_of(w)))
        free.append(laws.slots_of(node.allocatable) - taken)
    for w in book.workloads.values():
        if w.granted_at_revision >= book.capacity.revision:
            for role, count in zip(w.roles, w.granted, strict=True):
                sizes += [laws.slots_of(role.resources)] * count
    assert laws.packs(free, sizes), "everybody who was granted something finds a place"


@LAWFUL
@given(books(slots_max=2), st.randoms(use_true_random=False))
def test_input_order_does_not_matter(book: Book, rng: st.DataObject) -> None:
    view = book.view(RULES)
    assert view.capacity is not None

    def shuffled(items: tuple) -> tuple:  # type: ignore[type-arg]
        return tuple(rng.sample(items, len(items)))

    other = View(
        capacity=replace(view.capacity, nodes=shuffled(view.capacity.nodes)),
        active=shuffled(view.active),
        lines=shuffled(view.lines),
        claimants=shuffled(view.claimants),
        promises=shuffled(view.promises),
        rules=view.rules,
    )
    assert plan(other, 0.0) == plan(view, 0.0)


@LAWFUL
@given(books(slots_max=2))
def test_planning_again_changes_nothing_even_if_nobody_answers(book: Book) -> None:
    _settle(book)
    for now in (0.0, 1.0, 1_000.0):
        again = plan(book.view(RULES), now)
        assert again.decisions == ()
        assert {p.job_id: p for p in again.promises} == book.promises


@LAWFUL
@given(books(slots_max=2), st.data())
def test_a_less_urgent_arrival_changes_nothing_for_the_more_urgent(book: Book, data: st.DataObject) -> None:
    arrival = data.draw(workloads(9, slots_max=2))
    before = _fates(plan(book.view(RULES), 0.0))
    more_urgent = [w for w in book.workloads.values() if w.priority.urgency > arrival.priority.urgency]
    starts = [
        j
        for j, fate in before.items()
        if book.workloads[j].standing is Standing.WAITING and book.workloads[j].priority is arrival.priority
    ]
    book.put(arrival)
    after = _fates(plan(book.view(RULES), 0.0))
    for w in more_urgent:
        assert after.get(w.job_id) == before.get(w.job_id), w
    for j in starts:
        assert after.get(j, (None,))[0] is Grant, "an equal that came earlier starts as before"


@LAWFUL
@given(books())
def test_whoever_is_evicted_is_of_a_lower_class_than_somebody_promised(book: Book) -> None:
    decided = plan(book.view(RULES), 0.0)
    for decision in decided.decisions:
        if isinstance(decision, Evict):
            victim = book.workloads[decision.job_id]
            claimants = [book.workloads[p.job_id] for p in decided.promises if decision.job_id in p.origins]
            assert any(w.priority.urgency > victim.priority.urgency for w in claimants)


@LAWFUL
@given(books(), st.integers(1, 4))
def test_once_the_room_is_free_the_claimant_starts(book: Book, need: int) -> None:
    """Everybody who was told to goes, and is held so that nobody comes back for the room.

    Whoever had victims starts; room that came by itself may go to the growth of a higher class.
    """
    book.put(make_workload(8, make_submitted(priority=PriorityClass.CRITICAL, workers_min=need)))
    _settle(book)
    promised = [p.job_id for p in book.promises.values() if p.origins]
    for w in tuple(book.workloads.values()):
        if w.standing is Standing.DRAINING:
            freed = ledger.requeue(w).workload
            book.put(replace(freed, request=replace(freed.request, held=True)))
        elif any(h > g for g, h in zip(w.granted, w.held, strict=True)):
            book.put(replace(w, held=w.granted))
    _settle(book)
    for j in promised:
        assert book.workloads[j].standing is Standing.RUNNING, "its room is free and it waits"


@LAWFUL
@given(books())
def test_nobody_grows_beyond_what_is_wanted_or_allowed(book: Book) -> None:
    decided = plan(book.view(RULES), 0.0)
    for decision in decided.decisions:
        if isinstance(decision, Grant | Resize):
            w = book.workloads[decision.job_id]
            assert decision.workers <= max(
                w.workers, min(max(w.wanted, w.request.workers_min), w.request.workers_max)
            )


def test_ids_sort_by_number() -> None:
    assert sorted([job_id(10), job_id(9)]) == [job_id(9), job_id(10)]
