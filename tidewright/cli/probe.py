"""Asks what runs beside the services: a process by pid and start time, Postgres, the zygote."""

import json
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

_SECONDS: Final = 3.0
_PROTOCOL_3_0: Final = 196_608


class ProbeError(Exception):
    """No answer, or not the one of a healthy server: in one line."""


def is_running(record: Mapping[str, Any]) -> bool:
    """True if ``{"pid", "start"}`` names a living process: start time guards against reuse of the pid."""
    try:
        text = Path(f"/proc/{int(record['pid'])}/stat").read_text()
    except (OSError, KeyError, TypeError, ValueError):
        return False
    rest = text.rpartition(")")[2].split()
    return rest[0] not in "ZX" and int(rest[19]) == record.get("start")


def ask_postgres(address: Mapping[str, Any]) -> str:
    """Open a session as far as the server's first answer. ``address``: socket, or host and port; user, database.

    A request for a password counts as healthy: the server is there and accepts connections.
    """
    try:
        with _connected(address) as connection:
            connection.settimeout(_SECONDS)
            words = ("user", str(address["user"]), "database", str(address["database"]))
            body = struct.pack("!i", _PROTOCOL_3_0) + b"\0".join(word.encode() for word in words) + b"\0\0"
            connection.sendall(struct.pack("!i", len(body) + 4) + body)
            kind, length = struct.unpack("!ci", _read(connection, 5))
            payload = _read(connection, min(length - 4, 4096))
    except (OSError, struct.error) as exc:
        raise ProbeError(f"{_told(address)}: {getattr(exc, 'strerror', None) or exc}") from exc
    if kind == b"R":
        return f"accepts connections at {_told(address)}"
    if kind == b"E":
        fields = {part[:1]: part[1:].decode(errors="replace") for part in payload.split(b"\0") if part}
        raise ProbeError(f"{_told(address)}: {fields.get(b'M', 'it refuses')}")
    raise ProbeError(f"{_told(address)}: what answers there is no Postgres")


def ask_zygote(path: Path) -> str:
    """Ping the zygote by its socket."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_SECONDS)
            connection.connect(str(path))
            connection.sendall(b'{"op":"ping"}\n')
            answer: Any = json.loads(connection.makefile().readline() or "{}")
    except (OSError, ValueError) as exc:
        raise ProbeError(f"{path}: {getattr(exc, 'strerror', None) or exc}") from exc
    if not (isinstance(answer, dict) and answer.get("ok")):
        raise ProbeError(f"{path}: it answers {str(answer)[:100]}")
    warm = f"Paddle {answer['paddle']} imported" if answer.get("paddle") else "without Paddle"
    return f"answers, pid {answer.get('pid')}, {warm}"


def _connected(address: Mapping[str, Any]) -> socket.socket:
    if address.get("socket"):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(_SECONDS)
        try:
            connection.connect(str(address["socket"]))
        except OSError:
            connection.close()
            raise
        return connection
    return socket.create_connection((str(address["host"]), int(address["port"])), timeout=_SECONDS)


def _read(connection: socket.socket, length: int) -> bytes:
    received = b""
    while len(received) < length:
        part = connection.recv(length - len(received))
        if not part:
            raise OSError("the connection was closed")
        received += part
    return received


def _told(address: Mapping[str, Any]) -> str:
    return str(address.get("socket") or f"{address.get('host')}:{address.get('port')}")
