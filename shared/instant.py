"""One moment on both clocks: rows keep wall time, memory counts durations on the monotonic clock."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from shared.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    """``wall`` for rows, ``us`` (microseconds, monotonic) for the memory of this process."""

    wall: datetime
    us: int

    @classmethod
    def of(cls, clock: Clock) -> "Instant":
        return cls(wall=clock.now(), us=round(clock.monotonic() * 1_000_000))

    def to_us(self, at: datetime) -> int:
        """A row's time on this process's clock. Never in the future: a wall clock that was set back makes an
        age 0, so that what is left of a waiting time is never shortened by it.
        """
        return min(self.us, self.us - (self.wall - at) // timedelta(microseconds=1))

    def to_wall(self, us: int) -> datetime:
        """Inverse of ``to_us``."""
        return self.wall - timedelta(microseconds=self.us - us)
