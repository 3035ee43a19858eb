"""The one place that imports Paddle, and that knows its versions: process groups, accumulators, random generators."""

import ctypes
import functools
import importlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import numpy as np

from tidewright.elastic.devices import NCCL, Backend, choose_backend
from tidewright.elastic.ticks import quick_loops

paddle: Any = importlib.import_module("paddle")
core: Any = importlib.import_module("paddle.base.core")
NCCL_GROUP_ID_FIRST: Final = 1 << 24
ARENAS_MAX: Final = 2
_M_ARENA_MAX: Final = -8
_PLAIN_TYPES: Final = frozenset(
    ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64", "complex128")
)
_CPU_GENERATOR: Final = -1
_SEED_ONLY: Final = 3
"""Length of a generator's state in Paddle 2.6: device, seed and offset, which is all of it on a GPU alone."""


class _Register:
    """Keeps Paddle's own table of groups empty, so that a group is over when nobody here holds it any more.

    Paddle enters each group that it makes and removes none; what stays entered keeps its threads, descriptors and
    sockets. The table can only be emptied as a whole, and not while a group is being entered: whoever comes last
    out of the makers does it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._makers = 0

    def __enter__(self) -> None:
        with self._lock:
            self._makers += 1

    def __exit__(self, *raised: object) -> None:
        with self._lock:
            self._makers -= 1
            if not self._makers:
                core.ProcessGroupIdMap.destroy()


_REGISTER: Final = _Register()


def prepare_backend() -> Backend:
    """Choose by what is there and make Paddle use it."""
    _share_arenas()
    os.environ.setdefault("PADDLE_TRAINER_ID", "0")  # a group that Paddle did not launch itself wants it set
    with_cuda = bool(paddle.device.is_compiled_with_cuda())
    backend = choose_backend(
        compiled_with_cuda=with_cuda, visible_gpus=int(paddle.device.cuda.device_count()) if with_cuda else 0
    )
    if backend.name == NCCL:
        paddle.set_device(backend.device)
        core.CommContextManager.set_device_id(0)
    return backend


def _share_arenas() -> None:
    """Let all threads allocate from few arenas of the C library, by default it makes eight for each core.

    Each group has threads of its own. Where they spread over many arenas, what one leaves free is of no use to the
    next, and a generation costs the process twice the memory. Whoever has said it in the environment is obeyed.
    """
    if "MALLOC_ARENA_MAX" not in os.environ:
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:  # not in every C library
            mallopt(_M_ARENA_MAX, ARENAS_MAX)


def make_gloo_group(store: Any, *, rank: int, world: int, generation: int) -> Any:
    """Connect the members of a generation on the CPU; blocks until all are there. Raises what Paddle raises."""
    with _REGISTER, quick_loops():
        return core.ProcessGroupGloo.create(store, rank, world, generation)


def make_nccl_group(store: Any, *, rank: int, world: int, generation: int) -> Any:
    """The same on GPUs. Its number is another than that of the gloo group beside it."""
    collective = importlib.import_module("paddle.distributed.collective")
    with _REGISTER:
        group = collective._new_process_group_impl(
            NCCL, store, rank, world, f"tide-{generation}", None, group_id=NCCL_GROUP_ID_FIRST + generation
        )
    # The communicator is made by the first collective: here, in the background, and not in a step.
    group.all_reduce(paddle.zeros([1]), core.ReduceOp.SUM, True).wait()
    return group


def make_tensor(array: np.ndarray[Any, Any]) -> Any:
    """A tensor on the present device with a copy of ``array``.

    By way of an empty one: each call of Paddle's own constructor, so of ``to_tensor``, loses a list of some 100 bytes
    for good, and several of them in every step are gigabytes in a training of millions.
    """
    if array.dtype.name not in _PLAIN_TYPES:
        return paddle.to_tensor(array)
    tensor = paddle.empty(array.shape, dtype=array.dtype.name)
    tensor.get_tensor().set(array, paddle.base.framework._current_expected_place())
    return tensor


def to_tensors(fields: Iterable[np.ndarray[Any, Any]]) -> tuple[Any, ...]:
    """A batch on the present device."""
    return tuple(make_tensor(part) for part in fields)


def on_cpu(array: np.ndarray[Any, Any]) -> Any:
    """A tensor for gloo, whatever device the model is on."""
    is_here = paddle.get_device() == "cpu"
    return make_tensor(array) if is_here else paddle.to_tensor(array, place=paddle.CPUPlace())


# -- what versions of Paddle do differently -----------------------------------------------------------------------


def make_accumulators(optimizer: Any, parameters: Iterable[Any]) -> Iterator[Any]:
    """The optimizer's own tensors, by name and then by parameter; made here if it has not stepped yet."""
    if getattr(optimizer, "helper", None) is None:  # 2.6 makes it in the first step and needs it here
        layer_helper = importlib.import_module("paddle.base.layer_helper")
        optimizer.helper = layer_helper.LayerHelper(type(optimizer).__name__)
    block = paddle.base.framework.default_main_program().global_block()
    with paddle.no_grad():
        for parameter in parameters:
            optimizer._create_accumulators(block, [parameter])
    for name in sorted(optimizer._accumulators):
        yield from optimizer._accumulators[name].values()
    yield from getattr(optimizer, "_master_weights", {}).values()


def random_states() -> list[list[Any]]:
    """States of the random generators of the device in use, as plain values.

    Paddle 2.6 does not tell how far the CPU's generator has come. There this seeds it with a number drawn from it, so
    that the seed is the whole state: whoever takes it over, and this process, go on alike.
    """
    return [_state_of(state) for state in paddle.get_rng_state()]


def _state_of(state: Any) -> list[Any]:
    values = list(state.__getstate__())
    if values[0] == _CPU_GENERATOR and len(values) == _SEED_ONLY:
        generator = core.default_cpu_generator()
        values[1] = generator.random()
        generator.manual_seed(values[1])
    return [
        np.array(part, np.min_scalar_type(max(part))) if part and isinstance(part, list) else part for part in values
    ]


def set_random_states(states: list[list[Any]]) -> None:
    """Inverse of ``random_states``. A state is set into a new object: an existing one keeps what it has."""
    generators = paddle.get_rng_state()
    for index, state in enumerate(states[: len(generators)]):
        kind: Any = type(generators[index])
        generators[index] = kind.__new__(kind)
        generators[index].__setstate__(
            tuple(part.tolist() if isinstance(part, np.ndarray) else part for part in state)
        )
    paddle.set_rng_state(generators)


def remember_random() -> Callable[[], None]:
    """What sets the generators back to where they are now; cheap where they tell it themselves (10 µs)."""
    if _tells_its_whole_state():
        states = paddle.get_rng_state()
        return lambda: paddle.set_rng_state(states)
    values = random_states()
    return lambda: set_random_states(values)


@functools.cache
def _tells_its_whole_state() -> bool:
    return all(len(state.__getstate__()) != _SEED_ONLY for state in paddle.get_rng_state())
