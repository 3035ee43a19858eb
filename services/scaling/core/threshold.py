"""The threshold policy: how many workers a job would use well, judged by utilisation against a band.

1. Only a job that can be resized, is granted, and whose whole group has started is judged; not within a cooldown.
2. Its utilisation must have been above, or below, the band for a full window without a break.
3. Above: double (or scale by utilisation over target), since utilisation saturates. Below: scale by the ratio, up.
4. The answer stays within the job's limits; if it is the present size, there is nothing to propose.
5. Back inside the band for a full window: a proposal of this epoch that was not granted is withdrawn.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from schemas.vocabulary import Mode
from services.scaling.core.registers import Job
from services.scaling.core.stability import PPM, Band, Side, Streak


class Growth(StrEnum):
    """How far one proposal grows a job."""

    DOUBLE = "double"
    RATIO = "ratio"


class KeepReason(StrEnum):
    """Why there is no new proposal."""

    UNKNOWN_JOB = "unknown_job"
    MODE_FIXED = "mode_fixed"
    NO_CHECKPOINT_PATH = "no_checkpoint_path"
    HELD = "held"
    CANCELLED = "cancelled"
    NOT_GRANTED = "not_granted"
    GROUP_NOT_STARTED = "group_not_started"
    RESIZE_UNDER_WAY = "resize_under_way"
    COOLDOWN = "cooldown"
    NO_SIGNAL = "no_signal"
    WINDOW_NOT_FULL = "window_not_full"
    SIZE_IS_RIGHT = "size_is_right"
    AT_LIMIT = "at_limit"
    ALREADY_PROPOSED = "already_proposed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Settings of the policy. ``growth_ppm_max``: the greatest factor of one growth."""

    band: Band
    target_ppm: int
    cooldown_us: int
    growth: Growth
    growth_ppm_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Propose:
    workers: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    reason: KeepReason


Decision: TypeAlias = Propose | Keep


def decide(job: Job, *, now_us: int, policy: Policy) -> Decision:
    """What to propose for a job now."""
    barred = bar_of(job, now_us=now_us, policy=policy)
    if barred is not None:
        return Keep(reason=barred)
    streak = job.streak
    if streak is None or (streak.attempt, streak.generation) != (job.group.attempt, job.group.generation):
        return Keep(reason=KeepReason.NO_SIGNAL)
    if not streak.is_full(policy.band):
        return Keep(reason=KeepReason.WINDOW_NOT_FULL)
    return _judge(job, streak, policy=policy)


def bar_of(job: Job, *, now_us: int, policy: Policy) -> KeepReason | None:
    """What bars a job from being judged at all, whatever its utilisation; None if nothing does."""
    request, grant, group = job.request, job.grant, job.group
    if job.mode is None or request.version == 0:
        return KeepReason.UNKNOWN_JOB
    if job.mode is Mode.FIXED:
        return KeepReason.MODE_FIXED
    if job.mode is Mode.RESTART and not job.has_checkpoint_path:
        return KeepReason.NO_CHECKPOINT_PATH
    if request.cancelled:
        return KeepReason.CANCELLED
    if request.held:
        return KeepReason.HELD
    if grant.workers == 0 or job.closed:
        return KeepReason.NOT_GRANTED
    if group.attempt != grant.attempt or group.ended_attempt >= grant.attempt:
        return KeepReason.GROUP_NOT_STARTED
    if group.workers != grant.workers:
        return KeepReason.RESIZE_UNDER_WAY
    if job.disturbed_us is None or now_us - job.disturbed_us < policy.cooldown_us:
        return KeepReason.COOLDOWN
    return None


def _judge(job: Job, streak: Streak, *, policy: Policy) -> Decision:
    size = job.grant.workers
    if streak.side is Side.WITHIN:
        return _withdraw(job, streak, policy=policy)
    wished = _wished(size, streak, policy=policy)
    if wished == size:
        return Keep(reason=KeepReason.SIZE_IS_RIGHT)
    workers = max(job.request.workers_min, min(job.request.workers_max, wished))
    if workers == size or (workers > size) is not (wished > size):
        return Keep(reason=KeepReason.AT_LIMIT)
    if job.proposed == (job.grant.epoch, workers):
        return Keep(reason=KeepReason.ALREADY_PROPOSED)
    return Propose(workers=workers, reason=f"{_sentence(streak, policy=policy)}: {size} → {workers}")


def _wished(size: int, streak: Streak, *, policy: Policy) -> int:
    """The size that the policy wants, whatever the job's limits are."""
    by_ratio = -(-size * streak.utilisation_ppm // policy.target_ppm)
    if streak.side is Side.BELOW:
        return min(size, max(1, by_ratio))
    wished = size * 2 if policy.growth is Growth.DOUBLE else by_ratio
    return max(size + 1, min(wished, size * policy.growth_ppm_max // PPM))


def _withdraw(job: Job, streak: Streak, *, policy: Policy) -> Decision:
    """Only what this epoch still asks for is withdrawn: an earlier wish is queueing's to give back."""
    epoch, size = job.grant.epoch, job.grant.workers
    if job.proposed is None or job.proposed[0] != epoch or job.proposed[1] == size:
        return Keep(reason=KeepReason.SIZE_IS_RIGHT)
    return Propose(workers=size, reason=f"{_sentence(streak, policy=policy)}: stays at {size}")


def _sentence(streak: Streak, *, policy: Policy) -> str:
    low, high = percent(policy.band.low_ppm), percent(policy.band.high_ppm)
    where = {
        Side.ABOVE: f"above {high}",
        Side.BELOW: f"below {low}",
        Side.WITHIN: f"between {low} and {high}",
    }[streak.side]
    measured = f"utilisation {percent(streak.utilisation_ppm)} ({streak.measure.value})"
    return f"{measured} {where} for {streak.covered_us // 1_000_000} s"


def percent(ppm: int) -> str:
    """Whole where it is, else to a tenth, rounded down: never on the other side of an edge."""
    tenths = ppm // 1_000
    return f"{tenths // 10} %" if tenths % 10 == 0 else f"{tenths // 10}.{tenths % 10} %"
