"""Logs, members and curves: signed requests to the owner, passed on as they stream, 503 while it is away."""

import asyncio
import json
from contextlib import asynccontextmanager

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from schemas.vocabulary import ServiceName
from services.intake.settings import IntakeSettings
from shared.clock import SystemClock
from shared.http import make_app, serving
from shared.signing import InternalRequest
from shared.telemetry.instruments import Instruments
from shared.testing.harness import TEST_KEY, equipped
from tests.integration.intake_bed import intake_bed


class Owner:
    """A service with the internal routes, as far as their shape goes: signature, streaming, failure."""

    def __init__(self, name):
        self.seen = []
        self.go_on = asyncio.Event()
        self.breaks = False
        self.app = make_app("owner", ready=lambda: None, instruments=Instruments(name))
        self._add_routes(self.app)

    def _add_routes(self, app: FastAPI):
        @app.get("/internal/jobs/{job_id}/logs")
        async def logs(job_id: str, request: Request):
            self._check(request)
            return StreamingResponse(self._lines(), media_type="application/x-ndjson")

        @app.get("/internal/jobs/{job_id}/members")
        async def members(job_id: str, request: Request):
            self._check(request)
            return {"items": []}

        @app.get("/internal/jobs/{job_id}/curves")
        async def curves(job_id: str, request: Request):
            self._check(request)
            return JSONResponse({"windows": []}, 200)

    def _check(self, request):
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        InternalRequest(method="GET", target=target).verify(
            TEST_KEY, request.headers, now_seconds=SystemClock().now().timestamp()
        )
        self.seen.append((target, request.headers.get("accept"), request.headers.get("traceparent")))

    async def _lines(self):
        yield b'{"member":"m","cursor":"1","line":"first"}\n'
        await self.go_on.wait()
        if self.breaks:
            raise RuntimeError("the owner dies")
        yield b'{"member":"m","cursor":"2","line":"second"}\n'


@asynccontextmanager
async def owned(database, service):
    """The owner serves, and its lease row says where."""
    owner = Owner(service.value)
    async with serving(owner.app) as url, equipped(database, service, clock=SystemClock()) as equipment:
        assert await equipment.lease.try_acquire(url=url)
        yield owner


async def test_logs_stream_line_by_line(database):
    async with intake_bed(database) as bed, owned(database, ServiceName.EXECUTION) as owner:
        job = await bed.submit()
        path = f"/v1/jobs/{job['id']}/logs"
        parameters = {"follow": "true", "tail": "5", "cursor": "a/b c+&", "member": "x/worker/0/1"}
        async with bed.http.stream("GET", path, params=parameters) as answer:
            assert answer.headers["content-type"] == "application/x-ndjson"
            lines = answer.aiter_lines()
            assert json.loads(await anext(lines))["line"] == "first", "before the second one exists"
            owner.go_on.set()
            assert json.loads(await anext(lines))["line"] == "second"
            assert [line async for line in lines] == []
    [(target, _, trace)] = owner.seen
    assert httpx.URL(target).params == httpx.QueryParams(parameters)
    assert trace is not None


async def test_plain_text_is_asked_for_by_accept(database):
    async with intake_bed(database) as bed, owned(database, ServiceName.EXECUTION) as owner:
        owner.go_on.set()
        job = await bed.submit()
        await bed.http.get(f"/v1/jobs/{job['id']}/logs", headers={"Accept": "text/plain"})
    assert owner.seen[0][1] == "text/plain"


async def test_members_and_curves_come_from_their_owners(database):
    async with (
        intake_bed(database) as bed,
        owned(database, ServiceName.EXECUTION),
        owned(database, ServiceName.METRICS) as metrics,
    ):
        job = await bed.submit()
        assert (await bed.http.get(f"/v1/jobs/{job['id']}/members")).json() == {"items": []}
        assert (await bed.http.get(f"/v1/jobs/{job['id']}/curves?points=7")).json() == {"windows": []}
        assert metrics.seen[0][0].endswith("/curves?points=7")


async def test_an_owner_that_is_away_is_503_with_retry_after(database):
    async with intake_bed(database) as bed:
        job = await bed.submit()
        for part in ("logs", "members", "curves"):
            answer = await bed.http.get(f"/v1/jobs/{job['id']}/{part}")
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
            assert "away" in answer.json()["detail"]


async def test_an_owner_that_does_not_answer_is_503(database):
    settings = IntakeSettings(proxy_connect_seconds=0.2)
    async with (
        intake_bed(database, settings=settings) as bed,
        equipped(database, ServiceName.EXECUTION, clock=SystemClock()) as equipment,
    ):
        assert await equipment.lease.try_acquire(url="http://127.0.0.1:9")
        job = await bed.submit()
        answer = await bed.http.get(f"/v1/jobs/{job['id']}/logs")
        assert answer.status_code == 503
        assert "does not answer" in answer.json()["detail"]


async def test_an_owner_that_dies_in_the_middle_leaves_the_answer_incomplete(database):
    async with intake_bed(database) as bed, owned(database, ServiceName.EXECUTION) as owner:
        owner.breaks = True
        job = await bed.submit()

        async def read():
            async with bed.http.stream("GET", f"/v1/jobs/{job['id']}/logs?follow=true") as answer:
                async for _ in answer.aiter_lines():
                    owner.go_on.set()

        with pytest.raises(httpx.RemoteProtocolError):
            await read()


async def test_the_owner_is_let_go_when_the_reader_goes_away(database):
    async with intake_bed(database) as bed, owned(database, ServiceName.EXECUTION) as owner:
        ended = asyncio.Event()
        lines = owner._lines

        async def watched():
            try:
                async for line in lines():
                    yield line
            finally:
                ended.set()

        owner._lines = watched
        job = await bed.submit()
        async with bed.http.stream("GET", f"/v1/jobs/{job['id']}/logs?follow=true") as answer:
            await anext(answer.aiter_lines())
        async with asyncio.timeout(5):
            await ended.wait()


async def test_following_ends_in_order_at_the_stop(database):
    async with intake_bed(database) as bed, owned(database, ServiceName.EXECUTION):
        job = await bed.submit()
        async with bed.http.stream("GET", f"/v1/jobs/{job['id']}/logs?follow=true") as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            bed.stopping.set()
            async with asyncio.timeout(5):
                assert [line async for line in lines] == []
