"""Real trainers that are killed, stopped and overtaken while they write their checkpoints, and full disks."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.integration.elastic_bed import ZygoteBed, wait_until
from tests.integration.elastic_coordinator import SCRIPT, ElasticBed, largest_difference
from tidewright import protocol
from tidewright.elastic import shelf
from tidewright.elastic.checkpoint import load_first

paddle = pytest.importorskip("paddle")
from tidewright.elastic.keeper import Keeper  # noqa: E402
from tidewright.elastic.ledger import Ledger  # noqa: E402
from tidewright.elastic.standing import Identity, Standing  # noqa: E402
from tidewright.elastic.tracked import Tracked  # noqa: E402

LARGE = SCRIPT.replace("nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5)", "nn.Linear(12, 20000), nn.Linear(20000, 5)")


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZygoteBed]:
    bed = ZygoteBed(tmp_path_factory.mktemp("writers"))
    bed.start()
    yield bed
    bed.stop()


@pytest.fixture
def bed(zygote: ZygoteBed, tmp_path: Path) -> Iterator[ElasticBed]:
    """A state of 8 MB that is written all the time."""
    bed = ElasticBed.make(zygote, tmp_path, checkpoint_every_steps=1)
    bed.script.write_text(LARGE)
    yield bed
    bed.close()


def found(bed: ElasticBed) -> list[Path]:
    return shelf.found_in(bed.base / "checkpoints")


def hidden(bed: ElasticBed, generation: int) -> list[str]:
    return [path.name for path in (bed.base / "checkpoints").glob(f".g{generation}-s*")]


def step_of(folder: Path) -> int:
    number = shelf.parse_name(folder.name)
    assert number is not None
    return number[1]


def go_on(bed: ElasticBed, name: str) -> protocol.Started:
    """A new process takes over from what is there, as execution would offer it."""
    bed.start(name, epochs=5000, delay=0)
    names = [path.name for path in found(bed)]
    first = str(bed.base / "checkpoints" / names[0]) if names else ""
    bed.coordinator.resize([name], source=-1, checkpoint=first, older=tuple(names[1:]))
    return bed.coordinator.peers[name].said(protocol.Started)


def test_whenever_a_writer_is_killed_the_next_one_goes_on_from_the_newest_at_once(bed: ElasticBed) -> None:
    rng = random.Random(4)
    newest: Path | None = None
    for round_ in range(1, 7):
        started = go_on(bed, f"x{round_}")
        assert started.skipped == ()
        assert started.resumed_step == (step_of(newest) if newest is not None else 0)
        wait_until(lambda number=round_: not hidden(bed, number - 1), what="what the killed one left is cleared")
        wait_until(lambda number=round_: len([f for f in found(bed) if f.name.startswith(f"g{number}-")]) >= 2)
        wait_until(lambda number=round_: hidden(bed, number))
        time.sleep(rng.random() * 0.05)
        os.kill(bed.members[f"x{round_}"].worker_pid, signal.SIGKILL)
        bed.members[f"x{round_}"].gone()
        newest = found(bed)[0]
        assert load_first(found(bed), skipped=pytest.fail).step == step_of(newest)


def test_a_group_that_was_cut_off_adds_nothing_to_the_line_of_the_one_that_took_over(bed: ElasticBed) -> None:
    go_on(bed, "old")
    wait_until(lambda: len(found(bed)) == shelf.KEEP)
    pid = bed.members["old"].worker_pid

    def stopped_in_a_write() -> bool:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.02)
        if hidden(bed, 1):
            return True
        os.kill(pid, signal.SIGCONT)
        return False

    wait_until(stopped_in_a_write)
    before = {path.name for path in found(bed)}
    bed.coordinator.welcome = replace(bed.coordinator.welcome, checkpoint_every_steps=100_000)
    started = go_on(bed, "young")
    assert started.resumed_step == max(int(name.partition("-s")[2]) for name in before)
    bed.coordinator.peers["old"].words.clear()
    os.kill(pid, signal.SIGCONT)
    failed = wait_until(lambda: bed.coordinator.peers["old"].said(protocol.CheckpointFailed))
    assert failed.reason == "generation 2 has started, this is of generation 1"
    step = bed.coordinator.step("old")
    wait_until(lambda: bed.coordinator.step("old") > step + 5, what="it goes on stepping, that is accepted")
    assert {path.name for path in found(bed) if path.name.startswith("g1-")} <= before
    assert wait_until(lambda: not hidden(bed, 1))
    os.kill(pid, signal.SIGKILL)
    bed.coordinator.tell("young", protocol.Stop(grace_seconds=5, reason="enough"))
    bed.finish_quietly("young")
    assert load_first(found(bed), skipped=pytest.fail).generation == 2


def test_a_group_that_finds_no_whole_one_says_so_and_ends_nobody(bed: ElasticBed) -> None:
    """The one who loads tells why, the others that the group is off; all of them are there for the next offer."""
    c = bed.coordinator
    go_on(bed, "old")
    wait_until(lambda: len(found(bed)) >= 2)
    os.kill(bed.members["old"].worker_pid, signal.SIGKILL)
    bed.members["old"].gone()
    c.welcome = replace(c.welcome, checkpoint_every_steps=100_000)
    names = [path.name for path in found(bed)]
    for path in found(bed):
        (path / "values.bin").rename(path / "aside")
    bed.start("x", "y", epochs=5000, delay=0)
    offer: dict[str, Any] = {"checkpoint": str(bed.base / "checkpoints" / names[0]), "older": tuple(names[1:])}
    number = c.offer(["x", "y"], source=-1, **offer)
    lost = wait_until(lambda: c.peers["x"].said(protocol.FormFailed, number))
    assert lost.state_lost
    assert all(f"{name}: values.bin: No such file" in lost.reason for name in names)
    off = wait_until(lambda: c.peers["y"].said(protocol.FormFailed, number))
    assert not off.state_lost
    for path in found(bed):
        (path / "aside").rename(path / "values.bin")
    c.resize(["x", "y"], source=-1, **offer)
    assert c.peers["y"].said(protocol.Started).resumed_step == int(names[0].partition("-s")[2])
    c.tell("x", protocol.Stop(grace_seconds=5, reason="enough"))
    for name in "xy":
        bed.finish_quietly(name)


def test_a_disk_that_is_full_for_a_while(zygote: ZygoteBed, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"NO FILE SYSTEM CAN BE MOUNTED HERE ({done.stderr.strip()}): the limit on file sizes stands in")
    bed = ElasticBed.make(zygote, tmp_path, checkpoint_every_steps=20)
    c = bed.coordinator
    try:
        c.welcome = replace(c.welcome, checkpoint_directory=str(disk / "checkpoints"))
        filler = disk / "filler"
        with pytest.raises(OSError, match="No space left"):
            filler.write_bytes(bytes(2 << 20))
        bed.start("a", "b", epochs=25)
        c.resize(["a", "b"], source=-1)
        failed = wait_until(lambda: c.peers["a"].said(protocol.CheckpointFailed))
        assert (failed.step, "No space left on device" in failed.reason) == (20, True)
        filler.unlink()
        written = wait_until(lambda: c.peers["a"].said(protocol.CheckpointWritten))
        assert written.step % 20 == 0
        assert written.step > failed.step
        assert [path.name for path in (disk / "checkpoints").glob("*-s20*")] == []
        bed.finish("a", "b")
        assert "waiting" not in bed.kinds("a") + bed.kinds("b")
        assert largest_difference(bed.results()[0], bed.alone(epochs=25)) < 1e-12
    finally:
        bed.close()
        subprocess.run(["umount", str(disk)], check=True)


# -- what is due, and what is kept ----------------------------------------------------------------------------------


@pytest.fixture
def keeper(tmp_path: Path) -> Keeper:
    model = paddle.nn.Linear(2, 1)
    tracked = Tracked()
    tracked.add(model)
    tracked.add(paddle.optimizer.SGD(0.1, parameters=model.parameters()))
    standing = Standing(Identity())
    standing.set(generation=1)
    said: list[Any] = []
    keeper = Keeper(
        directory=str(tmp_path / "checkpoints"),
        every_steps=20,
        standing=standing,
        tracked=tracked,
        ledger=Ledger(None),
        plan={},
        say=said.append,
    )
    keeper.said = said  # type: ignore[attr-defined]
    return keeper


def kept(keeper: Keeper) -> list[int]:
    return [word.step for word in keeper.said if isinstance(word, protocol.CheckpointWritten)]  # type: ignore[attr-defined]


def test_what_failed_is_written_at_the_stop_though_it_was_due_before(keeper: Keeper, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("no folder")
    assert keeper.is_due(20)
    keeper.begin(20)
    keeper.wait()
    assert not keeper.is_due(39), "not again at every step"
    assert keeper.is_due(40)
    (tmp_path / "checkpoints").unlink()
    keeper.write(20)
    keeper.write(20)
    assert kept(keeper) == [20]


def test_a_state_that_came_from_a_living_member_is_not_on_the_disk_for_that(keeper: Keeper) -> None:
    keeper.note_due(57)
    assert (keeper.is_due(59), keeper.is_due(60)) == (False, True)
    keeper.write(57)
    assert kept(keeper) == [57]


def test_a_state_that_was_loaded_is(keeper: Keeper) -> None:
    keeper.note_loaded(57)
    keeper.write(57)
    keeper.write(58)
    assert kept(keeper) == [58]
