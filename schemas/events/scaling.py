"""Events of ``tide.scaling.v1``: how many workers a job would use well. Published by scaling; key = job id."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from schemas.vocabulary import Topic


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingProposed:
    """The proposal for a job changed.

    By: scaling. For: queueing, which uses the latest only and ignores it if the epoch moved.
    """

    TYPE: ClassVar[Literal["tide.scaling.proposed.v1"]] = "tide.scaling.proposed.v1"
    TOPIC: ClassVar[Topic] = Topic.SCALING
    epoch: int
    workers: int
    gain_per_worker: float | None
    reason: str
