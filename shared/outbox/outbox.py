"""Drafts of events become outbox rows, in one statement just before the commit."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import ARRAY, DateTime, LargeBinary, Text, bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection

from schemas.envelope import Draft
from schemas.registry import EventData, encode
from schemas.vocabulary import ServiceName
from shared.bus.log import Headers
from shared.clock import Clock
from shared.telemetry.instruments import Instruments
from shared.telemetry.trace import current_trace, parse_traceparent

_LOG_ID: Final = text("select i.log_id from log.identity i")
_INSERT: Final = text(
    """
    insert into log.outbox (time, topic, key, type, headers, payload)
    select :time, r.topic, r.key, r.type, r.headers, r.payload
      from unnest(:topics, :keys, :types, :headers, :payloads)
           with ordinality as r(topic, key, type, headers, payload, n)
     order by r.n
    """
).bindparams(
    bindparam("time", type_=DateTime(timezone=True)),
    bindparam("topics", type_=ARRAY(Text())),
    bindparam("keys", type_=ARRAY(Text())),
    bindparam("types", type_=ARRAY(Text())),
    bindparam("headers", type_=ARRAY(LargeBinary())),
    bindparam("payloads", type_=ARRAY(LargeBinary())),
)


class Outbox:
    """What one service publishes."""

    def __init__(self, service: ServiceName, clock: Clock, instruments: Instruments) -> None:
        self._service = service
        self._clock = clock
        self._instruments = instruments
        self._log_id: str | None = None

    async def insert(
        self, connection: AsyncConnection, drafts: Sequence[Draft[EventData]], traces: Mapping[str, str | None]
    ) -> None:
        """Add rows in this order. ``traces``: key -> traceparent of the event that caused what its key does now.

        Cost: one statement, about 15 µs an event. Raises what the driver raises.
        """
        if not drafts:
            return
        source = f"tidewright/{self._service}/{await self._log_id_of(connection)}"
        fallback = current_trace()
        parameters: dict[str, Any] = {
            "time": self._clock.now(),
            "topics": [draft.data.TOPIC.value for draft in drafts],
            "keys": [draft.key for draft in drafts],
            "types": [draft.data.TYPE for draft in drafts],
            "headers": [
                Headers(
                    tenant=draft.tenant,
                    source=source,
                    traceparent=_next_hop(traces.get(draft.key)) or (str(fallback) if fallback else None),
                ).encode()
                for draft in drafts
            ],
            "payloads": [encode(draft.data) for draft in drafts],
        }
        await connection.execute(_INSERT, parameters)

    def count(self, drafts: Sequence[Draft[EventData]]) -> None:
        """After the commit: these are published."""
        for draft in drafts:
            self._instruments.published_events.labels(draft.data.TOPIC.value).inc()

    async def _log_id_of(self, connection: AsyncConnection) -> str:
        if self._log_id is None:
            self._log_id = (await connection.execute(_LOG_ID)).scalar_one()
        return self._log_id


def _next_hop(traceparent: str | None) -> str | None:
    trace = parse_traceparent(traceparent)
    return str(trace.child()) if trace else None
