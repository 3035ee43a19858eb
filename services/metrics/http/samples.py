"""``POST /v1/samples``: one report of one trainer."""

from typing import Annotated, Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from schemas.api.jobs import Invalid
from schemas.vocabulary import JobId, UtilisationMeasure
from services.metrics.core.signals import PPM, Sample, fault_of
from services.metrics.settings import MetricsSettings
from services.metrics.writer import SampleWriter
from shared.errors import Rejected
from shared.problems import Unprocessable, parse_body
from shared.signing import is_same_token, sample_token

_BEARER: Final = "bearer "
_LOSS_MAX: Final = 1e30
_DAY: Final = 86_400
Counter = Annotated[int, Field(ge=0, le=2**31 - 1)]
LongCounter = Annotated[int, Field(ge=0, le=2**53)]
Seconds = Annotated[float, Field(ge=0, le=_DAY)]


class SampleReport(BaseModel):
    """What a member did in the ``wall_seconds`` since its last report.

    Seconds are parts of that interval; what is inside none of step, synchronisation and input wait was idle.
    ``steps`` and ``samples`` are this member's own. ``sequence`` rises with each report of a process, and a
    report that is sent again keeps its own. Unknown fields are ignored, so that a newer trainer can report.
    """

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, str_max_length=512)

    job_id: Annotated[str, Field(min_length=1, max_length=128)]
    attempt: Annotated[int, Field(ge=1, le=2**31 - 1)]
    member: Annotated[str, Field(min_length=1, max_length=256)]
    generation: Annotated[int, Field(ge=1, le=2**31 - 1)]
    rank: Counter
    world: Annotated[int, Field(ge=1, le=2**31 - 1)]
    sequence: LongCounter
    wall_seconds: Seconds
    step_seconds: Seconds
    sync_seconds: Seconds
    input_wait_seconds: Seconds
    steps: LongCounter
    samples: LongCounter
    loss: Annotated[float, Field(ge=-_LOSS_MAX, le=_LOSS_MAX)] | None = None
    step: LongCounter
    total_steps: LongCounter | None = None
    utilisation: Annotated[float, Field(ge=0, le=1)] | None = None
    measure: UtilisationMeasure = UtilisationMeasure.WALL

    def to_sample(self) -> Sample:
        return Sample(
            job_id=JobId(self.job_id),
            attempt=self.attempt,
            member=self.member,
            generation=self.generation,
            rank=self.rank,
            world=self.world,
            sequence=self.sequence,
            wall_us=round(self.wall_seconds * 1e6),
            step_us=round(self.step_seconds * 1e6),
            sync_us=round(self.sync_seconds * 1e6),
            input_wait_us=round(self.input_wait_seconds * 1e6),
            steps=self.steps,
            samples=self.samples,
            loss=self.loss,
            step=self.step,
            total_steps=self.total_steps,
            utilisation_ppm=None if self.utilisation is None else round(self.utilisation * PPM),
            measure=self.measure,
        )


_OPENAPI: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": SampleReport.model_json_schema()}},
    },
    "security": [{"sampleToken": []}],
}


def samples_router(writer: SampleWriter, settings: MetricsSettings, signing_key: bytes) -> APIRouter:
    """The route parses its body itself: half the cost of letting the framework do it."""
    router = APIRouter(tags=["samples"])

    @router.post("/v1/samples", status_code=202, summary="Report what a trainer did.", openapi_extra=_OPENAPI)
    async def post_sample(request: Request) -> JSONResponse:
        token = _token_of(request)
        report = parse_body(SampleReport, await request.body())
        if not is_same_token(sample_token(signing_key, report.job_id, report.attempt), token):
            raise Rejected(401, "bad_token", "the token is not the sample token of this job and attempt")
        sample = report.to_sample()
        fault = fault_of(sample, wall_us_max=round(settings.report_seconds_max * 1e6), world_max=settings.world_max)
        if fault is not None:
            raise Unprocessable([Invalid(field=f"/{fault.field}", detail=fault.detail, way_out=fault.way_out)])
        verdict = await writer.submit(sample)
        return JSONResponse({"verdict": verdict.value}, 202)

    return router


def _token_of(request: Request) -> str:
    header = request.headers.get("authorization", "")
    if not header.lower().startswith(_BEARER):
        raise Rejected(
            401, "no_token", "there is no sample token", way_out="Authorization: Bearer <the token from the welcome>"
        )
    return header[len(_BEARER) :].strip()
