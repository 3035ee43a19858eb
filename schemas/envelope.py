"""The envelope of every event: CloudEvents attributes, and the sequence that orders the log."""

from dataclasses import dataclass
from datetime import datetime
from typing import Generic, NamedTuple, TypeVar

from schemas.vocabulary import TenantName, Topic


class Sequence(NamedTuple):
    """Where an event stands in the log: (transaction id, row id) of its outbox row, compared in that order.

    It is the event's order, a reader's position, and the id of a server-sent event.
    """

    xid: int
    id: int

    def __str__(self) -> str:
        return f"{self.xid}-{self.id}"

    @classmethod
    def parse(cls, text: str) -> "Sequence":
        """Inverse of ``str``. Raises ValueError."""
        xid, separator, row = text.partition("-")
        if not (separator and xid.isascii() and xid.isdigit() and row.isascii() and row.isdigit()):
            raise ValueError(f"not a position in the log: {text[:40]!r}")
        return cls(int(xid), int(row))


START = Sequence(0, 0)
"""Before the first event."""

D = TypeVar("D", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event(Generic[D]):
    """One event as readers see it. ``time`` is the publisher's wall clock and orders nothing."""

    type: str
    topic: Topic
    key: str
    tenant: TenantName
    source: str
    sequence: Sequence
    time: datetime
    data: D
    traceparent: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft(Generic[D]):
    """One event as a handler hands it to its transaction; the rest of the envelope is added at the commit."""

    key: str
    tenant: TenantName
    data: D
