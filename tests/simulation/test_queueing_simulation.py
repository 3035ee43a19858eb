"""Whole stories of queueing under faults: safe at every commit, and at rest once nothing breaks any more."""

import random
from collections import Counter
from dataclasses import dataclass
from functools import cache

import pytest

from tests.simulation.laws import LawBroken
from tests.simulation.scenario import Story

SEEDS = range(100, 150)


@dataclass(frozen=True)
class Outcome:
    broken: str | None
    counts: Counter[str]


@cache
def outcome_of(seed: int) -> Outcome:
    story = Story(random.Random(seed))
    broken = None
    try:
        story.run()
    except LawBroken as exc:
        trace = "\n  ".join(story.world.trace)
        broken = f"seed {seed} breaks a law: {exc}\nnodes {story.nodes}\n  {trace}"
    return Outcome(broken=broken, counts=Counter(story.world.counts))


@pytest.mark.parametrize("seed", SEEDS)
def test_story_is_safe_and_settles(seed: int) -> None:
    broken = outcome_of(seed).broken
    if broken is not None:
        pytest.fail(broken, pytrace=False)


def test_stories_reach_what_they_are_about() -> None:
    """The faults and the decisions that the laws are about do occur in these seeds."""
    seen = sum((outcome_of(seed).counts for seed in SEEDS), Counter[str]())
    wanted = {
        "ADMITTED_IDLE": 50,
        "ADMITTED_PROMISE": 10,
        "SHRANK_FOR_CLAIMANT": 5,
        "PREEMPTED_FOR_CLAIMANT": 5,
        "PREEMPTED_FOR_SHORTAGE": 3,
        "GAVE_BACK": 3,
        "GREW_REQUESTED": 5,
        "GREW_PROPOSED": 2,
        "START_FAILED": 2,
        "RETRIED": 5,
        "LIMITS_CHANGED": 2,
        "crash": 10,
        "parked": 1,
        "promises": 20,
    }
    assert {name: seen[name] for name, least in wanted.items() if seen[name] < least} == {}, seen
