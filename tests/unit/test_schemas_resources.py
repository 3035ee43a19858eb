"""Laws of ``Resources``."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from schemas.resources import Resources, total

amounts = st.dictionaries(st.sampled_from(["cpu", "memory", "tidewright.io/slot"]), st.integers(0, 4))
sizes = amounts.map(Resources)
adapter = TypeAdapter(Resources)


@given(sizes, sizes, sizes)
def test_addition_is_commutative_and_associative(a, b, c):
    assert a + b == b + a
    assert (a + b) + c == a + (b + c) == total([c, a, b])


@given(sizes, sizes)
def test_what_was_added_fits_and_can_be_taken_away(a, b):
    assert a.fits(a + b)
    assert (a + b) - b == a


@given(sizes, sizes)
def test_at_most_is_the_largest_count_that_fits(size, room):
    if not size:
        with pytest.raises(ValueError, match="empty"):
            size.at_most(room)
        return
    count = size.at_most(room)
    assert (size * count).fits(room)
    assert not (size * (count + 1)).fits(room)


@given(sizes)
def test_zeros_do_not_distinguish_and_json_round_trips(size):
    assert Resources({**size.as_dict(), "absent": 0}) == size
    assert adapter.validate_json(adapter.dump_json(size)) == size


@pytest.mark.parametrize(
    "text", ['{"cpu": -1}', '{"cpu": 1.5}', '{"cpu": 9223372036854775808}', '{"": 1}', "[]", '{"cpu": "x"}']
)
def test_bad_sizes_are_refused(text):
    with pytest.raises(ValidationError):
        adapter.validate_json(text)
