"""Errors, sorted by what the shell does about them. Adapters translate library errors into these."""

from dataclasses import dataclass


class TideError(Exception):
    """Base of all errors that the shells know how to treat."""


@dataclass
class Rejected(TideError):
    """The caller broke a rule: a 4xx answer, no retry.

    ``field`` is a JSON pointer into the request ("" where none applies), ``detail`` says what is wrong,
    ``way_out`` what is allowed. ``code`` is a stable word for programs.
    """

    status: int
    code: str
    detail: str
    field: str = ""
    way_out: str = ""

    def __str__(self) -> str:
        return f"{self.field}: {self.detail}" if self.field else self.detail


class Conflict(TideError):
    """A race was lost: decide again, at most 3 times."""


class LeaseLost(TideError):
    """The partition has another holder now: drop the work and what was cached."""


@dataclass
class Unavailable(TideError):
    """A dependency failed or was slow: back off, acknowledge nothing."""

    detail: str
    retry_after_seconds: float = 1.0

    def __str__(self) -> str:
        return self.detail


class Poison(TideError):
    """The message can never succeed: set it aside with the reason."""
