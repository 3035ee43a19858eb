"""Decides when a process that ended is started again."""

from dataclasses import dataclass, replace
from typing import Final

_STREAK_OF_READY_MAX: Final = 4
"""What has become ready each time works, and was ended by others: it is not to stay away for long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts:
    """How often something has ended in quick succession, and the back-off that follows. Seconds."""

    seconds_min: float
    seconds_max: float
    steady_seconds: float
    streak: int = 0

    def after(self, *, ran_seconds: float, was_ready: bool) -> "Restarts":
        """The next state: a run of ``steady_seconds`` forgets what was before; one that was ready forgets most."""
        streak = 1 if ran_seconds >= self.steady_seconds else self.streak + 1
        return replace(self, streak=min(streak, _STREAK_OF_READY_MAX) if was_ready else streak)

    @property
    def wait_seconds(self) -> float:
        """Doubles with each end from ``seconds_min`` to ``seconds_max``; 0 before the first."""
        if self.streak == 0:
            return 0.0
        doublings = min(self.streak - 1, 32)
        return min(self.seconds_min * 2.0**doublings, self.seconds_max)
