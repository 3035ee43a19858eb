"""The folder in which a job's checkpoints lie: their order, who may still add one, which are kept, what is cleared.

Nobody takes a lock to write, so that a stopped or cut off writer holds up nobody:

1. A writer makes its hidden folder first and then looks for the mark of a younger generation; whoever starts a
   younger generation leaves its mark first and then moves hidden folders of older ones away. One sees the other.
2. Giving the hidden folder its name is one rename, moving it away is another: who comes second finds nothing.
"""

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

from tidewright.elastic.errors import CheckpointBroken

KEEP: Final = 3
MANIFEST: Final = "manifest.json"
_NAME: Final = re.compile(r"g(\d{1,9})-s(\d{1,15})")
_HIDDEN: Final = re.compile(r"\.g(\d{1,9})-s\d{1,15}\.\w+")
_MARK: Final = re.compile(r"\.g(\d{1,9})\.started")
_CLEARED: Final = ".old-"


class Fenced(Exception):
    """A younger generation has started: what this one still has to say is no longer the job's."""


def name_of(generation: int, step: int) -> str:
    return f"g{generation}-s{step}"


def parse_name(name: str) -> tuple[int, int] | None:
    """Generation and step of a checkpoint's folder; None for anything else."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def found_in(directory: Path) -> list[Path]:
    """Folders of checkpoints, the newest first: the youngest generation's, and of those the highest step."""
    named = [(number, entry) for entry in _entries(directory) if (number := parse_name(entry.name)) is not None]
    return [entry for _, entry in sorted(named, key=lambda pair: pair[0], reverse=True)]


def youngest_in(directory: Path) -> int:
    """The highest generation that has started or written here; 0 if none has."""
    marks = [int(match[1]) for entry in _entries(directory) if (match := _MARK.fullmatch(entry.name))]
    written = [number[0] for entry in found_in(directory) if (number := parse_name(entry.name))]
    return max((*marks, *written), default=0)


def _entries(directory: Path) -> list[Path]:
    """Empty where there is no such folder, or it cannot be read."""
    try:
        return list(directory.iterdir())
    except OSError:
        return []


# -- who may write --------------------------------------------------------------------------------------------------


def hidden_name(generation: int, step: int, token: str) -> str:
    """Where a checkpoint is written before it has its name. ``token`` tells one writer from all others."""
    return f".{name_of(generation, step)}.{token}"


def check_fence(directory: Path, generation: int) -> None:
    """Raises Fenced if a younger generation has started or written here."""
    youngest = youngest_in(directory)
    if youngest > generation:
        raise Fenced(f"generation {youngest} has started, this is of generation {generation}")


def raise_fence(directory: Path, generation: int, *, token: str) -> None:
    """From now on no older generation adds a checkpoint. Repeating is harmless. Raises OSError.

    What the caller itself (``token``) is writing is left to it: it is of the line that goes on here.
    """
    make_folder(directory)
    mark = directory / f".g{generation}.started"
    mark.touch(mode=0o600)
    for entry in _entries(directory):
        hidden, older = _HIDDEN.fullmatch(entry.name), _MARK.fullmatch(entry.name)
        if hidden and int(hidden[1]) < generation and not entry.name.endswith(f".{token}"):
            with suppress(OSError):  # it was given its name, or is gone
                entry.rename(directory / f"{_CLEARED}{entry.name[1:]}")
        elif older and int(older[1]) < generation:
            with suppress(OSError):
                entry.unlink()
    _clear(directory)


# -- what is kept ---------------------------------------------------------------------------------------------------


def drop_old(directory: Path, generation: int) -> None:
    """Keep the newest ones that look whole, and remove what killed writers of older generations left half done.

    One whose file is missing or cut off takes no place of those kept; neither is one removed that is being loaded.
    """
    kept = 0
    for entry in found_in(directory):
        if kept < KEEP:
            kept += looks_whole(entry)
            continue
        with _unless_in_use(entry) as free, suppress(OSError):
            if free:
                entry.rename(directory / f"{_CLEARED}{entry.name}")  # never seen half removed
    for entry in _entries(directory):
        hidden = _HIDDEN.fullmatch(entry.name)
        if hidden and int(hidden[1]) < generation:
            shutil.rmtree(entry, ignore_errors=True)
    _clear(directory)


def _clear(directory: Path) -> None:
    for entry in _entries(directory):
        if entry.name.startswith(_CLEARED):
            shutil.rmtree(entry, ignore_errors=True)


def looks_whole(folder: Path) -> bool:
    """Its manifest can be read and every file has the size that it gives. Cheap: checksums are for who loads it."""
    try:
        manifest: Any = json.loads((folder / MANIFEST).read_bytes())
        return bool(manifest["files"]) and all(
            (folder / name).stat().st_size == size for name, size in manifest.get("bytes", {}).items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def hold(manifest: BinaryIO, folder: Path) -> None:
    """Keep a checkpoint from being removed while ``manifest`` is open. Raises CheckpointBroken if it just was.

    On a file system without locks this does nothing; files that are open can be read to their end all the same.
    """
    try:
        fcntl.flock(manifest, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise CheckpointBroken("is being removed") from error
    except OSError:
        return
    if (folder / MANIFEST).stat().st_ino != os.fstat(manifest.fileno()).st_ino:
        raise CheckpointBroken("was removed")


@contextmanager
def _unless_in_use(folder: Path) -> Iterator[bool]:
    """False if somebody loads it; nobody begins to while True."""
    try:
        descriptor = os.open(folder / MANIFEST, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield True  # nobody can load it
        return
    try:
        free = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            free = False
        except OSError:
            pass  # a file system without locks
        yield free
    finally:
        os.close(descriptor)


# -- folders that survive a loss of power ---------------------------------------------------------------------------


def make_folder(directory: Path) -> None:
    """Make it and what it lies in, for this account alone; names are on the disk when this returns."""
    if directory.is_dir():
        return
    make_folder(directory.parent)
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    sync_folder(directory.parent)


def sync_folder(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
