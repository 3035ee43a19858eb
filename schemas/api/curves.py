"""Body of ``GET /v1/jobs/{id}/curves``, answered by metrics."""

from datetime import datetime

from pydantic import BaseModel


class CurvePointView(BaseModel):
    """One window of training. ``wall_seconds``: since the job's first group started, pauses included.

    ``samples_per_second`` is the whole group's, of the members that reported; ``loss`` their mean.
    """

    step: int
    loss: float | None
    samples_per_second: float | None
    utilisation: float | None
    workers: int
    attempt: int
    generation: int
    wall_seconds: float
    time: datetime


class CurvesView(BaseModel):
    """Oldest first. A long job has fewer, evenly spread points: every second one goes when the curve is full."""

    job_id: str
    points: list[CurvePointView]
