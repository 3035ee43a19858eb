"""Numbers that dashboard and alerts need: the oldest open transaction, open jobs by phase, pending jobs by class."""

import asyncio

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import text

from schemas.envelope import Draft
from schemas.vocabulary import CLUSTER_KEY, DEFAULT_TENANT, JobPhase, PriorityClass, ServiceName, Topic
from services.intake.queries import count_open_jobs
from services.queueing.handlers import QueueingHandler
from services.queueing.settings import QueueingSettings
from shared.db.horizon import Horizon
from shared.telemetry.instruments import Instruments
from shared.testing.harness import harness, publish
from tests.integration.intake_bed import closed, granted, intake_bed, started
from tests.simulation.builders import job_id, make_capacity, make_submitted


def value_of(instruments, name, **labels):
    families = text_string_to_metric_families(generate_latest(instruments.registry).decode())
    samples = [sample for family in families for sample in family.samples]
    (found,) = [sample.value for sample in samples if sample.name == name and sample.labels == labels]
    return found


async def test_the_oldest_open_transaction_is_seen_by_a_role_without_rights(postgres, clock):
    """Whoever writes anywhere on the server counts, in another database too; one that only reads does not."""
    instruments = Instruments("test")
    horizon = Horizon(clock, instruments)
    with postgres.database() as ours, postgres.database() as theirs:
        async with (
            ours.engine(ServiceName.SCALING) as engine,
            theirs.engine() as stranger,
            engine.connect() as looking,
        ):

            async def seconds():
                await horizon.look(looking)
                return value_of(instruments, "tidewright_test_oldest_transaction_seconds")

            await looking.execution_options(isolation_level="AUTOCOMMIT")
            async with stranger.connect() as reading:
                await reading.execute(text("select 1"))
                await seconds()
                clock.advance(7)
                assert await seconds() == 0.0
            async with stranger.connect() as writing:
                await writing.execute(text("select pg_current_xact_id()"))
                assert await seconds() == 0.0, "nobody has committed after it, so nothing is held back"
                clock.advance(7)
                async with stranger.begin() as other:
                    await other.execute(text("select pg_current_xact_id()"))
                assert await seconds() == 0.0, "now something is: counted from the first look"
                clock.advance(5)
                assert await seconds() == 5.0
                async with stranger.begin() as other:
                    await other.execute(text("select pg_current_xact_id()"))
                clock.advance(5)
                assert await seconds() == 10.0, "what others begin and end beside it does not hide it"
            clock.advance(5)
            assert await seconds() == 0.0


async def test_open_jobs_are_counted_by_phase_and_ended_ones_are_not(database):
    async with intake_bed(database) as bed:
        jobs = [str((await bed.submit())["id"]) for _ in range(4)]
        await bed.say(ServiceName.QUEUEING, jobs[0], granted())
        await bed.say(ServiceName.QUEUEING, jobs[1], granted())
        await bed.say(ServiceName.EXECUTION, jobs[1], started())
        await bed.say(ServiceName.QUEUEING, jobs[2], closed())
        await bed.fold()
        async with bed.run.context.read() as connection:
            counted = await count_open_jobs(connection)
    assert counted == {
        JobPhase.QUEUED: 1,
        JobPhase.STARTING: 1,
        JobPhase.RUNNING: 1,
        JobPhase.DRAINING: 0,
    }


async def test_intake_keeps_the_census_while_it_is_active(database):
    async with intake_bed(database) as bed:
        await bed.submit()
        await bed.fold()
        stopping = asyncio.Event()
        census = bed.parts.loops[-1]
        async with asyncio.TaskGroup() as group:
            group.create_task(census(stopping))
            async with asyncio.timeout(10):
                while 'open_jobs_total{phase="Queued"} 1.0' not in bed.run.context.instruments.render().decode():
                    await asyncio.sleep(0.02)
            stopping.set()


async def test_pending_and_charged_jobs_are_told_by_class(database, clock):

    def make(context):
        return QueueingHandler(QueueingSettings(), context.clock, context.instruments)

    topics = frozenset({Topic.JOB, Topic.CAPACITY})
    submitted = [(job_id(number), make_submitted(priority=PriorityClass.HIGH)) for number in range(3)]
    submitted.append((job_id(9), make_submitted(priority=PriorityClass.LOW)))
    async with harness(database, ServiceName.QUEUEING, make, topics, clock=clock) as base:
        await base.consumer.load()
        capacity = Draft(key=CLUSTER_KEY, tenant=DEFAULT_TENANT, data=make_capacity(1))
        await publish(database, ServiceName.EXECUTION, capacity, clock=clock)
        drafts = [Draft(key=key, tenant=DEFAULT_TENANT, data=data) for key, data in submitted]
        await publish(database, ServiceName.INTAKE, *drafts, clock=clock)
        await base.drain()
        instruments = base.context.instruments
        pending = {
            priority: value_of(instruments, "tidewright_queueing_pending_jobs_total", priority=priority.value)
            for priority in PriorityClass
        }
        charged = value_of(instruments, "tidewright_queueing_charged_jobs_total")
    assert pending == {
        PriorityClass.CRITICAL: 0,
        PriorityClass.HIGH: 2,
        PriorityClass.MEDIUM: 0,
        PriorityClass.LOW: 1,
    }
    assert charged == 1
