"""Metrics through its real route, handler and database; killed and taken up again between any two steps."""

import asyncio
import json

import pytest
from metrics_bed import authorization, metrics_bed, report
from sqlalchemy import text
from unit.scaling_builders import group_changed, group_ended, group_started

from schemas.events.job import JobEnded
from schemas.vocabulary import Outcome, ServiceName
from shared.testing.harness import read_rows

ENDED = JobEnded(
    outcome=Outcome.SUCCEEDED,
    exit_code=0,
    attributed_to=None,
    reason="done",
    image_digest=None,
    accelerator_seconds=1.0,
)


async def test_samples_become_windows(database, clock):
    async with metrics_bed(database, clock) as bed:
        await bed.tell(group_started(workers=2))
        await bed.seconds(10)
        windows = await bed.windows()
        assert [window.window_seconds for window in windows] == [5.0, 5.0]
        assert {(window.members_reporting, window.members_expected) for window in windows} == {(2, 2)}
        assert windows[1].utilisation == 0.93
        assert windows[1].samples_per_second == 200.0
        assert windows[1].progress.step == 100
        assert windows[1].progress.remaining_seconds == 90.0
        assert windows[1].idle_seconds == 0.1
        told = bed.base.context.instruments.render().decode()
        assert 'tidewright_metrics_window_utilisation_ratio_bucket{le="0.9"} 0.0' in told
        assert 'tidewright_metrics_window_utilisation_ratio_bucket{le="1.0"} 2.0' in told
        assert [event.tenant for event in await bed.base.log()][-1] == "default"


async def test_a_restart_between_any_two_steps_changes_nothing(database, postgres, clock):
    """The same story told in one life and with a new process before each second: the same windows and curve."""

    async def story(where, when, *, lives):
        for second in range(1, 12 + 1):
            async with metrics_bed(where, when) as bed:
                if second == 1:
                    await bed.tell(group_started(workers=2))
                if second == 8:
                    await bed.tell(group_changed(generation=2, workers=3))
                group = {"generation": 1, "world": 2} if second < 8 else {"generation": 2, "world": 3}
                await bed.seconds(1, first=second, ranks=(0, 1), **group)
                assert await bed.verdict(rank=0, sequence=second, **group) == "repeated"
                lives.append(await bed.windows())
        return lives[-1], (await bed_curve(where, when))

    async def bed_curve(where, when):
        async with metrics_bed(where, when) as bed:
            return (await bed.curves()).json()

    async with metrics_bed(database, clock) as bed:
        await bed.tell(group_started(workers=2))
        await bed.seconds(7)
        await bed.tell(group_changed(generation=2, workers=3))
        await bed.seconds(5, first=8, generation=2, world=3)
        whole = await bed.windows(), (await bed.curves()).json()
    with postgres.database() as other:
        again = await story(other, type(clock)(), lives=[])
    assert [w.window_seconds for w in whole[0]] == [5.0, 2.0]
    assert [(w.generation, w.members_reporting) for w in whole[0]] == [(1, 2), (1, 2)]
    assert again == whole


async def test_a_sample_counts_once_over_restarts(database, clock):
    """The answer was lost, the trainer repeats: the row is there, so it does not count again."""
    async with metrics_bed(database, clock) as bed:
        await bed.tell(group_started(workers=1))
        clock.advance(1)
        assert await bed.verdict(world=1) == "counted"
    async with metrics_bed(database, clock) as bed:
        bed.handler.tracks.clear()
        assert await bed.verdict(world=1) == "repeated"
    async with metrics_bed(database, clock) as bed:
        assert await bed.verdict(world=1) == "repeated"
        assert bed.handler.tracks["j1"].window.totals[0].wall_us == 1_000_000


async def test_reports_that_come_before_their_group_wait_for_it_also_over_a_restart(database, clock):
    async with metrics_bed(database, clock) as bed:
        assert await bed.verdict(world=1) == "ahead"
        clock.advance(1)
    async with metrics_bed(database, clock) as bed:
        await bed.tell(group_started(workers=1))
        assert bed.handler.tracks["j1"].window.totals[0].wall_us == 1_000_000
        await bed.seconds(4, first=2, ranks=(0,), world=1)
        (window,) = await bed.windows()
        assert (round(window.window_seconds, 3), window.members_reporting) == (5.0, 1)


async def test_an_outage_makes_one_incomplete_window(database, clock):
    async with metrics_bed(database, clock) as bed:
        await bed.tell(group_started(workers=2))
        await bed.seconds(2)
    clock.advance(60)
    async with metrics_bed(database, clock) as bed:
        await bed.base.drain()
        (window,) = await bed.windows()
        assert (window.window_seconds, window.members_reporting) == (62.0, 0)
        await bed.seconds(5, first=3)
        assert (await bed.windows())[1].members_reporting == 2


async def test_missing_and_silent_members(database, clock):
    async with metrics_bed(database, clock) as bed:
        await bed.tell(group_started(workers=2))
        await bed.seconds(5, ranks=(1,))
        assert await bed.windows() == [], "the missing one is waited for"
        clock.advance(2)
        await bed.base.drain()
        for _ in range(3):
            clock.advance(7)
            await bed.base.drain()
        assert [(w.members_reporting, w.utilisation) for w in await bed.windows()] == [(1, 0.93), (0, None)]
        assert bed.handler.due_seconds() is None, "silence is told once"
        await bed.seconds(6, first=6)
        assert (await bed.windows())[2].members_reporting == 2


async def test_older_generations_attempts_and_ended_jobs_are_fenced(database, clock):
    async with metrics_bed(database, clock) as bed:
        await bed.tell(group_started(workers=2), group_changed(generation=2, workers=2))
        assert await bed.verdict(generation=1) == "older"
        assert await bed.verdict(generation=2) == "counted"
        assert await bed.verdict(generation=2, rank=1, world=3) == "inconsistent"
        await bed.tell(group_ended(attempt=1))
        assert await bed.verdict(generation=2, sequence=2) == "older"
        await bed.tell(group_started(attempt=2, generation=3, workers=2))
        assert await bed.verdict(generation=2, sequence=2) == "older"
        assert await bed.verdict(attempt=2, generation=3, member="j1/worker/0/2") == "counted"


async def test_the_end_of_a_job_forgets_its_samples_and_keeps_its_curve(database, clock):
    async with metrics_bed(database, clock) as bed:
        await bed.tell(group_started(workers=2))
        await bed.seconds(7)
        await bed.tell(group_ended())
        await bed.tell(ENDED, service=ServiceName.INTAKE)
        assert "j1" not in bed.handler.tracks
        assert bed.handler.due_seconds() is None
        assert await read_rows(database, "select 1 from metrics.samples") == []
        points = (await bed.curves()).json()["points"]
        assert [(point["step"], point["wall_seconds"]) for point in points] == [(50, 5.0), (70, 7.0)]
        # Words that come late change nothing.
        await bed.tell(group_changed(generation=5, workers=4))
        assert len(await bed.windows()) == 2
    async with metrics_bed(database, clock) as bed:
        assert bed.handler.tracks == {}


async def test_an_end_that_is_read_before_the_group_started_fences_it(database, clock):
    async with metrics_bed(database, clock) as bed:
        await bed.tell(ENDED, service=ServiceName.INTAKE)
        await bed.tell(group_started(workers=2))
        clock.advance(60)
        await bed.base.drain()
        assert await bed.windows() == []


async def test_the_curve_is_bounded(database, clock):
    async with metrics_bed(database, clock, curve_points_max=4) as bed:
        await bed.tell(group_started(workers=1))
        await bed.seconds(60, ranks=(0,), world=1)
        points = (await bed.curves()).json()["points"]
        assert [point["step"] for point in points] == [50, 250, 450]
        assert points[1]["workers"] == 1
        assert points[1]["samples_per_second"] == 100.0


async def test_curves_are_for_other_services_only(database, clock):
    async with metrics_bed(database, clock) as bed:
        assert (await bed.client.get("/internal/jobs/j1/curves")).status_code == 401
        assert (await bed.curves()).json() == {"job_id": "j1", "points": []}


async def test_retention(database, clock):
    async with metrics_bed(
        database, clock, sample_retention_seconds=60.0, curve_retention_seconds=100.0, retention_rows_max=3
    ) as bed:
        await bed.tell(group_started(workers=2))
        await bed.seconds(7)
        await bed.tell(group_ended(), ENDED, key="j1")
        await bed.tell(group_started(workers=2), key="j2")
        await bed.verdict(job_id="j2")
        clock.advance(61)
        await drop_all(bed)
        assert await read_rows(database, "select 1 from metrics.samples") == []
        assert len(await read_rows(database, "select 1 from metrics.curves")) == 2
        clock.advance(100)
        await drop_all(bed)
        assert await read_rows(database, "select 1 from metrics.curves") == []
        assert await read_rows(database, "select job_id from metrics.jobs") == [{"job_id": "j2"}]


async def drop_all(bed):
    retention = bed.parts.loops[1].__self__
    while await retention._drop_some():
        pass


# -- bad input --------------------------------------------------------------------------------------------------


BAD_REPORTS = (
    ("/wall_seconds", -1.0),
    ("/wall_seconds", 0.0),
    ("/wall_seconds", 121.0),
    ("/wall_seconds", 1e300),
    ("/wall_seconds", 0.5),
    ("/step_seconds", -0.1),
    ("/step_seconds", "0.5"),
    ("/step_seconds", None),
    ("/sync_seconds", float("nan")),
    ("/input_wait_seconds", float("inf")),
    ("/loss", float("nan")),
    ("/loss", float("-inf")),
    ("/loss", 1e31),
    ("/utilisation", 1.01),
    ("/utilisation", -0.01),
    ("/measure", "guess"),
    ("/steps", -1),
    ("/steps", 1.5),
    ("/samples", 2**60),
    ("/step", 1001),
    ("/generation", 0),
    ("/generation", 2**31),
    ("/attempt", True),
    ("/rank", 2),
    ("/world", 10_001),
    ("/sequence", -1),
    ("/member", "j2/worker/0/1"),
    ("/member", "j1/worker/0/1\u0000"),
    ("/member", ""),
)


async def test_bad_reports_name_their_field_and_move_nothing(database, clock):
    async with metrics_bed(database, clock) as bed:
        await bed.tell(group_started(workers=2))
        for field, value in BAD_REPORTS:
            body = report(**{field[1:]: value})
            answer = await bed.client.post("/v1/samples", content=json.dumps(body), headers=authorization(report()))
            assert answer.status_code == 422, (field, value, answer.text)
            assert [error["field"] for error in answer.json()["errors"]] == [field], value
            assert answer.json()["errors"][0]["way_out"], (field, value)
        assert bed.handler.tracks["j1"].window.totals == {}


async def test_missing_fields_are_named(database, clock):
    async with metrics_bed(database, clock) as bed:
        body = {name: value for name, value in report().items() if name not in ("sequence", "wall_seconds")}
        answer = await bed.client.post("/v1/samples", json=body, headers=authorization(body))
        assert {error["field"] for error in answer.json()["errors"]} == {"/sequence", "/wall_seconds"}


async def test_what_is_no_report_is_refused(database, clock):
    async with metrics_bed(database, clock) as bed:
        for body in (b"", b"{", b"[]", b"null", b'"x"', b"\xff", b"[" * 10_000):
            answer = await bed.client.post("/v1/samples", content=body, headers=authorization(report()))
            assert answer.status_code in (400, 422), body
            assert answer.headers["content-type"] == "application/problem+json", body


WRONG_TOKENS = (
    {},
    {"Authorization": "Basic abc"},
    {"Authorization": "Bearer"},
    {"Authorization": "Bearer abc"},
    authorization(report(job_id="j2")),
    authorization(report(attempt=2)),
)


async def test_only_the_token_of_the_job_and_attempt_opens(database, clock):
    async with metrics_bed(database, clock) as bed:
        for headers in WRONG_TOKENS:
            answer = await bed.client.post("/v1/samples", json=report(), headers=headers)
            assert answer.status_code == 401, headers
        assert bed.handler.tracks == {}


async def test_a_newer_trainer_may_say_more(database, clock):
    async with metrics_bed(database, clock) as bed:
        await bed.tell(group_started(workers=2))
        assert await bed.verdict(gradient_norm=3.0) == "counted"


# -- many at once, and a database that does not answer ----------------------------------------------------------


async def test_reports_that_come_together_share_transactions(database, clock):
    async with metrics_bed(database, clock) as bed:
        await bed.tell(group_started(workers=100))
        clock.advance(1)
        async with asyncio.TaskGroup() as group:
            posts = [group.create_task(bed.verdict(rank=rank, world=100)) for rank in range(100)]
        assert {post.result() for post in posts} == {"counted"}
        (rows,) = await read_rows(
            database, "select count(*) as n, count(distinct xmin::text) as commits from metrics.samples"
        )
        assert rows["n"] == 100
        assert rows["commits"] < 50


async def test_what_cannot_be_written_is_not_counted_and_counts_when_it_is_sent_again(database, clock):
    async with metrics_bed(database, clock, lock_seconds=0.2) as bed:
        await bed.tell(group_started(workers=2))
        clock.advance(1)
        async with database.engine() as engine, engine.connect() as other:
            await other.execute(text("lock table metrics.samples in access exclusive mode"))
            assert (await bed.post()).status_code == 503
            assert bed.handler.tracks["j1"].window.totals == {}
        assert await bed.verdict() == "counted"


async def test_the_inbox_is_bounded(database, clock):
    async with metrics_bed(database, clock, lock_seconds=0.5, inbox_samples_max=5, batch_samples_max=1) as bed:
        await bed.tell(group_started(workers=100))
        clock.advance(1)
        async with database.engine() as engine, engine.connect() as other:
            await other.execute(text("lock table metrics.samples in access exclusive mode"))
            async with asyncio.TaskGroup() as group:
                posts = [group.create_task(bed.post(rank=rank, world=100)) for rank in range(20)]
        details = [post.result().json()["detail"] for post in posts if post.result().status_code == 503]
        assert details.count("too many reports wait to be written") >= 14


# -- who is not active --------------------------------------------------------------------------------------------


async def test_without_the_lease_nothing_is_taken(database, clock):
    async with metrics_bed(database, clock) as bed:
        await bed.base.equipment.lease.release()
        answer = await bed.post()
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1


async def test_a_process_that_lost_the_lease_writes_nothing(database, clock):
    """Another process has taken over, and this one does not know yet: the guard refuses the commit."""
    with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012
        async with metrics_bed(database, clock) as bed:
            await bed.tell(group_started(workers=2))
            database.psql("update log.lease set owner = 'another', term = term + 1 where service = 'metrics'")
            assert (await bed.post()).status_code == 503
    assert "led by another process" in repr(caught.value)
    assert await read_rows(database, "select 1 from metrics.samples") == []
