"""How long a signal has been on one side of the band without a break, and what breaks it.

Integers only: fractions in parts per million, durations in microseconds.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from schemas.events.metric import MetricWindow
from schemas.vocabulary import UtilisationMeasure

PPM: Final = 1_000_000


class Side(StrEnum):
    """Where a window's utilisation lies. On an edge of the band is inside it."""

    ABOVE = "above"
    WITHIN = "within"
    BELOW = "below"


class Unusable(StrEnum):
    """Why a window says nothing. Such a window breaks continuity."""

    NO_UTILISATION = "no_utilisation"
    OUT_OF_RANGE = "out_of_range"
    BAD_DURATION = "bad_duration"
    INCOMPLETE = "incomplete"
    STALE = "stale"


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Where utilisation may lie, and what a window must be to say anything about it.

    ``window_us``: how long the signal must stay on one side. ``staleness_us``: the greatest age of a window, the
    longest pause between two, and the longest stretch that one window may average over.
    """

    low_ppm: int
    high_ppm: int
    window_us: int
    staleness_us: int
    reporting_ppm: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One usable window: its length and its utilisation."""

    length_us: int
    utilisation_ppm: int
    measure: UtilisationMeasure

    def side(self, band: Band) -> Side:
        if self.utilisation_ppm > band.high_ppm:
            return Side.ABOVE
        return Side.BELOW if self.utilisation_ppm < band.low_ppm else Side.WITHIN


@dataclass(frozen=True, slots=True, kw_only=True)
class Streak:
    """Adjoining usable windows of one generation, all on one side and of one measure, oldest first.

    ``parts`` are (length, utilisation); no more are kept than cover the band's window. ``last_us``: when the newest
    one was received, on our own clock.
    """

    attempt: int
    generation: int
    side: Side
    measure: UtilisationMeasure
    parts: tuple[tuple[int, int], ...]
    last_us: int

    @property
    def covered_us(self) -> int:
        return sum(length for length, _ in self.parts)

    @property
    def utilisation_ppm(self) -> int:
        """Mean over the parts, weighted by their length, rounded down."""
        return sum(length * ppm for length, ppm in self.parts) // self.covered_us

    def is_full(self, band: Band) -> bool:
        return self.covered_us >= band.window_us


def to_part(window: MetricWindow, *, age_us: int, expected: int | None, band: Band) -> Part | Unusable:
    """What a window says, or why it says nothing.

    ``expected``: workers of the group that is known to run, None while it is not known which one does.
    ``age_us``: since the window was published.
    """
    utilisation, seconds = window.utilisation, window.window_seconds
    if utilisation is None:
        return Unusable.NO_UTILISATION
    if not (math.isfinite(utilisation) and 0 <= utilisation <= 1):
        return Unusable.OUT_OF_RANGE
    if not (math.isfinite(seconds) and 0 < seconds * PPM <= band.staleness_us):
        return Unusable.BAD_DURATION
    if age_us > band.staleness_us:
        return Unusable.STALE
    members = window.members_expected if expected is None else expected
    known = members == window.members_expected and 0 < window.members_reporting <= members
    if not known or window.members_reporting * PPM < band.reporting_ppm * members:
        return Unusable.INCOMPLETE
    length_us = max(1, round(seconds * PPM))
    return Part(length_us=length_us, utilisation_ppm=round(utilisation * PPM), measure=window.measure)


def extend(streak: Streak | None, part: Part, *, attempt: int, generation: int, now_us: int, band: Band) -> Streak:
    """The streak that ends with this part: the old one made longer, or a new one where it adjoins none."""
    side = part.side(band)
    adjoins = (
        streak is not None
        and (streak.attempt, streak.generation) == (attempt, generation)
        and (streak.side, streak.measure) == (side, part.measure)
        and 0 <= now_us - streak.last_us <= part.length_us + band.staleness_us
    )
    parts: tuple[tuple[int, int], ...] = ((part.length_us, part.utilisation_ppm),)
    if streak is not None and adjoins:
        parts = _newest((*streak.parts, *parts), window_us=band.window_us)
    return Streak(
        attempt=attempt, generation=generation, side=side, measure=part.measure, parts=parts, last_us=now_us
    )


def _newest(parts: tuple[tuple[int, int], ...], *, window_us: int) -> tuple[tuple[int, int], ...]:
    """The shortest tail that still covers the window, or all of it."""
    spare_us = sum(length for length, _ in parts) - window_us
    first = 0
    while spare_us >= parts[first][0]:
        spare_us -= parts[first][0]
        first += 1
    return parts[first:]
