"""The port between services and whatever carries the log, and how a record becomes an event."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, NamedTuple, Protocol

from pydantic import ValidationError

from schemas.envelope import START, Event
from schemas.envelope import Sequence as LogSequence
from schemas.registry import EventData, decode
from schemas.vocabulary import TenantName, Topic
from shared.errors import Poison

SNAPSHOT_TOPICS: Final = frozenset({Topic.CAPACITY})
SNAPSHOT_TYPES: Final = frozenset({"tide.allocation.queue_observed.v1"})
"""Their keys are never parked: the next snapshot replaces the one that failed."""


_ENCODER: Final = json.JSONEncoder(separators=(",", ":"))
"""Made once: ``json.dumps`` makes one at each call that is not plain."""


class Partition(NamedTuple):
    """A part of a topic that keeps its order. On the Postgres carrier each topic is one, number 0."""

    topic: Topic
    number: int = 0


class Position(NamedTuple):
    """Where a reader stands in one partition: behind the record of this sequence.

    ``offset``: where Kafka keeps that record, or one behind it that was nothing to us; None where nobody knows.
    """

    sequence: LogSequence
    offset: int | None = None


BEGINNING: Final = Position(START)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One row of the log, undecoded. ``key`` None: a record that is nobody's.

    ``sequence`` (0, offset): somebody wrote it into the topic who is no relay of ours.
    """

    partition: Partition
    sequence: LogSequence
    time: datetime
    key: str | None
    type: str
    headers: bytes
    payload: bytes
    offset: int | None = None
    """On Kafka."""

    @property
    def is_stray(self) -> bool:
        """It has no place in the log."""
        return self.sequence.xid == 0

    @property
    def parks_its_key(self) -> bool:
        """Whether later records of the key must follow this one into quarantine."""
        is_snapshot = self.partition.topic in SNAPSHOT_TOPICS or self.type in SNAPSHOT_TYPES
        return bool(self.key) and not is_snapshot and not self.is_stray


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What a read found, in log order, and the positions after it (also past what was not asked for)."""

    records: tuple[Record, ...]
    positions: Mapping[Partition, Position]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """How much is unread: rows (counted up to a limit) and the time of the oldest; None if there is none."""

    rows: int
    oldest: datetime | None


class Log(Protocol):
    """A carrier. Order holds within a partition; a record may come again only with the same sequence."""

    @property
    def trouble(self) -> str | None:
        """Why nothing can be read at present, for people; None: as far as is known it can."""

    def partitions(self, topics: Iterable[Topic]) -> tuple[Partition, ...]:
        """Those that this reader reads."""

    def count(self, topic: Topic) -> int:
        """How many partitions the topic has."""

    async def read(self, positions: Mapping[Partition, Position], *, limit: int) -> Page:
        """At most ``limit`` records after the positions. Raises Unavailable."""

    async def backlog(self, positions: Mapping[Partition, Position], *, limit: int) -> Backlog:
        """Raises Unavailable. Cost: up to ``limit`` rows looked at."""

    async def wait(self, *, seen: int, seconds: float) -> int:
        """Return when something was published since the count ``seen``, or after so long; gives the new count."""

    def committed(self, positions: Mapping[Partition, Position]) -> None:
        """The reader's positions are saved: monitors may be told, some time."""

    async def close(self) -> None:
        """Let go of what the carrier holds; it may be read again. Bounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Headers:
    """The part of the envelope that is neither key, type, topic nor sequence."""

    tenant: str
    source: str
    traceparent: str | None

    def encode(self) -> bytes:
        values = {"tenant": self.tenant, "source": self.source, "traceparent": self.traceparent}
        return _ENCODER.encode({k: v for k, v in values.items() if v is not None}).encode()

    @classmethod
    def parse(cls, data: bytes) -> "Headers":
        """Raises Poison."""
        try:
            values = json.loads(data)
            tenant, source, trace = values["tenant"], values["source"], values.get("traceparent")
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise Poison(_problem_of(data) or "the headers cannot be read") from exc
        if not (isinstance(tenant, str) and isinstance(source, str) and isinstance(trace, str | None)):
            raise Poison("the headers cannot be read")
        return cls(tenant=tenant, source=source, traceparent=trace)

    @staticmethod
    def unreadable(problem: str) -> bytes:
        """Headers of what is no record of ours: ``parse`` raises with this problem."""
        return json.dumps({"problem": problem}).encode()


def to_event(record: Record) -> Event[EventData]:
    """Decode. Raises Poison with the reason; the payload is not repeated in it."""
    headers = Headers.parse(record.headers)
    if record.is_stray:
        raise Poison("the record has no place in our log")
    if not record.key:
        raise Poison("the record has no key")
    try:
        data = decode(record.type, record.payload)
    except KeyError as exc:
        raise Poison(f"unknown event type {record.type[:100]}") from exc
    except ValidationError as exc:
        raise Poison(_what_is_wrong(exc)) from exc
    if record.partition.topic != data.TOPIC:
        raise Poison(f"{record.type} does not belong into {record.partition.topic}")
    return Event(
        type=record.type,
        topic=record.partition.topic,
        key=record.key,
        tenant=TenantName(headers.tenant),
        source=headers.source,
        sequence=record.sequence,
        time=record.time,
        data=data,
        traceparent=headers.traceparent,
    )


def _problem_of(headers: bytes) -> str | None:
    try:
        problem = json.loads(headers)["problem"]
    except (ValueError, KeyError, TypeError):
        return None
    return problem if isinstance(problem, str) else None


def positions_after(records: Sequence[Record], before: Mapping[Partition, Position]) -> dict[Partition, Position]:
    """Where a reader stands that has handled these records. A stray one moves the offset alone."""
    after = dict(before)
    for record in records:
        sequence = after.get(record.partition, BEGINNING).sequence if record.is_stray else record.sequence
        after[record.partition] = Position(sequence, record.offset)
    return after


def _what_is_wrong(exc: ValidationError) -> str:
    first = exc.errors(include_url=False, include_input=False, include_context=False)[0]
    return f"{'.'.join(str(part) for part in first['loc']) or 'payload'}: {first['msg']}"
