"""Routes of ``/v1``: jobs and what is known about them."""

import re
from dataclasses import dataclass
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request, Response

from schemas.api.jobs import (
    BulkAnswers,
    BulkJob,
    CancelJob,
    CapacityView,
    History,
    JobList,
    JobView,
    PatchJob,
    SubmitJob,
    WhyView,
)
from schemas.envelope import START, Sequence
from schemas.vocabulary import JobId, JobPhase, PriorityClass
from services.intake.core.validation import Caller
from services.intake.desk import Desk, unknown_job
from services.intake.http.bodies import hash_of, is_list, read_body
from services.intake.http.bulk import submit_list
from services.intake.http.documents import Limits
from services.intake.http.openapi import answers, takes
from services.intake.queries import JobFilter
from services.intake.settings import IntakeSettings
from shared.errors import Rejected

JOB_ID: Final = re.compile(r"j[0-7][0-9a-hjkmnp-tv-z]{25}")
_KEY: Final = re.compile(r"[\x21-\x7e]{1,255}")
_ETAG: Final = re.compile(r'(?:W/)?"(\d{1,9})"')
_NAME: Final = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
_LABEL: Final = r"^[-A-Za-z0-9._/]{1,253}(=[^\x00]{0,253})?$"
_DEFAULT_PAGE: Final = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """What the routes need. ``caller``: until access control is built everyone is the local user."""

    desk: Desk
    limits: Limits
    settings: IntakeSettings
    caller: Caller

    def page_of(self, limit: int) -> int:
        return min(limit, self.settings.page_jobs_max)


def to_job_id(text: str) -> JobId:
    """Raises Rejected (404) for what cannot be an id: it is no job's, whoever asks."""
    if not JOB_ID.fullmatch(text):
        raise unknown_job(text)
    return JobId(text)


def job_routes(door: Door) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["jobs"])

    @router.post(
        "/jobs",
        summary="Submit a job",
        status_code=201,
        openapi_extra={
            **takes(SubmitJob, or_list_of=BulkJob),
            "parameters": [
                {
                    "name": "Idempotency-Key",
                    "in": "header",
                    "required": False,
                    "schema": {"type": "string", "minLength": 1, "maxLength": 255},
                    "description": "Repeats with the same key and body answer the first job for 24 h. Without a key "
                    "a repeat after a lost answer makes a second job.",
                }
            ],
        },
        responses=answers(ok_200=JobView | BulkAnswers, ok_201=JobView, problems=(400, 413, 415, 422, 429, 503)),
    )
    async def submit(
        request: Request,
        allow_unsatisfiable: Annotated[
            bool, Query(description="Accept also what this cluster can never hold; `why` then says so.")
        ] = False,
    ) -> Response:
        """201 for a new job, 200 for a repeat of an Idempotency-Key. The answer comes after the commit.

        A list of jobs is answered with 200 and an answer for each job, in the same order, with its own status: one
        that is refused spoils no other. Each may carry an `idempotency_key`. 429 or 503: none is known to be taken,
        send the same list again.
        """
        content = await request.body()
        if is_list(content, request.headers.get("content-type", "")):
            return await submit_list(
                request,
                content,
                desk=door.desk,
                limits=door.limits,
                settings=door.settings,
                caller=door.caller,
                allow_unsatisfiable=allow_unsatisfiable,
            )
        key = _key_of(request)
        body = await read_body(request, SubmitJob, limits=door.limits)
        submitted = await door.desk.submit(
            body,
            caller=door.caller,
            key=key,
            body_hash=None if key is None else hash_of(body, str(allow_unsatisfiable)),
            allow_unsatisfiable=allow_unsatisfiable,
        )
        return _job_response(submitted.view, status=201 if submitted.is_new else 200)

    @router.get("/jobs", summary="List jobs", responses=answers(ok_200=JobList, problems=(422, 503)))
    async def list_jobs(
        *,
        phase: Annotated[list[JobPhase] | None, Query(description="Any of these.")] = None,
        queue: Annotated[str | None, Query(pattern=_NAME)] = None,
        priority: PriorityClass | None = None,
        label: Annotated[
            list[Annotated[str, Query(pattern=_LABEL)]] | None,
            Query(description="All of these: `key=value` or `key`."),
        ] = None,
        limit: Annotated[int, Query(ge=1)] = _DEFAULT_PAGE,
        cursor: Annotated[str | None, Query(pattern=f"^{JOB_ID.pattern}$")] = None,
    ) -> JobList:
        """Newest first. A page that is not the last has a `next_cursor`."""
        return await door.desk.list(
            JobFilter(
                tenant=door.caller.tenant,
                phases=tuple(phase or ()),
                queue=queue,
                priority=priority,
                labels=tuple(_label_of(text) for text in label or ()),
                before=cursor,
                limit=door.page_of(limit),
            )
        )

    @router.get("/jobs/{job_id}", summary="One job", responses=answers(ok_200=JobView, problems=(404, 503)))
    async def get_job(job_id: str) -> Response:
        """The ETag is the version of the request register."""
        return _job_response(await door.desk.get(to_job_id(job_id), caller=door.caller), status=200)

    @router.patch(
        "/jobs/{job_id}",
        summary="Change priority, limits, size or hold",
        openapi_extra={**takes(PatchJob), "parameters": [_if_match()]},
        responses=answers(ok_200=JobView, problems=(400, 404, 409, 412, 413, 415, 422, 503)),
    )
    async def patch_job(job_id: str, request: Request) -> Response:
        """Absent fields stay as they are; what equals the present state changes nothing."""
        known = to_job_id(job_id)
        versions = _versions_of(request)
        body = await read_body(request, PatchJob, limits=door.limits)
        view = await door.desk.patch(known, body, caller=door.caller, versions=versions)
        return _job_response(view, status=200)

    @router.post(
        "/jobs/{job_id}/cancel",
        summary="Cancel a job",
        status_code=202,
        openapi_extra=takes(CancelJob, required=False),
        responses=answers(ok_202=JobView, problems=(400, 404, 409, 415, 422, 503)),
    )
    async def cancel_job(job_id: str, request: Request) -> Response:
        """Asking again changes nothing; 409 for a job that ended otherwise."""
        known = to_job_id(job_id)
        body = await read_body(request, CancelJob, limits=door.limits, may_be_empty=True)
        view = await door.desk.cancel(known, caller=door.caller, reason=body.reason)
        return _job_response(view, status=202)

    @router.get(
        "/jobs/{job_id}/why", summary="Why it is as it is", responses=answers(ok_200=WhyView, problems=(404, 503))
    )
    async def why(job_id: str) -> WhyView:
        return await door.desk.why(to_job_id(job_id), caller=door.caller)

    @router.get(
        "/jobs/{job_id}/history",
        summary="What happened to a job",
        responses=answers(ok_200=History, problems=(404, 422, 503)),
    )
    async def history(
        job_id: str,
        limit: Annotated[int, Query(ge=1)] = _DEFAULT_PAGE,
        cursor: Annotated[str | None, Query(description="`next_cursor` of the page before.")] = None,
    ) -> History:
        """Oldest first, in the order of the log."""
        after = START if cursor is None else position_of(cursor, field="/cursor")
        return await door.desk.history(to_job_id(job_id), caller=door.caller, after=after, limit=door.page_of(limit))

    @router.get(
        "/capacity",
        tags=["cluster"],
        summary="What there is and who holds it",
        responses=answers(ok_200=CapacityView, problems=(503,)),
    )
    async def capacity() -> CapacityView:
        return await door.desk.capacity(caller=door.caller)

    return router


def position_of(text: str, *, field: str) -> Sequence:
    """Raises Rejected (422)."""
    refusal = Rejected(
        422, "invalid_request", "is not a position of the log", field=field, way_out="use an id as it was given"
    )
    try:
        position = Sequence.parse(text)
    except ValueError as exc:
        raise refusal from exc
    if max(position) >= 2**63:
        raise refusal
    return position


def _job_response(view: JobView, *, status: int) -> Response:
    headers = {"ETag": f'"{view.version}"'}
    if status == 201:
        headers["Location"] = f"/v1/jobs/{view.id}"
    return Response(view.model_dump_json(), status, headers, media_type="application/json")


def _key_of(request: Request) -> str | None:
    key = request.headers.get("idempotency-key")
    if key is not None and not _KEY.fullmatch(key):
        raise Rejected(
            422,
            "invalid_request",
            "is not a key",
            field="/Idempotency-Key",
            way_out="1 to 255 visible ASCII characters, such as a UUID",
        )
    return key


def _versions_of(request: Request) -> frozenset[int] | None:
    """If-Match: one or more ETags; ``*`` and no header mean any version."""
    text = request.headers.get("if-match")
    if text is None or text.strip() == "*":
        return None
    matches = [_ETAG.fullmatch(part.strip()) for part in text.split(",")]
    if not all(matches):
        raise Rejected(
            422, "invalid_request", "is not a version", field="/If-Match", way_out='the ETag of the job, such as "3"'
        )
    return frozenset(int(match[1]) for match in matches if match is not None)


def _label_of(text: str) -> tuple[str, str | None]:
    key, separator, value = text.partition("=")
    return key, value if separator else None


def _if_match() -> dict[str, object]:
    return {
        "name": "If-Match",
        "in": "header",
        "required": False,
        "schema": {"type": "string"},
        "description": "Change only if the job still has this version (its ETag).",
    }
