"""What one report of one trainer says, and whether its numbers agree with each other."""

from dataclasses import dataclass
from typing import Final

from schemas.vocabulary import WORKER_ROLE, JobId, UtilisationMeasure

PPM: Final = 1_000_000
"""Fractions are counted in parts per million, durations in microseconds: integer sums know no order."""
ROUNDING_US: Final = 20_000
ROUNDING_PPM: Final = 10_000
"""The parts of a report may exceed its wall time by 20 ms plus 1 %: they are read from a clock one by one."""
MEMBER_PARTS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one member did since its last report. ``steps`` and ``samples`` are its own share, not the group's."""

    job_id: JobId
    attempt: int
    member: str
    generation: int
    rank: int
    world: int
    sequence: int
    wall_us: int
    step_us: int
    sync_us: int
    input_wait_us: int
    steps: int
    samples: int
    loss: float | None
    step: int
    total_steps: int | None
    utilisation_ppm: int | None
    measure: UtilisationMeasure


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Why a report is refused: the field, what is wrong with it, what is allowed."""

    field: str
    detail: str
    way_out: str


def fault_of(sample: Sample, *, wall_us_max: int, world_max: int) -> Fault | None:
    """The first contradiction in a report, or None. Types, signs and finiteness are checked at the door."""
    job, _, rest = sample.member.partition("/")
    role, *numbers = rest.split("/")
    named = job == sample.job_id and role == WORKER_ROLE and len(numbers) == MEMBER_PARTS - 2
    if not (named and all(number.isascii() and number.isdigit() for number in numbers)):
        return Fault(
            field="member",
            detail="is not a worker of this job",
            way_out="the value of TIDE_MEMBER: <job>/worker/<index>/<incarnation>",
        )
    if sample.world > world_max:
        return Fault(field="world", detail=f"is {sample.world}", way_out=f"at most {world_max}")
    if sample.rank >= sample.world:
        return Fault(field="rank", detail=f"is {sample.rank}", way_out=f"0 to world - 1 = {sample.world - 1}")
    if not 0 < sample.wall_us <= wall_us_max:
        return Fault(
            field="wall_seconds",
            detail=f"is {sample.wall_us / 1e6:g}",
            way_out=f"above 0 and at most {wall_us_max / 1e6:g}: report more often",
        )
    return _fault_of_parts(sample)


def _fault_of_parts(sample: Sample) -> Fault | None:
    parts_us = sample.step_us + sample.sync_us + sample.input_wait_us
    if parts_us > sample.wall_us + ROUNDING_US + sample.wall_us * ROUNDING_PPM // PPM:
        return Fault(
            field="wall_seconds",
            detail=f"is {sample.wall_us / 1e6:g}, less than its parts, {parts_us / 1e6:g}",
            way_out="step_seconds + sync_seconds + input_wait_seconds is at most wall_seconds",
        )
    if sample.total_steps is not None and sample.step > sample.total_steps:
        return Fault(field="step", detail=f"is {sample.step}", way_out=f"at most total_steps = {sample.total_steps}")
    if sample.measure is UtilisationMeasure.NVML and sample.utilisation_ppm is None:
        return Fault(
            field="utilisation", detail="is missing", way_out='0 to 1, since measure is "nvml"; or measure "wall"'
        )
    return None
