"""Runs a group's collectives in a thread of its own, so that the process outlives one that never comes back.

When a peer dies, gloo can lock itself up: a send that fails holds the lock of its group and waits for the thread that
reads, which waits for that lock. Nothing outside gloo can part the two; but nobody else needs them either: the next
group has threads and locks of its own. The two that are stuck stay until the process ends.
"""

import queue
import select
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, Final

from tidewright.elastic.errors import GroupBroken

HUNG_SECONDS: Final = 0.3
"""How long a collective may stay away after its group was cut; one that raises does so within milliseconds."""
_Call = tuple[Callable[[], Any], "Future[None]"]


class Calls:
    """One call at a time. A step costs one more change of threads: about 30 microseconds."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._under_way: Future[None] | None = None

    def run(self, begin: Callable[[], Any], *, check: Callable[[], None]) -> None:
        """Begin a collective and wait for it. Raises what it raises, what ``check`` raises, GroupBroken if given up.

        A cut that comes before ``check`` is seen by it, one that comes after finds the call under way.
        """
        outcome: Future[None] = Future()
        self._under_way = outcome
        try:
            check()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_serve, args=(self._waiting,), name="tide-collectives", daemon=True
                )
                self._thread.start()
            self._waiting.put((begin, outcome))
            outcome.result()
        finally:
            self._under_way = None

    def see_through(self, stop: int) -> None:
        """Call after the cut, from another thread: gives up a call that stays away for HUNG_SECONDS.

        Comes back when nothing is under way, or as soon as the descriptor ``stop`` can be read.
        """
        outcome = self._under_way
        if outcome is None:
            return
        poll = select.poll()
        poll.register(stop, select.POLLIN)
        if poll.poll(HUNG_SECONDS * 1000):
            return
        with suppress(InvalidStateError):  # it has come back
            outcome.set_exception(GroupBroken("a collective did not come back after a peer was lost"))

    def close(self) -> None:
        """End the thread, unless it is stuck."""
        self._waiting.put(None)


def _serve(waiting: "queue.SimpleQueue[_Call | None]") -> None:
    while (call := waiting.get()) is not None:
        begin, outcome = call
        try:
            begin().wait()
        except BaseException as error:  # noqa: BLE001 - raised where the call was made
            failure: BaseException | None = error
        else:
            failure = None
        with suppress(InvalidStateError):  # it was given up
            outcome.set_exception(failure) if failure is not None else outcome.set_result(None)
        del call, begin, outcome, failure  # or the group would live on here
