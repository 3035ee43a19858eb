"""Routes of execution, for the other services only: every request is signed."""

import time
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Depends, FastAPI, Query, Request
from fastapi.responses import StreamingResponse

from schemas.api.jobs import MemberList
from schemas.vocabulary import JobId
from services.execution.core.state import Desired
from services.execution.http.cursors import from_cursor
from services.execution.http.logs import JobLogs, LogRequest, stream_logs
from services.execution.http.members import to_member_views
from services.execution.local.folders import Folders
from services.execution.memory import Memory
from services.execution.settings import ExecutionSettings
from services.execution.store import job_exists, load_all_members, load_jobs
from shared.errors import Rejected, Unavailable
from shared.runtime.service import ServiceContext
from shared.signing import InternalRequest

NDJSON = "application/x-ndjson"
TEXT = "text/plain; charset=utf-8"
_LOOK_SECONDS = 0.25


class InternalRoutes:
    """``/internal/jobs/{id}/logs`` and ``/internal/jobs/{id}/members``."""

    def __init__(
        self, context: ServiceContext, settings: ExecutionSettings, memory: Memory, folders: Folders
    ) -> None:
        self._context = context
        self._settings = settings
        self._memory = memory
        self._folders = folders
        self._streams = 0
        self._looks: dict[JobId, tuple[float, JobLogs]] = {}

    def add_to(self, app: FastAPI) -> None:
        signed = [Depends(self._verify)]
        app.add_api_route(
            "/internal/jobs/{job_id}/logs", self.logs, methods=["GET"], dependencies=signed, response_model=None
        )
        app.add_api_route("/internal/jobs/{job_id}/members", self.members, methods=["GET"], dependencies=signed)

    async def logs(
        self,
        request: Request,
        job_id: str,
        *,
        follow: bool = False,
        tail: Annotated[int | None, Query(ge=0, le=100_000)] = None,
        cursor: str | None = None,
        member: Annotated[str | None, Query(max_length=300)] = None,
    ) -> StreamingResponse:
        """Lines ``{"member", "cursor", "line"}``; by ``Accept: text/plain`` the lines alone."""
        await self._require_job(JobId(job_id))
        if self._streams >= self._settings.log_streams_max:
            raise Unavailable("too many logs are being read", retry_after_seconds=2.0)
        as_text = "text/plain" in request.headers.get("accept", "")
        wanted = LogRequest(
            follow=follow,
            tail=tail if cursor is None else None,
            offsets=from_cursor(cursor) if cursor else {},
            member=member,
            as_text=as_text,
        )
        body = self._counted(JobId(job_id), wanted)
        return StreamingResponse(body, media_type=TEXT if as_text else NDJSON)

    async def members(self, job_id: str) -> MemberList:
        await self._require_job(JobId(job_id))
        view = self._memory.jobs.get(JobId(job_id))
        async with self._context.read() as connection:
            members = await load_all_members(connection, JobId(job_id))
        return MemberList(
            items=to_member_views(
                members,
                reports=view.reports if view is not None else {},
                processes=view.processes if view is not None else {},
            )
        )

    async def _counted(self, job_id: JobId, wanted: LogRequest) -> AsyncIterator[bytes]:
        self._streams += 1
        try:
            async for piece in stream_logs(
                wanted,
                look=lambda: self._look(job_id),
                file_of=lambda name: self._folders.of_member(name) / "log",
                settings=self._settings,
            ):
                yield piece
        finally:
            self._streams -= 1
            if not self._streams:
                self._looks.clear()

    async def _look(self, job_id: JobId) -> JobLogs:
        """Shared by everyone who follows the same job, for a moment."""
        now = self._context.clock.monotonic()
        looked_at, logs = self._looks.get(job_id, (float("-inf"), None))
        if logs is None or now - looked_at >= _LOOK_SECONDS:
            logs = await self._load(job_id)
            self._looks[job_id] = (now, logs)
        return logs

    async def _load(self, job_id: JobId) -> JobLogs:
        async with self._context.read() as connection:
            members = await load_all_members(connection, job_id)
            stored = (await load_jobs(connection, [job_id])).get(job_id)
        is_over = stored is None or (stored.job.desired is Desired.CLOSED and not stored.job.held())
        return JobLogs(members=members, is_over=is_over)

    async def _require_job(self, job_id: JobId) -> None:
        if job_id in self._memory.jobs:
            return
        async with self._context.read() as connection:
            if not await job_exists(connection, job_id):
                raise Rejected(404, "no_such_job", f"there is no job {job_id}")

    async def _verify(self, request: Request) -> None:
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        signed = InternalRequest(method=request.method, target=target, body=await request.body())
        signed.verify(self._context.signing_key, request.headers, now_seconds=time.time())
