"""The trainers' wire: every message survives the round trip, and nothing else decodes."""

import json
from dataclasses import fields
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewright import protocol

VALUES = {
    "str": st.text(max_size=5),
    "int": st.integers(-5, 2**30),
    "float": st.floats(0, 1e6),
    "bool": st.booleans(),
}
messages = st.one_of(
    *(
        st.builds(
            cls, **{f.name: VALUES[f.type if isinstance(f.type, str) else f.type.__name__] for f in fields(cls)}
        )
        for cls in get_args(protocol.Message)
    )
)


@given(messages)
def test_round_trip_on_one_line(message):
    line = protocol.encode(message)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert protocol.decode(line) == message


@given(messages)
def test_unknown_fields_are_ignored_and_missing_ones_named(message):
    value = json.loads(protocol.encode(message))
    assert protocol.decode(json.dumps({**value, "of_a_newer_release": 1}).encode()) == message
    for name in [name for name in value if name != "t"][:1]:
        del value[name]
        with pytest.raises(protocol.ProtocolError, match=name):
            protocol.decode(json.dumps(value).encode())


@given(st.binary(max_size=40))
def test_noise_raises_one_error_only(noise):
    with pytest.raises(protocol.ProtocolError):
        protocol.decode(noise)


@pytest.mark.parametrize(
    "line",
    [
        b"null",
        b"[]",
        b"{}",
        b'{"t":"unknown"}',
        b'{"t":["mark"]}',
        b'{"t":"left","generation":true,"step":1}',
        b"[" * 100_000,
        b'{"t":"left","generation":1,"step":9007199254740993}',
        b'{"t":"left","generation":1073741825,"step":1}',
        b'{"t":"left","generation":1,"step":1' + b"0" * 5000 + b"}",
        b'{"t":"formed","generation":1,"seconds":NaN}',
        b'{"t":"formed","generation":1,"seconds":-Infinity}',
        b'{"t":"formed","generation":1,"seconds":1e999}',
    ],
)
def test_what_is_no_message(line):
    with pytest.raises(protocol.ProtocolError):
        protocol.decode(line)


def test_a_number_of_steps_may_be_great_and_a_text_is_unicode():
    said = protocol.CheckpointFailed(generation=2**30, step=2**53, reason="no room for a\udcff.npz")
    heard = protocol.decode(protocol.encode(said))
    assert (heard.generation, heard.step, heard.reason) == (2**30, 2**53, "no room for a?.npz")
