"""Reaps the zygote's children: shims, and what a killed shim leaves behind."""

import ctypes
import json
import os
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tidewright import shim

STRAY_STATUSES_MAX: Final = 1024
_PR_SET_CHILD_SUBREAPER: Final = 36
_libc = ctypes.CDLL(None, use_errno=True)


def set_subreaper() -> None:
    """Orphans below this process become its children. Kept over exec, not inherited by forks. Raises OSError."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


@dataclass(slots=True)
class Reaper:
    """Reaps by hand: shims, and what killed shims leave behind."""

    shims: dict[int, str] = field(default_factory=dict)
    """pid of each living shim: the member's folder"""
    on_standby_ended: Callable[[int], None] = lambda pid: None
    """called with the pid of a child that is no member's"""
    standbys: Callable[[], Collection[int]] = tuple
    """shims that are nobody's yet"""
    orphans: dict[int, str] = field(default_factory=dict)
    """pid of each living worker whose shim was killed: its folder"""
    ended: list[str] = field(default_factory=list)
    """folders of orphans that have ended, whose descendants may still live"""
    statuses: dict[int, tuple[int, float]] = field(default_factory=dict)
    """statuses of unknown children, since a worker may be reaped before the shim that was killed with it"""

    def reap(self) -> None:
        """Take every status there is, then end what orphans left behind. Repeat while ``has_strays``."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid in self.shims:
                self._shim_ended(self.shims.pop(pid))
            elif pid in self.orphans:
                self._orphan_ended(self.orphans.pop(pid), pid, status, time.time())
            else:
                self.on_standby_ended(pid)
                self.statuses[pid] = (status, time.time())
                while len(self.statuses) > STRAY_STATUSES_MAX:
                    self.statuses.pop(next(iter(self.statuses)))
        if self.has_strays:
            self._end_strays()

    @property
    def has_strays(self) -> bool:
        """Descendants of one orphan cannot be told from another's, so none is ended while an orphan lives."""
        return bool(self.ended) and not self.orphans

    def _shim_ended(self, directory: str) -> None:
        if Path(directory, "gone").exists():
            return
        try:
            record = json.loads(Path(directory, "pid.json").read_bytes())
            worker, start = int(record["worker_pid"]), int(record["worker_start"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return  # it never had a record, so its worker did not run
        if Path(directory, "exit.json").exists():
            self.ended.append(directory)
        elif self._is_child(worker, start):  # before the statuses: its pid may have been another's earlier
            self.orphans[worker] = directory
        elif worker in self.statuses:
            self._orphan_ended(directory, worker, *self.statuses.pop(worker))

    def _is_child(self, pid: int, start: int) -> bool:
        """Also one that has ended and was not reaped."""
        stat = shim.process_stat(pid)
        return stat is not None and stat[2] == start and pid in shim.children_of(os.getpid())

    def _orphan_ended(self, directory: str, worker: int, status: int, at: float) -> None:
        if not Path(directory, "exit.json").exists():
            with suppress(OSError):  # without a record the status counts as unknown
                shim.write_atomically(directory, "exit.json", shim.exit_record(worker, status, at))
        self.ended.append(directory)

    def _end_strays(self) -> None:
        known = {*self.shims, *self.standbys()}
        strays = [pid for pid in shim.children_of(os.getpid()) if pid not in known]
        for pid in strays:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not strays:
            for directory in self.ended:
                with suppress(OSError):
                    shim.write_atomically(directory, "gone", f"{time.time():.6f}")
            self.ended.clear()
            self.statuses.clear()
