"""Faults that can be planted in queueing: each takes one rule of the protocol out of it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from services.queueing.core import book, desk, growth, ledger, plan, preemption, values, words
from services.queueing.core.ordering import urgency_order
from services.queueing.core.placement import is_within
from tests.simulation.world import World

Patch = pytest.MonkeyPatch


def put(module: Any, name: str, replacement: Callable[..., Any]) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(module, name, replacement)


def hear_old_room_freed(patch: Patch) -> None:
    heed = words.on_room_freed
    patch.setattr(words, "on_room_freed", lambda w, data: heed(w, replace(data, epoch=w.epoch)))


def hear_old_start_failed(patch: Patch) -> None:
    heed = words.on_start_failed
    patch.setattr(words, "on_start_failed", lambda w, data, **rest: heed(w, replace(data, epoch=w.epoch), **rest))


def hear_old_group_ended(patch: Patch) -> None:
    heed = words.on_group_ended
    patch.setattr(words, "on_group_ended", lambda w, data, **rest: heed(w, replace(data, attempt=w.attempt), **rest))


def end_evictions_at_once(patch: Patch) -> None:
    """The room of an evicted job is free as soon as it is told to go."""
    evict = ledger.evict

    def careless(workload: values.Workload, **rest: Any) -> ledger.Step:
        step = evict(workload, **rest)
        return replace(step, workload=replace(step.workload, held=(0,) * len(workload.roles)))

    patch.setattr(ledger, "evict", careless)


def lower_charge_by_room_freed_of_an_evicted_job(patch: Patch) -> None:
    heed = words.on_room_freed

    def careless(workload: values.Workload, data: Any) -> ledger.Step:
        if workload.standing is values.Standing.DRAINING:
            return ledger.Step(workload=replace(workload, held=words._per_role(workload, data.held)))
        return heed(workload, data)

    patch.setattr(words, "on_room_freed", careless)


def promise_what_is_missing(workload: values.Workload) -> tuple[int, ...]:
    return tuple(max(0, n - 1) for n in plan.minimum_of(workload))


def leave_promises_as_they_were(patch: Patch) -> None:
    promise, correct = plan._promise, plan.correct_promises

    def keep_all(d: desk.Desk) -> None:
        sizes = {job_id: p.members for job_id, p in d.promises.items()}
        correct(d)
        for job_id, p in d.promises.items():
            d.promises[job_id] = replace(p, members=sizes[job_id])

    def keep_one(d: desk.Desk, workload: values.Workload, flavor: Any, taking: preemption.Taking) -> None:
        known = d.promises.get(workload.job_id)
        promise(d, workload, flavor, taking)
        if known is not None:
            made = d.promises[workload.job_id]
            d.promises[workload.job_id] = replace(made, members=known.members)

    patch.setattr(plan, "correct_promises", keep_all)
    patch.setattr(plan, "_promise", keep_one)


def ahead_by_urgency_alone(d: desk.Desk, workload: values.Workload, flavor: Any) -> tuple[values.Promise, ...]:
    return tuple(
        p
        for p in d.promises_by_urgency()
        if p.flavor == flavor
        and p.job_id != workload.job_id
        and urgency_order(d.workloads[p.job_id]) < urgency_order(workload)
    )


def keep_uncovered_promises(patch: Patch) -> None:
    consider = plan.consider

    def careless(d: desk.Desk, workload: values.Workload) -> plan.Fate:
        kept = d.promises.get(workload.job_id)
        fate = consider(d, workload)
        if fate is plan.Fate.VOIDED and kept is not None:
            d.promises[workload.job_id] = kept
            return plan.Fate.WAITS
        return fate

    patch.setattr(plan, "consider", careless)


def promise_only_victims_room(patch: Patch) -> None:
    promise = plan._promise

    def careless(d: desk.Desk, workload: values.Workload, flavor: Any, taking: preemption.Taking) -> None:
        if taking.victims or workload.job_id in d.promises:
            promise(d, workload, flavor, taking)

    patch.setattr(plan, "_promise", careless)


def grant_what_is_leaving(patch: Patch) -> None:
    patch.setattr(desk.Desk, "room_now", desk.Desk.room_coming)
    patch.setattr(desk.Desk, "finds_place", lambda self, before, after, flavor: True)


def count_leaving_in_shortage(d: desk.Desk, flavor: Any, changed: Any) -> bool:
    granted = any(any(w.granted) for w in d.workloads.values())
    return granted and not is_within(d.room_if(flavor, changed, charged=not changed).spare)


def forget_parked_words(patch: Patch) -> None:
    take = book.Book.take_changes
    patch.setattr(book.Book, "take_changes", lambda self: replace(take(self), parked=()))


def place_by_sums(patch: Patch) -> None:
    def careless(room: Any, members: Any) -> Any:
        spare = room.spare
        for size, count in members:
            spare = tuple(have - need * count for have, need in zip(spare, size, strict=True))
        return replace(room, spare=spare) if is_within(spare) else None

    for module in (plan, growth, desk):
        patch.setattr(module, "place", careless)
    patch.setattr(desk.Desk, "finds_place", lambda self, before, after, flavor: True)


def claim_in_a_pause(patch: Patch) -> None:
    patch.setattr(
        values.Workload,
        "claims",
        property(lambda w: w.standing is values.Standing.WAITING and not w.request.held),
    )


def preempt_equals(patch: Patch) -> None:
    choose = preemption.candidates_for

    def careless(d: desk.Desk, urgency: int, flavor: Any) -> desk.Candidates:
        found = choose(d, urgency + 1, flavor)
        return replace(found, evictable=tuple(w for w in found.evictable if w.urgency <= urgency))

    patch.setattr(plan, "candidates_for", careless)


def take_more_than_needed(patch: Patch) -> None:
    patch.setattr(preemption, "_spare", lambda taking, is_enough: taking)
    patch.setattr(preemption, "_give_back_one", lambda taking, workload, is_enough: taking)


def hear_older_requests(patch: Patch) -> None:
    heed = words.on_changed
    patch.setattr(
        words,
        "on_changed",
        lambda w, request: heed(replace(w, request=replace(w.request, version=request.version - 1)), request),
    )


def forget_the_closed(patch: Patch) -> None:
    patch.setattr(World, "has_closed", lambda self, job_id: False)


def grow_into_promised_room(patch: Patch) -> None:
    patch.setattr(growth, "promises_before_growth", lambda d, w: ())


def grow_into_victims_room(patch: Patch) -> None:
    patch.setattr(
        growth,
        "promises_before_growth",
        lambda d, w: tuple(
            p
            for p in d.promises_by_urgency()
            if p.flavor == w.flavor and d.workloads[p.job_id].priority.urgency >= w.priority.urgency
        ),
    )


def forget_whose_room_it_was(patch: Patch) -> None:
    patch.setattr(
        desk.Desk, "void_promise", lambda self, workload: self.promises.pop(workload.job_id, None) is not None
    )


def leave_a_line_at_the_first_without_room(patch: Patch) -> None:
    patch.setattr(
        plan,
        "next_in_line",
        lambda d, line, place, fate: len(line) if fate is plan.Fate.WAITS else place + 1,
    )


def remember_every_failure(patch: Patch) -> None:
    consider = plan.Considered.consider

    def careless(self: plan.Considered, d: desk.Desk, workload: values.Workload) -> plan.Fate:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(plan, "_made_room", lambda d, w: False)
            return consider(self, d, workload)

    patch.setattr(plan.Considered, "consider", careless)


def begin_with_the_least_urgent_class(patch: Patch) -> None:
    lines = plan._lines_by_class
    patch.setattr(plan, "_lines_by_class", lambda view: lines(view)[::-1])


def evict_for_each_claimant_alone(patch: Patch) -> None:
    patch.setattr(plan, "spare_victims", lambda d, urgency: None)
