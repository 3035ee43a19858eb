"""What the reports of one generation amount to in a window of time.

Windows tumble: the next one begins where the last one ended (after a silent one, with the next report), so that
they tile the life of a generation with no gap, also over a restart of this service: the beginning is a row, and an
outage makes one long window, in which members that could not report do not count as reporting. They are short on
purpose, ``emit_seconds``: whoever needs a longer view, as scaling does, composes it from adjoining windows and so
sees every dip in it.

A window closes when it is ``emit_us`` old and all members have reported for at least a share of it; where somebody
is missing, ``lateness_us`` later. What is missing then stays missing: ``members_reporting`` says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from schemas.events.metric import MetricWindow, Progress
from schemas.vocabulary import UtilisationMeasure
from services.metrics.core.signals import PPM, Sample

RATE_WINDOWS: Final = 12
"""The step rate behind ``remaining_seconds`` is that of the last so many windows of the generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRules:
    """When windows close. ``reach_us``: how far before its window's beginning a report may begin."""

    emit_us: int
    lateness_us: int
    reach_us: int
    coverage_ppm: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What one rank reported inside a window. ``busy_us_ppm``: utilisation weighted by wall time."""

    wall_us: int = 0
    step_us: int = 0
    sync_us: int = 0
    input_wait_us: int = 0
    steps: int = 0
    samples: int = 0
    busy_us_ppm: int = 0
    nvml: bool = True
    sequence: int = -1
    loss: float | None = None
    step: int = 0
    total_steps: int | None = None

    def plus(self, sample: Sample) -> "Totals":
        nvml = sample.measure is UtilisationMeasure.NVML and sample.utilisation_ppm is not None
        newest = sample.sequence > self.sequence
        return Totals(
            wall_us=self.wall_us + sample.wall_us,
            step_us=self.step_us + sample.step_us,
            sync_us=self.sync_us + sample.sync_us,
            input_wait_us=self.input_wait_us + sample.input_wait_us,
            steps=self.steps + sample.steps,
            samples=self.samples + sample.samples,
            busy_us_ppm=self.busy_us_ppm + (sample.utilisation_ppm or 0) * sample.wall_us,
            nvml=self.nvml and nvml,
            sequence=max(self.sequence, sample.sequence),
            loss=sample.loss if newest else self.loss,
            step=max(self.step, sample.step),
            total_steps=sample.total_steps if newest else self.total_steps,
        )

    @property
    def idle_us(self) -> int:
        """Wall time inside none of the others: forming, holding, paused."""
        return max(0, self.wall_us - self.step_us - self.sync_us - self.input_wait_us)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """An open window of one generation: totals by rank."""

    opened_us: int
    totals: Mapping[int, Totals] = field(default_factory=dict)

    def reaches(self, sample: Sample, *, now_us: int, rules: WindowRules) -> bool:
        """False for a report that lies mostly before the window: it is late, and counts nowhere."""
        return sample.wall_us <= max(0, now_us - self.opened_us) + rules.reach_us


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRate:
    """Steps and the wall time they took, for the last windows of a generation, oldest first."""

    parts: tuple[tuple[int, int], ...] = ()

    def plus(self, *, steps: int, wall_us: int) -> "StepRate":
        return StepRate(parts=(*self.parts, (steps, wall_us))[-RATE_WINDOWS:])

    def remaining_seconds(self, steps_left: int) -> float | None:
        """None while nothing moves: an unknown rate is not a rate of zero."""
        steps = sum(part[0] for part in self.parts)
        if steps_left <= 0:
            return 0.0
        return round(steps_left * sum(part[1] for part in self.parts) / steps / 1e6, 3) if steps > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """A closed window: its event, and the rate that the next one goes on with."""

    event: MetricWindow
    rate: StepRate


def close_us(window: Window, *, workers: int, now_us: int, rules: WindowRules) -> int:
    """When the window closes if nothing more is reported: the past if it is due."""
    if _reporting(window, workers=workers, elapsed_us=max(rules.emit_us, now_us - window.opened_us), rules=rules):
        return window.opened_us + rules.emit_us
    return window.opened_us + rules.emit_us + rules.lateness_us


def _reporting(window: Window, *, workers: int, elapsed_us: int, rules: WindowRules) -> bool:
    return len(_covering(window, elapsed_us=elapsed_us, rules=rules)) >= workers


def _covering(window: Window, *, elapsed_us: int, rules: WindowRules) -> tuple[Totals, ...]:
    """Totals of the ranks that reported for at least the required share of ``elapsed_us``, by rank."""
    least_us = elapsed_us * rules.coverage_ppm // PPM
    return tuple(totals for _, totals in sorted(window.totals.items()) if totals.wall_us >= max(1, least_us))


def close_window(
    window: Window, *, attempt: int, generation: int, workers: int, rate: StepRate, now_us: int, rules: WindowRules
) -> Closed:
    """What the window amounts to. Times are means per reporting member; rates are sums over them.

    A member that reported for less than the required share of the window is not reporting, and its numbers are
    in no mean. Cost: O(members log members).
    """
    elapsed_us = max(1, now_us - window.opened_us)
    members = _covering(window, elapsed_us=elapsed_us, rules=rules)
    wall_us = sum(totals.wall_us for totals in members)
    rate = rate.plus(steps=sum(totals.steps for totals in members), wall_us=wall_us) if members else rate
    utilisation, measure = _utilisation(members)
    event = MetricWindow(
        attempt=attempt,
        generation=generation,
        window_seconds=round(elapsed_us / 1e6, 6),
        members_reporting=len(members),
        members_expected=workers,
        utilisation=utilisation,
        measure=measure,
        step_seconds=_mean_seconds([totals.step_us for totals in members]),
        sync_seconds=_mean_seconds([totals.sync_us for totals in members]),
        input_wait_seconds=_mean_seconds([totals.input_wait_us for totals in members]),
        idle_seconds=_mean_seconds([totals.idle_us for totals in members]),
        samples_per_second=(
            round(sum(totals.samples * PPM / totals.wall_us for totals in members), 3) if members else None
        ),
        loss=_mean_loss(members),
        gradient_noise=None,
        progress=_progress(members, rate),
    )
    return Closed(event=event, rate=rate)


def _utilisation(members: tuple[Totals, ...]) -> tuple[float | None, UtilisationMeasure]:
    """Busy share of the members' wall time; communication counts as busy. NVML's only if everyone has it."""
    wall_us = sum(totals.wall_us for totals in members)
    if not members:
        return None, UtilisationMeasure.WALL
    if all(totals.nvml for totals in members):
        return round(min(PPM, sum(t.busy_us_ppm for t in members) // wall_us) / PPM, 6), UtilisationMeasure.NVML
    lost_us = sum(totals.input_wait_us + totals.idle_us for totals in members)
    return round(max(0, wall_us - lost_us) / wall_us, 6), UtilisationMeasure.WALL


def _mean_seconds(parts_us: list[int]) -> float | None:
    return round(sum(parts_us) / len(parts_us) / 1e6, 6) if parts_us else None


def _mean_loss(members: tuple[Totals, ...]) -> float | None:
    losses = [totals.loss for totals in members if totals.loss is not None]
    return sum(losses) / len(losses) if losses else None


def _progress(members: tuple[Totals, ...], rate: StepRate) -> Progress | None:
    if not members:
        return None
    step = max(totals.step for totals in members)
    totals_known = [totals.total_steps for totals in members if totals.total_steps is not None]
    total_steps = max(totals_known) if totals_known else None
    remaining = None if total_steps is None else rate.remaining_seconds(total_steps - step)
    return Progress(step=step, total_steps=total_steps, remaining_seconds=remaining)
