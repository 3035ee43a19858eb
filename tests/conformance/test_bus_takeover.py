"""What a reader does when processes change under it, on any carrier: exactly once, whoever stood in mid-batch."""

import asyncio
from collections.abc import Sequence
from datetime import datetime

import pytest

from schemas.envelope import Event
from schemas.registry import EventData
from schemas.vocabulary import ServiceName
from shared.bus.brokers import Brokers
from shared.bus.kafka import KafkaLog
from shared.errors import Conflict, LeaseLost, Unavailable
from shared.runtime.service import Transaction
from shared.testing.clock import FakeClock
from shared.testing.harness import drain, equipped, publish
from shared.testing.postgres import FreshDatabase
from tests.conformance.test_bus_consumer import (
    READER,
    Recorder,
    consumer_of,
    freed,
    quarantined,
    running,
    seen,
    stored,
)

__all__ = ["seen"]
_EXPIRE = "update log.lease set expires_at = now() - interval '1 second' where service = 'scaling'"


class Halting(Recorder):
    """Stands still in the middle of its batch, with its rows written and not committed, until told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.halted, self.goes_on = asyncio.Event(), asyncio.Event()

    async def on_events(self, batch: Sequence[Event[EventData]], *, tx: Transaction, now: datetime) -> None:
        await super().on_events(batch, tx=tx, now=now)
        self.halted.set()
        await self.goes_on.wait()


async def test_there_and_back_within_a_second_while_the_first_stands_in_mid_batch(
    seen: FreshDatabase, brokers: Brokers | None, clock: FakeClock
) -> None:
    """A halts with its batch written, B takes over and is held up by A's rows, A's process comes back and takes it.

    Then the halted batch of A and the one of B end: both are refused, and each event takes effect once.
    """
    halting, b_handler, again_handler = Halting(), Recorder(), Recorder()
    refused: list[str] = []

    async def drained(name: str, equipment, handler: Recorder) -> None:
        try:
            await drain(equipment, consumer_of(equipment, handler, clock))
        except (LeaseLost, Conflict, Unavailable):
            refused.append(name)

    await publish(seen, ServiceName.EXECUTION, *(freed(n, f"j{n % 3}") for n in range(30)))
    async with (
        equipped(seen, READER, clock=clock, brokers=brokers) as a,
        equipped(seen, READER, clock=clock, brokers=brokers) as b,
        equipped(seen, READER, clock=clock, brokers=brokers) as again,
        asyncio.TaskGroup() as group,
    ):
        assert await a.lease.try_acquire(url=None)
        group.create_task(drained("a", a, halting))
        async with asyncio.timeout(10):
            await halting.halted.wait()
        seen.psql(_EXPIRE)
        assert await b.lease.try_acquire(url=None)
        b_task = group.create_task(drained("b", b, b_handler))
        await asyncio.sleep(0.2)
        seen.psql(_EXPIRE)
        assert await again.lease.try_acquire(url=None)
        assert again.lease.term == 3
        halting.goes_on.set()
        await b_task
        await drain(again, consumer_of(again, again_handler, clock))
    assert sorted(refused) == ["a", "b"]
    rows = await stored(seen)
    assert sorted(number for _, number in rows) == list(range(30))
    for key in ("j0", "j1", "j2"):
        own = [number for k, number in rows if k == key]
        assert own == sorted(own)


async def test_a_relay_that_dies_between_sending_and_saving_repeats_nothing_to_handlers(
    seen: FreshDatabase, brokers: Brokers | None, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dies(*_: object) -> None:
        raise Unavailable("killed before it saved its position")

    async with running(seen, brokers, clock, Recorder()) as service:
        relay = service.equipment.relay
        for start in (0, 20):
            await publish(seen, ServiceName.EXECUTION, *(freed(n, f"j{n % 3}") for n in range(start, start + 20)))
            if relay is not None:
                with monkeypatch.context() as dying:
                    dying.setattr(relay, "_save", dies)
                    with pytest.raises(Unavailable):
                        await relay.drain()
                await service.consumer.drain()
            await service.drain()
        log = service.equipment.log
        if isinstance(log, KafkaLog):
            assert log._skipped.labels("repeated")._value.get() == 40, "they did come twice"
    assert sorted(number for _, number in await stored(seen)) == list(range(40))


async def test_fields_of_a_newer_version_are_no_hindrance(
    seen: FreshDatabase, brokers: Brokers | None, clock: FakeClock
) -> None:
    async with running(seen, brokers, clock, Recorder()) as service:
        await service.publish(ServiceName.EXECUTION, freed(1))
        seen.psql(
            "update log.outbox set payload = convert_to((convert_from(payload, 'utf8')::jsonb"
            " || '{\"newer\": {\"field\": [1]}}')::text, 'utf8')"
        )
        await service.drain()
    assert await stored(seen) == [("j1", 1)]
    assert await quarantined(seen) == []
