"""Server-sent events: in order, resumed without gap or repeat, explicit about gaps, ended in order."""

import asyncio
import json
from contextlib import asynccontextmanager

import httpx

from schemas.envelope import START
from schemas.vocabulary import DEFAULT_TENANT, ServiceName
from services.intake.feed import Feed, Interest
from services.intake.settings import IntakeSettings
from shared.clock import SystemClock
from shared.telemetry.instruments import Instruments
from shared.testing.harness import draft, publish, read_log
from tests.integration.intake_bed import capacity, closed, granted, intake_bed, started


class Reader:
    """Reads blocks of one stream, the way the specification says."""

    def __init__(self, response):
        self._lines = response.aiter_lines()
        self.comments = []

    async def next(self, seconds=30.0):
        fields = {}
        async with asyncio.timeout(seconds):
            async for line in self._lines:
                if line.startswith(":"):
                    self.comments.append(line)
                elif line:
                    name, _, value = line.partition(": ")
                    fields[name] = value
                elif fields:
                    return fields
        return None

    async def take(self, count):
        return [await self.next() for _ in range(count)]


@asynccontextmanager
async def subscribed(bed, after=None, **parameters):
    headers = {"Last-Event-ID": after} if after else {}
    timeout = httpx.Timeout(30, read=None)
    async with bed.http.stream("GET", "/v1/events", params=parameters, headers=headers, timeout=timeout) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        yield Reader(response)


async def test_events_come_as_cloud_events(database):
    async with intake_bed(database) as bed, subscribed(bed) as reader:
        job = await bed.submit(environment={"TOKEN": "sesame"})
        block = await reader.next()
        assert block["event"] == "tide.job.submitted.v1"
        event = json.loads(block["data"])
        assert (event["specversion"], event["subject"], event["sequence"]) == ("1.0", job["id"], block["id"])
        assert event["data"]["request"]["version"] == 1
        assert "sesame" not in block["data"]


async def test_without_an_id_only_what_is_new_comes(database):
    async with intake_bed(database) as bed:
        await bed.submit()
        async with subscribed(bed) as reader:
            second = await bed.submit()
            assert json.loads((await reader.next())["data"])["subject"] == second["id"]


async def test_a_stream_resumes_without_gap_or_repeat(database):
    """Cut off at any place; small pages and a small buffer, so that memory and log both answer."""
    settings = IntakeSettings(stream_page_events_max=7, stream_buffer_events_max=5)
    async with intake_bed(database, settings=settings) as bed:
        seen, after = [], "0-0"

        async def submit_all():
            for _ in range(60):
                await bed.submit()

        async with asyncio.TaskGroup() as group:
            group.create_task(submit_all())
            for count in (1, 2, 3, 5, 8, 13, 28):
                async with subscribed(bed, after) as reader:
                    blocks = await reader.take(count)
                seen += [block["id"] for block in blocks]
                after = seen[-1]
    assert seen == [str(event.sequence) for event in await read_log(database)]


async def test_many_subscribers_see_the_same_in_the_same_order(database):
    settings = IntakeSettings(stream_buffer_events_max=10)
    async with intake_bed(database, settings=settings) as bed:

        async def read(after):
            async with subscribed(bed, after) as reader:
                return [block["id"] for block in await reader.take(40)]

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(read("0-0")) for _ in range(8)]
            for _ in range(40):
                await bed.submit()
        expected = [str(event.sequence) for event in await read_log(database)]
        assert all(task.result() == expected for task in tasks)


async def test_the_last_subscriber_may_leave_while_the_reader_looks_where_the_log_ends(database):
    async with intake_bed(database) as bed:
        context, streams = bed.run.context, []

        @asynccontextmanager
        async def read():
            async with context.read() as connection:
                yield connection
            if streams:
                streams.pop().__exit__(None, None, None)

        feed = Feed(
            read=read, wait_for_events=asyncio.sleep, instruments=Instruments("intake"), settings=IntakeSettings()
        )
        streams.append(feed.stream())
        streams[0].__enter__()
        assert not await feed._advance()
        await bed.submit()
        with feed.stream():
            await feed._advance()
            blocks = feed.follow(Interest(tenant=DEFAULT_TENANT), after=START)
            await anext(blocks)
            async with asyncio.timeout(10):
                assert b"job.submitted" in await anext(blocks)
            await blocks.aclose()


async def test_a_reader_that_falls_behind_what_is_in_memory_loses_and_repeats_nothing(database):
    """The reader takes one page, then sleeps through more than the memory keeps, then takes the rest."""
    settings = IntakeSettings(stream_page_events_max=3, stream_buffer_events_max=4)
    async with intake_bed(database) as bed:
        context = bed.run.context
        feed = Feed(
            read=context.read, wait_for_events=asyncio.sleep, instruments=Instruments("intake"), settings=settings
        )

        async def submit(count):
            for _ in range(count):
                await bed.submit()
            while await feed._advance():
                pass

        with feed.stream():
            await submit(0)
            blocks = feed.follow(Interest(tenant=DEFAULT_TENANT), after=START)
            await anext(blocks)
            seen = b""
            for count in (4, 3, 25, 5):
                await submit(count)
                seen += await anext(blocks)
            expected = [str(event.sequence).encode() for event in await read_log(database)]
            while seen.count(b"id: ") < len(expected):
                async with asyncio.timeout(10):
                    seen += await anext(blocks)
            await blocks.aclose()
    assert [line.removeprefix(b"id: ") for line in seen.split(b"\n") if line.startswith(b"id: ")] == expected


async def test_events_of_one_job_only(database):
    async with intake_bed(database) as bed:
        mine, other = await bed.submit(), await bed.submit()
        async with subscribed(bed, "0-0", job_id=mine["id"]) as reader:
            await bed.say(ServiceName.QUEUEING, str(other["id"]), granted())
            await bed.say(ServiceName.QUEUEING, str(mine["id"]), granted())
            await bed.say(ServiceName.EXECUTION, "cluster", capacity(4))
            await bed.say(ServiceName.EXECUTION, str(mine["id"]), started())
            await bed.say(ServiceName.QUEUEING, str(mine["id"]), closed())
            blocks = await reader.take(5)
        assert {json.loads(block["data"])["subject"] for block in blocks} == {mine["id"]}
        assert [block["event"].split(".")[2] for block in blocks] == [
            "submitted", "granted", "group_started", "closed", "ended",
        ]  # fmt: skip


async def test_another_tenant_s_events_do_not_come(database):
    async with intake_bed(database) as bed, subscribed(bed) as reader:
        foreign = draft(granted(), "j9")
        foreign = type(foreign)(key="j9", tenant="somebody-else", data=foreign.data)
        await publish(database, ServiceName.QUEUEING, foreign, clock=SystemClock())
        job = await bed.submit()
        assert json.loads((await reader.next())["data"])["subject"] == job["id"]


async def test_an_id_behind_retention_gets_a_gap(database):
    async with intake_bed(database) as bed:
        for _ in range(5):
            await bed.submit()
        log = [event.sequence for event in await read_log(database)]
        database.psql(f"delete from log.outbox where (xid, id) <= ('{log[2].xid}', {log[2].id})")
        database.psql(f"update log.identity set trimmed_xid = '{log[2].xid}', trimmed_id = {log[2].id}")
        async with subscribed(bed, str(log[0])) as reader:
            gap, *rest = await reader.take(3)
        assert gap["event"] == "gap"
        assert gap["id"] == str(log[2])
        assert json.loads(gap["data"])["asked"] == str(log[0])
        assert [block["id"] for block in rest] == [str(log[3]), str(log[4])]
        async with subscribed(bed, str(log[2])) as reader:
            assert (await reader.next())["id"] == str(log[3]), "the last one that was dropped is no gap"


async def test_an_id_from_another_log_gets_a_gap(database):
    async with intake_bed(database) as bed, subscribed(bed, "999999999-1") as reader:
        assert (await reader.next())["event"] == "gap"
        job = await bed.submit()
        assert json.loads((await reader.next())["data"])["subject"] == job["id"]


async def test_heartbeats_keep_a_quiet_stream_alive(database):
    settings = IntakeSettings(stream_heartbeat_seconds=0.05)
    async with intake_bed(database, settings=settings) as bed, subscribed(bed) as reader:
        await asyncio.sleep(0.3)
        await bed.submit()
        assert await reader.next() is not None
        assert reader.comments.count(": heartbeat") >= 2


async def test_a_reader_that_takes_nothing_is_cut_and_can_resume(database):
    settings = IntakeSettings(stream_send_seconds=0.3, stream_page_events_max=50)
    async with intake_bed(database, settings=settings) as bed:
        host, port = bed.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.write(b"GET /v1/events HTTP/1.1\r\nHost: x\r\nLast-Event-ID: 0-0\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(0.1)
        for _ in range(150):
            await bed.submit(args=["x" * 65_000])
        await _until(lambda: "slow" in _streams_of(bed))
        writer.close()
        async with subscribed(bed, "0-0") as again:
            assert len(await again.take(150)) == 150


async def test_streams_have_a_limit(database):
    settings = IntakeSettings(streams_max=2)
    async with intake_bed(database, settings=settings) as bed, subscribed(bed), subscribed(bed):
        answer = await bed.http.get("/v1/events")
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1


async def test_streams_end_in_order_at_the_stop(database):
    async with intake_bed(database) as bed, subscribed(bed) as reader:
        await bed.submit()
        assert await reader.next() is not None
        bed.stopping.set()
        assert await reader.next() is None, "the answer is complete"


async def _until(condition, seconds=30.0):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.05)


def _streams_of(bed):
    text = bed.run.context.instruments.render().decode()
    return "slow" if "tidewright_intake_event_streams_info 0.0" in text else "open"
