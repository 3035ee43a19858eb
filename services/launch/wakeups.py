"""Signals as words: a handler only notes what was asked, and wakes the loop that acts on it."""

import contextlib
import os
import select
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final


class Stop(Enum):
    """How to stop: with the running jobs, or around them."""

    WITH_JOBS = "with jobs"
    KEEP_JOBS = "keep jobs"


_ASKED: Final = {
    signal.SIGTERM: Stop.WITH_JOBS,
    signal.SIGINT: Stop.WITH_JOBS,
    signal.SIGUSR1: Stop.KEEP_JOBS,
}


@dataclass(slots=True)
class Wakeups:
    """``asked``: the first that was asked, None so far; ``count``: how many signals have come."""

    asked: Stop | None = None
    count: int = 0
    _reading: int = -1

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """SIGTERM, SIGINT and SIGUSR1 are noted, a closed terminal (SIGHUP) stops nothing.

        All are handlers, not ignored, so that programs started meanwhile begin with the default.
        """
        reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._reading = reading
        before = {number: signal.signal(number, self._on_signal) for number in (*_ASKED, signal.SIGHUP)}
        earlier = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(earlier)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._reading = -1
            os.close(reading)
            os.close(writing)

    def sleep(self, seconds: float, descriptors: Iterable[int]) -> None:
        """Until a signal comes, a pidfd says that its process has ended, or the time is over."""
        poll = select.poll()
        for descriptor in (self._reading, *descriptors):
            poll.register(descriptor, select.POLLIN)
        if any(descriptor == self._reading for descriptor, _ in poll.poll(max(0.0, seconds) * 1000)):
            with contextlib.suppress(BlockingIOError):
                os.read(self._reading, 512)

    def _on_signal(self, number: int, _: object) -> None:
        asked = _ASKED.get(signal.Signals(number))
        if asked is not None:
            self.asked = self.asked or asked
            self.count += 1
