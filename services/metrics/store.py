"""Jobs, samples and curves of metrics in Postgres; batches travel as arrays."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Row, Text, TextClause, bindparam, select, text
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.ext.asyncio import AsyncConnection

from schemas.vocabulary import JobId, TenantName, UtilisationMeasure
from services.metrics.core.batch import StoredJob
from services.metrics.core.curves import CurveCursor, CurvePoint
from services.metrics.core.groups import Track
from services.metrics.core.signals import Sample
from services.metrics.core.window import Window
from services.metrics.tables import curves, jobs, samples
from shared.instant import Instant
from shared.runtime.service import Transaction


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSample:
    received_us: int
    sample: Sample


def _unnested(columns: Sequence[str]) -> str:
    """``unnest`` of one array per column, as rows in their order."""
    arrays = ", ".join(f":{name}" for name in columns)
    return f"unnest({arrays}) with ordinality as r({_names(columns)}, n)"


def _typed(statement: str, table: Any, columns: Sequence[str], *others: Any) -> TextClause:
    kinds = [Text() if isinstance(table.c[name].type, Text) else table.c[name].type for name in columns]
    arrays = [bindparam(name, type_=ARRAY(kind)) for name, kind in zip(columns, kinds, strict=True)]
    return text(statement).bindparams(*arrays, *others)


def _arrays(columns: Sequence[str], rows: Iterable[tuple[Any, ...]]) -> dict[str, list[Any]]:
    values: dict[str, list[Any]] = {name: [] for name in columns}
    for row in rows:
        for name, value in zip(columns, row, strict=True):
            values[name].append(value)
    return values


def _names(columns: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in columns)


# -- samples --------------------------------------------------------------------------------------------------

_SAMPLE_COLUMNS: Final = tuple(column.name for column in samples.columns if column.name != "received_at")
_INSERT_SAMPLES: Final = _typed(
    f"""
    insert into metrics.samples ({_names(_SAMPLE_COLUMNS)}, received_at)
    select {_names(_SAMPLE_COLUMNS)}, :received_at from {_unnested(_SAMPLE_COLUMNS)} order by r.n
    on conflict (job_id, member, sequence) do nothing
    returning member, sequence
    """,  # noqa: S608
    samples,
    _SAMPLE_COLUMNS,
    bindparam("received_at", type_=samples.c.received_at.type),
)


async def save_samples(
    tx: Transaction, batch: Sequence[Sample], *, received_at: datetime
) -> frozenset[tuple[str, int]]:
    """Write reports; answers (member, sequence) of those that were not there before. About 30 µs each."""
    if not batch:
        return frozenset()
    rows = ([getattr(sample, name) for name in _SAMPLE_COLUMNS[:-1]] + [sample.measure.value] for sample in batch)
    parameters = {**_arrays(_SAMPLE_COLUMNS, map(tuple, rows)), "received_at": received_at}
    return frozenset((row.member, row.sequence) for row in await tx.execute(_INSERT_SAMPLES, parameters))


_RECENT_SAMPLES: Final = text(
    """
    select s.* from metrics.samples s left join metrics.jobs j on j.job_id = s.job_id
     where s.received_at >= :since and j.ended_at is null
       and (   (s.received_at > j.window_opened_at and (s.attempt, s.generation) = (j.attempt, j.generation))
            or (s.received_at >= :fresh
                and (j.job_id is null or (s.attempt, s.generation) > (j.attempt, j.generation))))
     order by s.received_at, s.job_id, s.member, s.sequence
    """
).bindparams(
    bindparam("since", type_=samples.c.received_at.type), bindparam("fresh", type_=samples.c.received_at.type)
)


async def load_samples(tx: Transaction, *, since: datetime, fresh: datetime, at: Instant) -> tuple[StoredSample, ...]:
    """What open windows are rebuilt from, in the order of receipt; and what waits for its group, since ``fresh``."""
    rows = await tx.execute(_RECENT_SAMPLES, {"since": since, "fresh": fresh})
    return tuple(_to_stored_sample(row, at) for row in rows)


def _to_stored_sample(row: Row[Any], at: Instant) -> StoredSample:
    values = {name: getattr(row, name) for name in _SAMPLE_COLUMNS}
    values["measure"] = UtilisationMeasure(row.measure)
    return StoredSample(received_us=at.to_us(row.received_at), sample=Sample(**values))


# -- jobs -----------------------------------------------------------------------------------------------------

_JOB_COLUMNS: Final = tuple(column.name for column in jobs.columns if column.name not in ("started_at", "ended_at"))
_UPSERT_JOBS: Final = _typed(
    f"""
    insert into metrics.jobs ({_names(_JOB_COLUMNS)}, started_at)
    select {_names(_JOB_COLUMNS)}, r.window_opened_at from {_unnested(_JOB_COLUMNS)} order by r.n
    on conflict (job_id) do update set
        {", ".join(f"{name} = excluded.{name}" for name in _JOB_COLUMNS[1:])},
        started_at = coalesce(jobs.started_at, excluded.started_at)
    """,  # noqa: S608
    jobs,
    _JOB_COLUMNS,
)


async def save_jobs(tx: Transaction, tracks: Sequence[Track], *, at: Instant) -> None:
    """Write the present state of these jobs; one row a job, so ids must differ."""
    if tracks:
        await tx.execute(_UPSERT_JOBS, _arrays(_JOB_COLUMNS, (_job_row(track, at) for track in tracks)))


def _job_row(track: Track, at: Instant) -> tuple[Any, ...]:
    return (
        track.job_id,
        track.tenant,
        track.attempt,
        track.generation,
        track.workers,
        track.ended_attempt,
        at.to_wall(track.window.opened_us) if track.window else None,
        track.curve.next_index,
        track.curve.stride,
    )


async def load_open_jobs(tx: Transaction, *, at: Instant) -> tuple[Track, ...]:
    """Jobs whose group is training; their windows are empty still."""
    statement = select(jobs).where(jobs.c.window_opened_at.is_not(None), jobs.c.ended_at.is_(None))
    return tuple(_to_stored_job(row, at).track for row in await tx.execute(statement.order_by(jobs.c.job_id)))


_FIND_JOBS: Final = select(jobs).where(jobs.c.job_id == bindparam("ids", type_=ARRAY(Text())).any_())


async def load_jobs(tx: Transaction, job_ids: Sequence[JobId], *, at: Instant) -> dict[JobId, StoredJob]:
    """The rows that exist of these jobs."""
    if not job_ids:
        return {}
    return {JobId(row.job_id): _to_stored_job(row, at) for row in await tx.execute(_FIND_JOBS, {"ids": job_ids})}


def _to_stored_job(row: Row[Any], at: Instant) -> StoredJob:
    opened_at = row.window_opened_at
    track = Track(
        job_id=JobId(row.job_id),
        tenant=TenantName(row.tenant),
        attempt=row.attempt,
        generation=row.generation,
        workers=row.workers,
        ended_attempt=row.ended_attempt,
        window=None if opened_at is None else Window(opened_us=at.to_us(opened_at)),
        curve=CurveCursor(next_index=row.curve_next, stride=row.curve_stride),
    )
    return StoredJob(track=track, is_ended=row.ended_at is not None)


_END_COLUMNS: Final = ("job_id", "tenant")
_END_JOBS: Final = _typed(
    f"""
    insert into metrics.jobs
        (job_id, tenant, attempt, generation, workers, ended_attempt, curve_next, curve_stride, ended_at)
    select r.job_id, r.tenant, 0, 0, 0, 0, 0, 1, :ended_at from {_unnested(_END_COLUMNS)} order by r.n
    on conflict (job_id) do update set ended_at = excluded.ended_at, window_opened_at = null
    """,  # noqa: S608
    jobs,
    _END_COLUMNS,
    bindparam("ended_at", type_=jobs.c.ended_at.type),
)
_FORGET_SAMPLES: Final = _typed("delete from metrics.samples where job_id = any(:job_id)", samples, ("job_id",))


async def end_jobs(tx: Transaction, ended: Sequence[tuple[JobId, TenantName]], *, at: Instant) -> None:
    """These jobs are over: their samples go, their curves stay, the row fences what is still under way."""
    if ended:
        await tx.execute(_END_JOBS, {**_arrays(_END_COLUMNS, ended), "ended_at": at.wall})
        await tx.execute(_FORGET_SAMPLES, {"job_id": [job_id for job_id, _ in ended]})


# -- curves ---------------------------------------------------------------------------------------------------

_POINT_COLUMNS: Final = tuple(column.name for column in curves.columns if column.name != "at")
_INSERT_POINTS: Final = _typed(
    f"""
    insert into metrics.curves ({_names(_POINT_COLUMNS)}, at)
    select {_names(_POINT_COLUMNS)}, :at from {_unnested(_POINT_COLUMNS)} order by r.n
    """,  # noqa: S608
    curves,
    _POINT_COLUMNS,
    bindparam("at", type_=curves.c.at.type),
)
_THIN_COLUMNS: Final = ("job_id", "curve_stride")
_THIN: Final = _typed(
    f"""
    delete from metrics.curves c using {_unnested(_THIN_COLUMNS)}
     where c.job_id = r.job_id and c.point % r.curve_stride <> 0
    """,  # noqa: S608
    jobs,
    _THIN_COLUMNS,
)


async def save_points(tx: Transaction, points: Sequence[tuple[JobId, CurvePoint]], *, at: Instant) -> None:
    if points:
        fields = ["index", *_POINT_COLUMNS[2:]]
        rows = ((job_id, *(getattr(point, field) for field in fields)) for job_id, point in points)
        await tx.execute(_INSERT_POINTS, {**_arrays(_POINT_COLUMNS, rows), "at": at.wall})


async def thin_curves(tx: Transaction, tracks: Sequence[Track]) -> None:
    """Keep the points whose index is a multiple of the cursor's stride."""
    if tracks:
        rows = ((track.job_id, track.curve.stride) for track in tracks)
        await tx.execute(_THIN, _arrays(_THIN_COLUMNS, rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A job's points, oldest first, as rows of ``metrics.curves``; ``started_at``: its first group's start."""

    started_at: datetime | None
    points: Sequence[Row[Any]]


async def load_curve(connection: AsyncConnection, job_id: JobId) -> Curve | None:
    """None for a job of which nothing was ever reported."""
    job = (await connection.execute(select(jobs.c.started_at).where(jobs.c.job_id == job_id))).one_or_none()
    if job is None:
        return None
    points = await connection.execute(select(curves).where(curves.c.job_id == job_id).order_by(curves.c.point))
    return Curve(started_at=job.started_at, points=points.all())


# -- retention ------------------------------------------------------------------------------------------------

_DROP_SAMPLES: Final = text(
    """
    delete from metrics.samples where ctid = any(array(
        select ctid from metrics.samples where received_at < :before order by received_at limit :limit))
    """
).bindparams(bindparam("before", type_=samples.c.received_at.type))
_OLD_JOBS: Final = text(
    """
    select j.job_id from (
        select job_id, ended_at, row_number() over (order by ended_at desc, job_id) as place
          from metrics.jobs where ended_at is not null) j
     where j.ended_at < :before or j.place > :keep
     order by j.ended_at, j.job_id limit :limit
    """
).bindparams(bindparam("before", type_=jobs.c.ended_at.type))
_DROP_CURVES: Final = _typed("delete from metrics.curves where job_id = any(:job_id)", curves, ("job_id",))
_DROP_JOBS: Final = _typed("delete from metrics.jobs where job_id = any(:job_id)", jobs, ("job_id",))


async def drop_samples(tx: Transaction, *, before: datetime, limit: int) -> int:
    """Delete at most ``limit`` of the oldest; answers how many."""
    return (await tx.execute(_DROP_SAMPLES, {"before": before, "limit": limit})).rowcount


async def drop_ended_jobs(tx: Transaction, *, before: datetime, keep: int, limit: int) -> int:
    """Delete jobs that ended before, or that are not among the newest ``keep``, with their curves."""
    found = [row.job_id for row in await tx.execute(_OLD_JOBS, {"before": before, "keep": keep, "limit": limit})]
    if found:
        await tx.execute(_DROP_CURVES, {"job_id": found})
        await tx.execute(_DROP_JOBS, {"job_id": found})
    return len(found)
