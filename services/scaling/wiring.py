"""How scaling is put together."""

from schemas.vocabulary import Topic
from services.scaling.handlers import Retention, ScalingHandler
from services.scaling.settings import ScalingSettings
from shared.http import make_app
from shared.runtime.service import ServiceContext, ServiceParts


def build(context: ServiceContext) -> ServiceParts:
    settings = ScalingSettings.load()
    handler = ScalingHandler(clock=context.clock, policy=settings.policy(), instruments=context.instruments)
    retention = Retention(clock=context.clock, lease=context.lease, settings=settings)
    return ServiceParts(
        handler=handler,
        consumes=frozenset({Topic.JOB, Topic.ALLOCATION, Topic.WORKER, Topic.METRIC}),
        app=make_app(
            "Tidewright scaling",
            ready=lambda: None,
            instruments=context.instruments,
            body_bytes_max=settings.body_bytes_max,
        ),
        loops=(retention.run,),
    )
