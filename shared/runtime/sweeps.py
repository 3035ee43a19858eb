"""The loop that deletes what is old, a bounded number of rows at a time."""

import asyncio
from collections.abc import Awaitable, Callable

from shared.clock import pause
from shared.errors import Conflict, Unavailable
from shared.telemetry.logs import get_logger

_log = get_logger(part="retention")


async def run_sweeps(
    stopping: asyncio.Event, sweep: Callable[[], Awaitable[bool]], *, interval_seconds: float
) -> None:
    """Sweep until nothing more is said to be there, pause, and again; a database that is away costs one round."""
    while not stopping.is_set():
        try:
            while not stopping.is_set() and await sweep():
                pass
        except (Unavailable, Conflict) as exc:
            _log.warning("retention_failed", error=str(exc))
        await pause(stopping, interval_seconds)
