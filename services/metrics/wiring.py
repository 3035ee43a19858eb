"""How metrics is put together."""

from typing import Final

from schemas.vocabulary import Topic
from services.metrics.handlers import MetricsHandler
from services.metrics.http.curves import curves_router
from services.metrics.http.samples import samples_router
from services.metrics.settings import MetricsSettings
from services.metrics.writer import Retention, SampleWriter
from shared.http import make_app
from shared.runtime.service import ServiceContext, ServiceParts

CONSUMES: Final = frozenset({Topic.WORKER, Topic.JOB})


def build(context: ServiceContext, settings: MetricsSettings | None = None) -> ServiceParts:
    settings = settings or MetricsSettings.load()
    handler = MetricsHandler(
        clock=context.clock,
        rules=settings.rules(),
        close_interval_seconds=settings.close_interval_seconds,
        instruments=context.instruments,
    )
    writer = SampleWriter(handler=handler, lease=context.lease, settings=settings)
    retention = Retention(handler=handler, lease=context.lease, settings=settings)
    app = make_app(
        "Tidewright metrics",
        ready=lambda: None,
        instruments=context.instruments,
        body_bytes_max=settings.body_bytes_max,
    )
    app.include_router(samples_router(writer, settings, context.signing_key))
    app.include_router(curves_router(context))
    return ServiceParts(
        handler=handler,
        consumes=CONSUMES,
        app=app,
        loops=(writer.run, retention.run),
    )
