"""Deaths at exact moments of a step and of a change of groups; the result must be that of an undisturbed run."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.elastic_bed import ZygoteBed, is_alive, wait_until
from tests.integration.elastic_coordinator import ElasticBed, largest_difference
from tests.integration.elastic_moments import BREAK, DIE, GO, PAUSE, put_hooks
from tidewright import protocol
from tidewright.elastic.proof import Training

EPOCHS = 8
STEPS = 7 * EPOCHS


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZygoteBed]:
    bed = ZygoteBed(tmp_path_factory.mktemp("moments"))
    bed.start()
    yield bed
    bed.stop()


@pytest.fixture
def bed(zygote: ZygoteBed, tmp_path: Path) -> Iterator[ElasticBed]:
    bed = ElasticBed.make(zygote, tmp_path)
    put_hooks(bed.script)
    yield bed
    bed.close()


def is_idle(bed: ElasticBed, name: str) -> bool:
    mark = bed.coordinator.peers[name].mark
    return mark is not None and (mark.waiting or mark.generation == 0)


def is_dead(bed: ElasticBed, name: str) -> bool:
    return not is_alive(bed.members[name].worker_pid)


def mend(bed: ElasticBed, *names: str) -> None:
    """What execution does with a cut group: call the offer off, then offer again, from the most advanced."""
    c = bed.coordinator
    for name in names:
        c.tell(name, protocol.Abort(generation=c.generation))
    wait_until(lambda: all(is_idle(bed, name) for name in names), 10, f"{names} wait")
    c.resize(names, source=c.most_advanced(names))


def check(bed: ElasticBed) -> Training:
    training = bed.applied_once(samples=97, steps_per_epoch=7, total_steps=STEPS)
    alone = bed.alone(epochs=EPOCHS)
    results = bed.results()
    assert results
    assert all(largest_difference(result, alone) < 1e-12 for result in results)
    return training


@pytest.mark.parametrize("moment", ["begun", "sum", "stepped", "applied"])
def test_rank_0_dies_in_a_step(bed: ElasticBed, moment: str) -> None:
    """Before its all-reduce, between that and the optimizer, between that and the record, and after it."""
    bed.start("a", epochs=EPOCHS, moments={DIE: f"{moment} 1 9"})
    bed.start("b", epochs=EPOCHS)
    bed.coordinator.offer(["a", "b"], source=-1)
    wait_until(lambda: is_dead(bed, "a"), what="a dies")
    mend(bed, "b")
    bed.finish("b")
    training = check(bed)
    assert training.steps[8].generation == (2 if moment == "begun" else 1)
    assert training.repeated == 0


@pytest.mark.parametrize(
    "moment",
    [
        *("take 2 1", "max 2 1", "broadcast 2 1", "broadcast 2 2", "broadcast 2 3", "adopted 2 1"),
        *("begun 2 1", "sum 2 1", "stepped 2 1", "applied 2 1", "sum 2 2", "applied 2 2"),
    ],
)
def test_rank_0_dies_while_it_hands_over(bed: ElasticBed, moment: str) -> None:
    """a is the source of the state; b has it too, the newcomer has nothing, part of it, or all of it."""
    c = bed.coordinator
    bed.start("a", epochs=EPOCHS, moments={DIE: moment})
    bed.start("b", epochs=EPOCHS)
    c.resize(["a", "b"], source=-1)
    bed.start("n", epochs=EPOCHS, seed=99)
    c.offer(["a", "b", "n"])
    wait_until(lambda: is_dead(bed, "a"), what="a dies")
    mend(bed, "b", "n")
    bed.finish("b", "n")
    check(bed)


@pytest.mark.parametrize("moment", ["max 2 1", "broadcast 2 3", "adopted 2 1", "sum 2 1", "applied 2 1"])
def test_a_newcomer_dies_before_its_second_all_reduce(bed: ElasticBed, moment: str) -> None:
    """The old group goes on without anybody's help."""
    c = bed.coordinator
    bed.start("a", "b", epochs=EPOCHS)
    c.resize(["a", "b"], source=-1)
    bed.start("n", epochs=EPOCHS, moments={DIE: moment})
    c.offer(["a", "b", "n"])
    wait_until(lambda: is_dead(bed, "n"), what="n dies")
    bed.finish("a", "b")
    assert "waiting" not in bed.kinds("a") + bed.kinds("b")
    check(bed)


def test_a_newcomer_dies_after_its_second_all_reduce(bed: ElasticBed) -> None:
    """The others have let go of the old group: they hold their state."""
    c = bed.coordinator
    bed.start("a", "b", epochs=EPOCHS)
    c.resize(["a", "b"], source=-1)
    bed.start("n", epochs=EPOCHS, moments={DIE: "sum 2 2"})
    c.offer(["a", "b", "n"])
    wait_until(lambda: is_dead(bed, "n"), what="n dies")
    mend(bed, "a", "b")
    bed.finish("a", "b")
    check(bed)


@pytest.mark.parametrize("number", [1, 9])
def test_a_step_is_applied_by_some_and_not_by_others(bed: ElasticBed, number: int) -> None:
    """Also the first one of all, when nobody can know yet that the group has started."""
    c = bed.coordinator
    bed.start("a", "c", epochs=EPOCHS)
    bed.start("b", epochs=EPOCHS, moments={BREAK: f"sum 1 {number}"})
    c.connected("a", "b", "c")
    c.offer(["a", "b", "c"], source=-1)
    c.waiting(["a", "b", "c"])
    assert [c.step(name) for name in "abc"] == [number, number - 1, number]
    mend(bed, "b", "a", "c")
    bed.finish("a", "b", "c")
    training = check(bed)
    assert training.steps[number - 1].generation == 1
    assert training.repeated == 0


def test_some_have_the_first_step_of_a_new_group_and_the_old_one_goes_on(bed: ElasticBed) -> None:
    """a raises, b and n do not: in the old group a gets from b the step that the new one has applied."""
    c = bed.coordinator
    bed.start("a", epochs=EPOCHS, moments={BREAK: "sum 2 1"})
    bed.start("b", epochs=EPOCHS)
    c.resize(["a", "b"], source=-1)
    bed.start("n", epochs=EPOCHS)
    c.offer(["a", "b", "n"])
    wait_until(lambda: "fell_back" in bed.kinds("a") and "fell_back" in bed.kinds("b"))
    c.tell("n", protocol.Stop(grace_seconds=5, reason="not needed"))
    bed.finish("a", "b", "n")
    assert "waiting" not in bed.kinds("a") + bed.kinds("b")
    training = check(bed)
    assert training.repeated == 0
    assert [s.step for s in training.steps if s.generation == 2] == [
        e["step"] - 1 for e in bed.members["a"].ledger() if e["k"] == "fell_back"
    ]


@pytest.mark.parametrize(
    ("victim", "moment", "left"),
    [
        ("c", "asking 1 1", "ab"),  # the leaver, as it begins to wait for the others: they change without it
        ("c", "sum 1 12", "ab"),  # the leaver, in a step in which the others may just have agreed to change
        ("b", "take 2 1", "a"),  # one who stays, as the change is agreed
        ("b", "sum 2 1", "a"),  # one who stays, in the new group's first step
        ("a", "take 2 1", "b"),
        ("a", "sum 2 1", "b"),
    ],
)
def test_a_leaver_and_a_death_in_the_same_step(bed: ElasticBed, victim: str, moment: str, left: str) -> None:
    c = bed.coordinator
    for name in "abc":
        bed.start(name, epochs=EPOCHS, moments={DIE: moment} if name == victim else {})
    c.resize(["a", "b", "c"], source=-1)
    number = c.offer(["a", "b"], leavers=["c"])
    wait_until(lambda: is_dead(bed, victim), what=f"{victim} dies")
    if victim == "c":
        wait_until(
            lambda: (
                all(c.peers[name].said(protocol.Started, number) for name in left)
                or all(is_idle(bed, name) for name in left)
            ),
            what="they change, or hold their state",
        )
    if victim != "c" or is_idle(bed, "a"):
        mend(bed, *left)
    bed.finish(*left)
    check(bed)


@pytest.mark.parametrize("moment", ["take 2 1", "adopted 2 1", "applied 2 1", "begun 2 2"])
def test_all_who_stay_die_before_a_leaver_is_told_to_go(bed: ElasticBed, moment: str) -> None:
    """It is the last one that holds the state. A checkpoint has some of it at most."""
    c = bed.coordinator
    bed.start("a", epochs=EPOCHS, moments={DIE: moment})
    bed.start("b", epochs=EPOCHS)
    c.resize(["a", "b"], source=-1)
    c.offer(["a"], leavers=["b"])
    wait_until(lambda: is_dead(bed, "a"), what="a dies")
    mend(bed, "b")
    bed.finish("b")
    check(bed)


def test_another_leaver_dies_and_the_one_that_is_left_ends_when_it_is_told(bed: ElasticBed) -> None:
    """c cannot know whether the others have changed or died: it holds its state until execution has seen it."""
    c = bed.coordinator
    bed.start("a", epochs=EPOCHS, moments={PAUSE: "adopted 2 1"})
    bed.start("b", epochs=EPOCHS, moments={DIE: "asking 1 1"})
    bed.start("c", epochs=EPOCHS)
    c.resize("abc", source=-1)
    c.offer("a", leavers="bc")
    c.waiting("c")
    (bed.base / GO).touch()
    c.started("a")
    c.tell("c", protocol.Stop(grace_seconds=5, reason="it is not granted any more"))
    bed.finish("a", "c")
    check(bed)


def test_an_offer_in_the_first_step_of_a_group_waits_until_it_has_started(bed: ElasticBed) -> None:
    """b leaves for c, and d comes before that change is proven. Else the group that b waits in was forgotten."""
    c = bed.coordinator
    bed.start("a", "c", epochs=EPOCHS, moments={PAUSE: "begun 2 1"})
    bed.start("b", epochs=EPOCHS)
    c.resize("ab", source=-1)
    bed.start("d", epochs=EPOCHS)
    first = c.offer("ac", leavers="b")
    wait_until(lambda: all(bed.members[name].ledger()[-1]["generation"] == first for name in "ac"))
    second = c.offer("acd")
    wait_until(lambda: all(c.peers[name].said(protocol.Formed, second) for name in "acd"))
    (bed.base / GO).touch()
    c.started("acd", second)
    bed.finish_quietly("b")
    assert c.peers["a"].said(protocol.Started, first)
    bed.finish(*"acd")
    check(bed)
