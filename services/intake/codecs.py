"""JSON of what the tables keep: registers, specs, snapshots. Columns are text on the way in and out."""

from typing import Final, TypeVar

from pydantic import TypeAdapter

from schemas.events.allocation import QueueObserved
from schemas.events.capacity import CapacityObserved
from schemas.events.job import JobSpec, RoleRequest
from schemas.registry import EventData, encode
from services.intake.core.registers import Grant, Group, Measured, Proposal, Waiting

GRANT: Final = TypeAdapter(Grant)
WAITING: Final = TypeAdapter(Waiting)
GROUP: Final = TypeAdapter(Group)
MEASURED: Final = TypeAdapter(Measured)
PROPOSAL: Final = TypeAdapter(Proposal)
SPEC: Final = TypeAdapter(JobSpec)
ROLES: Final = TypeAdapter(tuple[RoleRequest, ...])
WARNINGS: Final = TypeAdapter(tuple[str, ...])
STRINGS: Final = TypeAdapter(dict[str, str])
QUEUE: Final = TypeAdapter(QueueObserved)
CAPACITY: Final = TypeAdapter(CapacityObserved)
T = TypeVar("T")


def to_json(adapter: TypeAdapter[T], value: T) -> str:
    """Exactly: what users sent is refused rather than changed."""
    return adapter.dump_json(value).decode()


def to_storable_json(adapter: TypeAdapter[T], value: T) -> str:
    r"""What others said, with U+FFFD for ``\u0000``, which Postgres refuses in jsonb: a view, not the truth."""
    return _storable(adapter.dump_json(value))


def event_json(data: EventData) -> str:
    return _storable(encode(data))


def storable_text(text: str) -> str:
    return text.replace("\x00", "\ufffd")


def _storable(document: bytes) -> str:
    return document.replace(b"\\u0000", b"\\ufffd").decode()
