"""Processes that are perhaps nobody's children: known by pid and start time, waited for and signalled by pidfd."""

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """A pid and the start time (clock ticks since boot) that tells it from a later process of the same pid."""

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> "ProcessId | None":
        """The living process of this pid; None for none, and for a zombie."""
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        fields = text.rpartition(")")[2].split()
        return None if fields[0] in "ZX" else cls(pid=pid, start=int(fields[19]))

    @classmethod
    def from_json(cls, value: object) -> "ProcessId | None":
        """From ``{"pid", "start"}``; None for anything else."""
        if not isinstance(value, dict):
            return None
        pid, start = value.get("pid"), value.get("start")
        if not isinstance(pid, int) or not isinstance(start, int) or pid <= 0:
            return None
        return cls(pid=pid, start=start)

    def as_json(self) -> dict[str, int]:
        return {"pid": self.pid, "start": self.start}

    def is_alive(self) -> bool:
        return ProcessId.of(self.pid) == self

    def open(self) -> int | None:
        """A pidfd, readable once the process has ended; None if it has. The caller closes it.

        The pidfd comes first and the comparison second, so that it cannot stand for a later process.
        """
        try:
            descriptor = os.pidfd_open(self.pid)
        except OSError:
            return None
        if self.is_alive():
            return descriptor
        os.close(descriptor)
        return None

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal; False if the process has ended."""
        descriptor = self.open()
        if descriptor is None:
            return False
        try:
            signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(descriptor)
        return True


def wait_for_end(processes: Iterable[ProcessId], *, seconds: float) -> tuple[ProcessId, ...]:
    """Wait until all have ended, at most so long; gives those that have not."""
    left = {descriptor: process for process in processes if (descriptor := process.open()) is not None}
    poll = select.poll()
    for descriptor in left:
        poll.register(descriptor, select.POLLIN)
    deadline = time.monotonic() + seconds
    try:
        while left and (remaining := deadline - time.monotonic()) > 0:
            for descriptor, _ in poll.poll(remaining * 1000):
                poll.unregister(descriptor)
                os.close(descriptor)
                del left[descriptor]
        return tuple(left.values())
    finally:
        for descriptor in left:
            os.close(descriptor)


def end_processes(processes: Iterable[ProcessId], *, grace_seconds: float) -> tuple[ProcessId, ...]:
    """SIGTERM, then SIGKILL for what is left after the grace; gives those that had to be killed."""
    asked = [process for process in processes if process.signal(signal.SIGTERM)]
    killed = wait_for_end(asked, seconds=grace_seconds)
    for process in killed:
        process.signal(signal.SIGKILL)
    wait_for_end(killed, seconds=5.0)
    return killed


def boot_id() -> str:
    """Which boot start times count from."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def reap(pid: int) -> int | None:
    """Wait status of an own child that has ended, so that no zombie stays; None if it is none."""
    with contextlib.suppress(ChildProcessError):
        found, status = os.waitpid(pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if found else None
    return None
