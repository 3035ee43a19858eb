"""What a claim comes to: held, failed, or never put to the test."""

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    OK = "ok"
    FAILED = "FAILED"
    NOT_REACHED = "not reached"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """``detail`` gives the numbers the status rests on."""

    status: Status
    detail: str


def held(detail: str) -> Verdict:
    return Verdict(status=Status.OK, detail=detail)


def failed(detail: str) -> Verdict:
    return Verdict(status=Status.FAILED, detail=detail)


def not_reached(detail: str) -> Verdict:
    """The story ended before this could be seen: no failure of its own, but no success of the run either."""
    return Verdict(status=Status.NOT_REACHED, detail=detail)
