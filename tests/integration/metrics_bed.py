"""Metrics on a real database with its real route, on a clock that stands still; a second bed is a restart."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from schemas.events.metric import MetricWindow
from schemas.vocabulary import ServiceName
from services.metrics.handlers import MetricsHandler
from services.metrics.settings import MetricsSettings
from services.metrics.wiring import CONSUMES, build
from shared.http import serving
from shared.runtime.service import ServiceContext, ServiceParts
from shared.signing import InternalRequest, sample_token
from shared.testing.clock import FakeClock
from shared.testing.harness import TEST_KEY, ServiceHarness, draft, harness, read_data
from shared.testing.postgres import FreshDatabase


def report(**changes: Any) -> dict[str, Any]:
    """A second of a worker that is busy for 93 % of it."""
    job_id, rank = changes.get("job_id", "j1"), changes.get("rank", 0)
    values = {
        "job_id": job_id,
        "attempt": 1,
        "member": f"{job_id}/worker/{rank}/1",
        "generation": 1,
        "rank": rank,
        "world": 2,
        "sequence": 1,
        "wall_seconds": 1.0,
        "step_seconds": 0.83,
        "sync_seconds": 0.1,
        "input_wait_seconds": 0.05,
        "steps": 10,
        "samples": 100,
        "loss": 0.5,
        "step": 10,
        "total_steps": 1000,
        "utilisation": None,
        "measure": "wall",
    }
    return {**values, **changes}


def authorization(body: dict[str, Any]) -> dict[str, str]:
    return {"Authorization": f"Bearer {sample_token(TEST_KEY, str(body['job_id']), body['attempt'])}"}


@dataclass
class MetricsBed:
    base: ServiceHarness
    parts: ServiceParts
    client: httpx.AsyncClient
    clock: FakeClock

    @property
    def handler(self) -> MetricsHandler:
        assert isinstance(self.parts.handler, MetricsHandler)
        return self.parts.handler

    async def tell(self, *data: Any, key: str = "j1", service: ServiceName = ServiceName.EXECUTION) -> None:
        """As if another service had published this; then metrics handles it."""
        await self.base.publish(service, *[draft(item, key) for item in data])
        await self.base.drain()

    async def post(self, **changes: Any) -> httpx.Response:
        body = report(**changes)
        return await self.client.post("/v1/samples", json=body, headers=authorization(body))

    async def verdict(self, **changes: Any) -> str:
        answer = await self.post(**changes)
        assert answer.status_code == 202, answer.text
        return str(answer.json()["verdict"])

    async def seconds(self, count: int, *, first: int = 1, ranks: tuple[int, ...] = (0, 1), **changes: Any) -> None:
        """So many seconds pass, with a report of each of these ranks at the end of each; then what is due is done."""
        for second in range(first, first + count):
            self.clock.advance(1.0)
            for rank in ranks:
                found = await self.verdict(rank=rank, sequence=second, step=10 * second, **changes)
                assert found == "counted", found
            await self.base.drain()

    async def windows(self, key: str = "j1") -> list[MetricWindow]:
        return await read_data(self.base.database, MetricWindow, key)

    async def curves(self, key: str = "j1") -> httpx.Response:
        target = f"/internal/jobs/{key}/curves"
        signed = InternalRequest(method="GET", target=target)
        headers = signed.signed_headers(TEST_KEY, now_seconds=self.clock.now().timestamp())
        return await self.client.get(target, headers=headers)


@asynccontextmanager
async def metrics_bed(database: FreshDatabase, clock: FakeClock, **settings: Any) -> AsyncIterator[MetricsBed]:
    made: list[ServiceParts] = []
    given = MetricsSettings(lease_seconds=100_000.0, write_interval_seconds=0.0, **settings)

    def make(context: ServiceContext) -> MetricsHandler:
        made.append(build(context, given))
        handler = made[0].handler
        assert isinstance(handler, MetricsHandler)
        return handler

    async with harness(database, ServiceName.METRICS, make, CONSUMES, clock=clock, settings=given) as base:
        await base.consumer.load()
        stopping = asyncio.Event()
        async with asyncio.TaskGroup() as group, serving(made[0].app) as url:
            group.create_task(made[0].loops[0](stopping))
            async with httpx.AsyncClient(base_url=url) as client:
                yield MetricsBed(base=base, parts=made[0], client=client, clock=clock)
            stopping.set()
