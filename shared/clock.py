"""The clock port: the only place where services learn the time."""

import asyncio
import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    def now(self) -> datetime:
        """Aware UTC wall clock: for people and records, never for durations."""

    def monotonic(self) -> float:
        """Seconds since some moment; only differences mean anything."""


class SystemClock:
    """The machine's clocks."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()


async def pause(stopping: asyncio.Event, seconds: float) -> None:
    """Sleep, but return at once when ``stopping`` is set."""
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            await stopping.wait()
    except TimeoutError:
        pass
