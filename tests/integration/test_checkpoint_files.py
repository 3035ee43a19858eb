"""Checkpoints as files: writers killed, stopped and overtaken at every point, damage, disks, and what is kept."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from integration.checkpoint_writer import FENCED, snapshot

from tidewright.elastic import shelf
from tidewright.elastic.checkpoint import BackgroundWriter, load_first, read_checkpoint, write_checkpoint
from tidewright.elastic.errors import CheckpointBroken

WRITER = Path(__file__).with_name("checkpoint_writer.py")
ROOT = Path(__file__).parents[2]


def write(directory: Path, *numbers: tuple[int, int]) -> list[Path]:
    return [write_checkpoint(directory, snapshot(*number)) for number in numbers]


def names(directory: Path) -> list[str]:
    return [path.name for path in shelf.found_in(directory)]


def hidden(directory: Path) -> list[str]:
    """What no one counts as a checkpoint: half written ones, and ones half removed."""
    return sorted(p.name for p in directory.iterdir() if p.name.startswith(".") and not p.name.endswith(".started"))


def start_writer(what: str, *arguments: object) -> "subprocess.Popen[bytes]":
    command = [sys.executable, str(WRITER), what, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})


def newest(directory: Path) -> tuple[int, list[str]]:
    """The step that is gone on from, and what was passed over."""
    skipped: list[str] = []
    back = load_first(shelf.found_in(directory), skipped=skipped.append)
    assert back.tensors[0][0] == back.step
    assert back.values == f"values of {back.step}".encode()
    return back.step, skipped


# -- a writer that dies ---------------------------------------------------------------------------------------------


def test_a_writer_killed_at_any_point_leaves_the_newest_whole_one_first(tmp_path: Path) -> None:
    before = tmp_path / "before"
    write(before, (1, 20), (1, 30), (2, 40))
    (before / ".g1-s35.aa").mkdir()
    (before / ".g1-s35.aa" / "tensors.npz").write_bytes(b"half")
    (before / ".old-g1-s10").mkdir()
    writer = start_writer("every", tmp_path)
    assert writer.wait(120) == 0
    deaths = sorted(path for path in tmp_path.iterdir() if path.name.isdigit())
    assert len(deaths) > 25
    found = [newest(directory) for directory in deaths]
    assert {tuple(skipped) for _, skipped in found} == {()}, "a killed writer left a broken checkpoint in sight"
    steps = [step for step, _ in found]
    assert set(steps) == {40, 50}
    assert steps == sorted(steps), "it was there, and then not"
    for directory in deaths:
        for folder in shelf.found_in(directory):
            read_checkpoint(folder)
        assert len(names(directory)) >= shelf.KEEP
        shelf.raise_fence(directory, 3, token="next")
        write(directory, (3, 60))
        assert hidden(directory) == [], "leftovers of the killed writer"
        assert (
            names(directory) == ["g3-s60", *(["g2-s50"] if newest_before(directory) else []), "g2-s40", "g1-s30"][:3]
        )


def newest_before(directory: Path) -> bool:
    return (directory / "g2-s50").exists()


@pytest.mark.parametrize("limit", [1, 4096, 400_000])
def test_a_writer_killed_in_the_middle_of_a_file_leaves_nothing_in_sight(tmp_path: Path, limit: int) -> None:
    write(tmp_path, (1, 40))
    writer = start_writer("bytes", tmp_path, limit)
    assert writer.wait(60) == -signal.SIGXFSZ
    assert len(hidden(tmp_path)) == 1
    assert newest(tmp_path) == (40, [])
    shelf.raise_fence(tmp_path, 3, token="next")
    assert hidden(tmp_path) == []


# -- a writer that is overtaken -------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["os.mkdir", "open", "fsync", "os.rename"])
def test_a_slow_old_writer_adds_nothing_once_a_younger_generation_has_started(tmp_path: Path, call: str) -> None:
    """Stopped wherever it is, right before it gives the folder its name included, and let go after the start."""
    write(tmp_path, (1, 20))
    writer = start_writer("stop", tmp_path, call)
    os.waitid(os.P_PID, writer.pid, os.WSTOPPED)
    shelf.raise_fence(tmp_path, 2, token="young")
    writer.send_signal(signal.SIGCONT)
    assert writer.wait(30) == FENCED
    assert names(tmp_path) == ["g1-s20"]
    assert hidden(tmp_path) == []


def test_a_slow_old_writer_adds_nothing_once_a_younger_generation_has_written(tmp_path: Path) -> None:
    writer = start_writer("stop", tmp_path, "fsync")
    os.waitid(os.P_PID, writer.pid, os.WSTOPPED)
    write(tmp_path, (2, 30))
    writer.send_signal(signal.SIGCONT)
    assert writer.wait(30) == FENCED
    assert [path.name for path in tmp_path.iterdir()] == ["g2-s30"]


def test_a_fence_is_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a survivor was writing when its group changed is of the same line: it is finished."""
    outcomes: list[Any] = []
    slow, reached = threading.Event(), threading.Event()
    really = os.fsync

    def fsync(descriptor: int) -> None:
        if threading.current_thread().name == "tide-checkpoint":
            reached.set()
            assert slow.wait(10)
        really(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    survivor = BackgroundWriter(tmp_path, lambda _, outcome: outcomes.append(outcome))
    stranger = BackgroundWriter(tmp_path, lambda _, outcome: outcomes.append(outcome))
    survivor.begin(snapshot(1, 40))
    assert reached.wait(10)
    reached.clear()
    stranger.begin(snapshot(1, 41))
    assert reached.wait(10)
    survivor.fence(2, on_failed=outcomes.append)
    slow.set()
    survivor.wait()
    stranger.wait()
    assert names(tmp_path) == ["g1-s40"]
    assert sorted(map(str, outcomes)) == [
        str(tmp_path / "g1-s40"),
        "generation 2 has started, this is of generation 1",
    ]
    survivor.begin(snapshot(2, 50))
    survivor.wait()
    assert (names(tmp_path), hidden(tmp_path)) == (["g2-s50", "g1-s40"], [])


def test_generations_that_race_leave_one_line(tmp_path: Path) -> None:
    """The older one writes as fast as it can while the younger one starts: nothing is added from then on."""
    for round_ in range(15):
        directory = tmp_path / str(round_)
        fenced = threading.Event()

        def old(directory: Path = directory, fenced: threading.Event = fenced) -> None:
            try:
                for step in range(1, 10_000):
                    write(directory, (1, step))
            except shelf.Fenced:
                fenced.set()

        thread = threading.Thread(target=old)
        thread.start()
        while len(names(directory)) < 2:
            pass
        threading.Event().wait(0.001 * round_)
        shelf.raise_fence(directory, 2, token="young")
        at_the_start = set(names(directory))
        write(directory, (2, 5000))
        assert fenced.wait(10)
        thread.join()
        assert set(names(directory)) - {"g2-s5000"} <= at_the_start
        assert newest(directory) == (5000, [])
        assert hidden(directory) == []


# -- damage ---------------------------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def lie(path: Path) -> None:
    """The manifest of another checkpoint, checksums and all."""
    other = path.parent.parent / "g1-s10"
    for file in other.iterdir():
        shutil.copy(file, path.parent / file.name)


def name_nothing(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "files": {}}))


FILES = ("tensors.npz", "values.bin", "manifest.json")
DAMAGES = [
    *(
        (do, name)
        for do in (cut, flip, empty, Path.unlink)
        for name in ("tensors.npz", "values.bin", "manifest.json")
    ),
    (lie, "manifest.json"),
    (name_nothing, "manifest.json"),
]


@pytest.mark.parametrize(("damage", "name"), DAMAGES, ids=lambda each: getattr(each, "__name__", each))
def test_damage_of_any_kind_is_seen_and_the_newest_whole_one_is_used(
    tmp_path: Path, damage: Callable[[Path], None], name: str
) -> None:
    write(tmp_path, (1, 10), (1, 20), (2, 30))
    damage(tmp_path / "g2-s30" / name)
    step, skipped = newest(tmp_path)
    assert step == 20
    assert len(skipped) == 1
    assert skipped[0].startswith("g2-s30: ")
    (tmp_path / "g1-s20" / "manifest.json").unlink()
    (tmp_path / "g1-s10" / "values.bin").write_bytes(b"others")
    with pytest.raises(CheckpointBroken, match="no whole checkpoint is left") as raised:
        newest(tmp_path)
    assert raised.value.is_damaged


def test_what_cannot_be_read_now_is_not_called_damaged(tmp_path: Path) -> None:
    """It may be read later: a job must not begin anew because of it."""
    write(tmp_path, (1, 10))
    manifest = tmp_path / "g1-s10" / "manifest.json"
    document = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**document, "version": 2}))
    with pytest.raises(CheckpointBroken) as raised:
        newest(tmp_path)
    assert not raised.value.is_damaged
    manifest.unlink()
    manifest.symlink_to(manifest)  # too many levels of links: neither there nor not there
    with pytest.raises(CheckpointBroken) as raised:
        newest(tmp_path)
    assert not raised.value.is_damaged


# -- disks ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"NO FILE SYSTEM CAN BE MOUNTED HERE ({done.stderr.strip()}): the limit on file sizes stands in")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_costs_only_the_checkpoint_that_did_not_fit(small_disk: Path) -> None:
    directory = small_disk / "checkpoints"
    write(directory, (1, 10))
    filler = small_disk / "filler"
    filler.write_bytes(bytes(900_000))
    with pytest.raises(OSError, match="No space left") as raised:
        write_checkpoint(directory, snapshot(1, 20, numbers=50_000))
    assert raised.value.errno == errno.ENOSPC
    assert (newest(directory), hidden(directory)) == ((10, []), [])
    filler.unlink()
    write_checkpoint(directory, snapshot(1, 30, numbers=50_000))
    assert newest(directory) == (30, [])


def test_a_disk_that_became_read_only_keeps_what_it_has(small_disk: Path) -> None:
    directory = small_disk / "checkpoints"
    write(directory, (1, 10))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(OSError, match="Read-only"):
        write(directory, (1, 20))
    with pytest.raises(OSError, match="Read-only"):
        shelf.raise_fence(directory, 2, token="young")
    assert newest(directory) == (10, [])


def test_a_folder_that_nothing_can_be_made_in_is_an_error_like_any_other(tmp_path: Path) -> None:
    """The kernel refuses it to everyone, root too: also where nothing can be mounted."""
    outcomes: list[Any] = []
    writer = BackgroundWriter(Path("/proc/tide/checkpoints"), lambda _, outcome: outcomes.append(outcome))
    writer.begin(snapshot(1, 10))
    writer.wait()
    writer.fence(1, on_failed=outcomes.append)
    assert [type(each) for each in outcomes] == [FileNotFoundError, FileNotFoundError]


def test_everything_is_on_the_disk_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss of power takes back what was not synced: files, their folder, its name, and the folders around it."""
    done: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(descriptor: int) -> None:
        done.append(("synced", os.path.relpath(Path(f"/proc/self/fd/{descriptor}").readlink(), tmp_path)))
        fsync(descriptor)

    def noted_rename(source: Any, target: Any, **more: Any) -> None:
        done.append(("named", os.path.relpath(target, tmp_path)))
        rename(source, target, **more)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    monkeypatch.setattr("tidewright.elastic.checkpoint.new_token", lambda: "t")
    write(tmp_path / "new" / "checkpoints", (1, 10))
    folder = "new/checkpoints/.g1-s10.t"
    assert done == [
        ("synced", "."),
        ("synced", "new"),
        ("synced", f"{folder}/tensors.npz"),
        ("synced", f"{folder}/values.bin"),
        ("synced", f"{folder}/manifest.json"),
        ("synced", folder),
        ("named", "new/checkpoints/g1-s10"),
        ("synced", "new/checkpoints"),
    ]


# -- what is kept ---------------------------------------------------------------------------------------------------


def test_three_are_kept_and_the_newest_generation_counts(tmp_path: Path) -> None:
    write(tmp_path, (1, 10), (1, 20), (1, 900), (2, 15), (2, 25))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["g1-s900", "g2-s15", "g2-s25"]


@pytest.mark.parametrize("damage", [cut, Path.unlink])
def test_what_is_not_whole_takes_no_place_of_those_kept(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    write(tmp_path, (1, 10), (1, 20), (1, 30))
    for step in (20, 30):
        damage(tmp_path / f"g1-s{step}" / "tensors.npz")
    write(tmp_path, (1, 40))
    assert names(tmp_path) == ["g1-s40", "g1-s30", "g1-s20", "g1-s10"], "10 is the second newest whole one"
    cut(tmp_path / "g1-s40" / "values.bin")
    assert newest(tmp_path)[0] == 10
    write(tmp_path, (1, 50), (1, 60))
    assert "g1-s10" in names(tmp_path)
    write(tmp_path, (1, 70))
    assert names(tmp_path) == ["g1-s70", "g1-s60", "g1-s50"]


def test_one_that_is_being_loaded_is_not_removed(tmp_path: Path) -> None:
    (old, *_) = write(tmp_path, (1, 10), (1, 20), (1, 30))
    with (old / "manifest.json").open("rb") as manifest:
        shelf.hold(manifest, old)
        write(tmp_path, (1, 40), (1, 50))
        assert names(tmp_path) == ["g1-s50", "g1-s40", "g1-s30", "g1-s10"]
        assert read_checkpoint(old).step == 10
    write(tmp_path, (1, 60))
    assert names(tmp_path) == ["g1-s60", "g1-s50", "g1-s40"]


def test_a_checkpoint_comes_back(tmp_path: Path) -> None:
    (folder,) = write(tmp_path / "new", (2, 30))
    back = read_checkpoint(folder)
    assert (back.generation, back.step, back.plan, back.values) == (2, 30, {"seed": 1}, b"values of 30")
    assert back.tensors[0].tolist() == [30.0] * 4
    assert back.tensors[1].shape == ()
    assert write(tmp_path / "new", (2, 30)) == [folder]
