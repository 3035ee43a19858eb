"""Trace context (W3C ``traceparent``), carried from HTTP header to outbox row to handler."""

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

_PATTERN: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_NO_TRACE: Final = "0" * 32
_NO_SPAN: Final = "0" * 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """Where one piece of work stands in a trace that may span all services."""

    trace_id: str
    span_id: str
    flags: str = "01"

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"

    def child(self) -> "TraceContext":
        """The same trace with a span of its own."""
        return TraceContext(trace_id=self.trace_id, span_id=secrets.token_hex(8), flags=self.flags)


def new_trace() -> TraceContext:
    return TraceContext(trace_id=secrets.token_hex(16), span_id=secrets.token_hex(8))


def parse_traceparent(text: str | None) -> TraceContext | None:
    """None for anything that is not a valid header: a bad one is ignored, as the recommendation asks."""
    match = _PATTERN.fullmatch(text) if text and len(text) <= 512 else None
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    if version == "ff" or trace_id == _NO_TRACE or span_id == _NO_SPAN or (version == "00" and rest):
        return None
    return TraceContext(trace_id=trace_id, span_id=span_id, flags=flags)


_current: ContextVar[TraceContext | None] = ContextVar("trace", default=None)


def current_trace() -> TraceContext | None:
    return _current.get()


@contextmanager
def use_trace(trace: TraceContext | None) -> Iterator[None]:
    """Make ``trace`` the current one inside the block."""
    token = _current.set(trace)
    try:
        yield
    finally:
        _current.reset(token)
