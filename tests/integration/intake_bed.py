"""A whole intake on a real database, served over real HTTP, for the tests of this folder."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from schemas.envelope import Draft
from schemas.events.allocation import AllocationClosed, AllocationGranted, Reason, RoleGrant
from schemas.events.capacity import CapacityObserved, Node
from schemas.events.worker import GroupStarted
from schemas.registry import EventData
from schemas.resources import Resources
from schemas.vocabulary import (
    DEFAULT_FLAVOR,
    DEFAULT_TENANT,
    DecisionCode,
    NodeName,
    Outcome,
    ServiceName,
    Topic,
)
from services.intake.settings import IntakeSettings
from services.intake.wiring import build_with
from shared.clock import Clock, SystemClock
from shared.http import serving
from shared.runtime.service import ServiceContext, ServiceParts
from shared.testing.harness import ServiceHarness, harness, publish
from shared.testing.postgres import FreshDatabase

SCRIPT = {"script": "/jobs/train.py"}


@dataclass(slots=True)
class Bed:
    """``http`` talks to the served app; ``fold`` lets the projection catch up with the log."""

    database: FreshDatabase
    http: httpx.AsyncClient
    url: str
    run: ServiceHarness
    parts: ServiceParts
    stopping: asyncio.Event

    async def fold(self) -> None:
        await self.run.drain()

    async def say(self, service: ServiceName, key: str, *data: EventData) -> None:
        """Another service publishes, and the projection reads it."""
        drafts = [Draft(key=key, tenant=DEFAULT_TENANT, data=item) for item in data]
        await publish(self.database, service, *drafts, clock=SystemClock())
        await self.fold()

    def in_process(self) -> httpx.AsyncClient:
        """Without sockets, for a thousand requests at once: httpx's pool of connections is slow at that."""
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.parts.app), base_url="http://intake")

    async def submit(self, **fields: object) -> dict[str, object]:
        answer = await self.http.post("/v1/jobs", json={**SCRIPT, **fields})
        assert answer.status_code == 201, answer.text
        body: dict[str, object] = answer.json()
        return body


@asynccontextmanager
async def intake_bed(
    database: FreshDatabase,
    *,
    settings: IntakeSettings | None = None,
    clock: Clock | None = None,
    runs_writer: bool = True,
) -> AsyncIterator[Bed]:
    made: list[ServiceParts] = []

    def make(context: ServiceContext) -> object:
        made.append(build_with(context, settings or IntakeSettings()))
        return made[0].handler

    stopping = asyncio.Event()
    async with harness(database, ServiceName.INTAKE, make, frozenset(Topic), clock=clock or SystemClock()) as run:
        parts = made[0]
        loops = parts.standing_loops if runs_writer else parts.standing_loops[1:]
        async with asyncio.TaskGroup() as group:
            for loop in loops:
                group.create_task(loop(stopping))
            async with serving(parts.app) as url, _client(url) as http:
                yield Bed(database=database, http=http, url=url, run=run, parts=parts, stopping=stopping)
                stopping.set()


def _client(url: str) -> httpx.AsyncClient:
    timeout = httpx.Timeout(30, pool=120)
    return httpx.AsyncClient(base_url=url, timeout=timeout, limits=httpx.Limits(max_connections=64))


def capacity(*slots: int, revision: int = 1) -> CapacityObserved:
    """A node per number of slots."""
    nodes = tuple(
        Node(
            name=NodeName(f"node-{index}"),
            flavor=DEFAULT_FLAVOR,
            allocatable=Resources({"tidewright.io/slot": 1000 * count, "cpu": 8000, "memory": 16 * 2**30}),
            used_by_others=Resources(),
        )
        for index, count in enumerate(slots)
    )
    return CapacityObserved(revision=revision, nodes=nodes)


def granted(*, epoch: int = 1, attempt: int = 1, workers: int = 1) -> AllocationGranted:
    role = RoleGrant(
        role="worker",
        elastic=True,
        members=workers,
        minimum=1,
        resources=Resources({"tidewright.io/slot": 1000}),
    )
    reason = Reason(code=DecisionCode.ADMITTED_IDLE, detail="room is free")
    return AllocationGranted(epoch=epoch, attempt=attempt, roles=(role,), flavor=DEFAULT_FLAVOR, reason=reason)


def started(*, epoch: int = 1, attempt: int = 1, generation: int = 1, workers: int = 1) -> GroupStarted:
    return GroupStarted(
        epoch=epoch,
        attempt=attempt,
        generation=generation,
        workers=workers,
        resumed_from=None,
        steps_dropped=0,
    )


def closed(*, epoch: int = 2, attempt: int = 1, outcome: Outcome = Outcome.SUCCEEDED) -> AllocationClosed:
    code = DecisionCode.COMPLETED if outcome is Outcome.SUCCEEDED else DecisionCode.CANCELLED
    return AllocationClosed(
        epoch=epoch,
        attempt=attempt,
        outcome=outcome,
        exit_code=0 if outcome is Outcome.SUCCEEDED else None,
        attributed_to=None,
        reason=Reason(code=code, detail="the group says so"),
    )


def fields_of(answer: httpx.Response) -> Sequence[str]:
    return [error["field"] for error in answer.json()["errors"]]
