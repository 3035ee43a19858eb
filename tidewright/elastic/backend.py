"""The one place that imports Paddle; makes the process groups of gloo and NCCL."""

import importlib
import os
from typing import Any, Final

from tidewright.elastic.devices import NCCL, Backend, choose_backend

paddle: Any = importlib.import_module("paddle")
core: Any = importlib.import_module("paddle.base.core")
NCCL_GROUP_ID_FIRST: Final = 1 << 24


def prepare_backend() -> Backend:
    """Choose by what is there and make Paddle use it."""
    os.environ.setdefault("PADDLE_TRAINER_ID", "0")  # a group that Paddle did not launch itself wants it set
    with_cuda = bool(paddle.device.is_compiled_with_cuda())
    backend = choose_backend(
        compiled_with_cuda=with_cuda, visible_gpus=int(paddle.device.cuda.device_count()) if with_cuda else 0
    )
    if backend.name == NCCL:
        paddle.set_device(backend.device)
        core.CommContextManager.set_device_id(0)
    return backend


def make_gloo_group(store: Any, *, rank: int, world: int, generation: int) -> Any:
    """Connect the members of a generation on the CPU; blocks until all are there. Raises what Paddle raises."""
    return core.ProcessGroupGloo.create(store, rank, world, generation)


def make_nccl_group(store: Any, *, rank: int, world: int, generation: int) -> Any:
    """The same on GPUs. Its number is another than that of the gloo group beside it."""
    collective = importlib.import_module("paddle.distributed.collective")
    group = collective._new_process_group_impl(
        NCCL, store, rank, world, f"tide-{generation}", None, group_id=NCCL_GROUP_ID_FIRST + generation
    )
    # The communicator is made by the first collective: here, in the background, and not in a step.
    group.all_reduce(paddle.zeros([1]), core.ReduceOp.SUM, True).wait()
    return group


def on_cpu(array: Any) -> Any:
    """A tensor for gloo, whatever device the model is on."""
    return paddle.to_tensor(array, place=paddle.CPUPlace())
