"""Puts intake together: desk, writer, projection, feed and routes."""

import asyncio

from fastapi import FastAPI, Request, Response

from schemas.vocabulary import DEFAULT_TENANT, DEFAULT_USER
from services.intake.core.readmodel import topics
from services.intake.core.validation import Caller
from services.intake.desk import Desk
from services.intake.feed import Feed, TooManyStreams
from services.intake.handlers import Projection
from services.intake.http.documents import Limits
from services.intake.http.openapi import document_with_bodies
from services.intake.http.owners import Owners
from services.intake.http.routes import Door, job_routes
from services.intake.http.streams import stream_routes
from services.intake.queries import count_open_jobs
from services.intake.settings import IntakeSettings
from services.intake.store import delete_expired_keys
from services.intake.writer import SubmissionWriter, TooBusy
from shared.clock import pause
from shared.errors import Conflict, Unavailable
from shared.http import make_app
from shared.problems import problem
from shared.runtime.service import ServiceContext, ServiceParts
from shared.telemetry.logs import get_logger

_log = get_logger()


def build(context: ServiceContext) -> ServiceParts:
    return build_with(context, IntakeSettings.load())


def build_with(context: ServiceContext, settings: IntakeSettings) -> ServiceParts:
    """As ``build``, with settings that were read elsewhere."""
    closing = asyncio.Event()
    writer = SubmissionWriter(
        transaction=context.transaction, clock=context.clock, instruments=context.instruments, settings=settings
    )
    desk = Desk(
        transaction=context.transaction, read=context.read, clock=context.clock, writer=writer, settings=settings
    )
    feed = Feed(
        read=context.read,
        wait_for_events=context.wait_for_events,
        instruments=context.instruments,
        settings=settings,
    )
    owners = Owners(
        directory=context.directory,
        signing_key=context.signing_key,
        clock=context.clock,
        closing=closing,
        settings=settings,
    )
    limits = Limits(
        nodes=settings.document_nodes_max, depth=settings.document_depth_max, bytes=settings.body_bytes_max
    )
    caller = Caller(tenant=DEFAULT_TENANT, user=DEFAULT_USER)
    door = Door(desk=desk, limits=limits, settings=settings, caller=caller)

    async def run_closing(stopping: asyncio.Event) -> None:
        await stopping.wait()
        closing.set()

    async def run_expiry(stopping: asyncio.Event) -> None:
        await _run_expiry(context, stopping, every_seconds=settings.expiry_interval_seconds)

    async def run_census(stopping: asyncio.Event) -> None:
        await _run_census(context, stopping, every_seconds=settings.census_interval_seconds)

    return ServiceParts(
        handler=Projection(),
        consumes=topics(),
        app=_make_app(context, door, owners=owners, feed=feed, closing=closing),
        loops=(run_expiry, run_census),
        standing_loops=(writer.run, feed.run, owners.run, run_closing),
        serves_without_events=True,
    )


def _make_app(context: ServiceContext, door: Door, *, owners: Owners, feed: Feed, closing: asyncio.Event) -> FastAPI:
    app = make_app(
        "Tidewright",
        ready=lambda: "the service is stopping" if closing.is_set() else None,
        instruments=context.instruments,
        description="Submit training jobs, watch them, change them, and ask why they are as they are.",
        body_bytes_max=max(door.settings.body_bytes_max, door.settings.bulk_bytes_max),
    )
    app.include_router(job_routes(door))
    app.include_router(stream_routes(door, owners=owners, feed=feed, closing=closing))
    app.add_exception_handler(TooBusy, _on_too_much)
    app.add_exception_handler(TooManyStreams, _on_too_much)
    document_with_bodies(app)
    return app


async def _on_too_much(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, TooBusy | TooManyStreams)
    what = "submissions wait to be written" if isinstance(exc, TooBusy) else "event streams are open"
    headers = {"Retry-After": str(max(1, round(exc.retry_after_seconds)))}
    detail = f"too many {what}: come again in a moment"
    return problem(429, "too_many_requests", detail, instance=request.url.path, headers=headers)


async def _run_expiry(context: ServiceContext, stopping: asyncio.Event, *, every_seconds: float) -> None:
    """Delete Idempotency-Keys that are older than their time."""
    while not stopping.is_set():
        try:
            async with context.lease.transaction() as tx:
                deleted = await delete_expired_keys(tx, now=context.clock.now())
            if deleted:
                _log.info("idempotency_keys_expired", keys=deleted)
        except (Conflict, Unavailable) as exc:
            _log.warning("expiry_failed", detail=str(exc))
        await pause(stopping, every_seconds)


async def _run_census(context: ServiceContext, stopping: asyncio.Event, *, every_seconds: float) -> None:
    """Keep the number of open jobs by phase up to date: counted by an index, since no process knows all jobs."""
    gauge = context.instruments.gauge("open_jobs_total", "Jobs that have not ended, by phase.", ("phase",))
    while not stopping.is_set():
        try:
            async with context.read() as connection:
                counted = await count_open_jobs(connection)
            for phase, jobs in counted.items():
                gauge.labels(phase.value).set(jobs)
        except (Conflict, Unavailable) as exc:
            _log.debug("census_failed", detail=str(exc))
        await pause(stopping, every_seconds)
