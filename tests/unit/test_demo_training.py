"""Pauses between the steps of a job, at both ends of an interval."""

from math import inf

from demo.training import largest_gap
from tidewright.elastic.proof import Step


def steps(*numbers: int) -> list[Step]:
    return [Step(step=n, generation=1, world=1, at=100.0 + n, loss=None) for n in numbers]


def test_gap_reaches_over_both_ends_of_the_interval():
    gap = largest_gap(steps(0, 1, 2, 3), since=100.5, until=101.5)
    assert (gap.seconds, gap.after_step, gap.steps) == (1.0, 0, 1)


def test_gap_is_endless_when_nothing_follows():
    gap = largest_gap(steps(0, 1), since=100.5, until=102.5)
    assert (gap.seconds, gap.after_step, gap.steps) == (inf, 1, 1)
