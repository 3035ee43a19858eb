"""Settings of queueing: section ``[queueing]``, environment ``TIDE_QUEUEING_*``."""

from typing import Annotated, ClassVar

from pydantic import Field

from services.queueing.core.values import Rules
from shared.settings import NotNegative, Positive, ServiceSettings


class QueueingSettings(ServiceSettings):
    """Limits of the policy and of the loop. Durations in seconds."""

    SECTION: ClassVar[str] = "queueing"

    batch_interval_seconds: NotNegative = 0.05
    """A plan is made at most this often: events that come together are planned together."""
    minimum_run_seconds: NotNegative = 0.0
    """Nobody is preempted for another job sooner than this after its group started."""
    back_off_first_seconds: Positive = 5.0
    """Pause after a failed start, and after the second failure of the platform in a row; then it doubles."""
    back_off_limit_seconds: Positive = 300.0
    steady_seconds: Positive = 300.0
    """An attempt that ran this long ends a row of failures of the platform."""
    platform_retries_without_progress_max: Annotated[int, Field(ge=0)] = 10
    """More attempts in a row that the platform ended without one step further, and the job has failed.

    A job whose steps nobody counts gets further by running for ``steady_seconds``.
    """
    explain_seconds: NotNegative = 1.0
    """A waiting reason whose code stays and whose numbers move is published at most this often."""
    observe_seconds: Positive = 5.0
    """The state of a queue is published at most this often."""
    tombstone_seconds: Positive = 30 * 86_400.0
    """So long late words about a closed job are recognised; longer than any log keeps them."""
    tombstone_interval_seconds: Positive = 3_600.0
    """How often old tombstones are deleted."""

    @property
    def rules(self) -> Rules:
        return Rules(
            minimum_run_seconds=self.minimum_run_seconds,
            back_off_first_seconds=self.back_off_first_seconds,
            back_off_limit_seconds=self.back_off_limit_seconds,
            steady_seconds=self.steady_seconds,
            explain_seconds=self.explain_seconds,
            platform_retries_without_progress_max=self.platform_retries_without_progress_max,
        )
