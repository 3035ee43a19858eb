"""Ticks: waits of a loop that is made meanwhile are ended, and nothing else is disturbed."""

import ctypes
import socket
import threading
from collections.abc import Callable

from tidewright.elastic.ticks import quick_loops

LIBC = ctypes.CDLL(None)


def epoll_wait(milliseconds: int) -> int:
    """What a loop of gloo's does: the C call itself, since Python's own waits again after a signal."""
    descriptor = LIBC.epoll_create1(0)
    events = ctypes.create_string_buffer(12)
    try:
        return int(LIBC.epoll_wait(descriptor, events, 1, milliseconds))
    finally:
        LIBC.close(descriptor)


def in_thread(call: Callable[[], int]) -> tuple[threading.Thread, list[int]]:
    outcome: list[int] = []
    thread = threading.Thread(target=lambda: outcome.append(call()), daemon=True)
    thread.start()
    return thread, outcome


def test_a_wait_of_a_thread_that_is_made_within_ends_at_once() -> None:
    with quick_loops():
        thread, outcome = in_thread(lambda: epoll_wait(60_000))
        thread.join(20)
    assert outcome == [-1], "interrupted: a loop looks up, and waits again"


def test_a_wait_of_a_thread_from_before_lasts_as_long_as_it_is_to() -> None:
    thread, outcome = in_thread(lambda: epoll_wait(500))
    with quick_loops():
        thread.join(20)
    assert outcome == [0], "nothing came, and nothing interrupted it"


def test_a_blocked_read_goes_on_through_the_signals() -> None:
    own, peer = socket.socketpair()
    buffer = ctypes.create_string_buffer(8)
    with own, peer, quick_loops():
        thread, outcome = in_thread(lambda: int(LIBC.recv(own.fileno(), buffer, 8, 0)))
        ticked, woken = in_thread(lambda: epoll_wait(60_000))
        ticked.join(20)
        assert (woken, outcome) == ([-1], [])
        peer.send(b"here")
        thread.join(20)
    assert (outcome, buffer.value) == ([4], b"here")


def test_no_thread_is_left_and_loops_rest_again() -> None:
    with quick_loops():
        pass
    thread, outcome = in_thread(lambda: epoll_wait(300))
    thread.join(20)
    assert outcome == [0]
    assert not [each for each in threading.enumerate() if each.name == "tide-ticks"]
