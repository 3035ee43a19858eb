"""Makes the event loops of gloo look up more often while a group is formed.

gloo's loop thread sleeps in ``epoll_wait`` for 10 ms, and whoever connects a pair waits for the end of such a sleep,
once for each peer, in each of the two meshes that Paddle builds: 60 of the 75 ms that forming a group of four takes.
A signal to that thread ends its sleep at once. It is one that nobody uses, its handler does nothing, and with
SA_RESTART no other call than such a wait is interrupted by it; gloo, like everyone, then looks and sleeps again.
"""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Final

TICK_SECONDS: Final = 0.001
TICKING_SECONDS: Final = 5.0
"""Then a peer is missing, and nothing is to be gained."""
_SIGNAL: Final = signal.SIGRTMAX - 3


@contextmanager
def quick_loops() -> Iterator[None]:
    """Within it the loops of threads that are made within it tick every millisecond. Costs a thread meanwhile."""
    if not _is_prepared():
        yield
        return
    stopping = threading.Event()
    thread = threading.Thread(target=_tick, args=(_threads(), stopping), name="tide-ticks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


def _tick(before: frozenset[int], stopping: threading.Event) -> None:
    own = threading.get_native_id()
    libc, process = ctypes.CDLL(None), os.getpid()
    end = time.monotonic() + TICKING_SECONDS
    while not stopping.wait(TICK_SECONDS) and time.monotonic() < end:
        for thread in _threads() - before:
            if thread != own:
                libc.tgkill(process, thread, _SIGNAL)


def _threads() -> frozenset[int]:
    return frozenset(int(entry.name) for entry in Path("/proc/self/task").iterdir())


@cache
def _is_prepared() -> bool:
    """Install the handler: ``abs``, a function of libc that takes a number and changes nothing."""
    if signal.getsignal(_SIGNAL) is not signal.SIG_DFL:
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "tgkill"):
        return False
    libc.signal.restype = ctypes.c_void_p
    return bool(libc.signal(_SIGNAL, ctypes.cast(libc.abs, ctypes.c_void_p)) in (None, 0))
