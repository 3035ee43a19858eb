"""Tells a worker's descendants from everybody else, whatever they did to lose their origin, and ends them.

A shim ends the tree below it, and the zygote what a killed shim leaves. Where both are killed, a descendant that
forked twice has no parent left that would lead to it, and needs not have its environment, session, folder or open
files either. Limits of resources are the one thing that every fork and exec hands on and no ordinary program sets:
``RLIMIT_RTTIME`` bounds how long a process of a real-time policy may run without blocking. A limit of tens of
thousands of years bounds nothing, so its digits are free to carry a mark.
"""

import os
import resource
import signal
from collections.abc import Collection, Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Final

_BASE: Final = 1 << 61
"""Microseconds, 73,000 years; the mark is in the digits below."""
_MARK_BITS: Final = 60
_LIMIT_NAME: Final = b"Max realtime timeout"


def mark_of(member: str, nonce: str) -> int:
    """The mark of one process that was started for a member, and of all its descendants."""
    digest = sha256(f"{member}\n{nonce}".encode()).digest()
    return _BASE | int.from_bytes(digest[:8]) >> (64 - _MARK_BITS)


def put_mark(mark: int) -> bool:
    """Mark this process and whatever it will start; False where its own limit is lower already."""
    try:
        resource.setrlimit(resource.RLIMIT_RTTIME, (mark, mark))
    except (OSError, ValueError):
        return False
    return True


def find_marked(marks: Collection[int]) -> Iterator[int]:
    """Pids of all living processes that carry one of these. Costs about 10 µs for each process of the machine."""
    for name in os.listdir("/proc"):  # noqa: PTH208 - names are all that is needed
        if name.isdigit() and _mark_on(int(name)) in marks and not _is_zombie(int(name)):
            yield int(name)


def end_marked(marks: Collection[int]) -> int:
    """SIGKILL to all of them; gives how many there were. Repeat until there are none: they may fork meanwhile.

    Who became another user, whom we may not signal, is not counted: waiting for it would be of no use. Raises OSError
    where the kernel has no descriptor left for a look.
    """
    found = 0
    for pid in find_marked(marks):
        with suppress(ProcessLookupError, PermissionError):
            descriptor = os.pidfd_open(pid)
            try:
                if _mark_on(pid) in marks:  # the pid is held now, and was not reused before
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                    found += 1
            finally:
                os.close(descriptor)
    return found


def _mark_on(pid: int) -> int | None:
    try:
        return resource.prlimit(pid, resource.RLIMIT_RTTIME)[1]
    except PermissionError:  # of another user, or so says a container: what it is can still be read
        return _mark_read(pid)
    except ProcessLookupError:
        return None


def _mark_read(pid: int) -> int | None:
    try:
        lines = Path(f"/proc/{pid}/limits").read_bytes().splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    words = next((line.split() for line in lines if line.startswith(_LIMIT_NAME)), [b""])
    return int(words[-2]) if len(words) > 2 and words[-2].isdigit() else None


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return True
