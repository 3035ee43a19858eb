"""Lists of jobs: ``POST /v1/jobs`` with a list, an answer for each."""

from typing import Final

from fastapi import Request as HttpRequest
from fastapi import Response

from schemas.api.jobs import BulkAnswer, BulkAnswers, BulkJob, Invalid
from services.intake.core.validation import Caller
from services.intake.desk import Desk, Entered, Request
from services.intake.http.bodies import hash_of, parse_list
from services.intake.http.documents import Limits
from services.intake.settings import IntakeSettings
from shared.errors import Rejected
from shared.problems import Unprocessable, to_problem

_KEY: Final = frozenset({"idempotency_key"})


async def submit_list(
    request: HttpRequest,
    body: bytes,
    *,
    desk: Desk,
    limits: Limits,
    settings: IntakeSettings,
    caller: Caller,
    allow_unsatisfiable: bool,
) -> Response:
    """200 whatever became of each: its own status is in its answer. Raises what refuses the list as a whole."""
    if "idempotency-key" in request.headers:
        raise Unprocessable(
            [
                Invalid(
                    field="/Idempotency-Key",
                    detail="does not go with a list",
                    way_out="give each job an idempotency_key of its own",
                )
            ]
        )
    items = parse_list(
        body,
        content_type=request.headers.get("content-type", ""),
        model=BulkJob,
        limits=limits,
        items_max=settings.bulk_jobs_max,
    )
    requests = [_request_of(item, allow_unsatisfiable) if isinstance(item, BulkJob) else item for item in items]
    outcomes = await desk.submit_many(requests, caller=caller, allow_unsatisfiable=allow_unsatisfiable)
    answers = BulkAnswers(answers=[_answer_of(outcome, n) for n, outcome in enumerate(outcomes)])
    return Response(answers.model_dump_json(exclude_defaults=True), media_type="application/json")


def _request_of(item: BulkJob, allow_unsatisfiable: bool) -> Request:
    """The key and hash are those that the job alone would have: a list and a single submission repeat each other."""
    key = item.idempotency_key
    body_hash = None if key is None else hash_of(item, str(allow_unsatisfiable), but=_KEY)
    return Request(body=item, key=key, body_hash=body_hash)


def _answer_of(outcome: Entered | Unprocessable | Rejected, number: int) -> BulkAnswer:
    if isinstance(outcome, Entered):
        return BulkAnswer(
            status=201 if outcome.is_new else 200,
            id=outcome.job_id,
            name=outcome.name,
            warnings=list(outcome.warnings),
        )
    told = to_problem(outcome, place=f"/{number}")
    return BulkAnswer(status=told.status, problem=told)
