"""A clock that moves only when it is told to."""

from datetime import UTC, datetime, timedelta
from typing import Final

NOON: Final = datetime(2030, 1, 1, 12, 0, tzinfo=UTC)


class FakeClock:
    def __init__(self, now: datetime = NOON) -> None:
        self._now = now
        self._monotonic = 1_000.0

    def now(self) -> datetime:
        return self._now

    def monotonic(self) -> float:
        return self._monotonic

    def advance(self, seconds: float) -> None:
        """Both clocks move by so much."""
        self._now += timedelta(seconds=seconds)
        self._monotonic += seconds
