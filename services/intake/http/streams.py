"""Routes that stream: logs, members and curves from their owners, and server-sent events."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Final

from fastapi import APIRouter, Header, Query, Request, Response

from schemas.api.jobs import LogLineView, MemberList, ServerEvent
from schemas.envelope import Sequence
from schemas.vocabulary import ServiceName
from services.intake.feed import Feed, Interest
from services.intake.http.openapi import answers, text_of
from services.intake.http.owners import Owners
from services.intake.http.routes import Door, position_of, to_job_id
from services.intake.http.streaming import Streamed

_NDJSON: Final = "application/x-ndjson"
_EVENTS: Final = "text/event-stream"
_PLAIN: Final = {"text/plain": {"schema": {"type": "string"}}}


def stream_routes(door: Door, *, owners: Owners, feed: Feed, closing: asyncio.Event) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["streams"])

    @router.get(
        "/jobs/{job_id}/logs",
        summary="A job's output",
        response_class=Response,
        responses=answers(
            ok_200=("Lines of all members, or of one.", {**text_of(LogLineView, _NDJSON), **_PLAIN}),
            problems=(404, 422, 503),
        ),
    )
    async def logs(
        *,
        job_id: str,
        request: Request,
        follow: Annotated[bool, Query(description="Go on with new lines until the job has ended.")] = False,
        tail: Annotated[int | None, Query(ge=0, le=1_000_000, description="The last so many lines first.")] = None,
        cursor: Annotated[str | None, Query(max_length=4096, description="Go on behind this line.")] = None,
        member: Annotated[str | None, Query(max_length=256)] = None,
    ) -> Response:
        """NDJSON, or plain text if Accept asks for text/plain. Answered by execution, also for ended jobs."""
        known = to_job_id(job_id)
        await door.desk.require(known, caller=door.caller)
        asked = {
            "follow": "true" if follow else None,
            "tail": None if tail is None else str(tail),
            "cursor": cursor,
            "member": member,
        }
        return await owners.pass_on(
            ServiceName.EXECUTION,
            f"/internal/jobs/{known}/logs",
            parameters={name: value for name, value in asked.items() if value is not None},
            accept=request.headers.get("accept", _NDJSON),
            is_endless=follow,
        )

    @router.get(
        "/jobs/{job_id}/members",
        summary="A job's processes",
        response_class=Response,
        responses=answers(ok_200=MemberList, problems=(404, 503)),
    )
    async def members(job_id: str) -> Response:
        """Answered by execution."""
        known = to_job_id(job_id)
        await door.desk.require(known, caller=door.caller)
        return await owners.pass_on(
            ServiceName.EXECUTION,
            f"/internal/jobs/{known}/members",
            parameters={},
            accept="application/json",
            is_endless=False,
        )

    @router.get(
        "/jobs/{job_id}/curves",
        summary="A job's measurements over time",
        response_class=Response,
        responses=answers(
            ok_200=("Curves as metrics keeps them.", {"application/json": {"schema": {"type": "object"}}}),
            problems=(404, 503),
        ),
    )
    async def curves(job_id: str, request: Request) -> Response:
        """Answered by metrics; parameters are passed on."""
        known = to_job_id(job_id)
        await door.desk.require(known, caller=door.caller)
        return await owners.pass_on(
            ServiceName.METRICS,
            f"/internal/jobs/{known}/curves",
            parameters=dict(request.query_params),
            accept="application/json",
            is_endless=False,
        )

    @router.get(
        "/events",
        summary="Events as they happen",
        response_class=Response,
        responses=answers(
            ok_200=(
                "Server-sent events: id: position in the log, event: its type, data: a CloudEvent; or `gap`.",
                text_of(ServerEvent, _EVENTS),
            ),
            problems=(404, 422, 429, 503),
        ),
    )
    async def events(
        job_id: Annotated[str | None, Query(description="Of this job only.")] = None,
        last_event_id: Annotated[
            str | None, Header(description="Resume behind this id; `0-0`: from the oldest that is kept.")
        ] = None,
    ) -> Response:
        """From now on, or behind Last-Event-ID. Without end; a comment every 15 s says that it is alive.

        An event `gap` says that the position asked for is not there any more, and where it goes on.
        """
        known = None if job_id is None else to_job_id(job_id)
        after = None if not last_event_id else position_of(last_event_id, field="/Last-Event-ID")
        if known is not None:
            await door.desk.require(known, caller=door.caller)
        feed.check_room()
        return Streamed(
            _events(feed, Interest(tenant=door.caller.tenant, job_id=known), after=after),
            closing=closing,
            media_type=_EVENTS,
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
            send_seconds=door.settings.stream_send_seconds,
        )

    return router


async def _events(feed: Feed, interest: Interest, *, after: Sequence | None) -> AsyncIterator[bytes]:
    with feed.stream():
        async for block in feed.follow(interest, after=after):
            yield block
