"""Decides whose fault an exit was: the job's, the platform's, or nobody's because it was asked for."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from schemas.vocabulary import Attribution
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
_FROM_OUTSIDE: Final = frozenset({1, 2, 6, 9, 15})
"""Signals by which others end a process; any other it draws upon itself. SIGABRT is here for the sake of gloo, which
aborts survivors of a lost peer."""


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
    kind: ExitKind
    attributed_to: Attribution
    reason: str


def attribute_exit(member: Member, exit_code: int | None) -> Exit:
    """Judge the end of ``member``. ``exit_code`` is negative for a signal, None where nobody saw it."""
    if member.ending is Ending.ABNORMAL:
        return Exit(kind=ExitKind.LOST, attributed_to=Attribution.PLATFORM, reason=member.ending_reason)
    if member.ending is not None:
        reason = member.ending_reason or member.ending.value
        return Exit(kind=ExitKind.ASKED, attributed_to=Attribution.PLATFORM, reason=reason)
    if exit_code is None:
        return Exit(
            kind=ExitKind.LOST, attributed_to=Attribution.PLATFORM, reason="nobody saw its end: counted as lost"
        )
    if exit_code == 0:
        return Exit(kind=ExitKind.DONE, attributed_to=Attribution.JOB, reason="exited with 0")
    if exit_code > 0:
        return Exit(kind=ExitKind.FAILED, attributed_to=Attribution.JOB, reason=f"exited with {exit_code}")
    name = SIGNAL_NAMES.get(-exit_code, f"signal {-exit_code}")
    if -exit_code not in _FROM_OUTSIDE:
        return Exit(kind=ExitKind.CRASHED, attributed_to=Attribution.JOB, reason=f"crashed with {name}")
    return Exit(kind=ExitKind.LOST, attributed_to=Attribution.PLATFORM, reason=f"killed by {name}")


def shell_code(exit_code: int | None) -> int | None:
    """The code as a shell shows it: 128 + the signal's number; None stays None."""
    return 128 - exit_code if exit_code is not None and exit_code < 0 else exit_code
