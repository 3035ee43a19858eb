"""Which process this is, and whether another one of this machine is gone."""

import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_START_FIELD: Final = 19
"""Of ``/proc/PID/stat`` behind the program's name: when the process started, in ticks since the boot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """A process, told apart from a later one with the same pid.

    ``host`` names boot and pid namespace: only inside the same ones does a pid mean anything.
    """

    host: str
    pid: int
    start: int

    @property
    def is_gone(self) -> bool:
        """Known to be dead: of this host, and not there any more. False for other hosts."""
        return self.host == _host() and _start_of(self.pid) != self.start


def this_process() -> ProcessIdentity:
    pid = os.getpid()
    start = _start_of(pid)
    assert start is not None
    return ProcessIdentity(host=_host(), pid=pid, start=start)


def new_owner() -> str:
    """A name for one holding of a lease: for people the front, for uniqueness the end."""
    return f"{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(6)}"


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"


def _start_of(pid: int) -> int | None:
    """Start time in ticks; None if there is no such process, or only its exit status is left of it."""
    try:
        fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[_START_FIELD])
