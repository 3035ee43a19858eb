"""Intake as the runtime runs it: ready, serving, projecting by itself, and stopped in order."""

import asyncio
import json
import socket
from contextlib import asynccontextmanager

import httpx

from schemas.vocabulary import ServiceName
from services.intake.wiring import build
from shared.clock import SystemClock
from shared.runtime.installation import Installation
from shared.runtime.run import run_service
from shared.testing.harness import TEST_KEY, draft, publish
from tests.integration.intake_bed import granted


@asynccontextmanager
async def running(database, state_directory, monkeypatch):
    """The service in this process; gives a client and the event that stops it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("TIDE_INTAKE_PORT", str(port))
    installation = Installation(state_directory=state_directory, database_url=database.url, signing_key=TEST_KEY)
    stopping, ready = asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        service = group.create_task(
            run_service(ServiceName.INTAKE, build, installation, stopping, on_ready=lambda _: ready.set())
        )
        async with asyncio.timeout(20):
            await ready.wait()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10) as http:
            yield http, stopping, service
        stopping.set()


async def test_from_submission_to_history_and_an_ordered_stop(database, state_directory, monkeypatch):
    async with running(database, state_directory, monkeypatch) as (http, stopping, service):
        assert (await http.get("/readyz")).status_code == 200
        async with http.stream("GET", "/v1/events", timeout=httpx.Timeout(5, read=20)) as stream:
            lines = stream.aiter_lines()
            job = (await http.post("/v1/jobs", json={"script": "/jobs/train.py"})).json()
            data = await _first(lines, "data: ")
            assert json.loads(data)["subject"] == job["id"]
            await publish(database, ServiceName.QUEUEING, draft(granted(), job["id"]), clock=SystemClock())
            assert json.loads(await _first(lines, "data: "))["type"] == "tide.allocation.granted.v1"
            async with asyncio.timeout(10):
                while (await http.get(f"/v1/jobs/{job['id']}")).json()["phase"] != "Starting":
                    await asyncio.sleep(0.02)
            metrics = (await http.get("/metrics")).text
            assert 'tidewright_intake_submissions_total{answer="created"} 1.0' in metrics
            stopping.set()
            assert [line async for line in lines if line.startswith("data")] == [], "the stream ends completely"
        async with asyncio.timeout(5):
            await service


async def _first(lines, prefix):
    async for line in lines:
        if line.startswith(prefix):
            return line.removeprefix(prefix)
    raise AssertionError("the stream ended")
