"""Checkpoints: a folder named by generation and step, whole or not at all, and the newest whole one is used."""

import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from tidewright.elastic.errors import CheckpointBroken

KEEP: Final = 3
MANIFEST: Final = "manifest.json"
_TENSORS: Final = "tensors.npz"
_VALUES: Final = "values.bin"
_NAME: Final = re.compile(r"g(\d+)-s(\d+)")
_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of training at a step boundary, as copies. ``tensors`` in the order of what is tracked."""

    generation: int
    step: int
    world: int
    layout: str
    tensors: list[NDArray[Any]] = field(repr=False)
    values: bytes = field(repr=False)
    plan: dict[str, Any]
    """how the script goes through its data; with another one the step would mean something else"""


class Fenced(Exception):
    """A younger generation has written here: this one is no longer the job's."""


def name_of(generation: int, step: int) -> str:
    return f"g{generation}-s{step}"


def parse_name(name: str) -> tuple[int, int] | None:
    """Generation and step of a checkpoint's folder; None for anything else."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def found_in(directory: Path) -> list[Path]:
    """Folders of checkpoints, the newest first: the youngest generation's, and of those the highest step."""
    try:
        entries = [(parse_name(entry.name), entry) for entry in directory.iterdir()]
    except OSError:
        return []
    named = [(number, entry) for number, entry in entries if number is not None]
    return [entry for _, entry in sorted(named, key=lambda pair: pair[0], reverse=True)]


# -- writing --------------------------------------------------------------------------------------------------------


def write_checkpoint(directory: Path, snapshot: Snapshot) -> Path:
    """Write it and drop old ones. Raises OSError (a full disk), or Fenced; then nothing of it is left.

    Everything is on the disk before the folder gets its name, and the manifest is the last file in it.
    """
    target = directory / name_of(snapshot.generation, snapshot.step)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if target.exists():
        return target
    temporary = directory / f".{target.name}.{os.getpid()}"
    try:
        temporary.mkdir(mode=0o700)
        files = {
            _TENSORS: _write(temporary / _TENSORS, lambda file: _save_arrays(file, snapshot.tensors)),
            _VALUES: _write(temporary / _VALUES, lambda file: file.write(snapshot.values)),
        }
        manifest = json.dumps(
            {
                "version": _VERSION,
                "generation": snapshot.generation,
                "step": snapshot.step,
                "world": snapshot.world,
                "layout": snapshot.layout,
                "plan": snapshot.plan,
                "written_at": time.time(),
                "files": files,
            },
            indent=1,
        )
        _write(temporary / MANIFEST, lambda file: file.write(manifest.encode()))
        _sync_folder(temporary)
        _check_fence(directory, snapshot.generation)
        try:
            temporary.rename(target)
        except OSError:
            if not target.exists():  # another member that held the same state was quicker
                raise
        _sync_folder(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _drop_old(directory, snapshot.generation)
    return target


def _save_arrays(file: BinaryIO, arrays: list[NDArray[Any]]) -> None:
    np.savez(file, **{f"t{index}": array for index, array in enumerate(arrays)})  # type: ignore[arg-type]


def _write(path: Path, save: Callable[[BinaryIO], object]) -> str:
    """Write a file through to the disk and return its SHA-256."""
    with path.open("wb") as file:
        save(file)
        file.flush()
        os.fsync(file.fileno())
    return _digest(path)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_fence(directory: Path, generation: int) -> None:
    for entry in found_in(directory):
        number = parse_name(entry.name)
        if number is not None and number[0] > generation:
            raise Fenced(f"generation {number[0]} has written here, this is {generation}")


def _drop_old(directory: Path, generation: int) -> None:
    """Keep the newest ones, and remove what killed writers of older generations left half done."""
    for entry in found_in(directory)[KEEP:]:
        hidden = directory / f".old-{entry.name}"
        try:
            entry.rename(hidden)  # never seen half removed
        except OSError:
            continue
        shutil.rmtree(hidden, ignore_errors=True)
    for entry in list(directory.glob(".*")):
        number = parse_name(entry.name[1:].partition(".")[0])
        if entry.name.startswith(".old-") or (number is not None and number[0] < generation):
            shutil.rmtree(entry, ignore_errors=True)


# -- reading --------------------------------------------------------------------------------------------------------


def read_checkpoint(folder: Path) -> Snapshot:
    """Raises CheckpointBroken if it is not whole: every file is compared with its checksum."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        for name, digest in manifest["files"].items():
            if _digest(folder / name) != digest:
                raise CheckpointBroken(f"{folder.name}: {name} is not what was written")
        with np.load(folder / _TENSORS, allow_pickle=False) as archive:
            tensors = [archive[f"t{index}"] for index in range(len(archive.files))]
        return Snapshot(
            generation=manifest["generation"],
            step=manifest["step"],
            world=manifest["world"],
            layout=manifest["layout"],
            tensors=tensors,
            values=(folder / _VALUES).read_bytes(),
            plan=manifest["plan"],
        )
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise CheckpointBroken(f"{folder.name}: {error}") from error


def load_newest(folder: Path, *, skipped: Callable[[str], None]) -> Snapshot:
    """The checkpoint ``folder``, or if it is broken the newest whole one beside it that is not younger.

    Raises CheckpointBroken if there is none: the job has made steps, so it must not begin anew.
    """
    number = parse_name(folder.name)
    others = [
        other
        for other in found_in(folder.parent)
        if other != folder and (number is None or (parse_name(other.name) or number) <= number)
    ]
    for candidate in (folder, *others):
        try:
            return read_checkpoint(candidate)
        except CheckpointBroken as error:
            skipped(str(error))
    raise CheckpointBroken(f"no whole checkpoint is in {folder.parent}")


def newest_in(directory: Path, *, skipped: Callable[[str], None]) -> Snapshot | None:
    """The newest whole checkpoint; None if there is none at all. Raises CheckpointBroken if all are broken."""
    found = found_in(directory)
    return load_newest(found[0], skipped=skipped) if found else None


class BackgroundWriter:
    """Writes snapshots in a thread, one at a time, so that no peer waits for a disk."""

    def __init__(self, directory: Path, on_written: Callable[[Snapshot, Path | Exception], None]) -> None:
        self._directory = directory
        self._on_written = on_written
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def begin(self, snapshot: Snapshot) -> None:
        """Write it in the background. Call only while not busy."""
        assert not self.is_busy
        self._thread = threading.Thread(target=self.write, args=(snapshot,), name="tide-checkpoint", daemon=True)
        self._thread.start()

    def write(self, snapshot: Snapshot) -> None:
        """Write it here and now; the outcome goes to ``on_written``."""
        try:
            outcome: Path | Exception = write_checkpoint(self._directory, snapshot)
        except (OSError, Fenced) as error:
            outcome = error
        self._on_written(snapshot, outcome)

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
