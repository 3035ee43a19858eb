"""What an event costs on its way to a reader, on both carriers, by how many the log holds.

``python -m loadtests.event_log [--quick] [--json FILE]``. Real Postgres and a real broker; CPU time of this process
beside the rates, since others may use the machine. Reading should cost the same however long the log is.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import uvloop

from schemas.envelope import Draft
from schemas.events.job import JobSpec, JobSubmitted, RequestRegister, RoleRequest
from schemas.resources import SLOT, Resources
from schemas.vocabulary import (
    DEFAULT_QUEUE,
    DEFAULT_TENANT,
    DEFAULT_USER,
    Mode,
    PriorityClass,
    ServiceName,
    Topic,
)
from shared.bus.brokers import Brokers
from shared.bus.cloudevents import to_message
from shared.bus.log import BEGINNING, Log, Partition, Position, Record, positions_after, to_event
from shared.bus.topics import ensure_topics
from shared.clock import SystemClock
from shared.runtime.context import Equipment
from shared.testing.harness import equipped, publish
from shared.testing.kafka import running_kafka
from shared.testing.postgres import FreshDatabase, database_server

PAGE: Final = 500
"""As a service reads (``batch_events_max``)."""
READ_MAX: Final = 10_000
"""Read are the last ones of the log, so that a long log costs no longer run."""
EVENT: Final = JobSubmitted(
    tenant=DEFAULT_TENANT,
    user=DEFAULT_USER,
    queue=DEFAULT_QUEUE,
    request=RequestRegister(version=1, priority=PriorityClass.LOW, workers_min=1, workers_max=8, workers=2),
    roles=(RoleRequest(name="worker", elastic=True, count=2, resources=Resources({SLOT: 1000})),),
    spec=JobSpec(name="load", mode=Mode.LIVE, script="load.py"),
)


class Cost(NamedTuple):
    """CPU microseconds of this process for an event, and events a second by the clock."""

    cpu: float
    rate: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="1,000 and 10,000 events, read three times")
    parser.add_argument("--json", type=Path, help="where results go")
    arguments = parser.parse_args()
    sizes, repeats = ([1_000, 10_000], 3) if arguments.quick else ([1_000, 10_000, 100_000], 5)
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; pages of {PAGE} events")
    print("CPU of this process in us an event, median (min-max) of repeats; events/s by the clock, median")
    results: dict[str, dict[str, dict[str, float]]] = {}
    with database_server() as server, running_kafka() as kafka:
        for size in sizes:
            with server.database() as database:
                brokers = Brokers(servers=kafka.servers, prefix=f"load{size}.")
                found = uvloop.run(measure(database, brokers, size=size, repeats=repeats))
            results[str(size)] = found
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"results": results}, indent=2))


async def measure(
    database: FreshDatabase, brokers: Brokers, *, size: int, repeats: int
) -> dict[str, dict[str, float]]:
    await ensure_topics(brokers)
    for start in range(0, size, 5_000):
        numbers = range(start, min(size, start + 5_000))
        drafts = [Draft(key=f"j{number:07}", tenant=DEFAULT_TENANT, data=EVENT) for number in numbers]
        await publish(database, ServiceName.INTAKE, *drafts)
    results: dict[str, dict[str, float]] = {}
    clock = SystemClock()
    async with (
        equipped(database, ServiceName.METRICS, clock=clock) as postgres,
        equipped(database, ServiceName.SCALING, clock=clock, brokers=brokers) as kafka,
    ):
        relayed = await timed(partial(relay_all, kafka), size)
        tell(results, size, "relay to Kafka", [relayed])
        records = await read_all(postgres.log, size)
        last = records[-READ_MAX:]
        for name, log in (("read from Postgres", postgres.log), ("read from Kafka", kafka.log)):
            everything = records if log is postgres.log else await read_all(log, size)
            begins = positions_after(everything[:-READ_MAX], {record.partition: BEGINNING for record in everything})
            reading = partial(read_from, log, begins, len(last))
            tell(results, size, name, [await timed(reading, len(last)) for _ in range(repeats)])
        for name, convert in (("decode", to_event), ("encode for Kafka", to_message)):
            converting = partial(convert_all, convert, last)
            tell(results, size, name, [await timed(converting, len(last)) for _ in range(repeats)])
    return results


async def relay_all(equipment: Equipment) -> None:
    assert equipment.relay is not None
    await equipment.relay.drain()


async def read_all(log: Log, size: int) -> list[Record]:
    return await read_from(log, dict.fromkeys(log.partitions([Topic.JOB]), BEGINNING), size)


async def read_from(log: Log, positions: Mapping[Partition, Position], count: int) -> list[Record]:
    """Page after page, as a service reads, waiting for what is on its way."""
    found: list[Record] = []
    at = {**dict.fromkeys(log.partitions([Topic.JOB]), BEGINNING), **positions}
    async with asyncio.timeout(120):
        while len(found) < count:
            page = await log.read(at, limit=PAGE)
            at = dict(page.positions)
            found += page.records
            if not page.records:
                await log.wait(seen=await log.wait(seen=-1, seconds=0), seconds=0.25)
    return found


async def convert_all(convert: Callable[[Record], object], records: Sequence[Record]) -> None:
    for record in records:
        convert(record)


async def timed(work: Callable[[], Awaitable[object]], events: int) -> Cost:
    began, cpu = time.perf_counter(), time.process_time()
    await work()
    return Cost((time.process_time() - cpu) / events * 1e6, events / (time.perf_counter() - began))


def tell(results: dict[str, dict[str, float]], size: int, what: str, costs: Sequence[Cost]) -> None:
    cpu = [cost.cpu for cost in costs]
    rate = statistics.median(cost.rate for cost in costs)
    results[what.replace(" ", "_").lower()] = {"cpu_microseconds": statistics.median(cpu), "per_second": rate}
    print(
        f"{size:>8} events  {what:<20} {statistics.median(cpu):7.1f} ({min(cpu):.1f}-{max(cpu):.1f})  {rate:>9,.0f}/s"
    )


if __name__ == "__main__":
    main()
