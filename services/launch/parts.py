"""What the supervisor keeps running: Postgres, the zygote, the process of the services."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import httpx
from sqlalchemy import select

from schemas.vocabulary import ServiceName
from services.launch.processes import ProcessId, end_processes, reap
from services.launch.settings import LaunchSettings
from shared.db.embedded import DATABASE, SUPERUSER, EmbeddedPostgres
from shared.db.engine import Session, parse_database_url, plain_engine
from shared.db.errors import connecting
from shared.db.tables import lease

_PING_SECONDS: Final = 2.0
_HTTP_SECONDS: Final = 2.0
_LAST_WORDS_BYTES: Final = 65_536
_LAST_WORDS_LINES: Final = 5
_LOG_LINE_CHARACTERS: Final = 300


class Part(Protocol):
    """Something that must live. ``start`` blocks until it is launched (seconds at most), not until it is ready."""

    @property
    def name(self) -> str: ...

    def start(self) -> ProcessId:
        """Launch it, or find it running. Raises SettingsError, Unavailable or OSError."""

    def how_it_ended(self, process: ProcessId) -> str:
        """Of a process that has ended: in words, for one line. Reaps it."""

    def stop(self, process: ProcessId) -> None:
        """End it in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresPart:
    """The embedded server; its own module ends what a killed postmaster leaves behind."""

    server: EmbeddedPostgres
    name: str = "Postgres"

    def start(self) -> ProcessId:
        self.server.start()
        process = ProcessId.of(self.server.postmaster_pid() or 0)
        if process is None:
            raise OSError("it ended right after its start")
        return process

    def how_it_ended(self, process: ProcessId) -> str:
        reap(process.pid)
        return "ended"

    def stop(self, process: ProcessId) -> None:
        self.server.stop()


@dataclass(slots=True, kw_only=True)
class ChildPart:
    """A program of ours in a session of its own, so that Ctrl-C reaches the supervisor alone.

    ``log_begin``: where in its log the last start begins, in bytes.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    stop_seconds: float
    log_bytes_max: int
    adopt: "Adopt | None" = None
    log_begin: int = 0
    children: dict[int, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def start(self) -> ProcessId:
        found = self.adopt() if self.adopt else None
        if found is not None:
            return found
        with contextlib.suppress(FileNotFoundError):
            if self.log.stat().st_size > self.log_bytes_max:
                self.log.replace(self.log.with_suffix(".old"))
        descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.log_begin = os.fstat(descriptor).st_size
        try:
            child = subprocess.Popen(  # noqa: S603 - our own program, no shell
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                env=dict(self.environment),
                start_new_session=True,
            )
        finally:
            os.close(descriptor)
        self.children[child.pid] = child
        process = ProcessId.of(child.pid)
        if process is None:
            raise OSError(self.how_it_ended(ProcessId(pid=child.pid, start=0)))
        return process

    def how_it_ended(self, process: ProcessId) -> str:
        child = self.children.pop(process.pid, None)
        if child is None:
            return "ended"
        code = child.wait()
        return f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"

    def stop(self, process: ProcessId) -> None:
        end_processes([process], grace_seconds=self.stop_seconds)
        self.how_it_ended(process)

    def last_words(self) -> list[str]:
        """The last lines of its log since the last start that are no mere information; long ones are cut."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(self.log_begin, file.seek(0, os.SEEK_END) - _LAST_WORDS_BYTES))
                text = file.read(_LAST_WORDS_BYTES).decode(errors="replace")
        except OSError:
            return []
        lines = [line[:_LOG_LINE_CHARACTERS] for line in text.splitlines() if '"level": "info"' not in line]
        return lines[-_LAST_WORDS_LINES:]


class Adopt(Protocol):
    def __call__(self) -> ProcessId | None:
        """The running process that may be kept, if there is one."""


def zygote_part(state: Path, settings: LaunchSettings) -> ChildPart:
    """A zygote that answers is kept: those it has started need it as their second parent.

    Workers inherit its environment, so it gets none of the server's own settings: no database, no key.
    """
    path = state / "zygote.sock"
    return ChildPart(
        name="the zygote",
        command=[
            *(sys.executable, "-m", "tidewright.elastic.zygote", "--socket", str(path)),
            *("--standbys", str(settings.standbys)),
        ],
        environment={name: value for name, value in os.environ.items() if not name.startswith("TIDE_")},
        log=state / "log" / "zygote.log",
        stop_seconds=settings.zygote_stop_seconds,
        log_bytes_max=settings.log_bytes_max,
        adopt=lambda: ping_zygote(path),
    )


def services_part(state: Path, settings: LaunchSettings, environment: Mapping[str, str]) -> ChildPart:
    """The five services in one process. Never adopted: it starts anew with today's settings; training goes on."""
    return ChildPart(
        name="the services",
        command=[sys.executable, "-m", "services.launch.process"],
        environment={**os.environ, **environment},
        log=state / "log" / "services.log",
        stop_seconds=settings.services_stop_seconds,
        log_bytes_max=settings.log_bytes_max,
    )


def ping_zygote(path: Path) -> ProcessId | None:
    """The zygote that answers at ``path``."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_PING_SECONDS)
            connection.connect(str(path))
            connection.sendall(b'{"op":"ping"}\n')
            answer: Any = json.loads(connection.makefile().readline() or "null")
    except (OSError, ValueError):
        return None
    pid = answer.get("pid") if isinstance(answer, dict) and answer.get("ok") else None
    return ProcessId.of(pid) if isinstance(pid, int) else None


def postgres_address(server: EmbeddedPostgres | None, url: str) -> dict[str, Any]:
    """Where Postgres answers, without a password: for ``up.json``."""
    if server is not None:
        path = server.folder / ".s.PGSQL.5432"
        return {"socket": str(path), "user": SUPERUSER, "database": DATABASE}
    parsed = parse_database_url(url)
    host = parsed.host or str(parsed.query.get("host", "localhost"))
    port = parsed.port or 5432
    address = {"user": parsed.username or SUPERUSER, "database": parsed.database or parsed.username or SUPERUSER}
    if host.startswith("/"):
        return {"socket": f"{host}/.s.PGSQL.{port}", **address}
    return {"host": host, "port": port, **address}


def service_urls(url: str, *, of_process: ProcessId | None = None) -> dict[str, str]:
    """Where each service answers, from the lease rows that are alive; of one process only where it is given.

    Raises Unavailable.
    """

    async def read() -> dict[str, str]:
        engine = plain_engine(url, Session(application="tidewright-launch"))
        with connecting():
            async with engine.connect() as connection:
                rows = await connection.execute(select(lease.c.service, lease.c.url, lease.c.pid))
                known = {service.value for service in ServiceName}
                return {
                    row.service: row.url
                    for row in rows
                    if row.service in known and row.url and (of_process is None or row.pid == of_process.pid)
                }

    with asyncio.Runner() as runner:
        return runner.run(read())


def unready(urls: Mapping[str, str]) -> str | None:
    """Why some service is not ready; None if all five are."""
    for service in ServiceName:
        if service.value not in urls:
            return f"{service.value} has not begun"
        try:
            response = httpx.get(f"{urls[service.value]}/readyz", timeout=_HTTP_SECONDS, trust_env=False)
        except httpx.HTTPError as exc:
            return f"{service.value}: {exc or type(exc).__name__}"
        if response.status_code != httpx.codes.OK:
            return f"{service.value}: {_detail(response)}"
    return None


def _detail(response: httpx.Response) -> str:
    try:
        body: Any = response.json()
    except ValueError:
        body = None
    return str(body.get("detail", response.status_code)) if isinstance(body, dict) else str(response.status_code)


def free_port(host: str, wanted: int) -> int:
    """``wanted`` if nobody listens on it, any free one for 0. Raises OSError."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, wanted))
        return int(probe.getsockname()[1])
