"""How scaling is put together."""

from typing import Final

from schemas.vocabulary import Topic
from services.scaling.handlers import Retention, ScalingHandler
from services.scaling.settings import ScalingSettings
from shared.http import make_app
from shared.runtime.service import ServiceContext, ServiceParts

CONSUMES: Final = frozenset({Topic.JOB, Topic.ALLOCATION, Topic.WORKER, Topic.METRIC})


def build(context: ServiceContext, settings: ScalingSettings | None = None) -> ServiceParts:
    settings = settings or ScalingSettings.load()
    handler = ScalingHandler(clock=context.clock, policy=settings.policy(), instruments=context.instruments)
    retention = Retention(clock=context.clock, lease=context.lease, settings=settings)
    return ServiceParts(
        handler=handler,
        consumes=CONSUMES,
        app=make_app(
            "Tidewright scaling",
            ready=lambda: None,
            instruments=context.instruments,
            body_bytes_max=settings.body_bytes_max,
        ),
        loops=(retention.run,),
    )
