"""Checkpoints: a folder named by generation and step, whole or not at all, and the newest whole one is used."""

import hashlib
import json
import os
import shutil
import threading
import time
import zipfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from tidewright.elastic.errors import CheckpointBroken
from tidewright.elastic.shelf import (
    MANIFEST,
    Fenced,
    check_fence,
    drop_old,
    hidden_name,
    hold,
    make_folder,
    name_of,
    parse_name,
    raise_fence,
    sync_folder,
)

_TENSORS: Final = "tensors.npz"
_VALUES: Final = "values.bin"
_VERSION: Final = 1
_FENCE_SECONDS: Final = 0.25
_UNREADABLE: Final = (ValueError, KeyError, TypeError, AttributeError, EOFError, RecursionError, zipfile.BadZipFile)


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


# -- writing --------------------------------------------------------------------------------------------------------


def write_checkpoint(
    directory: Path, snapshot: Snapshot, *, token: str = "", started: Callable[[], int] = lambda: 0
) -> Path:
    """Write it and drop old ones. Raises OSError (a full disk), or Fenced; then nothing of it is left.

    Everything is on the disk before the folder gets its name, the manifest is the last file in it, and the name is on
    the disk when this returns. ``token``: of this writer, see ``raise_fence``. ``started``: the youngest generation
    that it has started itself; the state of an older one that it still writes then is of the same line.
    """
    generation, step = snapshot.generation, snapshot.step
    target = directory / name_of(generation, step)
    make_folder(directory)
    if target.exists():
        return target
    hidden = directory / hidden_name(generation, step, token or new_token())
    try:
        hidden.mkdir(mode=0o700)
        check_fence(directory, max(generation, started()))
        _write_files(hidden, snapshot)
        check_fence(directory, max(generation, started()))
        _give_name(hidden, target)
        sync_folder(directory)
    except FileNotFoundError:
        check_fence(directory, generation)  # it was moved away from under this writer
        raise
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    drop_old(directory, generation)
    return target


def new_token() -> str:
    return os.urandom(6).hex()


def _write_files(hidden: Path, snapshot: Snapshot) -> None:
    digests = {
        _TENSORS: _write(hidden / _TENSORS, lambda file: _save_arrays(file, snapshot.tensors)),
        _VALUES: _write(hidden / _VALUES, lambda file: file.write(snapshot.values)),
    }
    manifest = {
        "version": _VERSION,
        "generation": snapshot.generation,
        "step": snapshot.step,
        "world": snapshot.world,
        "layout": snapshot.layout,
        "plan": snapshot.plan,
        "written_at": time.time(),
        "files": digests,
        "bytes": {name: (hidden / name).stat().st_size for name in digests},
    }
    _write(hidden / MANIFEST, lambda file: file.write(json.dumps(manifest, indent=1).encode()))
    sync_folder(hidden)


def _give_name(hidden: Path, target: Path) -> None:
    try:
        hidden.rename(target)
    except OSError:
        if not target.exists():  # else another member that held the same state was quicker
            raise


def _save_arrays(file: BinaryIO, arrays: list[NDArray[Any]]) -> None:
    np.savez(file, **{f"t{index}": array for index, array in enumerate(arrays)})  # type: ignore[arg-type]


def _write(path: Path, save: Callable[[BinaryIO], object]) -> str:
    """Write a file through to the disk and return its SHA-256."""
    with path.open("wb") as file:
        save(file)
        file.flush()
        os.fsync(file.fileno())
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -- reading --------------------------------------------------------------------------------------------------------


def read_checkpoint(folder: Path) -> Snapshot:
    """Raises CheckpointBroken if it is not whole: every file is compared with its checksum.

    It is not removed meanwhile, and what is compared is what is used: each file is opened once.
    """
    with ExitStack() as stack:
        try:
            manifest_file = stack.enter_context((folder / MANIFEST).open("rb"))
            hold(manifest_file, folder)
            files = {name: stack.enter_context((folder / name).open("rb")) for name in (_TENSORS, _VALUES)}
            return _read(folder, json.loads(manifest_file.read()), files)
        except CheckpointBroken as error:
            raise CheckpointBroken(f"{folder.name}: {error}", is_damaged=error.is_damaged) from error
        except OSError as error:
            gone = isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
            name = Path(str(error.filename or folder)).name
            raise CheckpointBroken(f"{folder.name}: {name}: {error.strerror}", is_damaged=gone) from error
        except _UNREADABLE as error:
            raise CheckpointBroken(f"{folder.name}: {type(error).__name__}: {error}") from error


def _read(folder: Path, manifest: dict[str, Any], files: dict[str, BufferedReader]) -> Snapshot:
    if manifest["version"] != _VERSION:
        raise CheckpointBroken(f"is of version {manifest['version']}, known is {_VERSION}", is_damaged=False)
    if (manifest["generation"], manifest["step"]) != parse_name(folder.name):
        raise CheckpointBroken(f"is {name_of(manifest['generation'], manifest['step'])} under another name")
    for name, file in files.items():
        if hashlib.file_digest(file, "sha256").hexdigest() != manifest["files"][name]:
            raise CheckpointBroken(f"{name} is not what was written")
        file.seek(0)
    with np.load(files[_TENSORS], allow_pickle=False) as archive:
        tensors = [archive[f"t{index}"] for index in range(len(archive.files))]
    return Snapshot(
        generation=manifest["generation"],
        step=manifest["step"],
        world=manifest["world"],
        layout=manifest["layout"],
        tensors=tensors,
        values=files[_VALUES].read(),
        plan=manifest["plan"],
    )


def load_first(candidates: Sequence[Path], *, skipped: Callable[[str], None]) -> Snapshot:
    """The first whole one of ``candidates``, in one pass; ``skipped`` hears why each before it is not used.

    Raises CheckpointBroken if none is whole: ``is_damaged`` only if that is certain of each.
    """
    certain = True
    for candidate in candidates:
        try:
            return read_checkpoint(candidate)
        except CheckpointBroken as error:
            certain = certain and error.is_damaged
            skipped(str(error))
    raise CheckpointBroken("no whole checkpoint is left", is_damaged=certain)


# -- in the background ----------------------------------------------------------------------------------------------


class BackgroundWriter:
    """Writes snapshots in a thread, one at a time, so that no peer waits for a disk."""

    def __init__(self, directory: Path, on_written: Callable[[Snapshot, Path | Exception], None]) -> None:
        self._directory = directory
        self._on_written = on_written
        self._token = new_token()
        self._started = 0
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
            outcome: Path | Exception = write_checkpoint(
                self._directory, snapshot, token=self._token, started=lambda: self._started
            )
        except (OSError, Fenced) as error:
            outcome = error
        self._on_written(snapshot, outcome)

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def fence(self, generation: int, *, on_failed: Callable[[OSError], None]) -> None:
        """Raise the fence of a generation that has started. A disk that hangs holds training up for a moment only."""

        self._started = generation

        def work() -> None:
            try:
                raise_fence(self._directory, generation, token=self._token)
            except OSError as error:
                on_failed(error)

        thread = threading.Thread(target=work, name="tide-fence", daemon=True)
        thread.start()
        thread.join(_FENCE_SECONDS)
