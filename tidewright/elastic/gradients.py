"""One all-reduce a step: all gradients, the loss, and the flags on which the members agree."""

import math
from typing import Any, Final

import numpy as np

from tidewright.elastic.agreement import Agreement, Flags, agree, flag_values
from tidewright.elastic.backend import make_tensor, paddle
from tidewright.elastic.errors import ElasticError
from tidewright.elastic.group import Group

_WIDE: Final = ("float64", "paddle.float64")


def check_loss(loss: Any) -> None:
    """Raises ElasticError for what is no scalar tensor."""
    if not isinstance(loss, paddle.Tensor) or math.prod(loss.shape) != 1:
        shape = list(loss.shape) if isinstance(loss, paddle.Tensor) else type(loss).__name__
        raise ElasticError(
            f"job.apply: the loss must be a tensor of one number, got {shape}: sum the losses of the samples and "
            "divide by step.global_batch"
        )


def reduce_gradients(
    parameters: list[Any], loss: Any, group: Group, flags: Flags, *, counts: bool, read_flags: bool
) -> Agreement | None:
    """Sum gradients over the group, in place. Raises GroupBroken, and then no gradient has changed.

    ``counts`` False: this member's loss and gradients are of a borrowed sample and stand for nothing. A parameter
    that no member has a gradient for keeps none, as in a process of its own. None if the flags were not to be read.
    """
    if group.is_solo:
        if not read_flags:
            return None
        return _read([float(loss.item()), *flag_values(flags)], world=1, flags=flags)
    dtype = "float64" if any(str(p.dtype) in _WIDE for p in parameters) else "float32"
    gradients = [_gradient(p) if counts else None for p in parameters]
    own_loss = loss.detach().reshape([1]).astype(dtype) if counts else paddle.zeros([1], dtype)
    tail = [float(gradient is not None) for gradient in gradients] + flag_values(flags)
    parts = [
        paddle.zeros([math.prod(p.shape)], dtype) if g is None else g.reshape([-1]).astype(dtype)
        for p, g in zip(parameters, gradients, strict=True)
    ]
    flat = paddle.concat([*parts, own_loss, make_tensor(np.array(tail, dtype))])
    group.sum(flat)
    begin = int(flat.shape[0]) - len(tail) - 1
    sums = flat[begin:].numpy().astype(float).tolist() if read_flags else None
    _spread(parameters, flat, present=sums[1 : 1 + len(parameters)] if sums is not None else None)
    return (
        _read([sums[0], *sums[1 + len(parameters) :]], world=group.world, flags=flags) if sums is not None else None
    )


def _read(sums: list[float], *, world: int, flags: Flags) -> Agreement:
    loss, samples, ready, squares, stop = sums
    return agree(sums=(loss, samples, ready, squares, stop), world=world, ready_generation=flags.ready_generation)


def _spread(parameters: list[Any], flat: Any, *, present: list[float] | None) -> None:
    """Hand the sums back to the parameters that anyone had a gradient for (all of them, where that is not known)."""
    at = 0
    for index, parameter in enumerate(parameters):
        size = math.prod(parameter.shape)
        if present is None or present[index] > 0:
            parameter.grad = flat[at : at + size].reshape(parameter.shape).astype(parameter.dtype)
        at += size


def _gradient(parameter: Any) -> Any:
    gradient = parameter.grad
    if gradient is not None and hasattr(gradient, "is_selected_rows") and gradient.is_selected_rows():
        raise ElasticError(f"job.apply: {parameter.name} has sparse gradients; use sparse=False")
    return gradient
