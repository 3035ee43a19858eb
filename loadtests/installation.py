"""A real ``tide up`` in a fresh state folder, seen from outside: for measurements of the whole system."""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

from demo.installation import Installation, free_port, fresh_state
from demo.record import read_ledgers
from services.launch.members import end_members
from tidewright.client import Client
from tidewright.elastic.proof import Entry

START_SECONDS: Final = 90.0
T = TypeVar("T")


@contextmanager
def installation(*, slots: int = 4, settings: Mapping[str, float] | None = None) -> Iterator[Installation]:
    """Up and ready, down at the end with everything that it started, the state folder included.

    ``settings``: by ``section.name``, as for ``tide up --set``. Raises TimeoutError or RuntimeError if it does not
    start. Nothing is recorded but the output of ``tide up``, and the machine is left to what is measured.
    """
    state = fresh_state()
    record = state.with_name(f"{state.name}-record")
    found = Installation(
        record=record, slots=slots, settings=dict(settings or {}), state=state, port=free_port(), recorded=False
    )
    found.start()
    try:
        until("it is ready", found.ready, seconds=START_SECONDS, trouble=found.ended)
        yield found
    finally:
        found.stop()
        end_members(state, grace_seconds=0.5)
        found.remove_state()
        shutil.rmtree(record, ignore_errors=True)


def client_of(found: Installation, *, retry_seconds: float = 30.0) -> Client:
    """The public client; a call is repeated for so long while nobody answers."""
    return Client(found.url, retry_seconds=retry_seconds)


def ledger_of(state: Path, job: str) -> tuple[Entry, ...]:
    """What the trainers of a job have written down so far, by wall time."""
    return read_ledgers(state, job=job).get(job, ())


def until(
    what: str,
    found: Callable[[], T],
    *,
    seconds: float = 30.0,
    look_seconds: float = 0.05,
    trouble: Callable[[], str] = lambda: "",
) -> T:
    """Poll until ``found()`` is true; gives it.

    Raises TimeoutError naming what did not happen; RuntimeError as soon as ``trouble`` names something.
    """
    deadline = time.monotonic() + seconds
    while not (value := found()):
        if said := trouble():
            raise RuntimeError(f"{what}: {said}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        time.sleep(look_seconds)
    return value
