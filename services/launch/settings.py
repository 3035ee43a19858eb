"""Limits of the launcher: environment ``TIDE_LAUNCH_*``."""

from typing import Annotated

from pydantic import Field

from shared.settings import Positive, SectionSettings


class LaunchSettings(SectionSettings):
    """How long the supervisor waits for what. Durations in seconds."""

    SECTION = "launch"

    start_seconds: Positive = 90.0
    """Until the zygote has imported Paddle and every service is ready, the first time."""
    jobs_stop_seconds: Positive = 120.0
    """Until running jobs have written their checkpoints and stopped, at ``tide down``."""
    services_stop_seconds: Positive = 15.0
    """For the ordered stop of the services' process; then it is killed."""
    zygote_stop_seconds: Positive = 5.0
    standbys: Annotated[int, Field(ge=0, le=256)] = 2
    """Workers that the zygote forks in advance, so that a start costs no fork; each holds some 30 MB of its own."""
    members_stop_seconds: Positive = 5.0
    """For workers that are left when their jobs should have stopped; then they are killed."""
    restart_seconds_min: Positive = 0.1
    restart_seconds_max: Positive = 15.0
    """Back-off between two starts of what ends again and again."""
    steady_seconds: Positive = 30.0
    """What ran for so long starts anew with the shortest back-off."""
    log_bytes_max: Annotated[int, Field(ge=65_536)] = 64 * 1024 * 1024
    """A log file that is larger at a start is put aside (one generation is kept)."""
