"""Settings of metrics: section ``[metrics]``, environment ``TIDE_METRICS_…``."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from services.metrics.core.groups import Rules
from services.metrics.core.signals import PPM
from services.metrics.core.window import WindowRules
from shared.settings import NotNegative, Positive, ServiceSettings

Fraction = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Many = Annotated[int, Field(ge=1, le=1_000_000)]


class MetricsSettings(ServiceSettings):
    """What metrics can be told."""

    SECTION = "metrics"

    emit_seconds: Positive = 5.0
    """Length of a window. Whoever needs a longer view composes it from adjoining windows."""
    lateness_seconds: NotNegative = 2.0
    """A window waits so much longer for members that have not reported for ``coverage_fraction`` of it."""
    reach_seconds: Positive = 3.0
    """A report may begin so long before its window; reports of a group not yet known wait as long for its event."""
    coverage_fraction: Fraction = 0.5
    """A member reports in a window if its reports cover this share of it."""
    report_seconds_max: Positive = 120.0
    """The longest stretch that one report may tell of."""
    world_max: Many = 10_000
    aside_samples_max: Many = 1_000
    """Reports of one job that may wait for their group's event."""
    inbox_samples_max: Many = 10_000
    """Reports that may wait to be written; above it the route answers 503."""
    batch_samples_max: Annotated[int, Field(ge=1, le=10_000)] = 1_000
    write_interval_seconds: NotNegative = 0.02
    """At least so long from the start of one write to the start of the next."""
    answer_seconds_max: Positive = 5.0
    close_interval_seconds: Positive = 0.1
    """Windows that are due are closed together, at most so often."""
    curve_points_max: Annotated[int, Field(ge=2, le=100_000)] = 1_000
    """Points of one job's curve; a full one loses every second point."""
    sample_retention_seconds: Positive = 120.0
    curve_retention_seconds: Positive = 604_800.0
    """How long the curve of a job stays after its end."""
    ended_jobs_max: Many = 10_000
    """Jobs that have ended and whose curves stay; the oldest go first."""
    retention_interval_seconds: Positive = 30.0
    retention_rows_max: Many = 5_000
    """Rows deleted in one transaction."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        window_seconds = self.emit_seconds + self.lateness_seconds + self.reach_seconds
        if self.sample_retention_seconds < 2 * window_seconds:
            raise ValueError(f"sample_retention_seconds must be at least {2 * window_seconds:g}, two whole windows")
        return self

    def rules(self) -> Rules:
        return Rules(
            window=WindowRules(
                emit_us=round(self.emit_seconds * 1e6),
                lateness_us=round(self.lateness_seconds * 1e6),
                reach_us=round(self.reach_seconds * 1e6),
                coverage_ppm=round(self.coverage_fraction * PPM),
            ),
            aside_max=self.aside_samples_max,
            points_max=self.curve_points_max,
        )
