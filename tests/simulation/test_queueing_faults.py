"""Planted faults: each takes one rule of the protocol out of queueing, and a named law has to notice.

A row names the rule, plants the fault, and names the laws that are about it. Stories run from the row's first seed
on until one breaks such a law; other laws, or the code's own assertions, may notice before.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest

from services.queueing.core import cycle, ledger, plan, words
from tests.simulation import plants, scenes
from tests.simulation.laws import LawBroken
from tests.simulation.scenario import Story

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


FAULTS = (
    Fault(
        rule="classes are strict, the most urgent first",
        plant=plants.begin_with_the_least_urgent_class,
        laws=("nobody is overtaken", "work conservation"),
    ),
    Fault(
        rule="victims that another claimant made redundant are spared",
        plant=plants.evict_for_each_claimant_alone,
        laws=("no redundant victim",),
        scene=scenes.two_claimants_come_at_once,
    ),
    Fault(
        rule="a promise behind one that gets nothing is looked at again",
        plant=plants.leave_a_line_at_the_first_without_room,
        laws=("promises are covered",),
        scene=scenes.two_of_a_line_lose_their_promise,
    ),
    Fault(
        rule="who waits for its own room holds up none of its line",
        plant=plants.leave_a_line_at_the_first_without_room,
        laws=("work conservation",),
        scene=scenes.equal_stands_behind_a_victim,
    ),
    Fault(
        rule="what fails for its own room fails for nobody else",
        plant=plants.remember_every_failure,
        laws=("work conservation",),
        scene=scenes.equal_stands_behind_a_victim,
    ),
    Fault(
        rule="who overtakes a claimant takes over its victims",
        plant=plants.forget_whose_room_it_was,
        laws=("room goes to whom it was made for",),
        scene=scenes.claimant_is_overtaken,
    ),
    Fault(
        rule="charge is the larger of granted and held",
        plant=plants.put(ledger, "charge_of", lambda w: w.granted),
        laws=("charges within capacity",),
    ),
    Fault(
        rule="a shrink or eviction first sets held to what was granted",
        plant=plants.put(ledger, "held_at_least_granted", lambda w: w.held),
        laws=("live within charge",),
    ),
    Fault(
        rule="a promise is for the whole present minimum",
        plant=plants.put(plan, "promised_members", plants.promise_what_is_missing),
        laws=("whole promises",),
    ),
    Fault(
        rule="free room is less the promises to more urgent claimants",
        plant=plants.put(plan, "promises_ahead", lambda d, w, flavor: ()),
        laws=("promises are covered", "promises are kept"),
    ),
    Fault(
        rule="free room is less the promises that came out of the job itself",
        plant=plants.put(plan, "promises_ahead", plants.ahead_by_urgency_alone),
        laws=("room goes to whom it was made for",),
        scene=scenes.own_room_is_promised,
    ),
    Fault(
        rule="a promise that is no longer covered is voided",
        plant=plants.keep_uncovered_promises,
        laws=("promises are covered",),
    ),
    Fault(
        rule="every plan corrects the sizes of promises first",
        plant=plants.leave_promises_as_they_were,
        laws=("whole promises",),
        scene=scenes.minimum_is_raised_while_waiting,
    ),
    Fault(
        rule="who is covered has a promise, also when nobody had to be evicted",
        plant=plants.promise_only_victims_room,
        laws=("who is covered has a promise",),
    ),
    Fault(
        rule="room_freed of an old epoch is ignored",
        plant=plants.hear_old_room_freed,
        laws=("old epochs are not heard",),
    ),
    Fault(
        rule="start_failed of an old epoch is ignored",
        plant=plants.hear_old_start_failed,
        laws=("old epochs are not heard",),
        scene=scenes.start_fails_after_a_resize,
    ),
    Fault(
        rule="group_ended of an old attempt is ignored",
        plant=plants.hear_old_group_ended,
        laws=("live within charge",),
        scene=scenes.end_of_the_first_run_is_told_twice,
    ),
    Fault(
        rule="group_ended alone ends an eviction", plant=plants.end_evictions_at_once, laws=("live within charge",)
    ),
    Fault(
        rule="there is no room_freed for an eviction",
        plant=plants.lower_charge_by_room_freed_of_an_evicted_job,
        laws=("live within charge", "old epochs are not heard"),
        scene=scenes.shrink_is_answered_after_an_eviction,
    ),
    Fault(
        rule="every retry in place is an attempt of its own",
        plant=plants.put(ledger, "next_attempt", lambda w: w.attempt),
        laws=("every run is an attempt of its own",),
    ),
    Fault(
        rule="a lowered minimum holds at once",
        plant=plants.put(words, "floor_after", lambda w: w.floor),
        laws=("lowered limits at once",),
    ),
    Fault(
        rule="a lowered maximum holds at once",
        plant=plants.put(words, "target_after", lambda w, **rest: w.workers),
        laws=("lowered limits at once",),
    ),
    Fault(
        rule="a raised minimum holds from the next admission",
        plant=plants.put(words, "floor_after", lambda w: w.request.workers_min),
        laws=("charges within capacity", "whole gangs"),
        scene=scenes.minimum_is_raised_while_running,
    ),
    Fault(rule="sums are not placement", plant=plants.place_by_sums, laws=("placement, not sums",), mixed=True),
    Fault(
        rule="words wait for the capacity revision that they speak of",
        plant=plants.put(cycle, "is_ahead_of_capacity", lambda b, revision: False),
        laws=("written-off room",),
        scene=scenes.word_before_its_capacity,
    ),
    Fault(
        rule="a waiting word is a row",
        plant=plants.forget_parked_words,
        laws=("evictions end", "comes to rest"),
        scene=scenes.restart_while_a_word_waits,
    ),
    Fault(
        rule="a shortage counts what is granted, not what is leaving",
        plant=plants.put(plan, "is_short", plants.count_leaving_in_shortage),
        laws=("shortage counts what is granted",),
        scene=scenes.node_is_lost_while_a_job_leaves,
    ),
    Fault(
        rule="what is leaving is not granted yet",
        plant=plants.grant_what_is_leaving,
        laws=("charges within capacity",),
    ),
    Fault(
        rule="a back-off claims nothing",
        plant=plants.claim_in_a_pause,
        laws=("back-off claims nothing", "claimants claim"),
        scene=scenes.start_fails_and_there_is_room,
    ),
    Fault(
        rule="only lower classes are preempted",
        plant=plants.preempt_equals,
        laws=("victims are less urgent", "comes to rest"),
    ),
    Fault(
        rule="no victim is redundant",
        plant=plants.take_more_than_needed,
        laws=("no redundant victim",),
        scene=scenes.one_worker_is_needed,
    ),
    Fault(
        rule="growth yields to promises",
        plant=plants.grow_into_promised_room,
        laws=("promises are covered", "promises are kept"),
        scene=scenes.proposal_while_somebody_waits,
    ),
    Fault(
        rule="a victim's room goes to its claimant",
        plant=plants.grow_into_victims_room,
        laws=("promises are kept",),
        scene=scenes.running_job_of_a_higher_class_wants_more,
    ),
    Fault(
        rule="the request register with the highest version wins",
        plant=plants.hear_older_requests,
        laws=("the highest version wins",),
        scene=scenes.old_request_comes_again,
    ),
    Fault(
        rule="late words about a closed job change nothing",
        plant=plants.forget_the_closed,
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
