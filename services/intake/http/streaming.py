"""An endless answer: cut when its reader is too slow, ended in order when the service stops."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from shared.errors import Unavailable
from shared.telemetry.logs import get_logger

_log = get_logger()


class BrokenOff(Exception):
    """The source of a stream failed: the answer stays incomplete, so that its reader notices."""


class Streamed(Response):
    """Sends chunks until their source ends, the reader goes away, or ``closing`` is set.

    ``send_seconds``: a reader that takes nothing for so long is cut off; None: it may take its time.
    """

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        *,
        closing: asyncio.Event,
        media_type: str,
        status_code: int = 200,
        headers: Mapping[str, str] | None = None,
        send_seconds: float | None = None,
    ) -> None:
        self._chunks = chunks
        self._closing = closing
        self._send_seconds = send_seconds
        self.status_code = status_code
        self.media_type = media_type
        self.background = None
        self.body = b""
        self.init_headers(headers)
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_whole = False
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            is_whole = await self._race(receive, send)
        finally:
            await _close(self._chunks)
        if is_whole:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _race(self, receive: Receive, send: Send) -> bool:
        """True if the answer is complete: the source ended, or the service is stopping."""
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(self._send_all(send))
            watchers = [
                group.create_task(_cancel_after(_disconnected(receive), sending)),
                group.create_task(_cancel_after(self._closing.wait(), sending)),
            ]
            sending.add_done_callback(lambda _: [watcher.cancel() for watcher in watchers])
        return self._closing.is_set() if sending.cancelled() else sending.result()

    async def _send_all(self, send: Send) -> bool:
        try:
            async for chunk in self._chunks:
                async with asyncio.timeout(self._send_seconds):
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except TimeoutError:
            _log.info("slow_reader_cut", after_seconds=self._send_seconds)
            return False
        except (BrokenOff, Unavailable) as exc:
            _log.info("stream_broken_off", detail=str(exc))
            return False
        return True


async def _cancel_after(moment: Awaitable[object], sending: "asyncio.Task[bool]") -> None:
    await moment
    sending.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _close(chunks: AsyncIterator[bytes]) -> None:
    close = getattr(chunks, "aclose", None)
    if close is not None:
        await close()
