"""Which samples a step uses, and fetching them ahead of time."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tidewright.elastic.errors import ElasticError

Fields: TypeAlias = tuple[NDArray[Any], ...]
Ids: TypeAlias = NDArray[np.int64]
PREFETCH_STEPS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The order of samples, the same in every process and at every size.

    A data epoch's order is a permutation seeded by (seed, epoch); its steps take ``global_batch`` each, the last one
    what is left; a rank takes its part of ``numpy.array_split``.
    """

    samples: int
    global_batch: int
    epochs: int
    seed: int
    shuffle: bool

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.global_batch)

    @property
    def total_steps(self) -> int:
        return self.steps_per_epoch * self.epochs

    def epoch_of(self, step: int) -> int:
        return step // self.steps_per_epoch

    def order(self, epoch: int) -> Ids:
        if not self.shuffle:
            return np.arange(self.samples)
        return np.random.RandomState([self.seed, epoch]).permutation(self.samples)  # its stream is frozen for good

    def batch(self, step: int, order: Ids) -> Ids:
        first = step % self.steps_per_epoch * self.global_batch
        return order[first : first + self.global_batch]


def make_plan(samples: int, *, global_batch: object, epochs: object, seed: object, shuffle: bool) -> Plan:
    """Check what the script says. Raises ElasticError naming the argument."""
    for name, value, least in (("global_batch", global_batch, 1), ("epochs", epochs, 1), ("seed", seed, 0)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
            raise ElasticError(f"job.steps: {name} must be a whole number of at least {least}, got {value!r}")
    if samples < 1:
        raise ElasticError("job.steps: the dataset is empty")
    assert isinstance(global_batch, (int, np.integer))
    assert isinstance(epochs, (int, np.integer))
    assert isinstance(seed, (int, np.integer))
    return Plan(samples=samples, global_batch=int(global_batch), epochs=int(epochs), seed=int(seed), shuffle=shuffle)


def to_source(dataset: Any) -> tuple[int, Callable[[Ids], Fields]]:
    """The number of samples, and how to fetch some of them, of arrays or a map-style ``paddle.io.Dataset``.

    Raises ElasticError for anything else.
    """
    if isinstance(dataset, (tuple, list)) and dataset:
        arrays = tuple(_array(part) for part in dataset)
        if len({len(array) for array in arrays}) != 1:
            raise ElasticError(f"job.steps: the arrays differ in length: {[len(array) for array in arrays]}")
        return len(arrays[0]), lambda ids: tuple(array[ids] for array in arrays)
    if hasattr(dataset, "shape") and len(dataset.shape) > 0:
        array = _array(dataset)
        return len(array), lambda ids: (array[ids],)
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return len(dataset), lambda ids: _collate([dataset[int(index)] for index in ids])
    raise ElasticError(
        "job.steps: the dataset must be arrays, such as (inputs, labels), or a paddle.io.Dataset with __getitem__ "
        f"and __len__, got {type(dataset).__name__}"
    )


def _array(part: Any) -> NDArray[Any]:
    array = part.numpy() if hasattr(part, "numpy") else np.asarray(part)
    if array.ndim == 0 or array.dtype == object:
        raise ElasticError("job.steps: each part of the dataset must be an array with one entry a sample")
    return np.asarray(array)


def _collate(samples: list[Any]) -> Fields:
    rows = [sample if isinstance(sample, (tuple, list)) else (sample,) for sample in samples]
    columns = zip(*rows, strict=True)
    return tuple(
        np.stack([part.numpy() if hasattr(part, "numpy") else np.asarray(part) for part in c]) for c in columns
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one rank does in a step. ``borrowed``: its part is empty, ``fields`` hold a sample that does not count."""

    step: int
    rank: int
    world: int
    epoch: int
    ids: Ids
    global_batch: int
    fields: Fields
    borrowed: bool


class Prefetcher:
    """Fetches the next steps in a thread of its own, and starts anew when rank, world or step jump."""

    def __init__(self, plan: Plan, fetch: Callable[[Ids], Fields]) -> None:
        self._plan = plan
        self._fetch = fetch
        self._run: _Run | None = None

    def get(self, *, step: int, rank: int, world: int) -> Batch:
        """The batch of ``step``. Raises what fetching it raised."""
        if self._run is None or not self._run.continues(step, rank, world):
            self.close()
            self._run = _Run(self._plan, self._fetch, step, rank, world)
        return self._run.take()

    def close(self) -> None:
        if self._run is not None:
            self._run.stopping.set()
            self._run = None


class _Run:
    """One thread that goes on from one step at one place in one group."""

    def __init__(self, plan: Plan, fetch: Callable[[Ids], Fields], step: int, rank: int, world: int) -> None:
        self.stopping = threading.Event()
        self._plan = plan
        self._fetch = fetch
        self._next = step
        self._place = (rank, world)
        self._ready: queue.Queue[Batch | BaseException] = queue.Queue(PREFETCH_STEPS)
        threading.Thread(target=self._work, args=(step,), name="tide-prefetch", daemon=True).start()

    def continues(self, step: int, rank: int, world: int) -> bool:
        return self._next == step and self._place == (rank, world)

    def take(self) -> Batch:
        got = self._ready.get()
        if isinstance(got, BaseException):
            raise got
        self._next += 1
        return got

    def _work(self, step: int) -> None:
        epoch, order = -1, np.arange(0)
        while step < self._plan.total_steps:
            if self._plan.epoch_of(step) != epoch:
                epoch = self._plan.epoch_of(step)
                order = self._plan.order(epoch)
            try:
                got: Batch | BaseException = self._batch(step, epoch, self._plan.batch(step, order))
            except Exception as error:  # noqa: BLE001 - the user's dataset: raised in the main thread
                got = error
            if not self._put(got) or isinstance(got, BaseException):
                return
            step += 1

    def _batch(self, step: int, epoch: int, batch: Ids) -> Batch:
        rank, world = self._place
        ids = np.array_split(batch, world)[rank]
        return Batch(
            step=step,
            rank=rank,
            world=world,
            epoch=epoch,
            ids=ids,
            global_batch=len(batch),
            fields=self._fetch(ids if len(ids) else batch[:1]),
            borrowed=not len(ids),
        )

    def _put(self, got: "Batch | BaseException") -> bool:
        while not self.stopping.is_set():
            try:
                self._ready.put(got, timeout=0.2)
            except queue.Full:
                continue
            return True
        return False
