"""The address of the membership endpoint: a port that stays the same, since trainers that run already know it."""

import asyncio
import errno
import os
import socket
from pathlib import Path

from shared.clock import Clock
from shared.errors import Unavailable
from shared.settings import SettingsError

_BACKLOG = 1024
_RETRY_SECONDS = 0.1


async def bind_kept_port(path: Path, *, host: str, port: int, seconds_max: float, clock: Clock) -> socket.socket:
    """Listen on ``port``, or on the port kept in ``path``, or on a free one that is then kept there.

    A kept port that is taken is tried again for ``seconds_max``: the former process may be about to end. Then a free
    one is taken, and trainers that know only the old one recover from their checkpoints. Raises SettingsError if the
    address cannot be had at all.
    """
    kept = port or _read(path)
    give_up = clock.monotonic() + seconds_max
    while kept:
        try:
            return _listen(host, kept)
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE:
                raise SettingsError(f"cannot listen on {host}:{kept}: {exc.strerror or exc}") from exc
        if clock.monotonic() > give_up:
            if port:
                raise Unavailable(f"{host}:{port} is taken by another process")
            break
        await asyncio.sleep(_RETRY_SECONDS)
    try:
        listening = _listen(host, 0)
    except OSError as exc:
        raise SettingsError(f"cannot listen on {host}: {exc.strerror or exc}") from exc
    _write(path, listening.getsockname()[1])
    return listening


def _listen(host: str, port: int) -> socket.socket:
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(_BACKLOG)
        listening.setblocking(False)
    except OSError:
        listening.close()
        raise
    return listening


def _read(path: Path) -> int:
    try:
        text = path.read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() and 0 < int(text) <= 65_535 else 0


def _write(path: Path, port: int) -> None:
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(f"{port}\n")
    draft.rename(path)
