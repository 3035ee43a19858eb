"""Where the active process of each service answers HTTP: its lease row."""

from typing import Final

from sqlalchemy import Text, bindparam, text
from sqlalchemy.ext.asyncio import AsyncEngine

from schemas.vocabulary import ServiceName
from shared.clock import Clock
from shared.db.errors import connecting

_CACHE_SECONDS: Final = 1.0
_URL: Final = text(
    """
    select l.url from log.lease l
     where l.service = :service and l.partition = 0 and l.expires_at > clock_timestamp()
    """
).bindparams(bindparam("service", type_=Text()))


class PostgresDirectory:
    """Implements ``shared.runtime.service.Directory``; an answer is kept for a second. Raises Unavailable."""

    def __init__(self, engine: AsyncEngine, clock: Clock) -> None:
        self._engine = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._clock = clock
        self._known: dict[ServiceName, tuple[float, str | None]] = {}

    async def url_of(self, service: ServiceName) -> str | None:
        now = self._clock.monotonic()
        at, url = self._known.get(service, (-_CACHE_SECONDS, None))
        if url is not None and now - at < _CACHE_SECONDS:
            return url
        with connecting():
            async with self._engine.connect() as connection:
                url = (await connection.execute(_URL, {"service": service.value})).scalar()
        self._known[service] = (now, url)
        return url
