"""What other services answer: logs and members (execution), curves (metrics), passed on as they stream."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Final

import httpx

from schemas.vocabulary import ServiceName
from services.intake.http.streaming import BrokenOff, Streamed
from services.intake.settings import IntakeSettings
from shared.clock import Clock
from shared.errors import Unavailable
from shared.runtime.service import Directory
from shared.signing import InternalRequest
from shared.telemetry.trace import current_trace

_PASSED_ON: Final = ("content-type", "retry-after", "cache-control")


class Owners:
    """Signed requests to the active process of another service. ``run`` holds the connections."""

    def __init__(
        self,
        *,
        directory: Directory,
        signing_key: bytes,
        clock: Clock,
        closing: asyncio.Event,
        settings: IntakeSettings,
    ) -> None:
        self._directory = directory
        self._signing_key = signing_key
        self._clock = clock
        self._closing = closing
        self._timeout = httpx.Timeout(settings.proxy_answer_seconds, connect=settings.proxy_connect_seconds)
        self._client: httpx.AsyncClient | None = None

    async def run(self, stopping: asyncio.Event) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=10)
        async with httpx.AsyncClient(timeout=self._timeout, limits=limits, trust_env=False) as client:
            self._client = client
            await stopping.wait()
            self._client = None

    async def pass_on(
        self, service: ServiceName, path: str, *, parameters: Mapping[str, str], accept: str, is_endless: bool
    ) -> Streamed:
        """The owner's answer, status and body. Raises Unavailable while the owner is away.

        ``is_endless``: the owner may be silent for as long as it likes.
        """
        if self._client is None:
            raise Unavailable("the service is starting or stopping")
        url = await self._directory.url_of(service)
        if url is None:
            raise Unavailable(f"{service} is away; training goes on without it", retry_after_seconds=2.0)
        request = self._request(self._client, url + path, parameters, accept=accept, is_endless=is_endless)
        try:
            response = await self._client.send(request, stream=True)
        except httpx.TransportError as exc:
            raise Unavailable(f"{service} does not answer", retry_after_seconds=2.0) from exc
        if response.status_code == httpx.codes.UNAUTHORIZED:
            await response.aclose()
            raise Unavailable(f"{service} does not know this service's key", retry_after_seconds=10.0)
        return Streamed(
            _chunks(response, service),
            closing=self._closing,
            status_code=response.status_code,
            media_type=response.headers.get("content-type", "application/octet-stream"),
            headers={name: response.headers[name] for name in _PASSED_ON[1:] if name in response.headers},
        )

    def _request(
        self, client: httpx.AsyncClient, url: str, parameters: Mapping[str, str], *, accept: str, is_endless: bool
    ) -> httpx.Request:
        timeout = {**self._timeout.as_dict(), **({"read": None} if is_endless else {})}
        trace = current_trace()
        headers = {"Accept": accept, "Accept-Encoding": "identity"}
        if trace is not None:
            headers["traceparent"] = str(trace.child())
        request = client.build_request(
            "GET", url, params=httpx.QueryParams(parameters), headers=headers, extensions={"timeout": timeout}
        )
        signed = InternalRequest(method="GET", target=request.url.raw_path.decode())
        request.headers.update(signed.signed_headers(self._signing_key, now_seconds=self._clock.now().timestamp()))
        return request


async def _chunks(response: httpx.Response, service: ServiceName) -> AsyncIterator[bytes]:
    try:
        async for chunk in response.aiter_raw():
            yield chunk
    except httpx.TransportError as exc:
        raise BrokenOff(f"{service} went away in the middle") from exc
    finally:
        await response.aclose()
