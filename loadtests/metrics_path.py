"""What a report costs on its way over HTTP into Postgres, and what a window costs in metrics and in scaling.

Prints CPU time beside the rates: on a machine that others use, only CPU time can be compared. Postgres runs with
fsync. ``python -m loadtests.metrics_path [jobs] [workers] [rounds]``
"""

import asyncio
import itertools
import json
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import uvloop

from schemas.envelope import Draft
from schemas.events.allocation import AllocationGranted, Reason, RoleGrant
from schemas.events.job import JobSpec, JobSubmitted, RequestRegister, RoleRequest
from schemas.events.metric import MetricWindow
from schemas.events.worker import GroupStarted
from schemas.registry import EventData
from schemas.resources import SLOT, Resources
from schemas.vocabulary import (
    DEFAULT_FLAVOR,
    DEFAULT_QUEUE,
    DEFAULT_TENANT,
    DEFAULT_USER,
    DecisionCode,
    Mode,
    PriorityClass,
    ServiceName,
    UtilisationMeasure,
)
from services.metrics import wiring as metrics
from services.metrics.settings import MetricsSettings
from services.scaling import wiring as scaling
from services.scaling.settings import ScalingSettings
from shared.clock import Clock, SystemClock
from shared.db.embedded import EmbeddedPostgres
from shared.db.migrate import migrate
from shared.http import serving
from shared.runtime.service import Handler, ServiceContext, ServiceParts
from shared.signing import sample_token
from shared.testing.clock import FakeClock
from shared.testing.harness import TEST_KEY, ServiceHarness, harness, publish
from shared.testing.postgres import FreshDatabase

CONNECTIONS: Final = 64
ONE: Final = Resources({SLOT: 1000})


def main(arguments: Sequence[str]) -> None:
    jobs, workers, rounds = (int(value) for value in (*arguments, *("1000", "4", "3")[len(arguments) :]))
    with tempfile.TemporaryDirectory(prefix="tide-load-", dir="/var/tmp") as folder:
        Path(folder).chmod(0o711)
        state = Path(folder) / "state"
        state.mkdir(mode=0o711)
        server = EmbeddedPostgres(state=state)
        server.start()
        try:
            uvloop.run(measure(server, jobs=jobs, workers=workers, rounds=rounds))
        finally:
            server.stop()


async def measure(server: EmbeddedPostgres, *, jobs: int, workers: int, rounds: int) -> None:
    server.psql("create database load", "postgres")
    database = FreshDatabase(name="load", url=server.url_of("load"), server=server)
    await migrate(database.url)
    names = [f"j{number:06}" for number in range(jobs)]
    await announce(database, names, workers)
    print(f"{jobs} jobs of {workers} workers, {rounds} rounds of reports, {CONNECTIONS} connections")
    await measure_route(database, names, workers=workers, rounds=rounds)
    await measure_windows(database, jobs=jobs, workers=workers)


async def announce(database: FreshDatabase, names: Sequence[str], workers: int) -> None:
    """The jobs as the other services tell of them."""
    reason = Reason(code=DecisionCode.ADMITTED_IDLE, detail="there was room")
    request = RequestRegister(
        version=1, priority=PriorityClass.LOW, workers_min=1, workers_max=4 * workers, workers=workers
    )
    submitted = JobSubmitted(
        tenant=DEFAULT_TENANT,
        user=DEFAULT_USER,
        queue=DEFAULT_QUEUE,
        request=request,
        roles=(RoleRequest(name="worker", elastic=True, count=workers, resources=ONE),),
        spec=JobSpec(name="load", mode=Mode.LIVE, script="load.py"),
    )
    role = RoleGrant(role="worker", elastic=True, members=workers, minimum=1, resources=ONE)
    granted = AllocationGranted(epoch=1, attempt=1, roles=(role,), flavor=DEFAULT_FLAVOR, reason=reason)
    started = GroupStarted(epoch=1, attempt=1, generation=1, workers=workers, resumed_from=None, steps_dropped=0)
    told: tuple[tuple[ServiceName, EventData], ...] = (
        (ServiceName.INTAKE, submitted),
        (ServiceName.QUEUEING, granted),
        (ServiceName.EXECUTION, started),
    )
    for service, data in told:
        await publish(database, service, *[Draft(key=name, tenant=DEFAULT_TENANT, data=data) for name in names])


# -- the route ------------------------------------------------------------------------------------------------


async def measure_route(database: FreshDatabase, names: Sequence[str], *, workers: int, rounds: int) -> None:
    made: list[ServiceParts] = []
    settings = MetricsSettings()

    def make(context: ServiceContext) -> Handler:
        made.append(metrics.build(context, settings))
        return made[0].handler

    clock: Clock = SystemClock()
    async with harness(database, ServiceName.METRICS, make, metrics.CONSUMES, clock=clock, settings=settings) as base:
        await base.drain()
        stopping, renewing = asyncio.Event(), asyncio.Event()
        async with asyncio.TaskGroup() as group, serving(made[0].app) as url:
            group.create_task(write_reports(made[0], stopping))
            group.create_task(base.equipment.lease.run_renewal(renewing))
            posts = list(all_posts(names, workers=workers, rounds=rounds))
            began, cpu = time.perf_counter(), cpu_seconds()
            load = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "loadtests.metrics_path",
                "--post",
                url.rpartition(":")[2],
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            out, _ = await load.communicate(b"".join(posts))
            wall = time.perf_counter() - began
            used = cpu_seconds() - cpu
            stopping.set()
            renewing.set()
        result = json.loads(out)
        counted = base.context.instruments.counter("samples_total", "", ("verdict",))
        found = [sample for metric in counted.collect() for sample in metric.samples]
        verdicts = {s.labels["verdict"]: int(s.value) for s in found if s.name.endswith("_total")}
    print(
        f"route: {len(posts) / wall:,.0f} reports/s, {used / len(posts) * 1e6:.0f} µs of metrics' CPU each, "
        f"answers p50/p99 {result['p50']:.0f}/{result['p99']:.0f} ms; {verdicts}"
    )


async def write_reports(parts: ServiceParts, stopping: asyncio.Event) -> None:
    await parts.loops[0](stopping)


def all_posts(names: Sequence[str], *, workers: int, rounds: int) -> Any:
    tokens = {name: sample_token(TEST_KEY, name, 1) for name in names}
    for sequence, name, rank in itertools.product(range(1, rounds + 1), names, range(workers)):
        body = json.dumps(
            {
                "job_id": name,
                "attempt": 1,
                "member": f"{name}/worker/{rank}/1",
                "generation": 1,
                "rank": rank,
                "world": workers,
                "sequence": sequence,
                "wall_seconds": 1.0,
                "step_seconds": 0.83,
                "sync_seconds": 0.1,
                "input_wait_seconds": 0.05,
                "steps": 10,
                "samples": 100,
                "loss": 0.5,
                "step": 10 * sequence,
                "total_steps": 100_000,
                "utilisation": None,
                "measure": "wall",
            }
        ).encode()
        head = (
            f"POST /v1/samples HTTP/1.1\r\nHost: m\r\nAuthorization: Bearer {tokens[name]}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode()
        yield len(head + body).to_bytes(4, "big") + head + body


async def post_all(port: int) -> None:
    """The load generator, a process of its own: one request at a time on each connection."""
    data, place, posts = sys.stdin.buffer.read(), 0, []
    while place < len(data):
        size = int.from_bytes(data[place : place + 4], "big")
        posts.append(data[place + 4 : place + 4 + size])
        place += 4 + size
    left, milliseconds = iter(posts), []

    async def use_connection() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for post in left:
            began = time.perf_counter()
            writer.write(post)
            answer = await reader.readuntil(b"}")
            assert b" 202 " in answer[:16], answer
            milliseconds.append((time.perf_counter() - began) * 1000)
        writer.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(CONNECTIONS):
            group.create_task(use_connection())
    milliseconds.sort()
    result = {"p50": milliseconds[len(milliseconds) // 2], "p99": milliseconds[len(milliseconds) * 99 // 100]}
    sys.stdout.write(json.dumps(result))


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


# -- windows --------------------------------------------------------------------------------------------------


async def measure_windows(database: FreshDatabase, *, jobs: int, workers: int) -> None:
    """Every job closes a window at once; then scaling reads them all."""
    clock = FakeClock(SystemClock().now())
    long_lease: Any = {"lease_seconds": 1e6, "batch_events_max": 1_000}
    for service, wiring, settings in (
        (ServiceName.METRICS, metrics, MetricsSettings(**long_lease)),
        (ServiceName.SCALING, scaling, ScalingSettings(**long_lease)),
    ):

        def make(context: ServiceContext, wiring: Any = wiring, settings: Any = settings) -> Handler:
            handler: Handler = wiring.build(context, settings).handler
            return handler

        async with harness(database, service, make, wiring.CONSUMES, clock=clock, settings=settings) as base:
            await drain(base)
            clock.advance(10)
            if service is ServiceName.METRICS:
                await report_costs(base, jobs, "metrics: a window closed, its point, its event")
            else:
                await drain(base)
                await tell_windows(database, clock, jobs, workers)
                await report_costs(base, jobs, "scaling: a window taken in and judged")


async def drain(base: ServiceHarness) -> None:
    await base.drain()


async def tell_windows(database: FreshDatabase, clock: FakeClock, jobs: int, workers: int) -> None:
    window = MetricWindow(
        attempt=1,
        generation=1,
        window_seconds=5.0,
        members_reporting=workers,
        members_expected=workers,
        utilisation=0.93,
        measure=UtilisationMeasure.WALL,
        step_seconds=4.0,
        sync_seconds=0.5,
        input_wait_seconds=0.2,
        idle_seconds=0.3,
        samples_per_second=100.0,
        loss=0.5,
        gradient_noise=None,
        progress=None,
    )
    drafts = [Draft(key=f"j{number:06}", tenant=DEFAULT_TENANT, data=window) for number in range(jobs)]
    await publish(database, ServiceName.METRICS, *drafts, clock=clock)


async def report_costs(base: ServiceHarness, jobs: int, what: str) -> None:
    began, cpu = time.perf_counter(), cpu_seconds()
    batches = await base.drain()
    wall, used = time.perf_counter() - began, cpu_seconds() - cpu
    print(
        f"{what}: {used / jobs * 1e6:.0f} µs of CPU each, {wall * 1000:.0f} ms for {jobs} jobs in {batches} batches"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--post"]:
        uvloop.run(post_all(int(sys.argv[2])))
    else:
        main(sys.argv[1:])
