"""Kubernetes quantities, read exactly: text or number to integer milli-units or bytes, without a float in between."""

import re
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache
from typing import Final

from schemas.resources import MILLI

AMOUNT_MAX: Final = 2**63 - 1
"""Largest amount that fits into an event (a signed 64-bit integer)."""

_SHAPE: Final = re.compile(
    r"(?P<sign>[+-]?)(?P<whole>[0-9]{1,30})(?:\.(?P<part>[0-9]{1,30}))?"
    r"(?:[eE](?P<exponent>[+-]?[0-9]{1,2})|(?P<suffix>[numkMGTPE]|[KMGTPE]i))?"
)
_DECIMAL: Final = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY: Final = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}


class Unit(StrEnum):
    """What an amount is counted in: thousandths of a unit, or bytes."""

    MILLI_UNITS = "milli-units"
    BYTES = "bytes"

    @property
    def per_whole(self) -> int:
        return MILLI if self is Unit.MILLI_UNITS else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BadQuantity:
    """Why a quantity cannot be used, and what can."""

    detail: str
    way_out: str


@lru_cache(maxsize=4096, typed=True)
def parse_quantity(value: str | int | float, *, unit: Unit) -> int | BadQuantity:
    """The amount in ``unit``, above zero and at most ``AMOUNT_MAX``; a float means the decimal it is written as."""
    match = _SHAPE.fullmatch(_as_text(value))
    if match is None:
        return BadQuantity(detail="is not a quantity", way_out=_examples(unit))
    amount = _exact(match) * unit.per_whole
    if amount <= 0:
        return BadQuantity(detail="must be above zero", way_out="leave the field out to ask for none")
    if amount > AMOUNT_MAX:
        return BadQuantity(detail="is larger than any machine", way_out=_examples(unit))
    if amount.denominator != 1:
        finest = "one thousandth (1m)" if unit is Unit.MILLI_UNITS else "one byte"
        return BadQuantity(detail=f"is finer than {finest}", way_out=_examples(unit))
    return int(amount)


def _as_text(value: str | int | float) -> str:
    """``repr`` of a float is the shortest decimal that means it, so 0.1 stays one tenth."""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, int):
        return str(value) if abs(value) <= AMOUNT_MAX else f"{'-' if value < 0 else ''}{AMOUNT_MAX}E"
    number = Decimal(repr(value))
    return format(number, "f") if number.is_finite() and abs(number.adjusted()) < 30 else "not finite"


def _exact(match: re.Match[str]) -> Fraction:
    part = match["part"] or ""
    digits = Fraction(int(match["whole"] + part), 10 ** len(part))
    if match["sign"] == "-":
        digits = -digits
    if match["exponent"] is not None:
        return digits * _power_of_ten(int(match["exponent"]))
    suffix = match["suffix"] or ""
    if suffix in _BINARY:
        return digits * (1 << _BINARY[suffix])
    return digits * _power_of_ten(_DECIMAL.get(suffix, 0))


def _power_of_ten(exponent: int) -> Fraction:
    return Fraction(10**exponent) if exponent >= 0 else Fraction(1, 10**-exponent)


def _examples(unit: Unit) -> str:
    return "write 500m, 2 or 1.5" if unit is Unit.MILLI_UNITS else "write 512Mi, 2Gi or a number of bytes"


def say_amount(name: str, amount: int, *, unit: Unit) -> str:
    """For people: ``1.5 cpu``, ``2Gi memory``."""
    if unit is Unit.MILLI_UNITS:
        return f"{format((Decimal(amount) / MILLI).normalize(), 'f')} {name}"
    for suffix, power in reversed(_BINARY.items()):
        if amount and amount % 2**power == 0:
            return f"{amount >> power}{suffix} {name}"
    return f"{amount} bytes of {name}"
