"""Records of the log as Kafka messages, and back: CloudEvents in binary mode; structured mode is understood."""

import base64
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final, NamedTuple

from schemas.envelope import Sequence as LogSequence
from schemas.vocabulary import Topic
from shared.bus.log import Headers, Partition, Record
from shared.errors import Poison

STRUCTURED: Final = b"application/cloudevents"
SPECVERSION: Final = b"1.0"
_JSON: Final = b"application/json"
_FIXED: Final = [("content-type", _JSON), ("ce_specversion", SPECVERSION)]
_READ: Final[Mapping[str, str]] = {
    f"ce_{name}": name for name in ("sequence", "time", "type", "tenant", "source", "traceparent")
}
_ATTRIBUTES_MAX: Final = 64
KafkaHeaders = Sequence[tuple[str, bytes]]


class Message(NamedTuple):
    """What a producer sends. The message's own time is the broker's: it refuses one that is far from its clock."""

    key: bytes | None
    value: bytes
    headers: list[tuple[str, bytes]]


def to_message(record: Record) -> Message:
    """Binary mode: the data as value, every attribute as a header. Raises Poison for headers that are none.

    The id is the place in the log, which is unique for the source; ``subject`` and the message's key are the key.
    Cost: about 5 µs.
    """
    own = Headers.parse(record.headers)
    place = str(record.sequence).encode()
    headers = [
        *_FIXED,
        ("ce_id", place),
        ("ce_source", own.source.encode()),
        ("ce_type", record.type.encode()),
        ("ce_time", record.time.isoformat().replace("+00:00", "Z").encode()),
        ("ce_dataschema", dataschema_of(record.type).encode()),
        ("ce_sequence", place),
        ("ce_tenant", own.tenant.encode()),
    ]
    if record.key is not None:
        headers.append(("ce_subject", record.key.encode()))
    if own.traceparent is not None:
        headers.append(("ce_traceparent", own.traceparent.encode()))
    key = record.key.encode() if record.key is not None else None
    return Message(key, record.payload, headers)


def dataschema_of(event_type: str) -> str:
    return f"urn:tidewright:{event_type}"


def to_record(
    *,
    topic: Topic,
    partition: int,
    offset: int,
    key: bytes | None,
    value: bytes | None,
    headers: KafkaHeaders,
    time_ms: int,
) -> Record:
    """The record that a message carries. Never raises: what is no record of ours gets the sequence (0, offset).

    Such a record cannot be decoded, and says why. Cost: about 5 µs.
    """
    try:
        attributes, payload = _attributes_of(headers, value)
        return Record(
            partition=Partition(topic, partition),
            sequence=_sequence_of(attributes),
            time=_time_of(attributes.get("time"), time_ms),
            key=None if key is None else _clean(key.decode(), "key"),
            type=_clean(attributes["type"], "type"),
            headers=Headers(
                tenant=_clean(attributes["tenant"], "tenant"),
                source=_clean(attributes["source"], "source"),
                traceparent=attributes.get("traceparent"),
            ).encode(),
            payload=payload,
            offset=offset,
        )
    except Poison as exc:
        reason = str(exc)
    except UnicodeDecodeError:
        reason = "a header or the key is not UTF-8"
    except KeyError as exc:
        reason = f"the attribute {exc.args[0]} is missing"
    return Record(
        partition=Partition(topic, partition),
        sequence=LogSequence(0, offset),
        time=_time_of(None, time_ms),
        key=_storable(key),
        type=_storable(dict(headers).get("ce_type")) or "",
        headers=Headers.unreadable(reason),
        payload=value or b"",
        offset=offset,
    )


def _attributes_of(headers: KafkaHeaders, value: bytes | None) -> tuple[dict[str, str], bytes]:
    """Attributes by name, and the data. Raises Poison or UnicodeDecodeError."""
    if value is None:
        raise Poison("the value is null")
    kind = next((content for name, content in headers if name.lower() == "content-type"), None) or b""
    if kind.startswith(STRUCTURED):
        return _structured(value)
    attributes = {
        wanted: (content or b"").decode() for name, content in headers if (wanted := _READ.get(name)) is not None
    }
    return attributes, value


def _structured(value: bytes) -> tuple[dict[str, str], bytes]:
    try:
        event = json.loads(value)
    except (ValueError, RecursionError) as exc:
        raise Poison("the structured event is not JSON") from exc
    if not isinstance(event, dict) or len(event) > _ATTRIBUTES_MAX:
        raise Poison("the structured event is no object of at most 64 attributes")
    attributes = {name: content for name, content in event.items() if isinstance(content, str)}
    if "data_base64" in event:
        try:
            return attributes, base64.b64decode(attributes.get("data_base64", ""), validate=True)
        except ValueError as exc:
            raise Poison("data_base64 is not Base64") from exc
    return attributes, json.dumps(event.get("data"), separators=(",", ":"), ensure_ascii=False).encode()


def _sequence_of(attributes: dict[str, str]) -> LogSequence:
    """Raises KeyError or Poison."""
    try:
        sequence = LogSequence.parse(attributes["sequence"])
    except ValueError as exc:
        raise Poison(str(exc)) from exc
    if not (0 < sequence.xid < 2**63 and sequence.id < 2**63):
        raise Poison(f"not a place in a log: {attributes['sequence'][:40]}")
    return sequence


def _time_of(text: str | None, time_ms: int) -> datetime:
    """The event's own time, else the message's."""
    if text is not None:
        with suppress(ValueError, OverflowError):
            found = datetime.fromisoformat(text)
            if found.tzinfo is not None:
                return found.astimezone(UTC)
    return datetime.fromtimestamp(min(max(time_ms, 0), 2**42) / 1000, UTC)


def _clean(text: str, what: str) -> str:
    """Raises Poison for what no column of text takes."""
    if "\x00" in text:
        raise Poison(f"the {what} contains a zero byte")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as exc:
            raise Poison(f"the {what} is no Unicode") from exc
    return text


def _storable(content: bytes | None) -> str | None:
    return None if content is None else content.decode(errors="replace").replace("\x00", "\ufffd")[:1_000]
