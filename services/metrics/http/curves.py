"""``GET /internal/jobs/{id}/curves``: for intake, which checks who may ask."""

from fastapi import APIRouter, Request
from sqlalchemy import Row

from schemas.api.curves import CurvePointView, CurvesView
from schemas.vocabulary import JobId
from services.metrics.store import Curve, load_curve
from shared.errors import Rejected
from shared.runtime.service import ServiceContext
from shared.signing import InternalRequest


def curves_router(context: ServiceContext) -> APIRouter:
    router = APIRouter(tags=["internal"])

    @router.get("/internal/jobs/{job_id}/curves", summary="Loss and throughput over time.")
    async def get_curves(job_id: str, request: Request) -> CurvesView:
        verify_internal(request, context)
        if "\x00" in job_id:
            raise Rejected(404, "unknown_job", "there is no such job")
        async with context.read() as connection:
            curve = await load_curve(connection, JobId(job_id))
        return CurvesView(job_id=job_id, points=[] if curve is None else _points(curve))

    return router


def verify_internal(request: Request, context: ServiceContext) -> None:
    """Raises Rejected (401) unless another service of this installation signed this."""
    query = request.scope["query_string"].decode("latin-1")
    path = request.scope["raw_path"].decode("latin-1")
    signed = InternalRequest(method=request.method, target=f"{path}?{query}" if query else path)
    signed.verify(context.signing_key, request.headers, now_seconds=context.clock.now().timestamp())


def _points(curve: Curve) -> list[CurvePointView]:
    return [_point(row, curve) for row in curve.points]


def _point(row: Row[tuple[object, ...]], curve: Curve) -> CurvePointView:
    began = curve.started_at or row.at
    return CurvePointView(
        step=row.step,
        loss=row.loss,
        samples_per_second=row.samples_per_second,
        utilisation=row.utilisation,
        workers=row.workers,
        attempt=row.attempt,
        generation=row.generation,
        wall_seconds=round((row.at - began).total_seconds(), 3),
        time=row.at,
    )
