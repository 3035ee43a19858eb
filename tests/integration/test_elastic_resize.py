"""Live resizing on real processes: the result, the samples, and what members say."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.elastic_bed import ZygoteBed, wait_until
from tests.integration.elastic_coordinator import ElasticBed, largest_difference
from tidewright import protocol


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZygoteBed]:
    bed = ZygoteBed(tmp_path_factory.mktemp("elastic"))
    bed.start()
    yield bed
    bed.stop()


@pytest.fixture
def bed(zygote: ZygoteBed, tmp_path: Path) -> Iterator[ElasticBed]:
    bed = ElasticBed.make(zygote, tmp_path)
    yield bed
    bed.close()


def test_1_2_4_2_equals_an_undisturbed_run(bed: ElasticBed) -> None:
    c = bed.coordinator
    bed.start("a", epochs=40)
    c.resize(["a"], source=-1)
    bed.start("b", epochs=40, seed=99)  # its own first weights must not matter
    c.resize(["a", "b"])
    pids = [bed.members[name].worker_pid for name in "ab"]
    bed.start("c", "d", epochs=40)
    c.resize(["a", "b", "c", "d"])
    c.resize(["a", "b"], leavers=["c", "d"])
    wait_until((bed.members["c"].directory / "exit.json").exists)
    bed.finish("c", "d")
    assert bed.kinds("c")[-1] == "left"
    assert c.peers["c"].said(protocol.Left)
    left_at = bed.members["c"].ledger()[-1]["t"]
    adopted_at = next(e["t"] for e in bed.entries() if e["k"] == "adopted" and e["generation"] == 4)
    assert left_at - adopted_at < 1.5, "leavers exit when the new group has started, not when training ends"
    bed.finish("a", "b")
    assert [bed.members[name].worker_pid for name in "ab"] == pids
    entries = bed.entries()
    assert {e["world"] for e in entries if e["k"] == "applied"} == {1, 2, 4}
    bed.applied_once(samples=97, steps_per_epoch=7, total_steps=280)
    alone = bed.alone(epochs=40)
    for result in bed.results():
        assert largest_difference(result, alone) < 1e-12
    assert c.peers["a"].said(protocol.Finished) == protocol.Finished(generation=4, step=280)
    pauses = [c.peers["a"].said(protocol.Started, g).pause_seconds for g in (1, 2, 3, 4)]
    assert pauses[0] == 0
    assert all(0 < pause < 2 for pause in pauses[1:])


def test_a_batch_smaller_than_the_group(bed: ElasticBed) -> None:
    c = bed.coordinator
    names = ["a", "b", "c"]
    options = {"epochs": 4, "samples": 13, "batch": 6}  # the last batch of an epoch has one sample
    bed.start(*names, **options)
    c.resize(names, source=-1)
    bed.finish(*names)
    bed.applied_once(samples=13, steps_per_epoch=3, total_steps=12)
    alone = bed.alone(**options)
    assert all(largest_difference(result, alone) < 1e-12 for result in bed.results())


def test_who_joins_after_the_last_step_runs_none(bed: ElasticBed) -> None:
    c = bed.coordinator
    bed.start("a", epochs=2, evaluate=2)
    c.resize(["a"], source=-1)
    wait_until(lambda: c.peers["a"].said(protocol.Finished))
    bed.start("b", epochs=2)
    number = c.offer(["a", "b"])
    wait_until(lambda: c.peers["a"].said(protocol.FormFailed, number))
    assert c.peers["a"].said(protocol.FormFailed, number).reason == "the training is complete"
    wait_until(lambda: c.peers["a"].mark.phase == "evaluating")
    c.tell("b", protocol.Stop(grace_seconds=5, reason="complete"))
    bed.finish("a", "b")
    assert "begun" not in bed.kinds("b")


def test_the_end_is_repeated_after_every_hello(bed: ElasticBed) -> None:
    c = bed.coordinator
    bed.start("a", epochs=1, evaluate=2)
    c.resize(["a"], source=-1)
    wait_until(lambda: c.peers["a"].said(protocol.Finished))
    c.down()
    c.peers["a"].words.clear()
    c.up()
    wait_until(lambda: c.peers["a"].said(protocol.Finished))
    assert c.peers["a"].said(protocol.Started)
    bed.finish("a")


def test_evaluation_by_rank_0_outlives_its_peers(bed: ElasticBed) -> None:
    c = bed.coordinator
    bed.start("a", "b", epochs=2, evaluate=1.5)
    c.resize(["a", "b"], source=-1)
    bed.finish("b")
    assert "finished" in bed.kinds("a")
    assert not (bed.members["a"].directory / "exit.json").exists()
    bed.finish("a")


def test_stop_is_agreed_and_the_lowest_rank_keeps_the_state(bed: ElasticBed) -> None:
    c = bed.coordinator
    bed.start("a", "b", epochs=40)
    c.resize(["a", "b"], source=-1)
    c.tell("b", protocol.Stop(grace_seconds=5, reason="evicted"))
    bed.finish("a", "b")
    stopped = [e for e in bed.entries() if e["k"] == "stopped"]
    assert len({e["step"] for e in stopped}) == 1
    assert len(stopped) == 2
    assert [path.name for path in (bed.base / "checkpoints").glob("g*")] == [f"g1-s{stopped[0]['step']}"]
    assert bed.results() == []
    # a new attempt goes on from it and ends as if nothing had happened
    bed.start("x", "y", "z", epochs=40)
    c.resize(["x", "y", "z"], source=-1, checkpoint=str(bed.base / "checkpoints" / f"g1-s{stopped[0]['step']}"))
    word = c.peers["y"].said(protocol.Started)
    assert (word.resumed_generation, word.resumed_step) == (1, stopped[0]["step"])
    bed.finish("x", "y", "z")
    bed.applied_once(samples=97, steps_per_epoch=7, total_steps=280)
    alone = bed.alone(epochs=40)
    assert all(largest_difference(result, alone) < 1e-12 for result in bed.results())


@pytest.mark.parametrize("round_", range(5))
def test_nobody_is_left_behind_in_the_last_step(bed: ElasticBed, round_: int) -> None:
    """Who ended at once after its last all-reduce cut that of a slower peer, which then waited for ever."""
    names = ["a", "b", "c", "d"]
    (bed.base / "hurry").touch()
    bed.start(*names, epochs=1)
    bed.coordinator.offer(names, source=-1)
    bed.finish(*names)
    assert all("finished" in bed.kinds(name) for name in names)


def test_workers_of_an_interpreter_of_their_own_are_elastic_too(bed: ElasticBed) -> None:
    """As on machines with GPUs, where nothing may be imported before a fork. They end as any interpreter does."""
    c = bed.coordinator
    bed.start("b", "c", epochs=60, interpreter=sys.executable)
    bed.start("a", epochs=60)
    c.resize(["a"], source=-1)
    c.resize(["a", "b"])
    c.resize(["b", "c"], leavers=["a"])
    bed.finish("a", "b", "c")
    bed.applied_once(samples=97, steps_per_epoch=7, total_steps=420)
