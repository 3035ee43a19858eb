"""Handing the state of training from one member of a group to all others."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidewright.elastic.agreement import DISMISSED, winner
from tidewright.elastic.backend import make_tensor
from tidewright.elastic.errors import Dismissed, ElasticError
from tidewright.elastic.group import Group
from tidewright.elastic.tracked import Tracked, buckets, bytes_of, from_bytes, to_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where training stands, beside its tensors and values.

    ``generation`` is the one that the state was last stepped in; ``resumed_generation`` and ``resumed_step`` are of
    the checkpoint that this very transfer brings, 0 if it comes from a living member.
    """

    step: int = 0
    generation: int = 0
    resumed_generation: int = 0
    resumed_step: int = 0


def elect(group: Group, *, own_bid: int) -> int:
    """The rank of the source. Raises GroupBroken; Dismissed if a newer group has started without this member."""
    greatest = group.max(own_bid)
    if greatest == DISMISSED:
        raise Dismissed(f"generation {group.generation} is over: a newer one has started")
    return winner(greatest)


def hand_over(
    group: Group, source: int, *, tracked: Tracked, plan: Mapping[str, Any], position: Position
) -> Position:
    """Broadcast everything from ``source`` and return its position.

    Raises GroupBroken, and then nothing here has changed: what comes is written only once all of it is there. Raises
    ElasticError if this process tracks other tensors, or goes through other data, than the source.
    """
    if group.is_solo:
        return position
    is_source = group.rank == source
    tensors, values = tracked.tensors(), tracked.save_values() if is_source else b""
    layout, course = _number(tracked.layout()), _number(json.dumps(dict(plan), sort_keys=True))
    own = [position.step, position.generation, position.resumed_generation, position.resumed_step]
    head = make_tensor(np.array([*own, len(values), layout, course], np.int64))
    group.broadcast(head, source)
    step, generation, resumed_generation, resumed_step, size, its_layout, its_course = (int(n) for n in head.numpy())
    _check(layout == its_layout, course == its_course, source)
    own_values = np.frombuffer(values, np.uint8) if is_source else np.empty(size, np.uint8)
    values = _broadcast_bytes(group, source, own_values).tobytes()
    arrived = []
    for bucket in buckets(tensors):
        own_data = to_bytes(bucket) if is_source else np.empty(bytes_of(bucket), np.uint8)
        arrived.append((bucket, _broadcast_bytes(group, source, own_data)))
    if not is_source:
        for bucket, data in arrived:
            from_bytes(bucket, data)
        tracked.load_values(values)
    return replace(
        position,
        step=step,
        generation=generation,
        resumed_generation=resumed_generation,
        resumed_step=resumed_step,
    )


def _broadcast_bytes(group: Group, source: int, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """What the source has; the data of others only tells how much."""
    if data.size == 0:
        return data
    tensor = make_tensor(data)
    group.broadcast(tensor, source)
    return data if group.rank == source else np.asarray(tensor.numpy())


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")


def _check(same_layout: bool, same_course: bool, source: int) -> None:
    if not same_layout:
        raise ElasticError(
            f"the tensors tracked here differ in number, shape or type from those of rank {source}: build the "
            "model and call job.track in the same way in every process"
        )
    if not same_course:
        raise ElasticError(
            "job.steps was called here with another dataset size, global_batch, epochs, seed or shuffle than in "
            f"rank {source}: every process must count the same steps"
        )
