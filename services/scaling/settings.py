"""Settings of scaling: section ``[scaling]``, environment ``TIDE_SCALING_…``."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from services.scaling.core.stability import PPM, Band
from services.scaling.core.threshold import Growth, Policy
from shared.settings import NotNegative, Positive, ServiceSettings

Fraction = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


class ScalingSettings(ServiceSettings):
    """The threshold policy. Utilisations are fractions of 1."""

    SECTION = "scaling"

    target: Fraction = 0.80
    """Where a job that shrinks (or grows by ratio) is meant to arrive."""
    band_low: Fraction = 0.75
    band_high: Fraction = 0.85
    """Between them, edges included, a size is right."""
    window_seconds: Positive = 300.0
    """Utilisation must be outside the band for so long without a break."""
    cooldown_seconds: NotNegative = 300.0
    """After any change of a job's allocation, and after the loss of a member, nothing is proposed for so long."""
    growth: Growth = Growth.DOUBLE
    growth_factor_max: Annotated[float, Field(ge=1, le=100, allow_inf_nan=False)] = 2.0
    """One growth multiplies the workers by at most this; it always adds at least one."""
    reporting_fraction_min: Fraction = 1.0
    """A window in which fewer of the members reported says nothing."""
    staleness_seconds: Positive = 15.0
    """A window older than this, or that averages over more, or that comes so long after the one before, says
    nothing. At least as long as windows are: metrics' ``emit_seconds`` and ``lateness_seconds``."""
    closed_retention_seconds: Positive = 86_400.0
    """How long the row of a closed job stays, to fence words that come late."""
    retention_interval_seconds: Positive = 60.0
    retention_rows_max: Annotated[int, Field(ge=1, le=1_000_000)] = 5_000
    """Rows deleted in one transaction."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.band_low <= self.target <= self.band_high:
            raise ValueError(
                f"target must lie in the band: {self.band_low:g} <= target <= {self.band_high:g}, not {self.target:g}"
            )
        return self

    def policy(self) -> Policy:
        return Policy(
            band=Band(
                low_ppm=round(self.band_low * PPM),
                high_ppm=round(self.band_high * PPM),
                window_us=round(self.window_seconds * 1e6),
                staleness_us=round(self.staleness_seconds * 1e6),
                reporting_ppm=round(self.reporting_fraction_min * PPM),
            ),
            target_ppm=round(self.target * PPM),
            cooldown_us=round(self.cooldown_seconds * 1e6),
            growth=self.growth,
            growth_ppm_max=round(self.growth_factor_max * PPM),
        )
