"""One member's process as its folder and the kernel show it: found, adopted, signalled through pidfds only."""

import asyncio
import json
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from services.execution.core.seen import MemoryEnd, MemoryWitness, Process
from services.execution.local import proc
from tidewright import protocol
from tidewright.kinship import end_marked, mark_of

_LEDGER_TAIL_BYTES: Final = 16_384
_RECORD_BYTES_MAX: Final = 65_536
_CODES: Final = 1 << 16
_LOG_TAIL_BYTES: Final = 8_192
_REFUSED_ALLOCATION: Final = re.compile(
    rb"^(?:[\w.]+\.)?MemoryError\b|^\(?ResourceExhausted(?:Error)?\b|^\s*what\(\):\s+std::bad_alloc", re.MULTILINE
)
"""What Python, Paddle and the C++ runtime write at last when an allocation was refused."""
_QUIET_LOOK_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """``pid.json``: written by the zygote before the worker may run."""

    shim_pid: int
    shim_start: int
    worker_pid: int
    worker_start: int
    boot_id: str
    member: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitStatus:
    """``exit.json``: written by the shim, or by the zygote in its place. ``code`` None: not there."""

    code: int | None = None
    used_bytes: int = 0
    memory: MemoryEnd | None = None


NO_STATUS: Final = ExitStatus()


class Watched:
    """Looks at one member. ``on_end`` is called, from the event loop, when its worker or its shim ends."""

    def __init__(self, directory: Path, *, nonce: str, boot_id: str, on_end: Callable[[], None]) -> None:
        self.directory = directory
        self._nonce = nonce
        self._boot_id = boot_id
        self._on_end = on_end
        self._record: Record | None = None
        self._mark = 0
        self._descriptors: dict[str, int] = {}
        self._ticks = -1
        self._moved_at = 0.0
        self._activity: tuple[int, int, int] | None = None
        self._active_at = 0.0
        self._activity_seen_at = float("-inf")
        self._unseen_since: float | None = None
        self._terminated = False
        self._kernel_code: int | None = None
        self._final: Process | None = None

    def look(self, now: float, *, watch_activity: bool, unseen_end_seconds: float) -> Process:
        """What there is to see. Cheap (some tens of microseconds) and repeatable; once gone, always the same."""
        if self._final is not None:
            return self._final
        if self._record is None and not self._find(now):
            return self._never_recorded()
        assert self._record is not None
        worker_over = self._is_over("worker")
        tree_gone = (self.directory / "gone").exists()  # written after the status: look for it before
        status = self._exit_status() if worker_over else NO_STATUS
        exit_code, memory = status.code, status.memory
        if worker_over and exit_code is None:
            self._ask_kernel()
        if worker_over and (
            tree_gone
            or (
                self._is_unseen(now, has_status=exit_code is not None, unseen_end_seconds=unseen_end_seconds)
                and self._is_alone()
            )
        ):
            exit_code = self._kernel_code if exit_code is None else exit_code
            self.close()
            ledger = read_ledger_end(self.directory / "ledger.jsonl")
            gave_up = exit_code is not None and (exit_code > 0 or exit_code == -signal.SIGABRT)
            if memory is None and gave_up and says_allocation_was_refused(self.directory / "log"):
                memory = MemoryEnd(witness=MemoryWitness.ALLOCATION, used_bytes=status.used_bytes)
            self._final = Process(
                recorded=True,
                pid=self._record.worker_pid,
                ended=True,
                gone=True,
                exit_code=exit_code,
                ledger_step=ledger.step,
                ledger_finished=ledger.finished,
                ledger_stopped=ledger.stopped,
                memory=memory,
                rebooted=self._record.boot_id != self._boot_id,
            )
            return self._final
        if worker_over:
            return Process(recorded=True, pid=self._record.worker_pid, ended=True, exit_code=exit_code, memory=memory)
        return self._alive(now, self._record, watch_activity=watch_activity)

    # -- signals ------------------------------------------------------------------------------------------------

    def terminate(self) -> None:
        """SIGTERM to the worker, once."""
        if not self._terminated and "worker" in self._descriptors:
            self._terminated = True
            proc.send_signal(self._descriptors["worker"], signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the worker; its shim ends the rest of the tree. A shim that was stopped is woken for that."""
        if "worker" in self._descriptors:
            proc.send_signal(self._descriptors["worker"], signal.SIGKILL)
        if "shim" in self._descriptors:
            proc.send_signal(self._descriptors["shim"], signal.SIGCONT)

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)
        self._descriptors.clear()

    # -- looking ------------------------------------------------------------------------------------------------

    def _find(self, now: float) -> bool:
        value = _read_json(self.directory / "pid.json")
        record = _to_record(value) if value is not None and value.get("nonce") == self._nonce else None
        if record is None:
            return False
        self._mark = mark_of(record.member, self._nonce)
        if record.boot_id == self._boot_id:
            self._open("shim", record.shim_pid, record.shim_start)
            self._open("worker", record.worker_pid, record.worker_start)
        self._record = record  # only now: a look that ran out of descriptors is repeated
        self._moved_at = self._active_at = now
        return True

    def _open(self, what: str, pid: int, start: int) -> None:
        descriptor = proc.open_pidfd(pid, start) if what not in self._descriptors else None
        if descriptor is not None:
            self._descriptors[what] = descriptor
            asyncio.get_running_loop().add_reader(descriptor, self._tell_end, descriptor)

    def _tell_end(self, descriptor: int) -> None:
        """A pidfd stays readable: one call is enough."""
        asyncio.get_running_loop().remove_reader(descriptor)
        self._on_end()

    def _is_over(self, what: str) -> bool:
        return what not in self._descriptors or proc.has_ended(self._descriptors[what])

    def _exit_status(self) -> ExitStatus:
        """Once the worker is over: before, such a file would be somebody else's."""
        return to_exit_status(_read_json(self.directory / "exit.json") or {})

    def _ask_kernel(self) -> None:
        """Its shim may be gone, and the zygote: how a process ended that is held here. Their word comes first."""
        if self._kernel_code is None and "worker" in self._descriptors and self._record is not None:
            self._kernel_code = proc.exit_code_of(self._descriptors["worker"], self._record.worker_pid)

    def _is_unseen(self, now: float, *, has_status: bool, unseen_end_seconds: float) -> bool:
        """Worker and shim are both over, and who may still write the status had its time."""
        if not (self._is_over("worker") and self._is_over("shim")):
            return False
        if self._unseen_since is None:
            self._unseen_since = now
        return has_status or now - self._unseen_since >= unseen_end_seconds

    def _is_alone(self) -> bool:
        """Nobody is left who would end what the worker has left behind; so that is done here, and looked at again."""
        try:
            return end_marked((self._mark,)) == 0
        except OSError as exc:
            proc.raise_shortage(exc)
            return False

    def _never_recorded(self) -> Process:
        """The zygote could not make the process, and said so: this incarnation is spent."""
        if (self.directory / "start_error").exists():
            return Process(recorded=True, ended=True, gone=True)
        return Process()

    def _alive(self, now: float, record: Record, *, watch_activity: bool) -> Process:
        stat = proc.read_stat(record.worker_pid)
        if stat is not None and stat.ticks != self._ticks:
            self._ticks, self._moved_at = stat.ticks, now
        if watch_activity and now - self._activity_seen_at >= _QUIET_LOOK_SECONDS:
            self._activity_seen_at = now
            activity = (*proc.tree_ticks(record.worker_pid), _size_of(self.directory / "log"))
            if activity != self._activity:
                self._activity, self._active_at = activity, now
        return Process(
            recorded=True,
            pid=record.worker_pid,
            stopped=stat is not None and stat.state in "Tt",
            still_seconds=now - self._moved_at,
            quiet_seconds=now - self._active_at if watch_activity else 0.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEnd:
    """Steps applied; whether the training is complete; whether the trainer stopped in order before that."""

    step: int = 0
    finished: bool = False
    stopped: bool = False


def read_ledger_end(path: Path) -> LedgerEnd:
    """By the last lines of a trainer's ledger; nothing without one."""
    end = LedgerEnd()
    for line in _tail(path, _LEDGER_TAIL_BYTES).split(b"\n"):
        value = _to_object(line) or {}  # the first one may be cut, the last one unfinished
        kind = value.get("k")
        if kind == "applied" and type(value.get("step")) is int and value["step"] < protocol.NUMBER_MAX:
            end = replace(end, step=max(end.step, value["step"] + 1))
        end = replace(end, finished=end.finished or kind == "finished", stopped=end.stopped or kind == "stopped")
    return end


def says_allocation_was_refused(log: Path) -> bool:
    """Whether the last that a process wrote is that it got no memory."""
    return _REFUSED_ALLOCATION.search(_tail(log, _LOG_TAIL_BYTES)) is not None


# -- files that the worker itself could have written: whatever they hold hurts nobody else ------------------------


def _to_record(value: dict[str, Any]) -> Record | None:
    fields = {name: value.get(name) for name in ("shim_pid", "shim_start", "worker_pid", "worker_start")}
    numbers = {name: n for name, n in fields.items() if type(n) is int and 0 < n < protocol.NUMBER_MAX}
    boot_id, member = value.get("boot_id"), value.get("member")
    if len(numbers) < len(fields) or not isinstance(boot_id, str) or not isinstance(member, str):
        return None
    return Record(**numbers, boot_id=boot_id, member=protocol.unicode_of(member))


def to_exit_status(value: dict[str, Any]) -> ExitStatus:
    code = value.get("code")
    if type(code) is not int or abs(code) >= _CODES:
        return NO_STATUS
    used, limit = (_size(value.get(name)) for name in ("used_bytes", "limit_bytes"))
    witness = value.get("out_of_memory")
    if witness not in (MemoryWitness.LIMIT, MemoryWitness.KERNEL):
        return ExitStatus(code=code, used_bytes=used)
    memory = MemoryEnd(witness=MemoryWitness(witness), used_bytes=used, limit_bytes=limit)
    return ExitStatus(code=code, used_bytes=used, memory=memory)


def _size(value: object) -> int:
    return value if type(value) is int and 0 < value < protocol.NUMBER_MAX else 0


def _read_json(path: Path) -> dict[str, Any] | None:
    return _to_object(_tail(path, _RECORD_BYTES_MAX))


def _to_object(text: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _tail(path: Path, size_bytes: int) -> bytes:
    """The last so many bytes of a file; nothing of what is none: to open a pipe could take for ever."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as exc:
        proc.raise_shortage(exc)
        return b""
    try:
        begin = max(0, os.lseek(descriptor, 0, os.SEEK_END) - size_bytes)
        return os.pread(descriptor, size_bytes, begin)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
