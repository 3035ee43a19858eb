"""The trainers' wire: every message survives the round trip, and nothing else decodes."""

import json
from dataclasses import MISSING, fields
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
    "tuple": st.lists(st.text(max_size=5), max_size=3).map(tuple),
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
    earlier = {field.name for field in fields(message) if field.default is MISSING}
    for name in [name for name in value if name in earlier][:1]:
        del value[name]
        with pytest.raises(protocol.ProtocolError, match=name):
            protocol.decode(json.dumps(value).encode())


@pytest.mark.parametrize(
    ("line", "filled"),
    [
        (
            b'{"t":"form","generation":2,"rank":0,"world":1,"store_host":"h","store_port":1,"source":-1,"checkpoint":"/c"}',
            {"older": (), "may_begin_anew": False},
        ),
        (
            (
                b'{"t":"started","generation":2,"step":2,"rank":0,"world":1,"pause_seconds":0.1,'
                b'"resumed_generation":1,"resumed_step":0}'
            ),
            {"skipped": ()},
        ),
        (b'{"t":"form_failed","generation":2,"reason":"r"}', {"state_lost": False}),
    ],
)
def test_a_message_of_an_earlier_release_decodes(line, filled):
    message = protocol.decode(line)
    assert {name: getattr(message, name) for name in filled} == filled


@pytest.mark.parametrize("older", ['"g1-s1"', "[1]", '[["g1-s1"]]', "null", "{}"])
def test_a_list_holds_texts_only(older):
    line = (
        '{"t":"form","generation":2,"rank":0,"world":1,"store_host":"h","store_port":1,"source":-1,"checkpoint":"/c",'
        f'"older":{older}}}'
    )
    with pytest.raises(protocol.ProtocolError, match="older"):
        protocol.decode(line.encode())


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
