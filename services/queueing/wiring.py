"""Queueing put together: its handler, the topics it reads, its HTTP app."""

from schemas.vocabulary import Topic
from services.queueing.handlers import QueueingHandler
from services.queueing.settings import QueueingSettings
from shared.http import make_app
from shared.runtime.service import ServiceContext, ServiceParts


def build(context: ServiceContext) -> ServiceParts:
    settings = QueueingSettings.load()
    handler = QueueingHandler(settings, context.clock, context.instruments)
    app = make_app(
        "Tidewright queueing",
        ready=lambda: None,
        instruments=context.instruments,
        body_bytes_max=settings.body_bytes_max,
    )
    consumes = frozenset({Topic.JOB, Topic.WORKER, Topic.SCALING, Topic.CAPACITY})
    return ServiceParts(handler=handler, consumes=consumes, app=app)
