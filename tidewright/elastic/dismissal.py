"""Telling those who wait in the old group that the new one has started, so that they may go."""

import threading
from contextlib import suppress
from typing import Final

from tidewright.elastic.agreement import DISMISSED
from tidewright.elastic.errors import GroupBroken
from tidewright.elastic.group import Group

SEE_OFF_SECONDS: Final = 2.0


class Dismissal:
    """Says it in the collective in which they wait, in a thread: who leaves may still be in the body of its loop."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def begin(self, old: Group) -> None:
        """Let go of ``old`` once everyone there knows, or someone there is gone. It is not the caller's any more."""

        def tell() -> None:
            with suppress(GroupBroken):
                old.max(DISMISSED)
                old.meet()  # who let go sooner would cut off a slower one that has not heard it yet
            old.let_go()

        old.watch(lambda _: None)
        self._thread = threading.Thread(target=tell, name="tide-dismissal", daemon=True)
        self._thread.start()

    def see_off(self) -> None:
        """Before this process ends, which would break that collective. Who is late learns it from execution."""
        if self._thread is not None:
            self._thread.join(SEE_OFF_SECONDS)
