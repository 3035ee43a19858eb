"""The app that every service has, over real sockets: problems, limits, readiness, metrics, trace context."""

import asyncio
import socket
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field

from shared.errors import Conflict, Rejected, Unavailable
from shared.http import add_readiness, bind, make_app, run_http, serving
from shared.problems import parse_body
from shared.settings import SettingsError
from shared.telemetry.instruments import Instruments
from shared.telemetry.trace import current_trace

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    password: int = 0


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    size: int = Field(ge=1, le=10)
    inner: Inner = Inner()


def app_with_routes(instruments: Instruments) -> FastAPI:
    app = make_app("test", ready=lambda: None, instruments=instruments, body_bytes_max=2_000)

    @app.get("/raise/{kind}")
    async def raise_it(kind: str) -> None:
        raise {
            "rejected": Rejected(422, "too_many", "too many workers", field="/workers/max", way_out="at most 8"),
            "missing": Rejected(404, "no_such_job", "there is no job x"),
            "conflict": Conflict("lost the race"),
            "unavailable": Unavailable("the database is down", retry_after_seconds=3),
            "crash": RuntimeError("secret of the house"),
        }[kind]

    @app.post("/bodies")
    async def bodies(request: Request) -> dict[str, int]:
        return {"size": parse_body(Body, await request.body()).size}

    @app.get("/numbers")
    async def numbers(limit: int) -> dict[str, str]:
        return {"trace": str(current_trace()), "limit": str(limit)}

    return app


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with serving(app_with_routes(Instruments("test"))) as url, httpx.AsyncClient(base_url=url) as client:
        yield client


def is_problem(response: httpx.Response, status: int, code: str) -> bool:
    assert response.headers["content-type"] == "application/problem+json"
    body = response.json()
    assert body["status"] == response.status_code
    return (response.status_code, body["type"]) == (status, f"urn:tidewright:problem:{code}")


async def test_errors_become_problems(client: httpx.AsyncClient) -> None:
    rejected = await client.get("/raise/rejected")
    assert is_problem(rejected, 422, "too_many")
    assert rejected.json()["errors"] == [
        {"field": "/workers/max", "detail": "too many workers", "way_out": "at most 8"}
    ]
    assert is_problem(await client.get("/raise/missing"), 404, "no_such_job")
    assert is_problem(await client.get("/raise/conflict"), 409, "conflict")
    unavailable = await client.get("/raise/unavailable")
    assert is_problem(unavailable, 503, "unavailable")
    assert unavailable.headers["retry-after"] == "3"
    assert is_problem(await client.get("/nowhere"), 404, "not_found")
    wrong_method = await client.delete("/bodies")
    assert is_problem(wrong_method, 405, "method_not_allowed")
    assert wrong_method.headers["allow"] == "POST"
    crash = await client.get("/raise/crash")
    assert is_problem(crash, 500, "internal_error")
    assert "secret of the house" not in crash.text


@pytest.mark.parametrize(
    ("body", "field", "way_out"),
    [
        ('{"size": 0}', "/size", "at least 1"),
        ('{"size": 11}', "/size", "at most 10"),
        ('{"size": "4"}', "/size", "an integer"),
        ("{}", "/size", "this field is required"),
        ('{"size": 1, "sice": 2}', "/sice", "known fields: inner, size"),
        ('{"size": 1, "inner": {"password": "hunter2"}}', "/inner/password", "an integer"),
        ('{"size": 1, "inner": {"pass/w~d": "hunter2"}}', "/inner/pass~1w~0d", "known fields: password"),
    ],
)
async def test_invalid_fields_are_named_and_values_are_not_echoed(
    client: httpx.AsyncClient, body: str, field: str, way_out: str
) -> None:
    answer = await client.post("/bodies", content=body)
    assert is_problem(answer, 422, "invalid_request")
    (error,) = answer.json()["errors"]
    assert (error["field"], error["way_out"]) == (field, way_out)
    assert "hunter2" not in answer.text


async def test_what_is_no_json_is_400(client: httpx.AsyncClient) -> None:
    for body in (b"", b"{", b"\xff\xfe", b'{"size": 1'):
        assert is_problem(await client.post("/bodies", content=body), 400, "malformed_json"), body


async def test_query_parameters_are_named_too(client: httpx.AsyncClient) -> None:
    answer = await client.get("/numbers", params={"limit": "many"})
    assert is_problem(answer, 422, "invalid_request")
    assert answer.json()["errors"][0]["field"] == "/limit"


async def test_large_bodies_are_refused_announced_or_not(client: httpx.AsyncClient) -> None:
    assert is_problem(await client.post("/bodies", content=b"x" * 2_001), 413, "body_too_large")

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(30):
            yield b"x" * 100

    assert is_problem(await client.post("/bodies", content=chunks()), 413, "body_too_large")
    assert (await client.post("/bodies", content='{"size": 1}'.ljust(2_000))).status_code == 200


async def test_trace_context_is_taken_over_or_made(client: httpx.AsyncClient) -> None:
    taken = (await client.get("/numbers?limit=1", headers={"traceparent": TRACE})).json()["trace"]
    assert taken.split("-")[1] == TRACE.split("-")[1]
    assert taken.split("-")[2] != TRACE.split("-")[2]
    made = {(await client.get("/numbers?limit=1")).json()["trace"] for _ in range(2)}
    assert len(made) == 2


async def test_readiness_tells_the_reason_and_metrics_count_requests() -> None:
    instruments = Instruments("test")
    app = app_with_routes(instruments)
    reasons: list[str | None] = ["the database does not answer"]
    add_readiness(app, lambda: reasons[0])
    async with serving(app) as url, httpx.AsyncClient(base_url=url) as client:
        assert is_problem(await client.get("/readyz"), 503, "not_ready")
        assert (await client.get("/readyz")).json()["detail"] == "the database does not answer"
        assert (await client.get("/livez")).status_code == 200
        reasons[0] = None
        assert (await client.get("/readyz")).json() == {"status": "ready"}
        await client.get("/raise/missing")
        text = (await client.get("/metrics")).text
    assert 'tidewright_test_http_request_seconds_count{method="GET",route="/raise/{kind}",status="404"} 1.0' in text


async def test_stopping_lets_requests_under_way_finish() -> None:
    app = make_app("test", ready=lambda: None, instruments=Instruments("test"))
    entered, stopping = asyncio.Event(), asyncio.Event()

    @app.get("/slow")
    async def slow() -> str:
        entered.set()
        await asyncio.sleep(0.3)
        return "done"

    bound = bind("127.0.0.1", 0)
    async with asyncio.TaskGroup() as group:
        served = group.create_task(run_http(app, bound, stopping))
        async with httpx.AsyncClient(base_url=bound.url()) as client:
            answer = group.create_task(client.get("/slow"))
            await entered.wait()
            stopping.set()
            assert (await answer).json() == "done"
            await served
            with pytest.raises(httpx.ConnectError):
                await client.get("/livez")


async def test_a_server_that_is_cancelled_leaves_no_socket_to_the_event_loop() -> None:
    """Its number is used again by the next connection, which must then be served."""
    stopping = asyncio.Event()
    for _ in range(3):
        bound = bind("127.0.0.1", 0)
        app = make_app("test", ready=lambda: None, instruments=Instruments("test"))
        async with asyncio.TaskGroup() as group:
            served = group.create_task(run_http(app, bound, stopping))
            async with httpx.AsyncClient(base_url=bound.url()) as client:
                assert (await client.get("/livez")).status_code == 200
            served.cancel()
        with socket.create_server(("127.0.0.1", 0)) as other:
            async with asyncio.timeout(5):
                reader, writer = await asyncio.open_connection(*other.getsockname())
                connection, _ = other.accept()
                connection.sendall(b"hello")
                assert await reader.read(5) == b"hello"
                writer.close()
                connection.close()


def test_a_taken_port_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(SettingsError, match=f"cannot listen on 127.0.0.1:{port}"):
            bind("127.0.0.1", port)
