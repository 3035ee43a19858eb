"""What this machine offers: GPUs as NVML counts them, else slots; cores and memory."""

import os
import socket
from dataclasses import dataclass

import psutil
import pynvml

from schemas.resources import CPU, MEMORY, MILLI, NVIDIA_GPU, SLOT, Resources
from schemas.vocabulary import NodeName

_SLOTS_MIN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """``accelerators`` are GPUs if ``has_gpus``, else slots that stand in for them."""

    node: NodeName
    accelerators: int
    has_gpus: bool
    size: Resources


def look_at_machine(*, slots: int | None, node: str | None) -> Machine:
    """Count what is there. ``slots`` overrides the number of accelerators (of GPUs: at most those that are there)."""
    gpus = count_gpus()
    cores = os.cpu_count() or 1
    if gpus:
        accelerators, resource = min(gpus, slots or gpus), NVIDIA_GPU
    else:
        accelerators, resource = slots or max(_SLOTS_MIN, cores), SLOT
    size = {resource: accelerators * MILLI, CPU: cores * MILLI, MEMORY: psutil.virtual_memory().total}
    return Machine(
        node=NodeName(node or socket.gethostname()),
        accelerators=accelerators,
        has_gpus=gpus > 0,
        size=Resources(size),
    )


def count_gpus() -> int:
    """GPUs that NVML sees; 0 where there is no driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0
    finally:
        pynvml.nvmlShutdown()
