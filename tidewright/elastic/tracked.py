"""What a script tracks: the tensors and values that a newcomer must receive, in an order all processes share.

Tensors are matched by that order and not by name, since names differ between processes. Layers and optimizers are
written in place, so nothing that the script holds becomes stale; everything else goes through its own ``state_dict``.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tidewright.elastic.backend import make_accumulators, paddle, random_states, remember_random, set_random_states
from tidewright.elastic.errors import ElasticError
from tidewright.elastic.values import decode_values, encode_values

Arrays = list[NDArray[Any]]
BUCKET_BYTES: Final = 64 << 20
ROUND_BYTES_MAX: Final = 1 << 20
"""Above it the state of a thing is not copied at every step."""


@dataclass(frozen=True, slots=True)
class _Thing:
    """Something with ``state_dict`` and a way to set it."""

    name: str
    target: Any
    is_small: bool

    def save(self) -> Any:
        return self.target.state_dict()

    def load(self, state: Any) -> None:
        setter = getattr(self.target, "set_state_dict", None) or self.target.load_state_dict
        setter(state)


class Tracked:
    """Everything that makes up the state of training beside the step."""

    def __init__(self) -> None:
        self.optimizers: list[Any] = []
        self.scaler: Any = None
        self._layers: list[Any] = []
        self._things: list[_Thing] = []
        self._round: _Round | None = None
        self._seen: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._seen)

    # -- what is tracked ----------------------------------------------------------------------------------------

    def add(self, thing: Any) -> None:
        """Sort a thing by what it is. Raises ElasticError if its state can neither be read nor set."""
        if id(thing) in self._seen:
            return
        self._seen.add(id(thing))
        name = f"job.track({type(thing).__name__})"
        if isinstance(thing, paddle.nn.Layer):
            self._layers.append(thing)
        elif isinstance(thing, paddle.optimizer.Optimizer):
            self._add_optimizer(thing)
        elif callable(getattr(thing, "state_dict", None)) and (
            callable(getattr(thing, "set_state_dict", None)) or callable(getattr(thing, "load_state_dict", None))
        ):
            if isinstance(thing, paddle.amp.GradScaler):
                self.scaler = thing
            size = len(encode_values(thing.state_dict(), where=name))
            self._things.append(_Thing(name, thing, size <= ROUND_BYTES_MAX))
        else:
            raise ElasticError(
                f"{name}: has no state_dict() with set_state_dict() or load_state_dict(); track layers, optimizers, "
                "schedulers, scalers, or objects of yours that have both"
            )

    def _add_optimizer(self, optimizer: Any) -> None:
        self.optimizers.append(optimizer)
        schedule = optimizer._learning_rate
        if isinstance(schedule, paddle.optimizer.lr.LRScheduler):
            self.add(schedule)

    def parameters(self) -> list[Any]:
        """All that the optimizers train, each once, in their order."""
        found: dict[int, Any] = {}
        for optimizer in self.optimizers:
            for parameter in _parameters_of(optimizer):
                found.setdefault(id(parameter), parameter)
        return list(found.values())

    def tensors(self) -> list[Any]:
        """Parameters and buffers, then the accumulators of the optimizers, which are made if they are not there."""
        found: dict[int, Any] = {}
        for layer in self._layers:
            for tensor in layer.state_dict().values():
                found.setdefault(id(tensor), tensor)
        for parameter in self.parameters():
            found.setdefault(id(parameter), parameter)
        for optimizer in self.optimizers:
            for tensor in make_accumulators(optimizer, _parameters_of(optimizer)):
                found.setdefault(id(tensor), tensor)
        return list(found.values())

    def layout(self) -> str:
        """Equal in two processes exactly if their tensors have the same order, shapes and types."""
        text = json.dumps([[list(tensor.shape), str(tensor.dtype)] for tensor in self.tensors()])
        return hashlib.sha256(text.encode()).hexdigest()

    # -- values -------------------------------------------------------------------------------------------------

    def save_values(self) -> bytes:
        """State of schedulers and the like, and of Paddle's random generators."""
        states = [thing.save() for thing in self._things]
        return encode_values({"states": states, "generators": random_states()}, where="job.track")

    def load_values(self, data: bytes) -> None:
        """Raises ElasticError if they are of a script that tracks other things."""
        value = decode_values(data, to_tensor=paddle.to_tensor)
        if len(value["states"]) != len(self._things):
            raise ElasticError(
                f"job.track: {len(self._things)} schedulers and the like are tracked here, "
                f"{len(value['states'])} were saved: track the same things in every process and version of the script"
            )
        for thing, state in zip(self._things, value["states"], strict=True):
            thing.load(state)
        set_random_states(value["generators"])

    # -- a round of the script's loop ---------------------------------------------------------------------------

    def begin_round(self) -> None:
        """Remember what a step that fails has to take back: values that a script may change before ``apply`` too.

        Costs 40 µs with a scheduler. What is too large to be copied at each step is remembered when the step fails.
        """
        small = [_encoded(thing) if thing.is_small else None for thing in self._things]
        self._round = _Round(small, remember_random())

    def end_round(self) -> None:
        """The step is applied."""
        self._round = None

    def keep_round(self) -> None:
        """The step has failed, or what follows the last one: what the script still does will be undone."""
        if self._round is None:
            self.begin_round()
        assert self._round is not None
        pairs = zip(self._things, self._round.states, strict=True)
        self._round.states = [_encoded(thing) if state is None else state for thing, state in pairs]

    def take_back_round(self) -> None:
        """As it was before the failed step, which comes again: random numbers included."""
        assert self._round is not None
        for thing, state in zip(self._things, self._round.states, strict=True):
            assert state is not None
            thing.load(decode_values(state, to_tensor=paddle.to_tensor))
        self._round.set_random_back()
        self._round = None


@dataclass(slots=True)
class _Round:
    """Encoded states of the things, None for a large one as long as it is not needed, and the random generators."""

    states: list[bytes | None]
    set_random_back: Callable[[], None]


def _encoded(thing: _Thing) -> bytes:
    return encode_values(thing.save(), where=thing.name)


def _parameters_of(optimizer: Any) -> Iterator[Any]:
    for entry in optimizer._param_groups:
        for parameter in entry["params"] if isinstance(entry, dict) else (entry,):
            if not parameter.stop_gradient:
                yield parameter


# -- tensors as bytes ---------------------------------------------------------------------------------------------


def buckets(tensors: list[Any]) -> Iterator[list[Any]]:
    """Neighbours together, up to ``BUCKET_BYTES``."""
    bucket: list[Any] = []
    size = 0
    for tensor in tensors:
        bucket.append(tensor)
        size += _nbytes(tensor)
        if size >= BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def bytes_of(tensors: list[Any]) -> int:
    """The length of ``to_bytes``."""
    return sum(_nbytes(tensor) for tensor in tensors)


def _nbytes(tensor: Any) -> int:
    return int(np.prod(tensor.shape, dtype=np.int64)) * int(tensor.element_size())


def to_bytes(tensors: list[Any]) -> NDArray[np.uint8]:
    """Bit for bit, whatever the types."""
    parts = [np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8) for tensor in tensors]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint8)


def from_bytes(tensors: list[Any], data: NDArray[np.uint8]) -> None:
    """Write in place what ``to_bytes`` made of tensors of the same layout."""
    at = 0
    for tensor in tensors:
        like = tensor.numpy()
        part = data[at : at + like.nbytes]
        tensor.set_value(part.view(like.dtype).reshape(like.shape))
        at += like.nbytes


def copies(tensors: list[Any]) -> Arrays:
    return [np.array(tensor.numpy(), copy=True) for tensor in tensors]


def set_from(tensors: list[Any], arrays: Arrays) -> None:
    for tensor, array in zip(tensors, arrays, strict=True):
        tensor.set_value(array)


def clear_gradients(optimizers: list[Any]) -> None:
    for optimizer in optimizers:
        with suppress(AttributeError):
            optimizer.clear_grad(set_to_zero=False)
