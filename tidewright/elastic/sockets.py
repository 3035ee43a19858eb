"""Finds the sockets of a group among all of a process, and cuts or lets them go.

gloo closes a broken pair's descriptor by itself and its number is used again, so only duplicates are polled and shut
down. Which sockets are the group's is decided by its members together: a socket counts if its two ends, the other way
round, are on a peer's list; what the script or a reconnecting control connection opens meanwhile is on nobody's.
"""

import os
import select
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

Ends = tuple[str, int, str, int]
"""Own address and port, the peer's address and port."""
_POLLRDHUP: Final = 0x2000
CUT_EVENTS: Final = _POLLRDHUP | select.POLLERR | select.POLLHUP
KEEP_ALIVE_IDLE_SECONDS: Final = 10
KEEP_ALIVE_INTERVAL_SECONDS: Final = 5
KEEP_ALIVE_PROBES: Final = 3


def socket_inodes() -> dict[int, int]:
    """Inode and descriptor of every socket of this process."""
    found: dict[int, int] = {}
    for entry in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):
            target = str(entry.readlink())
            if target.startswith("socket:["):
                found[int(target[8:-1])] = int(entry.name)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A connected socket, held by a duplicate of its descriptor."""

    descriptor: int
    ends: Ends


def connected_since(before: Iterable[int]) -> list[Candidate]:
    """Connected TCP sockets whose inodes were not there ``before``."""
    known = frozenset(before)
    found: list[Candidate] = []
    for inode, descriptor in sorted(socket_inodes().items()):
        if inode in known:
            continue
        with suppress(OSError):
            duplicate = os.dup(descriptor)
            ends = _ends(duplicate) if os.fstat(duplicate).st_ino == inode else None
            if ends is None:
                os.close(duplicate)
            else:
                found.append(Candidate(descriptor=duplicate, ends=ends))
    return found


def _ends(descriptor: int) -> Ends | None:
    with socket.socket(fileno=os.dup(descriptor)) as one:
        if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
            return None
        try:
            own, peer = one.getsockname(), one.getpeername()
        except OSError:  # listening, or closed already
            return None
        return str(own[0]), int(own[1]), str(peer[0]), int(peer[1])


def agreed(candidates: Iterable[Candidate], peers: Iterable[Ends]) -> tuple[list[int], list[int]]:
    """Descriptors that are a group's, and those that are not."""
    reversed_ends = frozenset((peer, peer_port, own, own_port) for own, own_port, peer, peer_port in peers)
    group: list[int] = []
    others: list[int] = []
    for candidate in candidates:
        (group if candidate.ends in reversed_ends else others).append(candidate.descriptor)
    return group, others


def _with_each(descriptors: Iterable[int], action: Callable[[socket.socket], None]) -> None:
    for descriptor in descriptors:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
            action(one)


def cut(descriptors: Iterable[int]) -> None:
    """Make running collectives raise within a millisecond. Reading only: a write that fails inside gloo aborts us."""
    _with_each(descriptors, lambda one: one.shutdown(socket.SHUT_RD))


def let_go(descriptors: Iterable[int]) -> None:
    """Tell the peers that this process is done with a group in which it has no collective under way."""
    _with_each(descriptors, lambda one: one.shutdown(socket.SHUT_WR))


def notice_lost_hosts(descriptors: Iterable[int]) -> None:
    """A host that vanishes sends no word: have the kernel ask."""

    def set_options(one: socket.socket) -> None:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_ALIVE_IDLE_SECONDS)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEP_ALIVE_INTERVAL_SECONDS)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEP_ALIVE_PROBES)

    _with_each(descriptors, set_options)


def set_no_delay(descriptors: Iterable[int]) -> None:
    _with_each(descriptors, lambda one: one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1))


def is_cut(descriptors: Iterable[int]) -> bool:
    """Whether a peer has closed, by asking the kernel (microseconds)."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, CUT_EVENTS)
    return bool(poll.poll(0))


def close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)
