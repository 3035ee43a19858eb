"""Events of ``tide.metric.v1``: what a job's samples amount to. Published by metrics; key = job id."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from schemas.vocabulary import Topic, UtilisationMeasure


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a job is. ``total_steps`` is None where the script does not say."""

    step: int
    total_steps: int | None
    remaining_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricWindow:
    """One closed window of one generation.

    By: metrics. For: scaling, intake. Times are means per worker over ``window_seconds``;
    ``utilisation`` is a fraction in 0..1, None where no worker reported. Wall time that was inside none
    of step, synchronisation or input wait is ``idle_seconds``. Fewer ``members_reporting`` than expected
    means that the window is incomplete and moves nothing.
    """

    TYPE: ClassVar[Literal["tide.metric.window.v1"]] = "tide.metric.window.v1"
    TOPIC: ClassVar[Topic] = Topic.METRIC
    attempt: int
    generation: int
    window_seconds: float
    members_reporting: int
    members_expected: int
    utilisation: float | None
    measure: UtilisationMeasure
    step_seconds: float | None
    sync_seconds: float | None
    input_wait_seconds: float | None
    idle_seconds: float | None
    samples_per_second: float | None
    loss: float | None
    gradient_noise: float | None
    progress: Progress | None
