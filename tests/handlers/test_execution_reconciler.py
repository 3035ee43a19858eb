"""The reconciler on real Postgres, whose answers to its commits are lost: what was said once is not said again."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from integration.execution_bed import roles
from properties.execution_world import submitted

from schemas.events.allocation import AllocationEvicted, AllocationGranted, Reason
from schemas.events.worker import GroupEnded
from schemas.vocabulary import DEFAULT_FLAVOR, DecisionCode, ServiceName, Topic
from services.execution.wiring import build
from shared.clock import SystemClock
from shared.errors import Unavailable
from shared.runtime.service import Handler, Lease, ServiceContext, ServiceParts, Transaction
from shared.testing.harness import draft, harness, read_data
from shared.testing.postgres import FreshDatabase

WHY = Reason(code=DecisionCode.CANCELLED, detail="for a test")


class LosesAnswers:
    """The real lease; after its commit of an end, the answer and the next transactions are lost."""

    def __init__(self, lease: Lease, *, away: int) -> None:
        self._lease = lease
        self._away = away
        self.lost = 0

    @property
    def is_held(self) -> bool:
        return self._lease.is_held

    @property
    def term(self) -> int:
        return self._lease.term

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        if 0 < self.lost <= self._away:
            self.lost += 1
            raise Unavailable("the database does not answer")
        async with self._lease.transaction() as tx:
            yield tx
            answer_is_lost = self.lost == 0 and any(isinstance(d.data, GroupEnded) for d in tx.drafts)
        if answer_is_lost:
            self.lost = 1
            raise Unavailable("the connection broke after the commit")


async def test_a_commit_of_unknown_outcome_is_read_again_before_anything_else_is_decided(
    database: FreshDatabase, tmp_path: Path
) -> None:
    """Postgres stays away after it: reading again fails at first, and memory would end the attempt twice."""
    parts: list[ServiceParts] = []
    leases: list[LosesAnswers] = []

    def make(context: ServiceContext) -> Handler:
        leases.append(LosesAnswers(context.lease, away=1))
        parts.append(build(replace(context, lease=leases[0])))
        return parts[0].handler

    consumes = (Topic.JOB, Topic.ALLOCATION)
    async with harness(
        database, ServiceName.EXECUTION, make, consumes, clock=SystemClock(), state_directory=tmp_path
    ) as service:
        granted = AllocationGranted(epoch=1, attempt=1, roles=roles(1), flavor=DEFAULT_FLAVOR, reason=WHY)
        evicted = AllocationEvicted(epoch=2, attempt=1, grace_seconds=1.0, reason=WHY, requeue=False)
        await service.publish(ServiceName.INTAKE, draft(submitted(), "j1"))
        await service.publish(ServiceName.QUEUEING, draft(granted, "j1"), draft(evicted, "j1"))
        await service.drain()
        stopping = asyncio.Event()
        reconciler = next(loop for loop in parts[0].loops if "Reconciler" in loop.__qualname__)
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            group.create_task(reconciler(stopping))
            while leases[0].lost < 2:
                await asyncio.sleep(0.05)
            await asyncio.sleep(1.5)
            stopping.set()
    assert len(await read_data(database, GroupEnded, "j1")) == 1
