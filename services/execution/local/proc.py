"""Reads of ``/proc`` and pidfds: whether a process is the one that was recorded, what it does, what is below it.

Where the kernel has no descriptor or memory left for a look, all of them raise Unavailable: not knowing is not gone.
"""

import errno
import fcntl
import os
import select
import signal
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shared.errors import Unavailable

_INFO_BYTES: Final = 64
_GET_INFO: Final = 3 << 30 | _INFO_BYTES << 16 | 0xFF << 8 | 11
"""``_IOWR(0xFF, 11, struct pidfd_info)``, with the first size that this struct had."""
_INFO_EXIT: Final = 8
_EXIT_OFFSET: Final = 60
_SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


@dataclass(frozen=True, slots=True, kw_only=True)
class Stat:
    """``state`` is the kernel's letter; ``ticks`` CPU time used; ``start`` ticks since boot."""

    state: str
    ticks: int
    start: int
    wait_status: int


def read_stat(pid: int) -> Stat | None:
    """None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError as exc:
        raise_shortage(exc)
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name in brackets may hold blanks
    return Stat(
        state=fields[0],
        ticks=sum(int(field) for field in fields[11:15]),
        start=int(fields[19]),
        wait_status=int(fields[-1]),
    )


def raise_shortage(exc: OSError) -> None:
    """Raises Unavailable if this error says nothing about what was looked at, only about us."""
    if exc.errno in _SHORTAGES:
        raise Unavailable(f"cannot look at processes: {exc.strerror}") from exc


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def open_pidfd(pid: int, start: int) -> int | None:
    """A descriptor of the very process that was recorded; None if it is gone or its pid belongs to another.

    The descriptor first, then the start time: in the other order the pid could be reused in between.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except OSError as exc:
        raise_shortage(exc)
        return None
    try:
        stat = read_stat(pid)
    except Unavailable:
        os.close(descriptor)
        raise
    if stat is None or stat.start != start:
        os.close(descriptor)
        return None
    return descriptor


def has_ended(pidfd: int) -> bool:
    """True for a zombie too."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


def exit_code_of(pidfd: int, pid: int) -> int | None:
    """How a process that has ended did so, negative for a signal: for those that are not its parent.

    A zombie shows it in ``/proc``; of one that somebody has reaped Linux tells it from 6.15 on. None: nobody knows.
    """
    stat = read_stat(pid)
    if stat is not None and stat.state in "ZX" and _is_pid_of(pidfd, pid):
        return os.waitstatus_to_exitcode(stat.wait_status)
    info = bytearray(struct.pack("Q", _INFO_EXIT).ljust(_INFO_BYTES, b"\0"))
    try:
        fcntl.ioctl(pidfd, _GET_INFO, info)
    except OSError as exc:
        raise_shortage(exc)
        return None
    told = struct.unpack_from("Q", info)[0] & _INFO_EXIT
    return os.waitstatus_to_exitcode(struct.unpack_from("i", info, _EXIT_OFFSET)[0]) if told else None


def _is_pid_of(pidfd: int, pid: int) -> bool:
    """False once it was reaped: its pid may be another's by now."""
    try:
        lines = Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines()
    except OSError as exc:
        raise_shortage(exc)
        return False
    return f"Pid:\t{pid}" in lines


def send_signal(pidfd: int, number: int) -> None:
    """Signal exactly that process; nothing happens if it is gone."""
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)


def tree_of(pid: int) -> list[int]:
    """The process and all below it, also in other sessions. Processes that come and go meanwhile may be missed."""
    found, queue = [pid], [pid]
    while queue:
        for task in _children_files(queue.pop()):
            with suppress(OSError, ValueError):
                children = [int(word) for word in task.read_text().split()]
                found += children
                queue += children
    return found


def tree_ticks(pid: int) -> tuple[int, int]:
    """(processes, CPU ticks) of the tree: any work in it changes one of them."""
    stats = [stat for stat in map(read_stat, tree_of(pid)) if stat is not None]
    return len(stats), sum(stat.ticks for stat in stats)


def _children_files(pid: int) -> list[Path]:
    try:
        return [task / "children" for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []
