"""The HTTP app that every service has, and the server that runs it."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Final

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared import problems
from shared.errors import Conflict, LeaseLost, Rejected, Unavailable
from shared.settings import SettingsError
from shared.telemetry.instruments import CONTENT_TYPE, Instruments
from shared.telemetry.trace import new_trace, parse_traceparent, use_trace

BODY_BYTES_MAX: Final = 1_048_576
_BACKLOG: Final = 2_048

Readiness = Callable[[], str | None]
"""None: ready. Otherwise why not, in one line."""


def make_app(
    title: str,
    *,
    ready: Readiness,
    instruments: Instruments,
    version: str = "0.1.0",
    description: str = "",
    body_bytes_max: int = BODY_BYTES_MAX,
) -> FastAPI:
    """An app with ``/livez``, ``/readyz``, ``/metrics``, problems as errors, trace context and a body limit.

    What ``ready`` says is the service's own word; ``add_readiness`` is how the runtime adds its own (database,
    lease, loaded), and it sets the role (active, standby) that ``/readyz`` tells. Bodies above the limit: 413.
    """
    app = FastAPI(title=title, version=version, description=description, docs_url=None, redoc_url=None)
    app.state.readiness = [ready]
    app.state.role = None
    _add_operations(app, instruments)
    for kind, handler in (
        (Rejected, problems.on_rejected),
        (problems.Unprocessable, problems.on_unprocessable),
        (RequestValidationError, problems.on_request_validation),
        (Conflict, problems.on_conflict),
        (Unavailable, problems.on_unavailable),
        (LeaseLost, problems.on_unavailable),
        (HTTPException, problems.on_http_exception),
        (Exception, problems.on_crash),
    ):
        app.add_exception_handler(kind, handler)
    app.add_middleware(_Edge, instruments=instruments, body_bytes_max=body_bytes_max)
    return app


def add_readiness(app: FastAPI, ready: Readiness) -> None:
    """Let ``/readyz`` ask one more; the first that objects is told."""
    app.state.readiness.append(ready)


def _add_operations(app: FastAPI, instruments: Instruments) -> None:
    @app.get("/livez", tags=["operations"], summary="The process answers.")
    async def livez() -> dict[str, str]:
        return {"status": "alive"}

    ready_now = instruments.gauge("ready_info", "1 while this process is ready, as /readyz says.")

    def objection() -> str | None:
        return next((reason for ready in app.state.readiness if (reason := ready()) is not None), None)

    @app.get("/readyz", tags=["operations"], summary="Ready to serve, or 503 with the reason.")
    async def readyz(request: Request) -> Response:
        reason = objection()
        if reason is not None:
            return problems.problem(503, "not_ready", reason, instance="/readyz", headers={"Retry-After": "1"})
        role: str | None = request.app.state.role
        return JSONResponse({"status": "ready", **({"role": role} if role else {})})

    @app.get("/metrics", tags=["operations"], summary="Prometheus instruments.", response_class=Response)
    async def metrics() -> Response:
        ready_now.set(objection() is None)
        return Response(instruments.render(), media_type=CONTENT_TYPE)


class _Edge:
    """Outermost layer: trace context, duration, and the limit on bodies, counted as they arrive."""

    def __init__(self, app: ASGIApp, *, instruments: Instruments, body_bytes_max: int) -> None:
        self._app = app
        self._seconds = instruments.http_seconds
        self._body_bytes_max = body_bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        began = time.perf_counter()
        received = parse_traceparent(headers.get(b"traceparent", b"").decode("latin-1"))

        async def send_timed(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._observe(scope, message["status"], time.perf_counter() - began)
            await send(message)

        with use_trace(received.child() if received else new_trace()):
            limited = _BodyLimit(receive, self._body_bytes_max, headers.get(b"content-length", b"0"))
            if limited.is_announced_too_large:
                await limited.refuse(scope, receive, send_timed)
                return
            await self._app(scope, limited, send_timed)

    def _observe(self, scope: Scope, status: int, seconds: float) -> None:
        route = scope.get("route")
        path = getattr(route, "path", None) or "none"
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._seconds.labels(method, path, str(status)).observe(seconds)


_METHODS: Final = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})


class _BodyLimit:
    """``receive`` that raises 413 once more than the limit has come in."""

    def __init__(self, receive: Receive, limit: int, announced: bytes) -> None:
        self._receive = receive
        self._limit = limit
        self._left = limit
        self.is_announced_too_large = announced.isdigit() and int(announced[:20]) > limit

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._left -= len(message.get("body", b""))
            if self._left < 0:
                raise HTTPException(413, self._detail)
        return message

    async def refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = problems.problem(413, "body_too_large", self._detail, headers={"Connection": "close"})
        await answer(scope, receive, send)

    @property
    def _detail(self) -> str:
        return f"the body is larger than {self._limit} bytes, which is the limit"


# -- the server -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundSocket:
    """A socket that listens already, so that its port is known before anyone is told."""

    socket: socket.socket
    host: str
    port: int

    def url(self, advertise_host: str | None = None) -> str:
        host = advertise_host or (socket.gethostname() if self.host in {"0.0.0.0", "::", ""} else self.host)  # noqa: S104
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


def bind(host: str, port: int) -> BoundSocket:
    """Listen on ``host:port`` (0: any free port). Raises SettingsError if the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(_BACKLOG)
        listening.setblocking(False)
    except OSError as exc:
        listening.close()
        raise SettingsError(f"cannot listen on {host}:{port}: {exc.strerror or exc}") from exc
    return BoundSocket(socket=listening, host=host, port=listening.getsockname()[1])


async def run_http(app: FastAPI, bound: BoundSocket, stopping: asyncio.Event, *, drain_seconds: float = 5.0) -> None:
    """Serve until ``stopping``, then let requests under way finish for ``drain_seconds``. Closes the socket."""
    config = uvicorn.Config(
        app,
        loop="none",
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=max(1, round(drain_seconds)),
    )
    server = _Server(config)
    async with asyncio.TaskGroup() as group:
        group.create_task(_stop_when(stopping, server))
        try:
            await server.serve(sockets=[bound.socket])
            if not stopping.is_set():
                raise RuntimeError("the HTTP server ended by itself")
        finally:
            server.cut_off()
            bound.socket.close()


async def _stop_when(stopping: asyncio.Event, server: uvicorn.Server) -> None:
    await stopping.wait()
    server.should_exit = True


class _Server(uvicorn.Server):
    """Leaves signals to the process that it runs in."""

    def cut_off(self) -> None:
        """End what an ordered shutdown would have ended; nothing is left after one.

        The event loop must forget the listening socket before it is closed: its number is used again, and the
        next connection that gets it would never be told of anything.
        """
        for listening in getattr(self, "servers", ()):
            listening.close()
        for connection in tuple(self.server_state.connections):
            connection.shutdown()
        for task in tuple(self.server_state.tasks):
            task.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serving(app: FastAPI, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve ``app`` inside the block; gives its URL."""
    bound = bind(host, port)
    stopping = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(run_http(app, bound, stopping, drain_seconds=1))
        try:
            yield bound.url()
        finally:
            stopping.set()
