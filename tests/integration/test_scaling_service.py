"""Scaling through its handler and a real database: proposals, restarts, what is remembered and what is forgotten."""

from contextlib import asynccontextmanager

import pytest
from unit.scaling_builders import (
    allocation_closed,
    changed,
    evicted,
    granted,
    group_changed,
    group_started,
    resized,
    submitted,
    window,
)

from schemas.events.allocation import PendingCount, QueueObserved
from schemas.events.scaling import ScalingProposed
from schemas.vocabulary import Mode, PriorityClass, ServiceName
from services.scaling.core.threshold import KeepReason
from services.scaling.settings import ScalingSettings
from services.scaling.wiring import CONSUMES, build
from shared.settings import SettingsError
from shared.testing.harness import draft, harness, read_data, read_rows

SERVICE_OF = {
    "tide.job.v1": ServiceName.INTAKE,
    "tide.allocation.v1": ServiceName.QUEUEING,
    "tide.worker.v1": ServiceName.EXECUTION,
    "tide.metric.v1": ServiceName.METRICS,
}


class Bed:
    def __init__(self, base, parts, clock):
        self.base, self.parts, self.clock = base, parts, clock

    @property
    def jobs(self):
        return self.parts.handler.jobs

    async def tell(self, *data, key="j1", drain=True):
        for item in data:
            await self.base.publish(SERVICE_OF[item.TOPIC.value], draft(item, key))
        if drain:
            await self.base.drain()

    async def windows(self, count, utilisation=0.93, *, key="j1", **changes):
        for _ in range(count):
            self.clock.advance(changes.get("window_seconds", 5.0))
            await self.tell(window(utilisation, **changes), key=key)

    async def proposals(self, key="j1"):
        return await read_data(self.base.database, ScalingProposed, key)

    def kept(self, reason):
        decisions = self.base.context.instruments.decisions
        return decisions.labels(reason.value if isinstance(reason, KeepReason) else reason)._value.get()


@asynccontextmanager
async def scaling_bed(database, clock, **settings):
    given = ScalingSettings(lease_seconds=100_000.0, window_seconds=20.0, cooldown_seconds=30.0, **settings)
    made = []

    def make(context):
        made.append(build(context, given))
        return made[0].handler

    async with harness(database, ServiceName.SCALING, make, CONSUMES, clock=clock, settings=given) as base:
        await base.consumer.load()
        yield Bed(base, made[0], clock)


async def start(bed, *, key="j1", **changes):
    """A live job of two workers whose cooldown is over."""
    await bed.tell(submitted(**changes), granted(), group_started(), key=key)
    bed.clock.advance(30)


async def test_a_busy_job_is_proposed_to_grow_once(database, clock):
    async with scaling_bed(database, clock) as bed:
        await start(bed)
        await bed.windows(3)
        assert await bed.proposals() == []
        await bed.windows(5)
        (proposal,) = await bed.proposals()
        assert (proposal.epoch, proposal.workers) == (1, 4)
        assert proposal.reason == "utilisation 93 % (wall) above 85 % for 20 s: 2 → 4"
        assert bed.kept("proposed") == 1
        assert bed.kept(KeepReason.ALREADY_PROPOSED) == 4


async def test_a_restart_between_any_two_batches_changes_nothing(database, clock):
    """Registers, streak, cooldown and the last proposal are rows."""
    story = [
        [submitted(), granted()],
        [group_started()],
        *[[window()] for _ in range(8)],
        [resized(epoch=2, workers=4)],
        [group_changed(generation=2, workers=4)],
        *[[window(0.3, generation=2, members_reporting=4, members_expected=4)] for _ in range(8)],
    ]
    for batch in story:
        async with scaling_bed(database, clock) as bed:
            clock.advance(5.0)
            await bed.tell(*batch)
            proposals = await bed.proposals()
    assert [(p.epoch, p.workers) for p in proposals] == [(1, 4), (2, 2)]
    assert proposals[1].reason == "utilisation 30 % (wall) below 75 % for 25 s: 4 → 2"


async def test_a_long_outage_costs_continuity_and_nothing_else(database, clock):
    async with scaling_bed(database, clock) as bed:
        await start(bed)
        await bed.windows(3)
    clock.advance(60)
    async with scaling_bed(database, clock) as bed:
        await bed.windows(3)
        assert await bed.proposals() == []
        await bed.windows(1)
        assert len(await bed.proposals()) == 1


async def test_windows_that_waited_in_the_log_are_stale(database, clock):
    async with scaling_bed(database, clock) as bed:
        await start(bed)
        for _ in range(10):
            await bed.tell(window(0.1), drain=False)
            clock.advance(5)
        clock.advance(60)
        await bed.base.drain()
        assert await bed.proposals() == []
        await bed.windows(3, 0.1)
        assert await bed.proposals() == []


async def test_broken_windows_move_nothing_and_are_counted(database, clock):
    async with scaling_bed(database, clock) as bed:
        await start(bed)
        await bed.windows(3)
        for broken in (None, -0.5, 1.5):
            await bed.windows(1, broken)
            await bed.windows(3)
        await bed.windows(1, members_reporting=1)
        await bed.windows(3)
        assert await bed.proposals() == []
        unusable = bed.base.context.instruments.counter("unusable_windows_total", "", ("cause",))
        assert unusable.labels("incomplete")._value.get() == 1
        assert unusable.labels("out_of_range")._value.get() == 2


async def test_two_jobs_do_not_disturb_each_other(database, clock):
    async with scaling_bed(database, clock) as bed:
        await start(bed)
        await start(bed, key="j2", mode=Mode.FIXED)
        for _ in range(4):
            clock.advance(5)
            await bed.tell(window(), drain=False)
            await bed.tell(window(None), key="j2", drain=False)
            await bed.base.drain()
        assert len(await bed.proposals("j1")) == 1
        assert await bed.proposals("j2") == []


@pytest.mark.parametrize("end", [allocation_closed(), evicted(epoch=2)])
async def test_what_is_not_granted_leaves_memory(database, clock, end):
    async with scaling_bed(database, clock) as bed:
        await start(bed)
        assert list(bed.jobs) == ["j1"]
        await bed.tell(end)
        await bed.windows(8)
        assert bed.jobs == {}
    async with scaling_bed(database, clock) as bed:
        assert bed.jobs == {}


async def test_a_closed_job_stays_closed_and_is_forgotten_later(database, clock):
    async with scaling_bed(database, clock, closed_retention_seconds=100.0) as bed:
        await start(bed)
        await bed.tell(allocation_closed())
        await bed.tell(granted(epoch=9, attempt=9), group_started(attempt=9, generation=9))
        assert bed.jobs == {}
        retention = bed.parts.loops[0].__self__
        assert not await retention._drop_some()
        assert len(await read_rows(database, "select 1 from scaling.jobs")) == 1
        clock.advance(101)
        await retention._drop_some()
        assert await read_rows(database, "select 1 from scaling.jobs") == []


async def test_a_pending_job_costs_a_row_and_no_memory(database, clock):
    async with scaling_bed(database, clock) as bed:
        await bed.tell(submitted(), changed(2, workers_max=3))
        assert bed.jobs == {}
        await bed.tell(granted(), group_started())
        clock.advance(30)
        await bed.windows(4)
        assert [p.workers for p in await bed.proposals()] == [3], "the limits come from the row"


async def test_a_queue_is_no_job(database, clock):
    async with scaling_bed(database, clock) as bed:
        observed = QueueObserved(
            pending=(PendingCount(priority=PriorityClass.LOW, jobs=1),),
            head=None,
            head_code=None,
            head_detail="",
            starts_per_minute=0.0,
        )
        await bed.tell(observed, key="default")
        assert await read_rows(database, "select 1 from scaling.jobs") == []


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("TARGET", "0.9", "target must lie in the band"),
        ("BAND_LOW", "nan", "BAND_LOW"),
        ("BAND_HIGH", "1.2", "BAND_HIGH"),
        ("WINDOW_SECONDS", "0", "WINDOW_SECONDS"),
        ("COOLDOWN_SECONDS", "-1", "COOLDOWN_SECONDS"),
        ("GROWTH", "triple", "GROWTH"),
        ("GROWTH_FACTOR_MAX", "0.5", "GROWTH_FACTOR_MAX"),
        ("WINDOW_SECOND", "5", "there is no such setting"),
    ],
)
def test_bad_settings_are_named(monkeypatch, name, value, words):
    monkeypatch.setenv(f"TIDE_SCALING_{name}", value)
    with pytest.raises(SettingsError, match=words):
        ScalingSettings.load()


def test_settings_reach_the_policy(monkeypatch):
    for name, value in (("WINDOW_SECONDS", "4"), ("TARGET", "0.8"), ("BAND_HIGH", "0.9"), ("GROWTH", "ratio")):
        monkeypatch.setenv(f"TIDE_SCALING_{name}", value)
    policy = ScalingSettings.load().policy()
    assert (policy.band.window_us, policy.band.high_ppm, policy.growth) == (4_000_000, 900_000, "ratio")
