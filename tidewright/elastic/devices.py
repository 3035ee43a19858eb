"""Decides between gloo and NCCL by what is there; knows nothing of Paddle."""

from dataclasses import dataclass
from typing import Final

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
