"""The one place where a driver's errors become ours."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from sqlalchemy.exc import DBAPIError, InterfaceError, InvalidRequestError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from shared.errors import Conflict, Poison, Unavailable

_CONFLICTS: Final = frozenset(
    {
        "40001",  # serialization failure
        "40P01",  # deadlock
        "23505",  # unique violation: somebody else was first
        "23P01",  # exclusion violation
    }
)
_UNAVAILABLE: Final = frozenset(
    {
        "55P03",  # lock not available in time
        "57014",  # statement took too long
        "25P03",  # idle in transaction for too long
        "25P04",  # transaction took too long
        "25006",  # the server became read-only
        "3D000",  # the database is not there yet
    }
)
_UNAVAILABLE_CLASSES: Final = ("08", "53", "57P", "58", "XX")
_POISON_CLASSES: Final = ("22", "23", "54")
"""Data that no column takes, a constraint that is broken, a limit that is exceeded."""


@contextmanager
def translated() -> Iterator[None]:
    """Around code that talks to Postgres: raises Conflict, Unavailable or Poison for what the driver raised.

    Mistakes of ours (a statement that is wrong, a right that is missing) pass unchanged.
    """
    try:
        yield
    except SQLAlchemyError as exc:
        ours = translation(exc)
        if ours is None:
            raise
        raise ours from exc


@contextmanager
def connecting() -> Iterator[None]:
    """``translated``, and a server that cannot be reached is Unavailable."""
    try:
        with translated():
            yield
    except (OSError, TimeoutError) as exc:
        raise Unavailable(f"the database does not answer: {exc or type(exc).__name__}") from exc


def translation(exc: SQLAlchemyError) -> Exception | None:
    """Our error for one of the driver's; None where it is our own mistake."""
    if isinstance(exc, PoolTimeoutError):
        return Unavailable("no database connection became free in time")
    if not isinstance(exc, DBAPIError):
        # A connection that was lost under a transaction: its rollback finds nothing to roll back.
        lost = isinstance(exc, InvalidRequestError) and "invalid transaction" in str(exc)
        return Unavailable("the connection to the database was lost") if lost else None
    state = str(getattr(exc.orig, "sqlstate", None) or "")
    if "cached statement plan is invalid" in str(exc.orig) or state in _CONFLICTS:
        return Conflict(_first_line(exc))
    if exc.connection_invalidated or state in _UNAVAILABLE or state.startswith(_UNAVAILABLE_CLASSES):
        return Unavailable(f"the database failed: {_first_line(exc)}")
    if isinstance(exc, InterfaceError) and "closed" in str(exc.orig):
        return Unavailable("the connection to the database was lost")
    if state.startswith(_POISON_CLASSES):
        return Poison(f"the database refuses this: {_first_line(exc)}")
    return None


def is_own_mistake(exc: BaseException) -> bool:
    """A statement that is wrong or a right that is missing: no record's fault, and no retry helps."""
    return isinstance(exc, SQLAlchemyError) and translation(exc) is None


def _first_line(exc: DBAPIError) -> str:
    """The server's message without the statement and its values."""
    return (str(exc.orig).splitlines() or [type(exc.orig).__name__])[0]
