"""What members agree on in the sum of every step: changing groups, stopping; and whose state counts."""

from dataclasses import dataclass
from typing import Final

READY_MODULUS: Final = 200
"""Numbers up to it and their squares, summed over 400 members, are exact in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """What a member adds to its part of the loss: its samples, the offer it has formed, whether to stop."""

    samples: int
    ready_generation: int
    stop: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What all members read in the same sum. ``swap``: everyone has formed the offer that this member has."""

    loss: float
    samples: int
    swap: bool
    stop: bool


def ready_number(generation: int) -> int:
    """0: not ready. Not the generation itself: its square would soon be beyond what float32 holds exactly."""
    return 1 + generation % READY_MODULUS if generation else 0


def agree(*, sums: tuple[float, float, float, float, float], world: int, ready_generation: int) -> Agreement:
    """Read the sums of loss, samples, ready number, its square, and stop.

    The ready numbers are all equal to r exactly if they sum up to n * r and their squares to n * r * r.
    """
    loss, samples, ready, squares, stop = sums
    number = ready_number(ready_generation)
    swap = number > 0 and ready == world * number and squares == world * number * number
    return Agreement(loss=loss, samples=round(samples), swap=swap, stop=stop > 0)


def flag_values(flags: Flags) -> list[float]:
    """Samples, ready number, its square, stop."""
    number = ready_number(flags.ready_generation)
    return [float(flags.samples), float(number), float(number * number), float(flags.stop)]


# -- whose state counts: the greatest bid wins ---------------------------------------------------------------

_RANK_BITS: Final = 16
RANKS_MAX: Final = (1 << _RANK_BITS) - 1
DISMISSED: Final = 1 << 62
"""Greater than any bid: said by those whose newer group has started to those who wait in this one."""


def bid(*, step: int, rank: int, may_be_source: bool, is_named: bool) -> int:
    """What a member says in the election: the greatest wins. The most advanced; of those the one that was named."""
    if not may_be_source:
        return 0
    return ((step + 1) << (_RANK_BITS + 1)) | (int(is_named) << _RANK_BITS) | (RANKS_MAX - rank)


def winner(greatest: int) -> int:
    return RANKS_MAX - (greatest & RANKS_MAX)
