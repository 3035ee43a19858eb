"""The length of the first job: measured, and long enough for the story on any machine."""

import pytest

from demo.pace import EPOCHS_MAX, EPOCHS_MIN, plan_epochs, samples_per_second
from demo.record import Entry


def ledger(*seconds: float) -> list[Entry]:
    """Steps of 100 samples by one worker that took so long each."""
    entries, at = [], 0.0
    for step, took in enumerate(seconds):
        where = {"member": "worker-0-1", "step": step, "generation": 1, "rank": 0, "world": 1, "pid": 7}
        at += took
        entries.append(Entry(kind="begun", at=at - took / 2, ids=tuple(range(100)), **where))
        entries.append(Entry(kind="applied", at=at, **where))
    return entries


def test_rate_is_that_of_the_usual_step():
    warm_up, hiccup = [3.0] * 5, [4.0]
    assert samples_per_second(ledger(*warm_up, *[0.1] * 10, *hiccup)) == pytest.approx(1000)


@pytest.mark.parametrize("steps", [0, 1, 6])
def test_too_few_steps_say_nothing(steps):
    assert samples_per_second(ledger(*[0.1] * steps)) == 0.0


def test_faster_machines_train_longer():
    slow, fast = (plan_epochs(samples_per_second=rate, cores=2) for rate in (800, 1600))
    assert fast == pytest.approx(2 * slow, abs=1)


def test_more_cores_train_longer_until_every_worker_has_one():
    epochs = [plan_epochs(samples_per_second=1000, cores=cores) for cores in (1, 2, 4, 8, 16, 64)]
    assert epochs == sorted(epochs)
    assert epochs[0] < epochs[1] < epochs[2]
    assert epochs[-1] == epochs[-2]


def test_length_stays_within_what_the_accuracy_and_the_time_allow():
    assert plan_epochs(samples_per_second=0, cores=2) == EPOCHS_MIN
    assert plan_epochs(samples_per_second=1e6, cores=64) == EPOCHS_MAX
