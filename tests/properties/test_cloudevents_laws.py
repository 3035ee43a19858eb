"""Any record survives the way through a message, and no message of anybody's is more than a record set aside."""

import json
from datetime import UTC

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.envelope import Sequence as LogSequence
from schemas.vocabulary import Topic
from shared.bus.cloudevents import to_message, to_record
from shared.bus.log import Headers, Partition, Record, to_event
from shared.errors import Poison

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=20)
RECORDS = st.builds(
    Record,
    partition=st.builds(Partition, st.sampled_from(Topic), st.integers(0, 11)),
    sequence=st.builds(LogSequence, st.integers(1, 2**63 - 1), st.integers(0, 2**63 - 1)),
    time=st.datetimes(timezones=st.just(UTC)),
    key=st.none() | TEXT,
    type=TEXT,
    headers=st.builds(Headers, tenant=TEXT, source=TEXT, traceparent=st.none() | TEXT).map(Headers.encode),
    payload=st.binary(max_size=50),
    offset=st.integers(0, 2**40),
)
NAMES = st.sampled_from(
    [
        "content-type",
        "Content-Type",
        "ce_specversion",
        "ce_sequence",
        "ce_time",
        "ce_type",
        "ce_tenant",
        "ce_source",
        "x",
    ]
)
SCRAPS = st.sampled_from(
    [b"5-5", b"0-1", b"99999999999999999999-1", b"-1-2", b"\xff", b"\x00", b"", b"application/cloudevents+json"]
)
HEADERS = st.lists(st.tuples(NAMES, st.none() | SCRAPS | st.binary(max_size=8)), max_size=12)
LEAVES = st.none() | st.booleans() | st.floats() | TEXT | st.sampled_from(["5-5", "a\x00", "=", "\ud800"])
STRUCTURED = st.dictionaries(
    st.sampled_from(["sequence", "time", "type", "tenant", "source", "data", "data_base64", "x"]),
    st.recursive(
        LEAVES, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2), max_leaves=4
    ),
).map(lambda event: json.dumps(event).encode())


@given(RECORDS)
def test_a_record_survives_the_way_through_a_message(record: Record) -> None:
    message = to_message(record)
    back = to_record(
        topic=record.partition.topic,
        partition=record.partition.number,
        offset=record.offset or 0,
        key=message.key,
        value=message.value,
        headers=message.headers,
        time_ms=0,
    )
    assert back == record


@given(
    st.none() | st.binary(max_size=20),
    st.none() | SCRAPS | STRUCTURED | st.binary(max_size=30),
    HEADERS,
    st.integers(),
)
def test_junk_is_set_aside_and_never_raises_anything_else(key, value, headers, time_ms: int) -> None:
    record = to_record(
        topic=Topic.JOB, partition=3, offset=17, key=key, value=value, headers=headers, time_ms=time_ms
    )
    assert record.sequence == LogSequence(0, 17) or record.sequence.xid > 0
    assert "\x00" not in (record.key or "") + record.type, "no column of text takes it"
    (record.key or "").encode()
    record.type.encode()
    with pytest.raises(Poison):
        to_event(record)


WORDS = (
    st.sampled_from(["5-5", "a\x00", "\ud800", "=", "", "2026-01-01T00:00:00Z", "0001-01-01T00:00:00+23:59"]) | TEXT
)
NEARLY = st.fixed_dictionaries(dict.fromkeys(("type", "tenant", "source"), WORDS), optional={"time": WORDS})


@given(NEARLY, st.none() | WORDS, st.booleans())
def test_what_nearly_is_an_event_can_be_stored(event: dict[str, str], key: str | None, is_structured: bool) -> None:
    event = {"sequence": "5-5", **event}
    if is_structured:
        headers = [("content-type", b"application/cloudevents+json")]
        value = json.dumps({**event, "data": {}}).encode()
    else:
        headers = [(f"ce_{name}", content.encode(errors="surrogatepass")) for name, content in event.items()]
        value = b"{}"
    raw = None if key is None else key.encode(errors="surrogatepass")
    record = to_record(topic=Topic.JOB, partition=3, offset=17, key=raw, value=value, headers=headers, time_ms=0)
    own = json.loads(record.headers)
    for text in (record.key or "", record.type, own.get("tenant", ""), own.get("source", "")):
        assert "\x00" not in text
        text.encode()
    with pytest.raises(Poison) as refused:
        to_event(record)
    str(refused.value).encode()
