"""Laws of intake's core: registers against repeats and order, the phase, quantities, texts, changes."""

from datetime import timedelta
from decimal import Decimal
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.api.jobs import PatchJob
from schemas.vocabulary import (
    AttemptOutcome,
    GroupChangeCause,
    JobPhase,
    Mode,
    Outcome,
)
from services.intake.core.batches import Created, Holder, KeyReused, Repeated, answer_to, split_by_key
from services.intake.core.changes import Changed, Unchanged, plan_cancel, plan_patch
from services.intake.core.fit import never_fits
from services.intake.core.phase import phase_of
from services.intake.core.quantities import AMOUNT_MAX, BadQuantity, Unit, parse_quantity, say_amount
from services.intake.core.readmodel import Registers, filed_under, fold_batch, fold_event
from services.intake.core.validation import Accepted
from tests.unit.intake_builders import (
    NOW,
    closed,
    event,
    evicted,
    granted,
    group_changed,
    group_ended,
    group_started,
    make_capacity,
    make_judgement,
    make_record,
    make_request,
    resized,
    waiting,
)


def law(*strategies):
    """Few examples from small ranges: the unit and property tests have 10 s together."""
    return lambda test: settings(max_examples=30, deadline=None)(given(*strategies)(test))


SMALL = st.integers(1, 3)
ALLOCATIONS = st.one_of(
    st.builds(granted, epoch=SMALL, attempt=SMALL, workers=SMALL),
    st.builds(resized, epoch=SMALL, attempt=SMALL, before=SMALL, after=SMALL),
    st.builds(evicted, epoch=SMALL, attempt=SMALL),
    st.builds(closed, epoch=st.integers(0, 3), attempt=SMALL, outcome=st.sampled_from(Outcome)),
    st.builds(waiting),
)
WORKERS = st.one_of(
    st.builds(group_started, epoch=SMALL, attempt=SMALL, generation=SMALL, workers=SMALL),
    st.builds(
        group_changed,
        epoch=SMALL,
        attempt=SMALL,
        generation=SMALL,
        workers=SMALL,
        cause=st.sampled_from(GroupChangeCause),
    ),
    st.builds(group_ended, attempt=SMALL, outcome=st.sampled_from(AttemptOutcome)),
)
REQUESTS = st.builds(make_request, held=st.booleans(), cancelled=st.booleans())


def numbered(data):
    return [event(item, xid=number) for number, item in enumerate(data, start=1)]


def folded(events, registers=None):
    registers = registers or Registers()
    for item in events:
        registers = fold_event(registers, item)
    return registers


TOLD = st.lists(st.one_of(ALLOCATIONS, WORKERS), max_size=12)


@law(TOLD, REQUESTS)
def test_the_phase_is_total_and_terminal_exactly_when_closed(told, request):
    """Also for registers that only delayed topics can show."""
    registers = folded(numbered(told))
    standing = phase_of(request, registers.grant, registers.group)
    is_closed = any(type(data).__name__ == "AllocationClosed" for data in told)
    assert standing.phase.is_terminal is is_closed
    assert (standing.phase is JobPhase.HELD) <= request.held
    assert (standing.phase is JobPhase.QUEUED) <= (not request.held)
    assert list(standing.flags) == sorted(set(standing.flags), key=standing.flags.index)
    assert not (standing.phase.is_terminal and standing.flags)


@law(TOLD, st.lists(st.one_of(ALLOCATIONS, WORKERS), max_size=5), REQUESTS, REQUESTS)
def test_a_terminal_phase_is_never_left(told, more, request, later):
    registers = folded(numbered([*told, closed()]))
    before = phase_of(request, registers.grant, registers.group)
    after = folded(numbered(more), registers)
    assert phase_of(later, after.grant, after.group).phase is before.phase
    assert after.grant == registers.grant


@law(TOLD, st.data())
def test_what_was_folded_changes_nothing_when_it_comes_again(told, data):
    """Any earlier part, in its order, as a carrier that sends again gives it."""
    events = numbered(told)
    registers = folded(events)
    first = data.draw(st.integers(0, len(events)))
    last = data.draw(st.integers(first, len(events)))
    again = events[first:last]
    assert folded(again, registers).grant == registers.grant
    assert folded(again, registers).waiting == registers.waiting


WORKER_STORY = st.lists(st.tuples(st.booleans(), SMALL, st.booleans()), min_size=1, max_size=4)


@law(WORKER_STORY, st.data())
def test_repeats_of_a_group_s_life_change_nothing(story, data):
    """A life as execution tells it: per attempt perhaps started, changed some times, then ended."""
    told, generation = [], 0
    for attempt, (starts, changes, _) in enumerate(story, start=1):
        if starts:
            generation += 1
            told.append(group_started(attempt=attempt, generation=generation, epoch=attempt))
            for _ in range(changes):
                generation += 1
                told.append(group_changed(attempt=attempt, generation=generation, epoch=attempt))
        told.append(group_ended(attempt=attempt))
    events = numbered(told)
    cut = data.draw(st.integers(0, len(events)))
    registers = folded(events[:cut])
    start = data.draw(st.integers(0, cut))
    end = data.draw(st.integers(start, cut))
    assert folded(events[start:end], registers) == registers


@law(st.lists(ALLOCATIONS, max_size=8), st.lists(WORKERS, max_size=8), st.randoms(use_true_random=False))
def test_topics_have_no_order_among_each_other(allocations, workers, random):
    """Any interleaving of two topics gives the same registers."""
    allocation_events, worker_events = numbered(allocations), numbered(workers)
    expected = folded([*allocation_events, *worker_events])
    left, right, mixed = list(allocation_events), list(worker_events), []
    while left or right:
        source = left if left and (not right or random.random() < 0.5) else right
        mixed.append(source.pop(0))
    assert folded(mixed) == expected


@law(TOLD, st.integers(0, 12))
def test_cutting_a_batch_in_two_gives_the_same(told, cut):
    events = numbered(told)
    whole = fold_batch({}, events)
    first = fold_batch({}, events[:cut])
    second = fold_batch(dict(first.jobs), events[cut:])
    assert dict(second.jobs or first.jobs) == dict(whole.jobs)
    assert first.history + second.history == whole.history
    assert len(first.endings) + len(second.endings) == len(whole.endings) <= 1


@law(TOLD, REQUESTS)
def test_lists_file_a_job_under_its_phase(told, request):
    registers = folded(numbered(told))
    phase = phase_of(request, registers.grant, registers.group).phase
    filed = filed_under(registers)
    assert filed is (JobPhase.QUEUED if phase is JobPhase.HELD else phase)


@law(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 4)), max_size=8))
def test_usage_is_the_area_under_what_was_granted(steps):
    now, events, area, held = NOW, [], 0, 0
    for epoch, (seconds, workers) in enumerate(steps, start=1):
        area += seconds * held
        now += timedelta(seconds=seconds)
        data = granted(epoch=epoch, workers=workers) if workers else evicted(epoch=epoch)
        held = workers
        events.append(event(data, xid=epoch, at=now))
    usage = folded(events).grant.usage
    assert usage.accelerator_seconds(now) == area
    assert usage.accelerator_seconds(now + timedelta(seconds=2)) == area + 2 * held


DIGITS = st.integers(0, 10**9)
SUFFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "e3": 1000}


@law(DIGITS, st.integers(0, 999_999), st.sampled_from(sorted(SUFFIXES)), st.sampled_from(Unit))
def test_quantities_are_exact(whole, part, suffix, unit):
    text = f"{whole}.{part:06d}{suffix}"
    exact = (Fraction(whole) + Fraction(part, 10**6)) * SUFFIXES[suffix] * unit.per_whole
    parsed = parse_quantity(text, unit=unit)
    if exact.denominator == 1 and 0 < exact <= AMOUNT_MAX:
        assert parsed == exact
    else:
        assert isinstance(parsed, BadQuantity)


@law(st.decimals(min_value=0, max_value=10_000, places=3))
def test_numbers_mean_the_decimal_that_was_written(value):
    parsed = parse_quantity(float(value), unit=Unit.MILLI_UNITS)
    assert isinstance(parsed, BadQuantity) if value <= 0 else parsed == int(value * 1000)


@law(st.one_of(st.text(max_size=12), st.floats(), st.integers()), st.sampled_from(Unit))
def test_whatever_is_written_is_an_amount_or_a_reason(value, unit):
    parsed = parse_quantity(value, unit=unit)
    assert isinstance(parsed, BadQuantity) or 0 < parsed <= AMOUNT_MAX


@law(st.integers(1, 2**45))
def test_what_is_said_of_bytes_can_be_read_again(amount):
    said = say_amount("memory", amount, unit=Unit.BYTES).split(" ")[0]
    assert parse_quantity(said, unit=Unit.BYTES) == amount
    milli = say_amount("cpu", amount, unit=Unit.MILLI_UNITS).split(" ")[0]
    assert Decimal(milli) * 1000 == amount


SIZES = st.integers(1, 5)


@law(
    st.one_of(st.none(), SIZES),
    st.one_of(st.none(), SIZES),
    st.one_of(st.none(), SIZES),
    st.one_of(st.none(), st.sampled_from(Mode)),
)
def test_an_accepted_size_is_consistent(low, high, wished, mode):
    fields = {"workers_min": low, "workers_max": high, "workers": wished, "mode": mode}
    judgement = make_judgement(script="/t.py", **{name: value for name, value in fields.items() if value is not None})
    if isinstance(judgement, Accepted):
        request = judgement.submitted.request
        assert 1 <= request.workers_min <= request.workers <= request.workers_max
        assert low in (None, request.workers_min)
        assert high in (None, request.workers_max)
        assert wished in (None, request.workers)
        assert judgement.submitted.spec.mode is not Mode.FIXED or request.workers_min == request.workers_max
    else:
        assert all(error.field and error.way_out for error in judgement.errors)


PATCHES = st.builds(
    lambda fields: PatchJob.model_validate_json(
        PatchJob.model_construct(**fields).model_dump_json(exclude_unset=True)
    ),
    st.fixed_dictionaries(
        {},
        optional={"workers_min": SIZES, "workers_max": SIZES, "workers": SIZES, "held": st.booleans()},
    ),
)


@law(st.tuples(SIZES, SIZES, SIZES).map(sorted), PATCHES, st.sampled_from(Mode))
def test_a_change_keeps_the_register_consistent_and_raises_its_version(sizes, patch, mode):
    low, wished, high = sizes
    request = make_request(workers_min=low, workers=wished, workers_max=high, version=7)
    change = plan_patch(request, patch, phase=JobPhase.QUEUED, mode=mode)
    if isinstance(change, Changed):
        after = change.request
        assert after.version == 8
        assert after.workers_min <= after.workers <= after.workers_max
        again = plan_patch(after, patch, phase=JobPhase.QUEUED, mode=mode)
        assert isinstance(again, Unchanged), "a change that was made is made"
        assert mode is not Mode.FIXED or (after.workers_min, after.workers_max) == (low, high)


@law(REQUESTS, st.sampled_from(JobPhase))
def test_cancel_once_is_cancelled(request, phase):
    change = plan_cancel(request, phase=phase)
    if isinstance(change, Changed):
        assert change.request.cancelled
        assert isinstance(plan_cancel(change.request, phase=phase), Unchanged)


KEYS = st.lists(st.tuples(st.one_of(st.none(), st.sampled_from("ab")), st.sampled_from([b"1", b"2"])), max_size=8)


@law(KEYS, st.booleans())
def test_one_key_one_job_inside_a_batch(keys, is_taken):
    class Item:
        def __init__(self, number, key, body):
            self.job_id, self.tenant, self.key = f"j{number}", "t", key
            self.body_hash = None if key is None else body

    batch = [Item(number, key, body) for number, (key, body) in enumerate(keys)]
    split = split_by_key(batch)
    assert sorted(map(id, split.leaders + split.followers)) == sorted(map(id, batch))
    holders = {
        (item.tenant, item.key): Holder(body_hash=item.body_hash, job_id=item.job_id) for item in split.leaders
    }
    if is_taken:
        holders[("t", "a")] = Holder(body_hash=b"1", job_id="before")
    answers = [answer_to(item, holders) for item in batch]
    for item, answer in zip(batch, answers, strict=True):
        holder = holders.get((item.tenant, item.key))
        match answer:
            case Created():
                assert item in split.leaders
            case Repeated(job_id=job_id):
                assert job_id == holder.job_id != item.job_id
                assert holder.body_hash == item.body_hash
            case KeyReused():
                assert holder.body_hash != item.body_hash
    created = [item.key for item, answer in zip(batch, answers, strict=True) if answer == Created() and item.key]
    assert len(created) == len(set(created))


@law(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 8))
def test_only_what_can_never_start_is_refused(nodes, per_worker, workers):
    record = make_record(workers_min=workers, resources={"accelerators": per_worker})
    verdict = never_fits(record.roles, record.request, make_capacity(*nodes))
    holds = sum(slots // per_worker for slots in nodes)
    assert (verdict is not None) == (holds < workers)
