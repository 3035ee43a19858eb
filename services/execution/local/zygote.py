"""Asks the zygote to start processes: one JSON line out, one in, a connection each."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from shared.errors import Rejected, Unavailable

_ANSWER_BYTES_MAX: Final = 65_536


async def request_start(socket_path: Path, request: Mapping[str, Any], *, seconds_max: float) -> bool:
    """Have a member started. True if this request did it, False if its folder was locked already.

    Repeating is harmless. Raises Unavailable if the zygote does not answer, Rejected if it says no.
    """
    answer = await _ask(socket_path, {"op": "start", **request}, seconds_max)
    if answer.get("ok") is not True:
        raise Rejected(409, "not_started", str(answer.get("error", "the zygote gave no reason"))[:500])
    return answer.get("duplicate") is not True


async def ping(socket_path: Path, *, seconds_max: float) -> Mapping[str, Any]:
    """Pid of the zygote and the version of Paddle that it holds. Raises Unavailable."""
    return await _ask(socket_path, {"op": "ping"}, seconds_max)


async def _ask(socket_path: Path, request: Mapping[str, Any], seconds_max: float) -> Mapping[str, Any]:
    try:
        async with asyncio.timeout(seconds_max):
            reader, writer = await asyncio.open_unix_connection(str(socket_path), limit=_ANSWER_BYTES_MAX)
            try:
                writer.write(json.dumps(request).encode() + b"\n")
                await writer.drain()
                line = await reader.readline()
            finally:
                writer.close()
        answer = json.loads(line)
    except (OSError, TimeoutError, ValueError) as exc:
        raise Unavailable(f"the zygote does not answer at {socket_path}: {type(exc).__name__}") from exc
    if not isinstance(answer, dict):
        raise Unavailable(f"the zygote at {socket_path} gave an answer that is none")
    return answer
