"""Pure decisions of the trainer: flags, election, sockets, backend, checkpoints' names, stopwatch, values."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewright.elastic import agreement, checkpoint, devices, sockets
from tidewright.elastic.admission import address_of
from tidewright.elastic.child import BadRequest, to_start_request
from tidewright.elastic.errors import ElasticError
from tidewright.elastic.ledger import finite
from tidewright.elastic.samples import Section, Stopwatch
from tidewright.elastic.values import decode_values, encode_values
from tidewright.elastic.warm import decide_warm


@given(ready=st.lists(st.sampled_from([0, 1, 2, 7, 200, 201, 1137, 10**9]), min_size=1, max_size=16))
def test_a_swap_needs_everyone_to_have_formed_the_same_offer(ready: list[int]) -> None:
    """Summed in float32, as on the wire."""
    sums = np.zeros(5, np.float32)
    for generation in ready:
        flags = agreement.Flags(samples=3, ready_generation=generation, stop=False)
        sums += np.array([1.5, *agreement.flag_values(flags)], np.float32)
    values = tuple(float(value) for value in sums)
    numbers = {agreement.ready_number(generation) for generation in ready}
    for own in ready:
        said = agreement.agree(sums=values, world=len(ready), ready_generation=own)
        assert said.swap == (len(numbers) == 1 and numbers != {0})
        assert said.samples == 3 * len(ready)
        assert not said.stop


@given(world=st.integers(1, 400), generation=st.integers(1, 10**6))
def test_the_ready_flag_is_exact_in_float32_for_400_workers(world: int, generation: int) -> None:
    number = agreement.ready_number(generation)
    ready, squares = np.float32(0), np.float32(0)
    for _ in range(world):
        ready, squares = np.float32(ready + number), np.float32(squares + number * number)
    sums = (0.0, 0.0, float(ready), float(squares), 0.0)
    assert agreement.agree(sums=sums, world=world, ready_generation=generation).swap
    short = (0.0, 0.0, float(ready) - number, float(squares) - number * number, 0.0)
    assert not agreement.agree(sums=short, world=world, ready_generation=generation).swap


def test_one_wish_to_stop_stops_all() -> None:
    assert agreement.agree(sums=(0.0, 0.0, 0.0, 0.0, 1.0), world=400, ready_generation=0).stop


@given(
    members=st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=6),
    named=st.integers(0, 5),
)
def test_the_most_advanced_who_may_is_the_source(members: list[tuple[int, bool]], named: int) -> None:
    named %= len(members)
    bids = [
        agreement.bid(step=step, rank=rank, may_be_source=may or rank == named, is_named=rank == named)
        for rank, (step, may) in enumerate(members)
    ]
    source = agreement.winner(max(bids))
    candidates = {rank: step for rank, (step, may) in enumerate(members) if may or rank == named}
    assert candidates[source] == max(candidates.values())
    if candidates[named] == max(candidates.values()):
        assert source == named
    else:
        assert source == min(rank for rank, step in candidates.items() if step == max(candidates.values()))


def test_only_sockets_that_a_peer_has_too_are_the_groups() -> None:
    mine = [
        sockets.Candidate(descriptor=5, ends=("127.0.0.1", 100, "127.0.0.1", 200)),
        sockets.Candidate(descriptor=6, ends=("127.0.0.1", 101, "127.0.0.1", 300)),
        sockets.Candidate(descriptor=7, ends=("127.0.0.1", 102, "10.0.0.9", 443)),
    ]
    peers = [("127.0.0.1", 200, "127.0.0.1", 100), ("127.0.0.1", 300, "127.0.0.1", 999)]
    assert sockets.agreed(mine, peers) == ([5], [6, 7])


@pytest.mark.parametrize(
    ("cuda", "gpus", "name", "every"), [(False, 0, "gloo", 1), (True, 0, "gloo", 1), (True, 2, "nccl", 10)]
)
def test_backend_by_what_is_there(cuda: bool, gpus: int, name: str, every: int) -> None:
    chosen = devices.choose_backend(compiled_with_cuda=cuda, visible_gpus=gpus)
    assert (chosen.name, chosen.flags_every_steps) == (name, every)
    assert chosen.survives_a_lost_peer == (name == "gloo")


@pytest.mark.parametrize(
    ("distributions", "devices", "reason"),
    [
        (["numpy", "paddlepaddle"], ["/dev/nvidia0"], ""),
        (["PaddlePaddle_GPU"], [], ""),
        (["paddlepaddle-gpu"], ["/dev/nvidia0"], "GPUs"),
        (["numpy"], [], "not installed"),
    ],
)
def test_a_gpu_wheel_is_not_imported_before_a_fork(distributions: list[str], devices: list[str], reason: str) -> None:
    said = decide_warm(distributions=distributions, devices=devices)
    assert (reason in said) if reason else said == ""


def test_checkpoint_names() -> None:
    assert checkpoint.parse_name(checkpoint.name_of(12, 345)) == (12, 345)
    for name in (".g1-s2", "g1-s2.tmp", "g-s1", "g1s2", "g1-s2\n"):
        assert checkpoint.parse_name(name) is None


def test_stopwatch_counts_the_section_under_way() -> None:
    now = [0.0]
    watch = Stopwatch(clock=lambda: now[0])
    now[0] = 1.0
    watch.enter(Section.STEP)
    now[0] = 3.0
    with watch.within(Section.SYNC):
        now[0] = 7.0
        assert watch.take() == {Section.IDLE: 1.0, Section.STEP: 2.0, Section.SYNC: 4.0, Section.INPUT: 0.0}
        now[0] = 8.0
    now[0] = 8.5
    assert watch.take() == {Section.IDLE: 0.0, Section.STEP: 0.5, Section.SYNC: 1.0, Section.INPUT: 0.0}


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(values)
def test_values_come_back(value: object) -> None:
    assert decode_values(encode_values(value, where="here"), to_tensor=lambda array: array) == value


def test_arrays_come_back_bit_for_bit() -> None:
    arrays = [np.array(math.pi), np.zeros((0, 3)), np.arange(6, dtype="int8").reshape(2, 3)[:, ::-1]]
    back = decode_values(encode_values(arrays, where="here"), to_tensor=lambda array: array)
    for one, other in zip(arrays, back, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(one, other)
        assert other.flags.writeable


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(ElasticError, match=r"job\.track\(Thing\): its state_dict holds a set"):
        encode_values({"a": [{1, 2}]}, where="job.track(Thing)")


def test_finite() -> None:
    assert [finite(v) for v in (1.5, math.nan, math.inf, None)] == [1.5, None, None, None]


def test_addresses() -> None:
    assert address_of("127.0.0.1:80") == ("127.0.0.1", 80)
    assert address_of("[::1]:80") == ("::1", 80)
    for text in ("", "host", "host:", ":1", "host:x", "host:70000"):
        with pytest.raises(ValueError, match="TIDE_ADDRESS must be host:port"):
            address_of(text)


def test_start_requests() -> None:
    request = to_start_request({"directory": "/d", "member": "m", "nonce": "n", "script": "/s.py", "args": ["a"]})
    assert request.is_forked
    assert request.args == ("a",)
    other = to_start_request(
        {"directory": "/d", "member": "m", "nonce": "n", "script": "/s.py", "interpreter": "/bin/python"}
    )
    assert not other.is_forked
    with pytest.raises(BadRequest, match="args must be a list of texts"):
        to_start_request({"directory": "/d", "member": "m", "nonce": "n", "script": "/s", "args": "abc"})
