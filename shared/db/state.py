"""The state folder: made with tight permissions, and nothing outside it is ever changed."""

import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

from shared.settings import SettingsError


def prepare_state_directory(path: Path) -> Path:
    """Make the state folder (0700) if it is missing, its parents too; gives its absolute path.

    A folder that is there keeps its permissions. Raises SettingsError if it cannot be made or is not ours.
    """
    path = path.absolute()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as exc:
        raise SettingsError(f"the state folder {path} cannot be made: {exc.strerror or exc}") from exc
    if path.stat().st_uid != os.geteuid():
        raise SettingsError(f"the state folder {path} belongs to somebody else")
    return path


def closed_parent(path: Path, account: pwd.struct_passwd) -> Path | None:
    """The first folder above ``path`` that the account may not pass through; None if it reaches ``path``."""
    return next((folder for folder in _from_root(path.resolve().parent) if not _may(folder, account, 0o1)), None)


def may_run(path: Path, account: pwd.struct_passwd) -> bool:
    """Whether the account reaches the program ``path`` and may read and execute it."""
    return closed_parent(path, account) is None and _may(path.resolve(), account, 0o5)


def _from_root(path: Path) -> Iterator[Path]:
    yield from reversed(path.parents)
    yield path


def _may(path: Path, account: pwd.struct_passwd, wanted: int) -> bool:
    """Permission bits only (rwx as 4, 2, 1): access lists are not read, so the answer errs towards no."""
    try:
        found = path.stat()
    except OSError:
        return False
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid == account.pw_uid:
        mode >>= 6
    elif found.st_gid == account.pw_gid:
        mode >>= 3
    return mode & wanted == wanted
