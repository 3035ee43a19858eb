"""One Postgres transaction with the outbox in it."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from sqlalchemy import Executable
from sqlalchemy.engine import CursorResult
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from schemas.envelope import Draft
from schemas.registry import EventData
from shared.db.errors import connecting, translated
from shared.outbox.outbox import Outbox

Guard = Callable[["PostgresTransaction"], Awaitable[None]]
"""Last word before the outbox rows: raises to refuse the commit."""


class PostgresTransaction:
    """Implements ``shared.runtime.service.Transaction``."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection
        self.drafts: list[Draft[EventData]] = []
        self.traces: Mapping[str, str | None] = {}
        """Key -> traceparent: set by the consumer, so that what is published continues the trace of its cause."""

    @property
    def connection(self) -> AsyncConnection:
        return self._connection

    async def execute(
        self, statement: Executable, parameters: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
    ) -> CursorResult[Any]:
        with connecting():
            return await self._connection.execute(statement, parameters)

    def publish(self, *drafts: Draft[EventData]) -> None:
        self.drafts.extend(drafts)


@asynccontextmanager
async def begin(
    engine: AsyncEngine,
    outbox: Outbox,
    *,
    guard: Guard | None = None,
    published: Callable[[], None],
) -> AsyncIterator[PostgresTransaction]:
    """Commit at the end of the block, roll back if it raises. ``published`` is called after a commit with events.

    The engine's execution options choose the isolation. Raises Conflict, Unavailable or Poison for what Postgres
    says, in the block too. After Unavailable at the end the commit may have happened: read again to know.
    """
    async with AsyncExitStack() as stack:
        with connecting():
            connection = await stack.enter_async_context(engine.connect())
        tx = PostgresTransaction(connection)
        with translated():
            yield tx
        with connecting():
            if guard is not None:
                await guard(tx)
            await outbox.insert(connection, tx.drafts, tx.traces)
            await connection.commit()
    if tx.drafts:
        outbox.count(tx.drafts)
        published()
