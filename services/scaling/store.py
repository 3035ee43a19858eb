"""Jobs of scaling in Postgres; batches travel as arrays."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Row, Text, bindparam, select, text
from sqlalchemy.dialects.postgresql import ARRAY

from schemas.vocabulary import JobId, Mode, TenantName, UtilisationMeasure
from services.scaling.core.registers import Grant, Group, Job, Request
from services.scaling.core.stability import Side, Streak
from services.scaling.tables import jobs
from shared.db.arrays import as_arrays, columns_of, upsert_rows
from shared.instant import Instant
from shared.runtime.service import Transaction

_COLUMNS: Final = columns_of(jobs)
_UPSERT: Final = upsert_rows(jobs, _COLUMNS)


async def save_jobs(tx: Transaction, changed: Sequence[Job], *, at: Instant) -> None:
    """Write the present state of these jobs; ids must differ. About 40 µs each in a batch."""
    if changed:
        await tx.execute(_UPSERT, as_arrays(_COLUMNS, (_to_row(job, at) for job in changed)))


def _to_row(job: Job, at: Instant) -> tuple[Any, ...]:
    request, grant, group = job.request, job.grant, job.group
    return (
        job.job_id,
        job.tenant,
        None if job.mode is None else job.mode.value,
        job.has_checkpoint_path,
        request.version,
        request.workers_min,
        request.workers_max,
        request.held,
        request.cancelled,
        grant.epoch,
        grant.attempt,
        grant.workers,
        group.attempt,
        group.generation,
        group.workers,
        group.ended_attempt,
        None if job.disturbed_us is None else at.to_wall(job.disturbed_us),
        *_streak_row(job.streak, at),
        *(job.proposed or (None, None)),
        at.wall if job.closed else None,
    )


def _streak_row(streak: Streak | None, at: Instant) -> tuple[Any, ...]:
    if streak is None:
        return (None,) * 7
    return (
        streak.attempt,
        streak.generation,
        streak.side.value,
        streak.measure.value,
        streak.covered_us,
        streak.utilisation_ppm,
        at.to_wall(streak.last_us),
    )


_ACTIVE: Final = select(jobs).where(jobs.c.closed_at.is_(None), jobs.c.workers > 0).order_by(jobs.c.job_id)
_FIND: Final = select(jobs).where(jobs.c.job_id == bindparam("ids", type_=ARRAY(Text())).any_())


async def load_active_jobs(tx: Transaction, *, at: Instant) -> tuple[Job, ...]:
    """Jobs that are granted; the others are read when something is said of them."""
    return tuple(_to_job(row, at) for row in await tx.execute(_ACTIVE))


async def load_jobs(tx: Transaction, job_ids: Sequence[JobId], *, at: Instant) -> dict[JobId, Job]:
    """The rows that exist of these jobs."""
    if not job_ids:
        return {}
    found = await tx.execute(_FIND, {"ids": list(job_ids)})
    return {JobId(row.job_id): _to_job(row, at) for row in found}


def _to_job(row: Row[Any], at: Instant) -> Job:
    return Job(
        job_id=JobId(row.job_id),
        tenant=TenantName(row.tenant),
        mode=None if row.mode is None else Mode(row.mode),
        has_checkpoint_path=row.has_checkpoint_path,
        request=Request(
            version=row.request_version,
            workers_min=row.workers_min,
            workers_max=row.workers_max,
            held=row.held,
            cancelled=row.cancelled,
        ),
        grant=Grant(epoch=row.epoch, attempt=row.attempt, workers=row.workers),
        group=Group(
            attempt=row.group_attempt,
            generation=row.group_generation,
            workers=row.group_workers,
            ended_attempt=row.ended_attempt,
        ),
        disturbed_us=None if row.disturbed_at is None else at.to_us(row.disturbed_at),
        streak=_to_streak(row, at),
        proposed=None if row.proposed_epoch is None else (row.proposed_epoch, row.proposed_workers),
        closed=row.closed_at is not None,
    )


def _to_streak(row: Row[Any], at: Instant) -> Streak | None:
    """As one part: its windows are summed up, which is all that continuity needs. None after a clock went back."""
    if row.streak_covered_us is None or row.streak_last_at > at.wall:
        return None
    return Streak(
        attempt=row.streak_attempt,
        generation=row.streak_generation,
        side=Side(row.streak_side),
        measure=UtilisationMeasure(row.streak_measure),
        parts=((row.streak_covered_us, row.streak_utilisation_ppm),),
        last_us=at.to_us(row.streak_last_at),
    )


_DROP_CLOSED: Final = text(
    """
    delete from scaling.jobs where job_id = any(array(
        select job_id from scaling.jobs where closed_at < :before order by closed_at, job_id limit :limit))
    """
).bindparams(bindparam("before", type_=jobs.c.closed_at.type))


async def drop_closed_jobs(tx: Transaction, *, before: datetime, limit: int) -> int:
    """Delete at most ``limit`` of the oldest; answers how many."""
    return (await tx.execute(_DROP_CLOSED, {"before": before, "limit": limit})).rowcount
