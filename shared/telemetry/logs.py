"""Structured logs: one JSON object a line (or a console line), a constant message and fields."""

import logging
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, Final, TextIO, cast

import structlog
from structlog.typing import FilteringBoundLogger, Processor

from shared.telemetry.trace import current_trace

_QUIET: Final = ("uvicorn.error", "uvicorn.access", "httpx", "httpcore", "alembic", "asyncio")


def configure_logging(*, level: str, log_format: str, stream: TextIO | None = None) -> None:
    """Send structlog's and the standard library's records to one stream (default: standard error)."""
    target = stream or sys.stderr
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        _add_trace,
    ]
    final: list[Processor]
    if log_format == "json":
        # Local variables hold keys and passwords: tracebacks name places only.
        tracebacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        final = [structlog.processors.ExceptionRenderer(tracebacks), structlog.processors.JSONRenderer(default=str)]
    else:
        final = [
            structlog.dev.ConsoleRenderer(colors=target.isatty(), exception_formatter=structlog.dev.plain_traceback)
        ]
    minimum = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*shared, *final],
        wrapper_class=structlog.make_filtering_bound_logger(minimum),
        logger_factory=structlog.WriteLoggerFactory(file=target),
        cache_logger_on_first_use=False,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *final]
    )
    handler = logging.StreamHandler(target)
    handler.setFormatter(formatter)
    logging.getLogger().handlers = [handler]
    logging.getLogger().setLevel(minimum)
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(minimum, logging.WARNING))
    # It tells of every attempt to connect; what matters of that we say once, in our own words.
    logging.getLogger("aiokafka").setLevel(logging.DEBUG if minimum == logging.DEBUG else logging.CRITICAL)


def get_logger(**fields: Any) -> FilteringBoundLogger:
    """A logger; ``fields`` stand in each of its lines. Call as ``log.info("gang_admitted", job_id=...)``."""
    return cast(FilteringBoundLogger, structlog.get_logger(**fields))


def bind_log_fields(fields: Mapping[str, object]) -> None:
    """Add fields to every line logged by this task and the tasks that it starts from now on."""
    structlog.contextvars.bind_contextvars(**fields)


def _add_trace(logger: object, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    trace = current_trace()
    if trace is not None:
        event.setdefault("trace_id", trace.trace_id)
    return event
