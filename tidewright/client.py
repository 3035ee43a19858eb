"""The HTTP client of Tidewright: small, typed at its edges, and patient with a server that restarts.

What goes in and comes out is JSON as ``/openapi.json`` describes it. Every call repeats by itself when the
connection breaks or the server answers 429 or 503, for at most ``retry_seconds`` in all; submissions carry an
Idempotency-Key, so that a repeat never makes a second job.
"""

import json
import math
import os
import random
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, TypeAlias
from urllib.parse import quote

import httpx
from httpx_sse import EventSource, SSEError

from tidewright.client_errors import InvalidField, LostContact, RequestRefused, TidewrightError

__all__ = ["Client", "InvalidField", "LogLine", "LostContact", "RequestRefused", "StreamedEvent", "TidewrightError"]

JsonObject: TypeAlias = dict[str, Any]

DEFAULT_SERVER: Final = "http://127.0.0.1:8470"
SERVER_VARIABLE: Final = "TIDE_SERVER"
TERMINAL_PHASES: Final = frozenset({"Succeeded", "Failed", "Cancelled"})
_REPEATED_STATUS: Final = frozenset({429, 502, 503, 504})
_LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})
"""Never reached through a proxy, whatever the environment says."""
_BACK_OFF_SECONDS: Final = (0.1, 2.0)
_SOUND_SECONDS: Final = 5.0
_SILENCE_SECONDS: Final = 45.0
"""Events come with a sign of life every 15 s; a stream that is silent for so long is opened anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One line of a member's output. ``cursor`` resumes right behind it."""

    member: str
    cursor: str
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedEvent:
    """One server-sent event. ``id`` resumes behind it; ``type`` is the CloudEvent's, or ``gap``."""

    id: str
    type: str
    data: JsonObject


class _Patience:
    """Back-off with a budget, counted anew after every success. Raises LostContact when it is used up."""

    def __init__(self, *, server: str, seconds: float, sleep: Callable[[float], None]) -> None:
        self._server = server
        self._seconds = seconds
        self._sleep = sleep
        self.reset()

    def reset(self) -> None:
        self._deadline: float | None = None
        self._next_seconds = _BACK_OFF_SECONDS[0]

    def pause_after(self, ended: "_Interrupted") -> None:
        """Before a stream is opened again. One that had been open for a while was sound, only silent or cut."""
        if ended.open_seconds >= _SOUND_SECONDS:
            self.reset()
        self.pause(ended.cause, at_least_seconds=ended.retry_after_seconds)

    def pause(self, cause: str, *, at_least_seconds: float = 0.0) -> None:
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + self._seconds
        wait = max(at_least_seconds, self._next_seconds * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
        if now + wait > self._deadline:
            raise LostContact(self._server, cause)
        self._sleep(wait)
        self._next_seconds = min(self._next_seconds * 2, _BACK_OFF_SECONDS[1])


class Client:
    """One server. Not thread-safe; use as a context manager or call ``close``.

    ``server`` defaults to ``TIDE_SERVER``, else to this machine. Raises ValueError if it is no HTTP address.
    """

    def __init__(
        self,
        server: str | None = None,
        *,
        timeout_seconds: float = 10.0,
        retry_seconds: float = 15.0,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.server = _checked(server or os.environ.get(SERVER_VARIABLE) or DEFAULT_SERVER)
        self._retry_seconds = retry_seconds
        self._sleep = sleep
        self._http = httpx.Client(
            base_url=self.server,
            timeout=httpx.Timeout(timeout_seconds, connect=min(timeout_seconds, 5.0)),
            transport=transport,
            trust_env=not self.is_local,
            headers={"User-Agent": "tidewright-client", "Accept": "application/json"},
        )

    @property
    def is_local(self) -> bool:
        """True if the server is on this machine, so that both see the same files."""
        return httpx.URL(self.server).host in _LOOPBACK

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    # -- jobs -------------------------------------------------------------------------------------------------

    def submit(
        self, job: Mapping[str, Any], *, idempotency_key: str | None = None, allow_unsatisfiable: bool = False
    ) -> JsonObject:
        """Submit and return the job's view. Without a key of its own a submission gets a random one."""
        return self._call(
            "POST",
            "/v1/jobs",
            body=job,
            parameters=[("allow_unsatisfiable", "true")] if allow_unsatisfiable else (),
            headers={"Idempotency-Key": idempotency_key or uuid.uuid4().hex},
        )

    def job(self, job_id: str) -> JsonObject:
        return self._call("GET", _of(job_id))

    def jobs(
        self,
        *,
        phases: Sequence[str] = (),
        queue: str | None = None,
        priority: str | None = None,
        labels: Sequence[str] = (),
        limit: int | None = None,
    ) -> Iterator[JsonObject]:
        """Newest first, page by page as they are asked for; at most ``limit`` in all."""
        parameters: list[tuple[str, str]] = [("phase", phase) for phase in phases]
        parameters += [("label", label) for label in labels]
        parameters += [(name, value) for name, value in (("queue", queue), ("priority", priority)) if value]
        return self._pages("/v1/jobs", parameters, limit=limit)

    def patch(self, job_id: str, changes: Mapping[str, Any], *, if_version: int | None = None) -> JsonObject:
        """Change what is wanted. With ``if_version`` only if the request register still has that version."""
        headers = {} if if_version is None else {"If-Match": f'"{if_version}"'}
        return self._call("PATCH", _of(job_id), body=changes, headers=headers)

    def cancel(self, job_id: str, *, reason: str = "") -> JsonObject:
        return self._call("POST", _of(job_id, "cancel"), body={"reason": reason})

    def why(self, job_id: str) -> JsonObject:
        return self._call("GET", _of(job_id, "why"))

    def history(self, job_id: str, *, limit: int | None = None) -> Iterator[JsonObject]:
        """Oldest first."""
        return self._pages(_of(job_id, "history"), [], limit=limit)

    def members(self, job_id: str) -> list[JsonObject]:
        return list(self._call("GET", _of(job_id, "members"))["items"])

    def curves(self, job_id: str) -> JsonObject:
        return self._call("GET", _of(job_id, "curves"))

    def capacity(self) -> JsonObject:
        return self._call("GET", "/v1/capacity")

    def readiness(self) -> str | None:
        """None if the server is ready, else its reason. One attempt; raises LostContact."""
        try:
            response = self._http.get("/readyz")
        except httpx.TransportError as exc:
            raise LostContact(self.server, _cause(exc)) from exc
        if response.status_code == httpx.codes.OK:
            return None
        return str(RequestRefused.from_response(response))

    # -- streams ----------------------------------------------------------------------------------------------

    def logs(
        self,
        job_id: str,
        *,
        follow: bool = False,
        tail: int | None = None,
        cursor: str | None = None,
        member: str | None = None,
    ) -> Iterator[LogLine]:
        """A job's output, line by line. Following ends with the job, and resumes by cursor where it broke off."""
        patience = self._patience()
        while True:
            parameters = {
                "follow": "true" if follow else None,
                "tail": None if tail is None or cursor is not None else str(tail),
                "cursor": cursor,
                "member": member,
            }
            try:
                for item in self._lines(_of(job_id, "logs"), parameters):
                    patience.reset()
                    line = LogLine(
                        member=str(item.get("member", "")),
                        cursor=str(item.get("cursor", "")),
                        line=str(item.get("line", "")),
                    )
                    cursor = line.cursor or cursor
                    yield line
                ended = _Interrupted("the stream of logs ends at once, again and again")
            except _Interrupted as exc:
                ended = exc
            else:
                if not follow or self.job(job_id)["phase"] in TERMINAL_PHASES:
                    return
            patience.pause_after(ended)

    def events(self, *, job_id: str | None = None, after: str | None = None) -> Iterator[StreamedEvent]:
        """Events from now on, or behind the id ``after``; without end. Resumes by itself where it broke off."""
        patience = self._patience()
        while True:
            headers = {"Accept": "text/event-stream", "Cache-Control": "no-store"}
            if after is not None:
                headers["Last-Event-ID"] = after
            try:
                with self._stream("/v1/events", {"job_id": job_id}, headers) as response:
                    for item in EventSource(response).iter_sse():
                        patience.reset()
                        after = item.id or after
                        yield StreamedEvent(id=item.id, type=item.event, data=_object(item.data))
                ended = _Interrupted("the stream of events ends at once, again and again")
            except _Interrupted as exc:
                ended = exc
            except SSEError as exc:
                raise LostContact(self.server, "it answers, but not with server-sent events") from exc
            patience.pause_after(ended)

    # -- how --------------------------------------------------------------------------------------------------

    def _patience(self) -> _Patience:
        return _Patience(server=self.server, seconds=self._retry_seconds, sleep=self._sleep)

    def _call(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        parameters: Sequence[tuple[str, str]] = (),
        headers: Mapping[str, str] | None = None,
    ) -> JsonObject:
        content = None if body is None else json.dumps(body, allow_nan=False).encode()
        sent = {**(headers or {}), **({} if content is None else {"Content-Type": "application/json"})}
        patience = self._patience()
        while True:
            try:
                response = self._http.request(
                    method, path, content=content, params=httpx.QueryParams(tuple(parameters)), headers=sent
                )
            except httpx.TransportError as exc:
                patience.pause(_cause(exc))
                continue
            if response.status_code in _REPEATED_STATUS:
                patience.pause(_said(response), at_least_seconds=_retry_after_seconds(response))
                continue
            if not response.is_success:
                raise RequestRefused.from_response(response)
            return _decoded(response, self.server)

    def _pages(self, path: str, parameters: list[tuple[str, str]], *, limit: int | None) -> Iterator[JsonObject]:
        cursor: str | None = None
        left = limit
        while left is None or left > 0:
            size = 200 if left is None else min(left, 200)
            page: list[tuple[str, str]] = [
                *parameters,
                ("limit", str(size)),
                *([("cursor", cursor)] if cursor else []),
            ]
            answer = self._call("GET", path, parameters=page)
            items = answer["items"][:left]
            yield from items
            cursor = answer.get("next_cursor")
            if left is not None:
                left -= len(items)
            if cursor is None:
                return

    def _lines(self, path: str, parameters: Mapping[str, str | None]) -> Iterator[JsonObject]:
        with self._stream(path, parameters, {"Accept": "application/x-ndjson"}) as response:
            for line in response.iter_lines():
                if line.strip():
                    yield _object(line)

    @contextmanager
    def _stream(
        self, path: str, parameters: Mapping[str, str | None], headers: Mapping[str, str]
    ) -> Generator[httpx.Response, None, None]:
        """Open a stream. Raises _Interrupted for all that a new attempt may mend, also while it is read."""
        given = {name: value for name, value in parameters.items() if value is not None}
        timeout = httpx.Timeout(5.0, read=_SILENCE_SECONDS)
        opened: float | None = None
        try:
            with self._http.stream("GET", path, params=given, headers=headers, timeout=timeout) as response:
                if not response.is_success:
                    response.read()
                    if response.status_code in _REPEATED_STATUS:
                        raise _Interrupted(_said(response), retry_after_seconds=_retry_after_seconds(response))
                    raise RequestRefused.from_response(response)
                opened = time.monotonic()
                yield response
        except httpx.TransportError as exc:
            lasted = 0.0 if opened is None else time.monotonic() - opened
            raise _Interrupted(_cause(exc), open_seconds=lasted) from exc


class _Interrupted(Exception):
    """A stream broke off, ``open_seconds`` after it had begun; another attempt may go on where it did."""

    def __init__(self, cause: str, *, retry_after_seconds: float = 0.0, open_seconds: float = 0.0) -> None:
        super().__init__(cause)
        self.cause = cause
        self.retry_after_seconds = retry_after_seconds
        self.open_seconds = open_seconds


def _checked(server: str) -> str:
    try:
        url = httpx.URL(server)
    except httpx.InvalidURL as exc:
        raise ValueError(f"{server!r} is no address: {exc}") from exc
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"{server!r} is no address of a server: give http://HOST:PORT")
    return server.rstrip("/")


def _of(job_id: str, part: str = "") -> str:
    return f"/v1/jobs/{quote(job_id, safe='')}{'/' + part if part else ''}"


def _object(text: str) -> JsonObject:
    """Raises _Interrupted for a line that was torn when the server went away."""
    try:
        value: Any = json.loads(text)
    except ValueError as exc:
        raise _Interrupted("the stream broke off within a line") from exc
    return value if isinstance(value, dict) else {"value": value}


def _decoded(response: httpx.Response, server: str) -> JsonObject:
    try:
        value: Any = response.json()
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise LostContact(server, "something answers there, but it is not Tidewright")
    return value


def _said(response: httpx.Response) -> str:
    return f"it answers {response.status_code}: {RequestRefused.from_response(response)}"


def _cause(exc: httpx.TransportError) -> str:
    if isinstance(exc, httpx.ConnectError):
        return "connection refused" if "refused" in str(exc).lower() else str(exc) or "no connection"
    if isinstance(exc, httpx.TimeoutException):
        return "it does not answer in time"
    return str(exc) or type(exc).__name__


def _retry_after_seconds(response: httpx.Response) -> float:
    """``Retry-After`` in seconds, at most 60; 0 where there is none or it is a date."""
    text = response.headers.get("Retry-After", "")
    try:
        seconds = float(text)
    except ValueError:
        return 0.0
    return min(max(seconds, 0.0), 60.0) if math.isfinite(seconds) else 0.0
