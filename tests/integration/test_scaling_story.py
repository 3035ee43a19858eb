"""Metrics and scaling as the runtime runs them: reports over HTTP become windows, windows a proposal."""

import asyncio

import httpx
from metrics_bed import authorization, report
from unit.scaling_builders import granted, group_started, submitted

from schemas.events.metric import MetricWindow
from schemas.events.scaling import ScalingProposed
from schemas.vocabulary import ServiceName
from services.metrics import wiring as metrics
from services.scaling import wiring as scaling
from shared.clock import SystemClock
from shared.runtime.installation import Installation
from shared.runtime.run import run_service
from shared.testing.harness import TEST_KEY, draft, publish, read_data, read_rows

SETTINGS = {
    "TIDE_METRICS_EMIT_SECONDS": "0.5",
    "TIDE_METRICS_LATENESS_SECONDS": "0.3",
    "TIDE_METRICS_CLOSE_INTERVAL_SECONDS": "0.02",
    "TIDE_SCALING_WINDOW_SECONDS": "1",
    "TIDE_SCALING_COOLDOWN_SECONDS": "0.5",
}


async def tell(database, service, *data):
    await publish(database, service, *[draft(item) for item in data], clock=SystemClock())


async def test_from_a_trainers_report_to_a_proposal(database, tmp_path, monkeypatch):
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    installation = Installation(state_directory=tmp_path, database_url=database.url, signing_key=TEST_KEY)
    await tell(database, ServiceName.INTAKE, submitted())
    await tell(database, ServiceName.QUEUEING, granted())
    await tell(database, ServiceName.EXECUTION, group_started())
    stopping, urls = asyncio.Event(), asyncio.Queue()
    async with asyncio.TaskGroup() as group:
        group.create_task(
            run_service(ServiceName.METRICS, metrics.build, installation, stopping, on_ready=urls.put_nowait)
        )
        group.create_task(run_service(ServiceName.SCALING, scaling.build, installation, stopping))
        try:
            async with asyncio.timeout(20), httpx.AsyncClient(base_url=await urls.get()) as client:
                proposals = await report_until_proposed(client, database)
        finally:
            stopping.set()
    assert [(p.epoch, p.workers) for p in proposals] == [(1, 4)]
    assert proposals[0].reason.startswith("utilisation 93 % (wall) above 85 % for 1 s: 2 → 4")
    complete = [w for w in await read_data(database, MetricWindow) if w.members_reporting == 2]
    assert len(complete) >= 2
    assert complete[-1].samples_per_second == 200.0
    urls_left = await read_rows(database, "select url from log.lease where service in ('metrics', 'scaling')")
    assert urls_left == [{"url": None}, {"url": None}], "both leases were given up"


async def report_until_proposed(client, database):
    """Two workers report five times a second."""
    for number in range(1, 80):
        await asyncio.sleep(0.2)
        for rank in (0, 1):
            parts = {name: value / 5 for name, value in report().items() if name.endswith("_seconds")}
            body = report(rank=rank, sequence=number, step=number, steps=2, samples=20, **parts)
            answer = await client.post("/v1/samples", json=body, headers=authorization(body))
            assert answer.status_code == 202, answer.text
        proposals = await read_data(database, ScalingProposed)
        if proposals:
            return proposals
    return []
