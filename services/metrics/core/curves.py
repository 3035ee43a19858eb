"""Which windows stay as points of a job's curve: ever fewer of the old ones, never more than a bound."""

from dataclasses import dataclass

from schemas.events.metric import MetricWindow


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveCursor:
    """Where a curve stands: the index of the next window, and that every ``stride``-th one is kept."""

    next_index: int = 0
    stride: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """One kept window: what the group of ``workers`` members of a generation did."""

    index: int
    attempt: int
    generation: int
    workers: int
    step: int
    loss: float | None
    samples_per_second: float | None
    utilisation: float | None
    window_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePlan:
    """``thinned``: points whose index is no multiple of the cursor's new stride go."""

    cursor: CurveCursor
    point: CurvePoint | None
    thinned: bool


def plan_point(cursor: CurveCursor, window: MetricWindow, *, points_max: int, last: bool) -> CurvePlan:
    """Keep the window if its turn has come, and the last of an attempt always; halve the curve where it is full.

    The last one takes the next index whose turn it is, so that every kept index is a multiple of the stride and the
    bound holds whatever ends. A window in which nobody reported has nothing to draw and takes no index.
    """
    if window.progress is None:
        return CurvePlan(cursor=cursor, point=None, thinned=False)
    stride = cursor.stride
    index = -(-cursor.next_index // stride) * stride if last else cursor.next_index
    point = CurvePoint(
        index=index,
        attempt=window.attempt,
        generation=window.generation,
        workers=window.members_expected,
        step=window.progress.step,
        loss=window.loss,
        samples_per_second=window.samples_per_second,
        utilisation=window.utilisation,
        window_seconds=window.window_seconds,
    )
    full = index // stride + 1 >= points_max
    return CurvePlan(
        cursor=CurveCursor(next_index=index + 1, stride=stride * 2 if full else stride),
        point=point if index % stride == 0 else None,
        thinned=full,
    )
