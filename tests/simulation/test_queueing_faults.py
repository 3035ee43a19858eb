"""Planted faults: each takes one rule of the protocol out of queueing, and a named law has to notice.

A row names the rule, plants the fault, and names the laws that are about it. Stories run from the row's first seed
on until one breaks such a law; other laws, or the code's own assertions, may notice before.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from services.queueing.core import book, cycle, desk, growth, ledger, plan, preemption, values, words
from services.queueing.core.ordering import urgency_order
from services.queueing.core.placement import is_within
from tests.simulation import scenes
from tests.simulation.laws import LawBroken
from tests.simulation.scenario import Story
from tests.simulation.world import World

SEEDS = range(12)
Patch = pytest.MonkeyPatch


@dataclass(frozen=True, kw_only=True)
class Fault:
    """``scene``: leads to what the rule is about; without one, random stories do.

    ``mixed``: whether members have different sizes; None: by chance.
    """

    rule: str
    plant: Callable[[Patch], None]
    laws: tuple[str, ...]
    mixed: bool | None = None
    scene: Callable[[], None] | None = None


def _put(module: Any, name: str, replacement: Callable[..., Any]) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(module, name, replacement)


def _hear_old_room_freed(patch: Patch) -> None:
    heed = words.on_room_freed
    patch.setattr(words, "on_room_freed", lambda w, data: heed(w, replace(data, epoch=w.epoch)))


def _hear_old_start_failed(patch: Patch) -> None:
    heed = words.on_start_failed
    patch.setattr(words, "on_start_failed", lambda w, data, **rest: heed(w, replace(data, epoch=w.epoch), **rest))


def _hear_old_group_ended(patch: Patch) -> None:
    heed = words.on_group_ended
    patch.setattr(words, "on_group_ended", lambda w, data, **rest: heed(w, replace(data, attempt=w.attempt), **rest))


def _end_evictions_at_once(patch: Patch) -> None:
    """The room of an evicted job is free as soon as it is told to go."""
    evict = ledger.evict

    def careless(workload: values.Workload, **rest: Any) -> ledger.Step:
        step = evict(workload, **rest)
        return replace(step, workload=replace(step.workload, held=(0,) * len(workload.roles)))

    patch.setattr(ledger, "evict", careless)


def _lower_charge_by_room_freed_of_an_evicted_job(patch: Patch) -> None:
    heed = words.on_room_freed

    def careless(workload: values.Workload, data: Any) -> ledger.Step:
        if workload.standing is values.Standing.DRAINING:
            return ledger.Step(workload=replace(workload, held=words._per_role(workload, data.held)))
        return heed(workload, data)

    patch.setattr(words, "on_room_freed", careless)


def _promise_what_is_missing(workload: values.Workload) -> tuple[int, ...]:
    return tuple(max(0, n - 1) for n in plan.minimum_of(workload))


def _leave_promises_as_they_were(patch: Patch) -> None:
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


def _ahead_by_urgency_alone(d: desk.Desk, workload: values.Workload, flavor: Any) -> tuple[values.Promise, ...]:
    return tuple(
        p
        for p in d.promises_by_urgency()
        if p.flavor == flavor
        and p.job_id != workload.job_id
        and urgency_order(d.workloads[p.job_id]) < urgency_order(workload)
    )


def _keep_uncovered_promises(patch: Patch) -> None:
    consider = plan.consider

    def careless(d: desk.Desk, workload: values.Workload) -> plan.Fate:
        kept = d.promises.get(workload.job_id)
        fate = consider(d, workload)
        if fate is plan.Fate.VOIDED and kept is not None:
            d.promises[workload.job_id] = kept
            return plan.Fate.WAITS
        return fate

    patch.setattr(plan, "consider", careless)


def _promise_only_victims_room(patch: Patch) -> None:
    promise = plan._promise

    def careless(d: desk.Desk, workload: values.Workload, flavor: Any, taking: preemption.Taking) -> None:
        if taking.victims or workload.job_id in d.promises:
            promise(d, workload, flavor, taking)

    patch.setattr(plan, "_promise", careless)


def _grant_what_is_leaving(patch: Patch) -> None:
    patch.setattr(desk.Desk, "room_now", desk.Desk.room_coming)
    patch.setattr(desk.Desk, "finds_place", lambda self, before, after, flavor: True)


def _count_leaving_in_shortage(d: desk.Desk, flavor: Any, changed: Any) -> bool:
    granted = any(any(w.granted) for w in d.workloads.values())
    return granted and not is_within(d.room_if(flavor, changed, charged=not changed).spare)


def _forget_parked_words(patch: Patch) -> None:
    take = book.Book.take_changes
    patch.setattr(book.Book, "take_changes", lambda self: replace(take(self), parked=()))


def _place_by_sums(patch: Patch) -> None:
    def careless(room: Any, members: Any) -> Any:
        spare = room.spare
        for size, count in members:
            spare = tuple(have - need * count for have, need in zip(spare, size, strict=True))
        return replace(room, spare=spare) if is_within(spare) else None

    for module in (plan, growth, desk):
        patch.setattr(module, "place", careless)
    patch.setattr(desk.Desk, "finds_place", lambda self, before, after, flavor: True)


def _claim_in_a_pause(patch: Patch) -> None:
    patch.setattr(
        values.Workload,
        "claims",
        property(lambda w: w.standing is values.Standing.WAITING and not w.request.held),
    )


def _preempt_equals(patch: Patch) -> None:
    choose = preemption.candidates_for

    def careless(d: desk.Desk, urgency: int, flavor: Any) -> desk.Candidates:
        found = choose(d, urgency + 1, flavor)
        return replace(found, evictable=tuple(w for w in found.evictable if w.urgency <= urgency))

    patch.setattr(plan, "candidates_for", careless)


def _take_more_than_needed(patch: Patch) -> None:
    patch.setattr(preemption, "_spare", lambda taking, is_enough: taking)
    patch.setattr(preemption, "_give_back_one", lambda taking, workload, is_enough: taking)


def _hear_older_requests(patch: Patch) -> None:
    heed = words.on_changed
    patch.setattr(
        words,
        "on_changed",
        lambda w, request: heed(replace(w, request=replace(w.request, version=request.version - 1)), request),
    )


def _forget_the_closed(patch: Patch) -> None:
    patch.setattr(World, "has_closed", lambda self, job_id: False)


def _grow_into_promised_room(patch: Patch) -> None:
    patch.setattr(growth, "promises_before_growth", lambda d, w: ())


def _grow_into_victims_room(patch: Patch) -> None:
    patch.setattr(
        growth,
        "promises_before_growth",
        lambda d, w: tuple(
            p
            for p in d.promises_by_urgency()
            if p.flavor == w.flavor and d.workloads[p.job_id].priority.urgency >= w.priority.urgency
        ),
    )


def _forget_whose_room_it_was(patch: Patch) -> None:
    patch.setattr(
        desk.Desk, "void_promise", lambda self, workload: self.promises.pop(workload.job_id, None) is not None
    )


FAULTS = (
    Fault(
        rule="who overtakes a claimant takes over its victims",
        plant=_forget_whose_room_it_was,
        laws=("room goes to whom it was made for",),
        scene=scenes.claimant_is_overtaken,
    ),
    Fault(
        rule="charge is the larger of granted and held",
        plant=_put(ledger, "charge_of", lambda w: w.granted),
        laws=("charges within capacity",),
    ),
    Fault(
        rule="a shrink or eviction first sets held to what was granted",
        plant=_put(ledger, "held_at_least_granted", lambda w: w.held),
        laws=("live within charge",),
    ),
    Fault(
        rule="a promise is for the whole present minimum",
        plant=_put(plan, "promised_members", _promise_what_is_missing),
        laws=("whole promises",),
    ),
    Fault(
        rule="free room is less the promises to more urgent claimants",
        plant=_put(plan, "promises_ahead", lambda d, w, flavor: ()),
        laws=("promises are covered", "promises are kept"),
    ),
    Fault(
        rule="free room is less the promises that came out of the job itself",
        plant=_put(plan, "promises_ahead", _ahead_by_urgency_alone),
        laws=("room goes to whom it was made for",),
        scene=scenes.own_room_is_promised,
    ),
    Fault(
        rule="a promise that is no longer covered is voided",
        plant=_keep_uncovered_promises,
        laws=("promises are covered",),
    ),
    Fault(
        rule="every plan corrects the sizes of promises first",
        plant=_leave_promises_as_they_were,
        laws=("whole promises",),
        scene=scenes.minimum_is_raised_while_waiting,
    ),
    Fault(
        rule="who is covered has a promise, also when nobody had to be evicted",
        plant=_promise_only_victims_room,
        laws=("who is covered has a promise",),
    ),
    Fault(
        rule="room_freed of an old epoch is ignored",
        plant=_hear_old_room_freed,
        laws=("old epochs are not heard",),
    ),
    Fault(
        rule="start_failed of an old epoch is ignored",
        plant=_hear_old_start_failed,
        laws=("old epochs are not heard",),
        scene=scenes.start_fails_after_a_resize,
    ),
    Fault(
        rule="group_ended of an old attempt is ignored",
        plant=_hear_old_group_ended,
        laws=("live within charge",),
        scene=scenes.end_of_the_first_run_is_told_twice,
    ),
    Fault(rule="group_ended alone ends an eviction", plant=_end_evictions_at_once, laws=("live within charge",)),
    Fault(
        rule="there is no room_freed for an eviction",
        plant=_lower_charge_by_room_freed_of_an_evicted_job,
        laws=("live within charge", "old epochs are not heard"),
        scene=scenes.shrink_is_answered_after_an_eviction,
    ),
    Fault(
        rule="every retry in place is an attempt of its own",
        plant=_put(ledger, "next_attempt", lambda w: w.attempt),
        laws=("every run is an attempt of its own",),
    ),
    Fault(
        rule="a lowered minimum holds at once",
        plant=_put(words, "floor_after", lambda w: w.floor),
        laws=("lowered limits at once",),
    ),
    Fault(
        rule="a lowered maximum holds at once",
        plant=_put(words, "target_after", lambda w, **rest: w.workers),
        laws=("lowered limits at once",),
    ),
    Fault(
        rule="a raised minimum holds from the next admission",
        plant=_put(words, "floor_after", lambda w: w.request.workers_min),
        laws=("charges within capacity", "whole gangs"),
        scene=scenes.minimum_is_raised_while_running,
    ),
    Fault(rule="sums are not placement", plant=_place_by_sums, laws=("placement, not sums",), mixed=True),
    Fault(
        rule="words wait for the capacity revision that they speak of",
        plant=_put(cycle, "is_ahead_of_capacity", lambda b, revision: False),
        laws=("written-off room",),
        scene=scenes.word_before_its_capacity,
    ),
    Fault(
        rule="a waiting word is a row",
        plant=_forget_parked_words,
        laws=("evictions end", "comes to rest"),
        scene=scenes.restart_while_a_word_waits,
    ),
    Fault(
        rule="a shortage counts what is granted, not what is leaving",
        plant=_put(plan, "is_short", _count_leaving_in_shortage),
        laws=("shortage counts what is granted",),
        scene=scenes.node_is_lost_while_a_job_leaves,
    ),
    Fault(
        rule="what is leaving is not granted yet",
        plant=_grant_what_is_leaving,
        laws=("charges within capacity",),
    ),
    Fault(
        rule="a back-off claims nothing",
        plant=_claim_in_a_pause,
        laws=("back-off claims nothing", "claimants claim"),
        scene=scenes.start_fails_and_there_is_room,
    ),
    Fault(
        rule="only lower classes are preempted",
        plant=_preempt_equals,
        laws=("victims are less urgent", "comes to rest"),
    ),
    Fault(
        rule="no victim is redundant",
        plant=_take_more_than_needed,
        laws=("no redundant victim",),
        scene=scenes.one_worker_is_needed,
    ),
    Fault(
        rule="growth yields to promises",
        plant=_grow_into_promised_room,
        laws=("promises are covered", "promises are kept"),
        scene=scenes.proposal_while_somebody_waits,
    ),
    Fault(
        rule="a victim's room goes to its claimant",
        plant=_grow_into_victims_room,
        laws=("promises are kept",),
        scene=scenes.running_job_of_a_higher_class_wants_more,
    ),
    Fault(
        rule="the request register with the highest version wins",
        plant=_hear_older_requests,
        laws=("the highest version wins",),
        scene=scenes.old_request_comes_again,
    ),
    Fault(
        rule="late words about a closed job change nothing",
        plant=_forget_the_closed,
        laws=("one outcome",),
        scene=scenes.ended_job_is_submitted_once_more,
    ),
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.rule.replace(" ", "-"))
def test_a_law_notices_the_fault(fault: Fault, monkeypatch: Patch) -> None:
    stories = [fault.scene] if fault.scene else [partial(_tell, seed, fault.mixed) for seed in SEEDS]
    noticed = []
    for story in stories:
        assert _is_fine(story)
        with monkeypatch.context() as patch:
            fault.plant(patch)
            noticed.append(_first_broken(story))
        if noticed[-1] in fault.laws:
            return
    pytest.fail(f"nobody noticed: {fault.rule}; {noticed}")


def _tell(seed: int, mixed: bool | None) -> None:
    Story(random.Random(seed), mixed=mixed).run()


_FINE: set[str] = set()


def _is_fine(story: Callable[[], None]) -> bool:
    """Without the fault the story breaks nothing; told once for all rows."""
    name = repr((story.func, story.args)) if isinstance(story, partial) else repr(story)
    if name not in _FINE:
        story()
        _FINE.add(name)
    return True


def _first_broken(story: Callable[[], None]) -> str | None:
    try:
        story()
    except LawBroken as broken:
        return broken.law
    except (AssertionError, KeyError) as broken:
        return f"{type(broken).__name__} in the code itself"
    return None
