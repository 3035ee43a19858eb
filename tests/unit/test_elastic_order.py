"""Which samples a step uses: laws of the plan, at any size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewright.elastic.data import make_plan, to_source
from tidewright.elastic.errors import ElasticError


@given(
    samples=st.integers(1, 40),
    global_batch=st.integers(1, 12),
    worlds=st.lists(st.integers(1, 6), min_size=1, max_size=40),
    seed=st.integers(0, 3),
    shuffle=st.booleans(),
)
def test_each_sample_once_an_epoch_at_any_size(
    samples: int, global_batch: int, worlds: list[int], seed: int, shuffle: bool
) -> None:
    plan = make_plan(samples, global_batch=global_batch, epochs=2, seed=seed, shuffle=shuffle)
    used: list[list[int]] = [[], []]
    for step in range(plan.total_steps):
        batch = plan.batch(step, plan.order(plan.epoch_of(step)))
        assert 1 <= len(batch) <= global_batch
        for part in np.array_split(batch, worlds[step % len(worlds)]):
            used[plan.epoch_of(step)].extend(part.tolist())
    assert [sorted(ids) for ids in used] == [list(range(samples))] * 2
    if not shuffle:
        assert used[0] == list(range(samples))


def test_the_order_is_that_of_every_version() -> None:
    """Ledgers and checkpoints of earlier versions count on it."""
    plan = make_plan(8, global_batch=3, epochs=3, seed=7, shuffle=True)
    assert [plan.order(epoch).tolist() for epoch in range(2)] == GOLDEN


GOLDEN = [[1, 7, 5, 6, 4, 3, 2, 0], [6, 7, 2, 3, 5, 0, 1, 4]]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"global_batch": 0}, "global_batch must be a whole number of at least 1, got 0"),
        ({"global_batch": 2.5}, "global_batch must be a whole number of at least 1, got 2.5"),
        ({"global_batch": True}, "global_batch must be"),
        ({"epochs": 0}, "epochs must be"),
        ({"seed": -1}, "seed must be"),
    ],
)
def test_arguments_that_cannot_work_are_named(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(ElasticError, match=text):
        make_plan(5, **{"global_batch": 1, "epochs": 1, "seed": 0, "shuffle": True, **arguments})


def test_datasets() -> None:
    class Pairs:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
            return np.full(2, index), index * 10

    count, fetch = to_source((np.arange(6).reshape(3, 2), [7, 8, 9]))
    assert count == 3
    assert [part.tolist() for part in fetch(np.array([2, 0]))] == [[[4, 5], [0, 1]], [9, 7]]
    count, fetch = to_source(Pairs())
    assert count == 4
    assert [part.tolist() for part in fetch(np.array([3, 1]))] == [[[3, 3], [1, 1]], [30, 10]]
    count, fetch = to_source(np.arange(3))
    assert [part.tolist() for part in fetch(np.array([1]))] == [[1]]


@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        ((np.zeros(3), np.zeros(4)), "differ in length"),
        (iter([1, 2]), "must be arrays"),
        ((np.float64(3),), "one entry a sample"),
    ],
)
def test_datasets_that_cannot_work_are_named(dataset: object, text: str) -> None:
    with pytest.raises(ElasticError, match=text):
        to_source(dataset)
