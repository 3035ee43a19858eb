"""Decides whose fault an exit was: the job's, the platform's, or nobody's because it was asked for."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from schemas.vocabulary import Attribution, EndCause, Mode
from services.execution.core.seen import MemoryEnd, MemoryWitness, Process
from services.execution.core.state import Ending, Member

SIGNAL_NAMES: Final = {
    1: "SIGHUP",
    2: "SIGINT",
    3: "SIGQUIT",
    4: "SIGILL",
    5: "SIGTRAP",
    6: "SIGABRT",
    7: "SIGBUS",
    8: "SIGFPE",
    9: "SIGKILL",
    10: "SIGUSR1",
    11: "SIGSEGV",
    12: "SIGUSR2",
    13: "SIGPIPE",
    14: "SIGALRM",
    15: "SIGTERM",
    24: "SIGXCPU",
    25: "SIGXFSZ",
    31: "SIGSYS",
}
FROM_OUTSIDE: Final = frozenset({1, 2, 9, 15})
"""Signals by which others end a process; any other it draws upon itself."""
_CRASHES: Final = frozenset({3, 4, 5, 6, 7, 8, 11, 31})
SIGABRT: Final = 6
CANNOT_EXECUTE: Final = 126
NOT_FOUND: Final = 127
_MIB: Final = 2**20
_GIB: Final = 2**30


class ExitKind(StrEnum):
    ASKED = "asked"
    """It went because we asked it to, or before it had run anything."""
    DONE = "done"
    """Exit 0 by itself."""
    FAILED = "failed"
    """A failure of the job: it ends the attempt."""
    CRASHED = "crashed"
    """Ended by a signal that it drew upon itself: replaced a few times, then a failure of the job."""
    LOST = "lost"
    """Taken away: replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """``attributed_to`` None: nobody's."""

    kind: ExitKind
    cause: EndCause
    attributed_to: Attribution | None
    reason: str


def attribute_exit(member: Member, process: Process, *, mode: Mode = Mode.LIVE, memory_bytes: int = 0) -> Exit:
    """Judge the end of ``member``. ``memory_bytes``: what the job asked for per member; 0 if it did not say.

    1. What we ended is nobody's, unless it was stuck.  2. A machine that restarted took everything with it.
    3. Out of memory.  4. What nobody saw.  5. Signals.  6. Exit codes.
    """
    if member.ending is Ending.ABNORMAL:
        return _lost(EndCause.STUCK, member.ending_reason)
    if member.ending is not None:
        reason = member.ending_reason or member.ending.value
        return Exit(kind=ExitKind.ASKED, cause=EndCause.STOPPED, attributed_to=None, reason=reason)
    if process.rebooted and process.exit_code is None:
        return _lost(EndCause.NODE_RESTARTED, "was lost when its machine was restarted")
    if process.memory is not None and process.exit_code != 0:
        return _out_of_memory(process.memory, memory_bytes=memory_bytes)
    code = process.exit_code
    if code is None:
        return _lost(EndCause.UNSEEN, "was lost: nobody saw how it ended")
    if code < 0:
        return _signalled(-code, f"signal {-code}")
    return _exited(code, process, mode=mode)


def may_follow(exit_code: int | None) -> bool:
    """What a member ends with when it trips over a lost peer: an exception, or SIGABRT by gloo."""
    return exit_code is not None and (exit_code > 0 or exit_code == -SIGABRT)


def took_its_peers_along(judged: Exit) -> bool:
    """Whether what peers of the member do right after it (raise, or are aborted by gloo) follows from its end."""
    return judged.kind is ExitKind.LOST and judged.cause is not EndCause.PEER_LOST


def as_follower(judged: Exit) -> Exit:
    """The same exit of a member whose peer was taken away: one burst, and the platform's."""
    return Exit(
        kind=ExitKind.LOST,
        cause=EndCause.PEER_LOST,
        attributed_to=Attribution.PLATFORM,
        reason=f"{judged.reason} after a peer was lost",
    )


def root_cause_order(judged: Exit) -> int:
    """Of ends that are seen together the one that explains the others comes first."""
    if judged.cause is EndCause.OUT_OF_MEMORY:
        return 0
    if took_its_peers_along(judged):
        return 1
    return 3 if judged.kind is ExitKind.CRASHED else 2


def shell_code(exit_code: int | None) -> int | None:
    """The code as a shell shows it: 128 + the signal's number; None stays None."""
    return 128 - exit_code if exit_code is not None and exit_code < 0 else exit_code


def amount(size_bytes: int) -> str:
    """``1.5 GiB``, ``300 MiB``."""
    return f"{size_bytes / _GIB:.1f} GiB" if size_bytes >= _GIB else f"{size_bytes / _MIB:.0f} MiB"


def _lost(cause: EndCause, reason: str) -> Exit:
    return Exit(kind=ExitKind.LOST, cause=cause, attributed_to=Attribution.PLATFORM, reason=reason)


def _of_job(kind: ExitKind, cause: EndCause, reason: str) -> Exit:
    return Exit(kind=kind, cause=cause, attributed_to=Attribution.JOB, reason=reason)


def _signalled(number: int, told: str) -> Exit:
    name = SIGNAL_NAMES.get(number, told)
    if number in FROM_OUTSIDE:
        return _lost(EndCause.KILLED, f"was killed from outside by {name}")
    verb = "crashed with" if number in _CRASHES else "was ended by"
    return _of_job(ExitKind.CRASHED, EndCause.CRASHED, f"{verb} {name}")


def _exited(code: int, process: Process, *, mode: Mode) -> Exit:
    if code == 0 and process.ledger_stopped and mode is Mode.LIVE:
        return _lost(EndCause.KILLED, "was stopped from outside by SIGTERM")
    if code == 0:
        return _of_job(ExitKind.DONE, EndCause.COMPLETED, "exited with 0")
    if code - 128 in FROM_OUTSIDE:
        name = SIGNAL_NAMES[code - 128]
        return _lost(EndCause.KILLED, f"exited with {code}: what it ran was killed from outside by {name}")
    if code - 128 in _CRASHES:
        name = SIGNAL_NAMES[code - 128]
        return _of_job(ExitKind.FAILED, EndCause.CRASHED, f"exited with {code}: what it ran crashed with {name}")
    if code == NOT_FOUND:
        reason = f"exited with {code}: a command was not found (see its log)"
        return _of_job(ExitKind.FAILED, EndCause.COMMAND_NOT_FOUND, reason)
    if code == CANNOT_EXECUTE:
        reason = f"exited with {code}: a command is there and cannot be executed (see its log)"
        return _of_job(ExitKind.FAILED, EndCause.COMMAND_NOT_EXECUTABLE, reason)
    return _of_job(ExitKind.FAILED, EndCause.EXIT_CODE, f"exited with {code}")


def _out_of_memory(end: MemoryEnd, *, memory_bytes: int) -> Exit:
    used = f"it used {amount(end.used_bytes)}" if end.used_bytes else "how much it used is not known"
    if end.witness is MemoryWitness.KERNEL and 0 < end.used_bytes <= memory_bytes:
        within = f"{used} of the {amount(memory_bytes)} that it asked for"
        return _lost(EndCause.NODE_OUT_OF_MEMORY, f"was killed because its machine ran out of memory: {within}")
    limit = end.limit_bytes or memory_bytes
    bound = f", its limit is {amount(limit)}" if limit else ""
    what = {
        MemoryWitness.LIMIT: "was ended above its memory",
        MemoryWitness.KERNEL: "was killed by the kernel, out of memory",
        MemoryWitness.ALLOCATION: "could not allocate memory",
    }[end.witness]
    way_out = (
        "ask for more (resources.memory, tide submit --memory) or use less, such as a smaller batch for each worker"
    )
    return _of_job(ExitKind.FAILED, EndCause.OUT_OF_MEMORY, f"{what}: {used}{bound}; {way_out}")
