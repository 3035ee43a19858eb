"""Sentences for people: sizes, counts, and other jobs, which are named only within the same tenant."""

from typing import Final

from schemas.resources import CPU, MEMORY, MILLI, NVIDIA_GPU, SHM, SLOT, Resources
from schemas.vocabulary import TenantName
from services.queueing.core.values import Workload

_NOUNS: Final = {SLOT: "slot", NVIDIA_GPU: "GPU", CPU: "cpu"}
_BYTES: Final = {MEMORY: "memory", SHM: "shared memory"}
_GIB: Final = 2**30
_MIB: Final = 2**20


def workers_text(workers: int) -> str:
    return f"{workers} worker" if workers == 1 else f"{workers} workers"


def amount_text(size: Resources) -> str:
    """``2 slots, 1.5 cpu, 4 GiB memory``; negative amounts read as 0; ``nothing`` where all are."""
    parts = [_part(name, amount) for name, amount in size.amounts if amount > 0]
    return ", ".join(parts) or "nothing"


def job_text(other: Workload, *, reader: TenantName) -> str:
    """The other job's name and id for readers of its tenant, else ``another job``."""
    return f"{other.name} ({other.job_id})" if other.tenant == reader else "another job"


def _part(name: str, amount: int) -> str:
    if name in _BYTES:
        unit, size = ("GiB", _GIB) if amount >= _GIB else ("MiB", _MIB)
        return f"{_decimal(amount * 10 // size, 10)} {unit} {_BYTES[name]}"
    noun = _NOUNS.get(name, name)
    plural = "s" if noun in ("slot", "GPU") and amount != MILLI else ""
    return f"{_decimal(amount, MILLI)} {noun}{plural}"


def _decimal(amount: int, unit: int) -> str:
    """``amount / unit`` without a trailing fraction of zeros."""
    whole, rest = divmod(amount, unit)
    digits = str(rest).rjust(len(str(unit)) - 1, "0").rstrip("0")
    return f"{whole}.{digits}" if digits else str(whole)
