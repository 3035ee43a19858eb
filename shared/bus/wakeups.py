"""Wake-ups: tell readers, in this process and in others, that something was published.

They only make things faster: whoever waits also looks again by itself. The notification goes out after the
commit, on a connection of its own, at most one every 2 ms; inside a transaction it would hold a lock of the whole
server over the commit.
"""

import asyncio
from typing import Final

import asyncpg

from shared.clock import pause
from shared.db.engine import parse_database_url
from shared.telemetry.logs import get_logger

CHANNEL: Final = "tide_log"
_COALESCE_SECONDS: Final = 0.002
_RECONNECT_SECONDS: Final = 0.5
_CONNECT_SECONDS: Final = 5
_LOST: Final = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
"""What a connection that ends raises; the last one where it ends in the middle of a command."""
_log = get_logger()


class Wakeups:
    """One for each process. ``published`` after a commit, ``wait`` in readers, ``run`` once in the background."""

    def __init__(self, database_url: str) -> None:
        url = parse_database_url(database_url).set(drivername="postgresql")
        self._url = url.render_as_string(hide_password=False)
        self._count = 0
        self._moved = asyncio.Event()
        self._to_send = asyncio.Event()

    def published(self) -> None:
        """Something of this process is committed."""
        self._to_send.set()
        self._wake()

    async def wait(self, *, seen: int, seconds: float) -> int:
        """Return once the count differs from ``seen``, at the latest after so long; gives the count."""
        if self._count == seen and seconds > 0:
            try:
                async with asyncio.timeout(seconds):
                    await self._moved.wait()
            except TimeoutError:
                pass
        return self._count

    async def run(self, stopping: asyncio.Event) -> None:
        """Carry wake-ups to and from other processes; connects again for as long as it takes."""
        async with asyncio.TaskGroup() as group:
            end = group.create_task(self._end(stopping))
            while not stopping.is_set():
                try:
                    await self._connect(stopping)
                except _LOST as exc:
                    _log.debug("wakeups_interrupted", error=type(exc).__name__)
                    await pause(stopping, _RECONNECT_SECONDS)
            end.cancel()

    async def _connect(self, stopping: asyncio.Event) -> None:
        connection = await asyncpg.connect(
            self._url, timeout=_CONNECT_SECONDS, server_settings={"application_name": "tidewright-wakeups"}
        )
        try:
            await self._carry(connection, stopping)
        finally:
            connection.terminate()

    async def _carry(self, connection: "asyncpg.Connection[asyncpg.Record]", stopping: asyncio.Event) -> None:
        """Until stopping, or the connection ends. What was missed while there was none: wake everybody once."""
        own = connection.get_server_pid()
        connection.add_termination_listener(lambda _: self._to_send.set())

        def heard(_: object, pid: int, channel: str, payload: object) -> None:
            if pid != own:
                self._wake()

        await connection.add_listener(CHANNEL, heard)
        self._wake()
        while not stopping.is_set():
            await self._to_send.wait()
            self._to_send.clear()
            if connection.is_closed():
                raise ConnectionResetError("the connection for wake-ups ended")
            await connection.execute(f"notify {CHANNEL}")
            await asyncio.sleep(_COALESCE_SECONDS)

    async def _end(self, stopping: asyncio.Event) -> None:
        await stopping.wait()
        self._to_send.set()

    def _wake(self) -> None:
        self._count += 1
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()
