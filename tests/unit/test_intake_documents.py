"""JSON and YAML: what they mean, their limits, and hashes that ignore spelling."""

import json
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.api.jobs import SubmitJob
from services.intake.http.bodies import hash_of, parse
from services.intake.http.documents import Limits, _is_plainly_sound, check, read_json, read_yaml
from shared.errors import Rejected
from shared.problems import Unprocessable

LIMITS = Limits(nodes=1000, depth=20)


# -- documents --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: yes", "yes"),
        ("a: on", "on"),
        ("a: n", "n"),
        ("a: True", True),
        ("a: 'true'", "true"),
        ("a: 010", 10),
        ("a: 0o10", 8),
        ("a: 0x1F", 31),
        ("a: 1:30", "1:30"),
        ("a: 1_000", "1_000"),
        ("a: 2030-01-01", "2030-01-01"),
        ("a: 2030-01-01T00:00:00Z", "2030-01-01T00:00:00Z"),
        ("a: 1e3", 1000.0),
        ("a: .5", 0.5),
        ("a: ~", None),
        ("a:", None),
        ("a: ''", ""),
        ("a: !!str 5", "5"),
        ("a: |\n  x\n  y\n", "x\ny\n"),
        ("b: &x [1, 2]\na: *x", [1, 2]),
        ("a: {on: off, 1: 2}", {"on": "off", "1": 2}),
    ],
)
def test_yaml_by_its_core_schema(text, value):
    assert read_yaml(text.encode(), limits=LIMITS)["a"] == value


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(10**15), 10**15), st.text("abon\u00e9 :-#'\"", max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text("abno:-#", max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text("abc", min_size=1, max_size=3), VALUES, max_size=3))
def test_json_is_read_alike_by_both(value):
    """JSON is YAML: both readers agree on it."""
    text = json.dumps(value, ensure_ascii=False).encode()
    assert read_json(text, limits=LIMITS) == read_yaml(text, limits=LIMITS) == value


@settings(max_examples=100, deadline=None)
@given(st.one_of(st.binary(max_size=60), st.text("{}[]&*a:,-!|>'\"#\n \t?%@", max_size=60).map(str.encode)))
def test_any_bytes_are_a_value_or_a_refusal(text):
    for read in (read_json, read_yaml):
        with suppress(Rejected, Unprocessable):
            read(text, limits=LIMITS)


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.text("a\x00", max_size=2),
        st.recursive(
            st.one_of(
                st.text("a\x00:,[{", max_size=3), st.floats(allow_nan=False, allow_infinity=False), st.integers()
            ),
            lambda inner: st.one_of(
                st.lists(inner, max_size=4), st.dictionaries(st.text("b\x00", max_size=1), inner, max_size=2)
            ),
            max_leaves=12,
        ),
        max_size=3,
    )
)
def test_the_cheap_check_passes_nothing_that_the_thorough_one_refuses(value):
    limits = Limits(nodes=8, depth=3)
    text = json.dumps(value).encode()
    if _is_plainly_sound(text, limits):
        check(json.loads(text), limits)


def test_an_infinite_number_is_named():
    with pytest.raises(Unprocessable, match="/a/1/b: is not a finite number"):
        read_json(b'{"a": [1, {"b": -1e999}]}', limits=LIMITS)


def test_aliases_count_as_often_as_they_are_used():
    text = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\nb: [{}]\n"
    assert len(read_yaml(text.format(", ".join(["*a"] * 90)).encode(), limits=LIMITS)["b"]) == 90
    with pytest.raises(Unprocessable, match="too many values"):
        read_yaml(text.format(", ".join(["*a"] * 110)).encode(), limits=LIMITS)


def test_equal_requests_have_equal_hashes():
    one = parse(
        b'{"script": "/t.py", "labels": {"a": "1", "b": "2"}}', content_type="", model=SubmitJob, limits=LIMITS
    )
    two = parse(
        b"labels: {b: '2', a: '1'}\nscript: /t.py\nworkers_min: 1",
        content_type="text/yaml",
        model=SubmitJob,
        limits=LIMITS,
    )
    assert hash_of(one) == hash_of(two)
    assert hash_of(one, "x") != hash_of(one)
    assert hash_of(one) != hash_of(two.model_copy(update={"workers_min": 2}))
