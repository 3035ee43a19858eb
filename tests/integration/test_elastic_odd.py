"""Odd numbers and odd moments: small batches, empty parts, newcomers in the last step, random numbers."""

import importlib.metadata
import json
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.elastic_bed import ZygoteBed, wait_until
from tests.integration.elastic_coordinator import ElasticBed, largest_difference
from tests.integration.elastic_moments import BREAK, DIE, GO, PAUSE, put_hooks
from tidewright import protocol


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZygoteBed]:
    bed = ZygoteBed(tmp_path_factory.mktemp("odd"))
    bed.start()
    yield bed
    bed.stop()


@pytest.fixture
def bed(zygote: ZygoteBed, tmp_path: Path) -> Iterator[ElasticBed]:
    bed = ElasticBed.make(zygote, tmp_path)
    put_hooks(bed.script)
    yield bed
    bed.close()


def check_results(bed: ElasticBed, **options: float) -> None:
    alone = bed.alone(**options)
    results = bed.results()
    assert results
    assert all(largest_difference(result, alone) < 1e-12 for result in results)


@pytest.mark.parametrize(
    ("samples", "batch", "steps_per_epoch"),
    [
        (3, 16, 1),  # fewer samples than workers: one part is empty in every step
        (1, 1, 1),  # one sample: all parts but one are empty
        (13, 2, 7),  # a world larger than the batch, and a last batch of one
        (21, 16, 2),  # parts of 4, then a last batch of five: parts of 2, 1, 1, 1
    ],
)
def test_small_numbers(bed: ElasticBed, samples: int, batch: int, steps_per_epoch: int) -> None:
    """1 → 4 → 3 → 2 workers, some of whose parts are empty: weights and every loss are those of one worker."""
    c = bed.coordinator
    options = {"epochs": 84 // steps_per_epoch, "samples": samples, "batch": batch}
    bed.start("a", **options)
    c.resize(["a"], source=-1)
    bed.start("b", "c", "d", seed=99, **options)
    c.resize("abcd")
    c.resize("bcd", leavers="a")
    bed.finish_quietly("a")  # who dies while it is being told would keep it: what then is for execution to say
    os.kill(bed.members["c"].worker_pid, signal.SIGKILL)
    c.waiting("bd")
    c.resize("bd", source=c.most_advanced("bd"))
    bed.finish(*"bd")
    training = bed.applied_once(samples=samples, steps_per_epoch=steps_per_epoch, total_steps=84)
    assert {step.world for step in training.steps} == {1, 2, 3, 4}
    check_results(bed, **options)
    lines = (bed.base / "alone" / "run" / "ledger.jsonl").read_text().splitlines()
    losses = [line["loss"] for line in map(json.loads, lines) if line["k"] == "applied"]
    for step, loss in zip(training.steps, losses, strict=True):
        assert step.loss is not None
        assert math.isclose(step.loss, loss, rel_tol=1e-11), step


def comes_to(bed: ElasticBed, name: str, step: int) -> None:
    """It has begun that step, where it pauses."""
    wait_until(lambda: "begun" in bed.kinds(name) and bed.members[name].ledger()[-1]["step"] == step)


@pytest.mark.parametrize("index", [27, 13, 14])
def test_a_newcomer_in_the_last_step(bed: ElasticBed, index: int) -> None:
    """Of training, of a data epoch, and in the first of the next: the change is agreed on in that very step."""
    c = bed.coordinator
    bed.start("a", epochs=4, moments={PAUSE: f"begun 1 {index + 1}"})
    c.resize(["a"], source=-1)
    bed.start("b", epochs=4, seed=99)
    comes_to(bed, "a", index)
    number = c.offer(["a", "b"])
    wait_until(lambda: all(c.peers[name].said(protocol.Formed, number) for name in "ab"))
    (bed.base / GO).touch()
    bed.finish("a", "b")
    training = bed.applied_once(samples=97, steps_per_epoch=7, total_steps=28)
    assert [e["step"] for e in bed.members["b"].ledger() if e["k"] == "adopted"] == [index + 1]
    assert [step.generation for step in training.steps] == [1] * (index + 1) + [number] * (27 - index)
    assert bed.kinds("b")[-1] == "finished"
    check_results(bed, epochs=4)
    assert len(bed.results()) == 2


def test_a_newcomer_dies_in_the_last_step(bed: ElasticBed) -> None:
    """There is no second all-reduce to prove that everyone has the first; whoever is left ends with it."""
    c = bed.coordinator
    bed.start("a", epochs=4, moments={PAUSE: "begun 1 27"})
    c.resize(["a"], source=-1)
    bed.start("n", epochs=4, moments={DIE: "asking 2 2"})
    comes_to(bed, "a", 26)
    number = c.offer(["a", "n"])
    wait_until(lambda: all(c.peers[name].said(protocol.Formed, number) for name in "an"))
    (bed.base / GO).touch()
    bed.finish("a")
    training = bed.applied_once(samples=97, steps_per_epoch=7, total_steps=28)
    assert training.steps[-1].generation == number
    check_results(bed, epochs=4)


@pytest.mark.parametrize("step", [0, 1])
def test_an_offer_in_the_first_steps(bed: ElasticBed, step: int) -> None:
    """The first group starts before it changes, so that it can be returned to."""
    c = bed.coordinator
    bed.start("a", "b", epochs=4, moments={PAUSE: f"begun 1 {step + 1}"})
    c.offer(["a", "b"], source=-1)
    for name in "ab":
        comes_to(bed, name, step)
    bed.start("n", epochs=4, seed=99)
    number = c.offer(["a", "b", "n"])
    wait_until(lambda: all(c.peers[name].said(protocol.Formed, number) for name in "abn"))
    (bed.base / GO).touch()
    c.started("abn", number)
    assert c.peers["a"].said(protocol.Started, 1)
    bed.finish("a", "b", "n")
    bed.applied_once(samples=97, steps_per_epoch=7, total_steps=28)
    check_results(bed, epochs=4)


@pytest.mark.skipif(
    any(d.name == "paddlepaddle-gpu" and d.version.startswith("2.6") for d in importlib.metadata.distributions()),
    reason="Paddle 2.6 does not tell how far a CPU's generator has come: all draw alike, but not as one alone",
)
def test_random_numbers_schedule_and_order_go_along(bed: ElasticBed) -> None:
    """Every step adds random numbers, the same in each worker: all must draw as one undisturbed worker does.

    Newcomers have other seeds; a step comes again after it has drawn its numbers, in a group that falls back and in
    one that is cut; and the one that drew from the beginning leaves.
    """
    c = bed.coordinator
    options = {"epochs": 12, "noise": 0.3}
    bed.start("a", **options)
    c.resize(["a"], source=-1)
    bed.start("n", seed=98, moments={BREAK: "sum 2 1"}, **options)
    c.offer(["a", "n"])
    wait_until(lambda: "fell_back" in bed.kinds("a"))
    c.tell("n", protocol.Stop(grace_seconds=5, reason="not needed"))
    bed.finish_quietly("n")
    bed.start("b", "c", seed=99, **options)
    c.resize("abc")
    os.kill(bed.members["b"].worker_pid, signal.SIGKILL)
    c.waiting("ac")
    c.resize("ca", source=c.most_advanced("ca"))
    c.resize("c", leavers="a")
    bed.finish("a", "c")
    bed.applied_once(samples=97, steps_per_epoch=7, total_steps=84)
    begun = [(e["step"], e["pid"]) for e in bed.entries() if e["k"] == "begun"]
    assert max(begun.count(entry) for entry in begun) > 1, "no step was done again"
    check_results(bed, **options)
