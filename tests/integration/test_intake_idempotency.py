"""One key, one job: races, repeats after a crash, other bodies, expiry; and rows that spoil no others."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from sqlalchemy import text

from schemas.events.job import JobSubmitted
from schemas.vocabulary import ServiceName
from services.intake.core.batches import Created, Repeated
from services.intake.settings import IntakeSettings
from services.intake.store import Submission
from services.intake.writer import SubmissionWriter, TooBusy
from shared.clock import SystemClock
from shared.errors import Rejected, Unavailable
from shared.telemetry.instruments import Instruments
from shared.testing.clock import FakeClock
from shared.testing.harness import equipped, read_data, read_rows
from tests.integration.intake_bed import intake_bed
from tests.unit.intake_builders import make_record

HASH = "repeat('h', 32)::bytea"
BODY = {"script": "/jobs/train.py", "name": "first"}


async def post(bed, key, body=BODY, **parameters):
    return await bed.http.post("/v1/jobs", json=body, headers={"Idempotency-Key": key}, params=parameters)


async def test_a_repeat_answers_the_first_job(database):
    async with intake_bed(database) as bed:
        first = await post(bed, "k1")
        spelled = await bed.http.post(
            "/v1/jobs",
            content="name: first\nscript: '/jobs/train.py'\n",
            headers={"Idempotency-Key": "k1", "Content-Type": "text/yaml"},
        )
        assert (first.status_code, spelled.status_code) == (201, 200)
        assert spelled.json()["id"] == first.json()["id"]
    assert len(await read_data(database, JobSubmitted)) == 1


async def test_a_repeat_leaves_no_second_environment(database):
    async with intake_bed(database) as bed:
        body = {**BODY, "environment": {"A": "1"}}
        assert [(await post(bed, "k1", body)).status_code for _ in range(2)] == [201, 200]
    rows = await read_rows(
        database, "select j.job_id from intake.environments e left join intake.jobs j using (job_id)"
    )
    assert [row["job_id"] is not None for row in rows] == [True]


async def test_a_lost_race_is_decided_again(database):
    """Another process takes the key between this one's snapshot and its insert, twice."""
    async with equipped(database, ServiceName.INTAKE, clock=SystemClock()) as equipment:
        lost = [2]

        @asynccontextmanager
        async def contended():
            async with equipment.context.transaction() as tx:
                if lost[0]:
                    lost[0] -= 1
                    await tx.execute(text("select 1"))
                    database.psql("delete from intake.idempotency")
                    database.psql(
                        f"insert into intake.idempotency values ('default', 'k1', {HASH}, 'j-other', 'infinity')"
                    )
                yield tx

        async with _running(_writer(equipment.context, transaction=contended)) as writer:
            assert await writer.submit(submission("k1")) == Repeated("j-other")
        assert lost == [0]


async def test_another_body_under_the_same_key_is_refused(database):
    async with intake_bed(database) as bed:
        first = await post(bed, "k1")
        other = await post(bed, "k1", {**BODY, "workers_max": 2})
        assert other.status_code == 422
        assert other.json()["type"].endswith("idempotency_key_reused")
        assert "new key" in other.json()["errors"][0]["way_out"]
        waived = await post(bed, "k1", allow_unsatisfiable="true")
        assert waived.status_code == 422, "the parameter decides too"
        assert (await post(bed, "k1")).json()["id"] == first.json()["id"]


async def test_a_refused_body_does_not_use_up_its_key(database):
    async with intake_bed(database) as bed:
        assert (await post(bed, "k1", {**BODY, "workers_min": 0})).status_code == 422
        assert (await post(bed, "k1")).status_code == 201


async def test_the_same_key_at_once_makes_one_job(database):
    """Through two processes of intake, so that the race is not settled inside one batch."""
    async with intake_bed(database) as one, _second_process(database) as writer:
        async with asyncio.TaskGroup() as group:
            over_http = [group.create_task(post(one, f"k{n % 5}")) for n in range(50)]
            beside = [group.create_task(writer.submit(submission(f"k{n % 5}"))) for n in range(50)]
        answers = [task.result() for task in over_http]
        assert {answer.status_code for answer in answers} <= {200, 201, 422}
        assert all(task.done() for task in beside)
    rows = await read_rows(database, "select key, job_id from intake.idempotency")
    jobs = await read_rows(database, "select job_id from intake.jobs")
    assert len(rows) == len(jobs) == 5
    assert {row["job_id"] for row in rows} == {row["job_id"] for row in jobs}
    assert len(await read_data(database, JobSubmitted)) == 5


async def test_after_a_crash_between_commit_and_answer_the_repeat_finds_the_job(database):
    async with _second_process(database, loses_answer=True) as writer:
        with pytest.raises(Unavailable):
            await writer.submit(submission("k1"))
    [row] = await read_rows(database, "select job_id from intake.jobs")
    async with _second_process(database) as again:
        answer = await again.submit(submission("k1"))
    assert answer == Repeated(row["job_id"])
    assert len(await read_data(database, JobSubmitted)) == 1


async def test_a_key_is_free_again_after_a_day(database):
    clock = FakeClock()
    async with intake_bed(database, clock=clock) as bed:
        first = await post(bed, "k1")
        clock.advance(86_399)
        assert (await post(bed, "k1")).status_code == 200
        clock.advance(2)
        later = await post(bed, "k1", {**BODY, "name": "second"})
        assert later.status_code == 201
        assert later.json()["id"] != first.json()["id"]


async def test_one_row_that_cannot_be_stored_spoils_no_other(database):
    async with _second_process(database) as writer:
        bad = submission("bad")
        bad = replace(bad, environment={"A": "\x00"})
        async with asyncio.TaskGroup() as group:
            good = [group.create_task(writer.submit(submission(None))) for _ in range(20)]
            refused = group.create_task(_refusal(writer.submit(bad)))
        assert isinstance(refused.result(), Rejected)
        assert all(isinstance(task.result(), Created) for task in good)
    [row] = await read_rows(database, "select count(*) n from intake.jobs")
    assert row["n"] == 20
    assert len(await read_data(database, JobSubmitted)) == 20


async def test_more_than_can_be_written_is_answered_with_429(database):
    settings = IntakeSettings(unwritten_jobs_max=3, submission_seconds_max=0.3)
    async with intake_bed(database, settings=settings, runs_writer=False) as bed:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(bed.http.post("/v1/jobs", json=BODY)) for _ in range(5)]
        statuses = sorted(task.result().status_code for task in tasks)
        assert statuses == [429, 429, 503, 503, 503]
        busy = next(task.result() for task in tasks if task.result().status_code == 429)
        assert int(busy.headers["retry-after"]) >= 1
        assert busy.json()["type"].endswith("too_many_requests")


async def test_what_was_accepted_is_written_before_the_stop(database):
    async with equipped(database, ServiceName.INTAKE, clock=SystemClock()) as equipment:
        writer = _writer(equipment.context)
        stopping = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(writer.submit(submission(None))) for _ in range(50)]
            await asyncio.sleep(0)
            stopping.set()
            group.create_task(writer.run(stopping))
        assert all(isinstance(task.result(), Created) for task in tasks)
        with pytest.raises(Unavailable):
            await writer.submit(submission(None))
    assert len(await read_data(database, JobSubmitted)) == 50


def submission(key):
    body_hash = None if key is None else b"h" * 32
    return Submission(record=make_record(), environment={}, key=key, body_hash=body_hash)


async def _refusal(answer):
    try:
        return await answer
    except (Rejected, TooBusy) as exc:
        return exc


def _writer(context, transaction=None):
    return SubmissionWriter(
        transaction=transaction or context.transaction,
        clock=context.clock,
        instruments=Instruments("intake"),
        settings=IntakeSettings(),
    )


@asynccontextmanager
async def _second_process(database, *, loses_answer=False):
    """A writer with connections of its own. ``loses_answer``: its commits happen, and then it is cut off."""
    async with equipped(database, ServiceName.INTAKE, clock=SystemClock()) as equipment:

        @asynccontextmanager
        async def lossy():
            async with equipment.context.transaction() as tx:
                yield tx
            raise Unavailable("cut off after the commit")

        async with _running(_writer(equipment.context, transaction=lossy if loses_answer else None)) as writer:
            yield writer


@asynccontextmanager
async def _running(writer):
    stopping = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(writer.run(stopping))
        try:
            yield writer
        finally:
            stopping.set()
            await task
