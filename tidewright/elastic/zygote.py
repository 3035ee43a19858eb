"""Starts workers: forks them, Paddle already imported, each below a shim of its own.

Run as ``python -m tidewright.elastic.zygote --socket PATH``. One JSON object a line in, one out, a connection each:
``{"op":"ping"}`` and ``{"op":"start", ...}`` (see ``child.StartRequest``). A start is idempotent: the folder's
``lock`` is made exclusively, a repeated request answers ``duplicate``. It has one thread, so that forking is safe,
and is a second subreaper: of a shim that was killed it inherits the worker, and writes its exit status in its place.
"""

import argparse
import errno
import gc
import json
import os
import resource
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NoReturn

from tidewright import shim
from tidewright.elastic import child
from tidewright.elastic.reaper import Reaper, set_subreaper
from tidewright.elastic.standby import Reserve, start_record
from tidewright.elastic.warm import Warmth, warm_up

REQUEST_BYTES_MAX: Final = 8 << 20
REQUEST_SECONDS_MAX: Final = 10.0
CONNECTIONS_MAX: Final = 256
SOCKET_PATH_BYTES_MAX: Final = 107
WATCH_INTERVAL_SECONDS: Final = 1.0


# -- starting -------------------------------------------------------------------------------------------------------


def start_worker(
    request: child.StartRequest, *, base_environment: dict[str, str], reserve: Reserve | None = None
) -> int | None:
    """Have a standby become the worker, or fork one; the pid of its shim, None if this start was already made.

    Raises OSError. The folder's lock is never taken back: after a failure this incarnation is spent, and it says so.
    """
    Path(request.directory).mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        os.close(os.open(f"{request.directory}/lock", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return None
    taken = reserve.take(request, time.monotonic()) if reserve is not None and request.is_forked else None
    if taken is not None:
        return taken
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        pid = os.fork()
    except OSError as error:
        _write_start_error(request, error)
        raise
    if pid == 0:
        _become_shim(request, base_environment)
    return pid


def _become_shim(request: child.StartRequest, base_environment: dict[str, str]) -> NoReturn:
    """Order matters: the worker may run only once its record is on the disk."""
    try:
        child.reset_signals()
        os.setsid()
        child.close_descriptors()
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        os.close(nothing)
        set_subreaper()
        reading, writing = os.pipe()
        worker = os.fork()
        if worker == 0:
            os.close(writing)
            child.run_worker(request, record_written=reading, base_environment=base_environment)
        os.close(reading)
        record = start_record(request, shim_pid=os.getpid(), worker_pid=worker)
        shim.write_atomically(request.directory, "pid.json", record)
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD, *shim.PASSED_ON))
        os.write(writing, b"g")
        os.close(writing)
        program = [sys.executable, "-S", "-E", "-I", "-B", shim.__file__]
        own = [request.directory, str(worker), str(WATCH_INTERVAL_SECONDS), str(request.memory_bytes)]
        os.execv(program[0], [*program, *own])  # noqa: S606
    except BaseException as error:  # noqa: BLE001 - a fork must never return into the zygote's loop
        _write_start_error(request, error)
        os._exit(99)


def _write_start_error(request: child.StartRequest, error: BaseException) -> None:
    with suppress(OSError):
        shim.write_atomically(request.directory, "start_error", f"{error!r}\n")


# -- serving --------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Connection:
    socket: socket.socket
    deadline: float
    received: bytearray = field(default_factory=bytearray)


class Zygote:
    """The loop: one selector over the listener, the connections and the signals."""

    def __init__(
        self, listener: socket.socket, warmth: Warmth, base_environment: dict[str, str], *, standbys: int
    ) -> None:
        self._listener = listener
        self._warmth = warmth
        self._base_environment = base_environment
        self._reserve = Reserve(
            standbys if warmth.paddle is not None else 0,
            base_environment=base_environment,
            watch_seconds=WATCH_INTERVAL_SECONDS,
        )
        self._reaper = Reaper(standbys=lambda: self._reserve.shims, on_standby_ended=self._reserve.forget)
        self._selector = selectors.DefaultSelector()
        self._connections: set[_Connection] = set()
        self._stopping = False

    def run(self) -> None:
        reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_stop)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(reading, selectors.EVENT_READ)
        while not self._stopping:
            ready = self._selector.select(self._select_seconds())
            for key, _ in ready:
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fd == reading:
                    with suppress(BlockingIOError):
                        os.read(reading, 4096)
                else:
                    self._read(key.data)
            self._drop_late()
            self._reaper.reap()
            if not ready:
                self._reserve.fill(time.monotonic())
        self._reserve.close()

    def _select_seconds(self) -> float:
        if self._reaper.has_strays:
            return 0.005
        return 0.1 if self._reserve.is_short(float("inf")) else 1.0

    def _on_stop(self, *_: object) -> None:
        self._stopping = True

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError:
            return
        if len(self._connections) >= CONNECTIONS_MAX:
            accepted.close()
            return
        accepted.setblocking(False)
        connection = _Connection(accepted, time.monotonic() + REQUEST_SECONDS_MAX)
        self._connections.add(connection)
        self._selector.register(accepted, selectors.EVENT_READ, connection)

    def _read(self, connection: _Connection) -> None:
        try:
            chunk = connection.socket.recv(65_536)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        connection.received += chunk
        line, newline, _ = connection.received.partition(b"\n")
        if not newline and chunk and len(connection.received) <= REQUEST_BYTES_MAX:
            return
        if line:
            self._send(connection, self.answer(bytes(line)) if newline else _error("the line is too long or cut off"))
        self._close(connection)

    def _send(self, connection: _Connection, answer: dict[str, Any]) -> None:
        with suppress(OSError):  # who does not wait for the answer asks again and is told "duplicate"
            connection.socket.sendall(json.dumps(answer).encode() + b"\n")

    def _close(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()

    def _drop_late(self) -> None:
        now = time.monotonic()
        for connection in [each for each in self._connections if each.deadline < now]:
            self._close(connection)

    def answer(self, line: bytes) -> dict[str, Any]:
        """The answer to one request; whatever is wrong with it is said, never raised."""
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            return _error("not a line of JSON")
        if not isinstance(value, dict):
            return _error("a request is an object")
        if value.get("op") == "ping":
            return {"ok": True, "pid": os.getpid(), "paddle": self._warmth.paddle, "reason": self._warmth.reason}
        if value.get("op") != "start":
            return _error("op must be start or ping")
        try:
            request = child.to_start_request(value)
            if request.is_forked and self._warmth.paddle is None:
                request = _executed(request)
            pid = start_worker(request, base_environment=self._base_environment, reserve=self._reserve)
        except child.BadRequest as error:
            return _error(str(error))
        except OSError as error:
            return _error(f"cannot start: {error}")
        if pid is None:
            return {"ok": True, "duplicate": True}
        self._reaper.shims[pid] = request.directory
        return {"ok": True, "shim_pid": pid}


def _executed(request: child.StartRequest) -> child.StartRequest:
    """Without Paddle in memory there is nothing to gain by a fork: the script gets a fresh interpreter."""
    return replace(request, interpreter=sys.executable)


def _error(text: str) -> dict[str, Any]:
    return {"ok": False, "error": text}


def listen(path: str) -> socket.socket:
    """A listening socket at ``path``. Raises OSError; EADDRINUSE if a living zygote answers there."""
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX - 16:
        raise OSError(errno.ENAMETOOLONG, f"a socket's path has at most {SOCKET_PATH_BYTES_MAX - 16} bytes", path)
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            pass
        else:
            raise OSError(errno.EADDRINUSE, "a zygote answers there already", path)
    listener = socket.socket(socket.AF_UNIX)
    temporary = Path(f"{path}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    listener.bind(str(temporary))
    temporary.chmod(0o600)
    listener.listen(512)
    temporary.rename(path)  # announced only now that it listens
    return listener


def _raise_descriptor_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main() -> int:
    parser = argparse.ArgumentParser(prog="tidewright.elastic.zygote", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--socket", required=True, metavar="PATH", help="where to listen")
    parser.add_argument(
        "--preload", action="append", default=[], metavar="MODULE", help="import this too; repeatable"
    )
    parser.add_argument(
        "--standbys", type=int, default=0, metavar="N", help="keep so many workers forked in advance (0)"
    )
    options = parser.parse_args()
    began = time.monotonic()
    base_environment = dict(os.environ)
    os.environ.update(OMP_NUM_THREADS="1", PADDLE_TRAINER_ID="0")  # more than one thread, and forking is not safe
    os.environ.setdefault("GLOG_minloglevel", "2")
    _raise_descriptor_limit()
    set_subreaper()
    warmth = warm_up(options.preload)
    gc.collect()
    gc.freeze()  # a collection in a child would touch, and so copy, every page
    try:
        listener = listen(options.socket)
    except OSError as error:
        sys.stderr.write(f"zygote: {options.socket}: {error.strerror}\n")
        return 1
    said = f"paddle {warmth.paddle}" if warmth.paddle else warmth.reason
    threads = len(list(Path("/proc/self/task").iterdir()))
    seconds = time.monotonic() - began
    sys.stdout.write(f"zygote {os.getpid()} listens, {said}, {threads} thread(s), {seconds:.1f} s\n")
    sys.stdout.flush()
    Zygote(listener, warmth, base_environment, standbys=options.standbys).run()
    Path(options.socket).unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
