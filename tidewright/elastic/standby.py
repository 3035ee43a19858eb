"""Workers that are forked before anyone asks for them, each below a shim of its own, so that a start costs no fork.

Copying the zygote's page tables, and the pages that a new process writes to first, takes longer than all the rest of
a start. A standby has that behind it: its worker waits for a request, its shim for the record of who they are. The
order of a start stays: the record is on the disk before the worker goes on. Both end when the zygote does.
"""

import errno
import json
import os
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, NoReturn

from tidewright import shim
from tidewright.elastic import child
from tidewright.elastic.reaper import set_subreaper

MESSAGE_BYTES_MAX: Final = 65_536
"""A request that is larger, by its environment, is not worth a standby: it might not fit into a socket at once."""
QUIET_SECONDS: Final = 1.0
"""A new one is forked only so long after the last start: those that start now need the machine more."""


@dataclass(slots=True, eq=False)
class Standby:
    """One pair of processes; the zygote's ends of the connections to them."""

    shim_pid: int
    to_shim: socket.socket
    to_worker: socket.socket

    def close(self) -> None:
        """Both see the end of their connection, and end."""
        self.to_worker.close()
        self.to_shim.close()


def start_record(request: child.StartRequest, *, shim_pid: int, worker_pid: int) -> str:
    """The text of ``pid.json``. Raises ProcessLookupError if one of the two is gone."""
    own, its = shim.process_stat(shim_pid), shim.process_stat(worker_pid)
    if own is None or its is None:
        raise ProcessLookupError(errno.ESRCH, "the worker is gone before its record was written")
    return json.dumps(
        {
            "member": request.member,
            "nonce": request.nonce,
            "shim_pid": shim_pid,
            "shim_start": own[2],
            "worker_pid": worker_pid,
            "worker_start": its[2],
            "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        }
    )


class Reserve:
    """The standbys of a zygote. ``fill`` now and then, ``take`` for a start."""

    def __init__(self, size: int, *, base_environment: dict[str, str], watch_seconds: float) -> None:
        self._size = size
        self._base_environment = base_environment
        self._watch_seconds = watch_seconds
        self._standbys: list[Standby] = []
        self._taken_at = float("-inf")

    @property
    def shims(self) -> frozenset[int]:
        return frozenset(standby.shim_pid for standby in self._standbys)

    def is_short(self, now: float) -> bool:
        """One more should be forked."""
        return len(self._standbys) < self._size and now - self._taken_at >= QUIET_SECONDS

    def fill(self, now: float) -> None:
        """Fork one more if it is time."""
        if self.is_short(now):
            with suppress(OSError):  # no process is left, or no descriptor: a start tells, if it meets that too
                self._standbys.append(_fork(self._base_environment, self._watch_seconds))

    def take(self, request: child.StartRequest, now: float) -> int | None:
        """Make a standby the member of ``request``, whose folder is locked; the pid of its shim, None without one.

        Never blocks. A standby that does not take what it is told is killed, and has run nothing.
        """
        self._taken_at = now
        text = json.dumps(asdict(request)).encode() + b"\n"
        while self._standbys and len(text) <= MESSAGE_BYTES_MAX:
            standby = self._standbys.pop(0)
            try:
                worker_pid = int(standby.to_shim.recv(64))
                record = start_record(request, shim_pid=standby.shim_pid, worker_pid=worker_pid)
                # The worker first: without the shim's word, which follows the record, it goes no further.
                _send(standby.to_worker, text)
                identity = (os.fsencode(request.directory), str(request.memory_bytes).encode(), record.encode())
                _send(standby.to_shim, b"\0".join(identity) + b"\n")
            except (OSError, ValueError):
                with suppress(ProcessLookupError):
                    os.kill(standby.shim_pid, signal.SIGKILL)
            else:
                return standby.shim_pid
            finally:
                standby.close()
        return None

    def forget(self, shim_pid: int) -> None:
        """It was killed: its worker ends by itself."""
        for standby in [each for each in self._standbys if each.shim_pid == shim_pid]:
            self._standbys.remove(standby)
            standby.close()

    def close(self) -> None:
        for standby in self._standbys:
            standby.close()
        self._standbys.clear()


def _send(connection: socket.socket, message: bytes) -> None:
    """At once and whole, or OSError."""
    if connection.send(message, socket.MSG_DONTWAIT) != len(message):
        raise BlockingIOError(errno.EAGAIN, "a standby does not take its request")


def _fork(base_environment: dict[str, str], watch_seconds: float) -> Standby:
    to_shim, of_shim = socket.socketpair()
    to_worker, of_worker = socket.socketpair()
    to_shim.setblocking(False)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _become_shim(of_shim.fileno(), of_worker.fileno(), base_environment, watch_seconds)
    of_shim.close()
    of_worker.close()
    return Standby(shim_pid=pid, to_shim=to_shim, to_worker=to_worker)


def _become_shim(of_shim: int, of_worker: int, base_environment: dict[str, str], watch_seconds: float) -> NoReturn:
    try:
        child.reset_signals()
        os.setsid()
        child.close_descriptors(keep=(of_shim, of_worker))
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        os.close(nothing)
        set_subreaper()
        reading, writing = os.pipe()
        worker = os.fork()
        if worker == 0:
            os.close(writing)
            child.run_standby(of_worker, record_written=reading, base_environment=base_environment)
        os.close(reading)
        os.close(of_worker)
        os.write(of_shim, str(worker).encode())
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD, *shim.PASSED_ON))
        os.set_inheritable(of_shim, True)
        os.set_inheritable(writing, True)
        program = [sys.executable, "-S", "-E", "-I", "-B", shim.__file__, shim.STANDBY, str(of_shim), str(writing)]
        os.execv(program[0], [*program, str(worker), str(watch_seconds)])  # noqa: S606
    except BaseException:  # noqa: BLE001 - a fork must never return into the zygote's loop
        os._exit(99)
