"""The one place that imports Paddle, and chooses between gloo and NCCL."""

import importlib
import os
from dataclasses import dataclass
from typing import Any, Final

paddle: Any = importlib.import_module("paddle")
core: Any = importlib.import_module("paddle.base.core")

GLOO: Final = "gloo"
NCCL: Final = "nccl"
NCCL_FLAGS_EVERY_STEPS: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """How members talk. ``flags_every_steps``: reading a flag off a GPU stops the host, so it is read seldom."""

    name: str
    device: str
    flags_every_steps: int

    @property
    def survives_a_lost_peer(self) -> bool:
        """With gloo a broken collective raises; one of NCCL cannot be ended from Python, so its process ends."""
        return self.name == GLOO


def choose_backend(*, compiled_with_cuda: bool, visible_gpus: int) -> Backend:
    """NCCL where a GPU wheel sees a GPU, else gloo on the CPU. One process drives one GPU, the first it sees."""
    if compiled_with_cuda and visible_gpus > 0:
        return Backend(name=NCCL, device="gpu:0", flags_every_steps=NCCL_FLAGS_EVERY_STEPS)
    return Backend(name=GLOO, device="cpu", flags_every_steps=1)


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


def make_process_group(backend: Backend, store: Any, *, rank: int, world: int, generation: int) -> Any:
    """Connect the members of a generation; blocks until all are there. Raises what Paddle raises."""
    if backend.name == GLOO:
        return core.ProcessGroupGloo.create(store, rank, world, generation)
    collective = importlib.import_module("paddle.distributed.collective")
    group = collective._new_process_group_impl(
        NCCL, store, rank, world, f"tide-{generation}", None, group_id=generation
    )
    # The communicator is made by the first collective: here, in the background, and not in a step.
    group.all_reduce(paddle.zeros([1]), core.ReduceOp.SUM, True).wait()
    return group
