"""The membership endpoint as a trainer meets it: tokens, names, bad lines, a port that stays. And starts and logs."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from integration.elastic_bed import is_alive
from integration.execution_bed import NAMES, ExecutionBed, running_bed
from integration.trainer_talk import Talk, hello, run_sleeper

from schemas.events.worker import GroupEnded, GroupStarted, StartFailed
from schemas.vocabulary import Attribution
from shared.signing import trainer_token
from shared.testing.harness import TEST_KEY
from shared.testing.postgres import DatabaseServer
from tidewright import protocol

SETTINGS = {"start_seconds": "3", "start_retry_seconds": "0.05", "slots": "32"}


@pytest.fixture(scope="module")
def bed(postgres: DatabaseServer) -> Iterator[ExecutionBed]:
    """One installation for all tests of this file; each has a job of its own."""
    with running_bed(postgres, SETTINGS) as bed:
        yield bed


@pytest.fixture
def job() -> str:
    return next(NAMES)


@pytest_asyncio.fixture(autouse=True)
async def connections() -> AsyncIterator[None]:
    yield
    await Talk.close_all()


async def test_only_the_admitted_process_with_the_token_is_heard(bed: ExecutionBed, job: str) -> None:
    nonce = await run_sleeper(bed, job)
    wrong = [
        {"nonce": nonce, "token": trainer_token(TEST_KEY, "another")},
        {"nonce": "another"},
        {"nonce": nonce, "member": f"{job}/worker/0/2"},
        {"nonce": nonce, "member": "j9/worker/0/1"},
        {"nonce": nonce, "attempt": 2},
        {"nonce": nonce, "version": 99},
    ]
    for changes in wrong:
        talk = await Talk.open(bed)
        talk.say(hello(job, **changes))
        assert isinstance(await talk.hear(), protocol.Refused), changes
        assert await talk.hear() is None
    talk = await Talk.open(bed)
    talk.say(hello(job, nonce=nonce))
    welcome = await talk.hear()
    assert isinstance(welcome, protocol.Welcome)
    assert welcome.checkpoint_directory.endswith(f"jobs/{job}/checkpoints")
    form = await talk.hear()
    assert isinstance(form, protocol.Form)
    assert (form.rank, form.world, form.source, form.checkpoint) == (0, 1, -1, "")
    # It comes back on another connection: the first one is cut, the offer is repeated.
    again = await Talk.open(bed)
    again.say(hello(job, nonce=nonce))
    assert isinstance(await again.hear(), protocol.Welcome)
    assert await again.hear() == form
    assert await talk.hear() is None


async def test_it_proves_who_it_is_and_hears_nobody_before(bed: ExecutionBed, job: str) -> None:
    """Also about a job that it does not know any more, or its trainers would wait for ever."""
    nonce = await run_sleeper(bed, job)
    for member in (f"{job}/worker/0/1", "gone/worker/3/1"):
        talk = await Talk.silent(bed)
        knock = protocol.Knock(member=member)
        talk.say(knock)
        proof = await talk.hear()
        assert isinstance(proof, protocol.Proof)
        assert proof.is_of(knock, token=trainer_token(TEST_KEY, member.partition("/")[0]))
        assert not proof.is_of(protocol.Knock(member=member), token=trainer_token(TEST_KEY, job))
    for first in (hello(job, nonce=nonce), protocol.Admit(token="", member=f"{job}/worker/0/1", nonce=nonce, pid=1)):
        talk = await Talk.silent(bed)
        talk.say(first)
        assert await talk.hear() is None


async def test_admission_is_asked_again_and_refused_to_a_stranger(bed: ExecutionBed, job: str) -> None:
    nonce = await run_sleeper(bed, job)
    for claimed, expected in ((nonce, protocol.Admitted), ("another", protocol.Refused)):
        talk = await Talk.open(bed)
        talk.say(protocol.Admit(token=trainer_token(TEST_KEY, job), member=f"{job}/worker/0/1", nonce=claimed, pid=1))
        assert isinstance(await talk.hear(), expected)


BAD_LINES = (
    b"\n",
    b"{}\n",
    b"[]\n",
    b"\xff\xfe\n",
    b"[" * 60_000 + b"\n",
    b"x" * 70_000,
    b'{"t":"mark"}\n',
    b'{"t":"hello","version":true}\n',
)


async def test_bad_lines_end_their_connection_and_nothing_else(bed: ExecutionBed, job: str) -> None:
    nonce = await run_sleeper(bed, job)
    for line in BAD_LINES:
        for talk in (await Talk.silent(bed), await Talk.open(bed)):
            talk.writer.write(line)
            assert await talk.hear() is None, line[:40]
        good = await Talk.open(bed)
        good.say(hello(job, nonce=nonce))
        assert isinstance(await good.hear(), protocol.Welcome)
        good.writer.write(line)
        while await good.hear() is not None:
            pass


async def test_port_stays_and_metrics_is_told_when_it_comes(bed: ExecutionBed, job: str) -> None:
    nonce = await run_sleeper(bed, job)
    before = (bed.state / "membership.port").read_text()
    bed.kill()
    bed.start()

    async def connected() -> Talk | None:
        try:
            talk = await Talk.open(bed)
        except OSError:
            return None
        talk.say(hello(job, nonce=nonce))
        return talk if isinstance(await talk.hear(), protocol.Welcome) else None

    talk = await bed.until(connected)
    assert (bed.state / "membership.port").read_text() == before
    bed.database.psql(
        "insert into log.lease (service, partition, owner, term, expires_at, url, host, pid, process_start)"
        " values ('metrics', 0, 'x', 1, now() + interval '1 hour', 'http://127.0.0.1:7', 'h', 1, 1)"
    )
    while not isinstance(message := await talk.hear(), protocol.Welcome):
        assert message is not None
    assert message.metrics_url == "http://127.0.0.1:7"


async def test_start_that_does_not_come_true_is_told_and_repeated_requests_start_once(
    bed: ExecutionBed, job: str
) -> None:
    link = bed.state / "zygote.sock"
    link.unlink()
    try:
        await bed.submit(job, command=("/bin/sh", "-c", "echo once; sleep 300"))
        epoch = await bed.grant(job, 1)
        failed = await bed.event(StartFailed, job)
        assert (failed.epoch, failed.missing[0].members) == (epoch, 1)
        assert "zygote does not answer" in failed.detail
    finally:
        link.symlink_to(bed.zygote_socket)
    await bed.event(GroupStarted, job)
    assert len(await bed.events(StartFailed, job)) == 1
    bed.kill()
    bed.start()
    await bed.ready()
    assert len(list(bed.state.glob(f"run/{job}/*/pid.json"))) == 1
    assert [line["line"] for line in await bed.log_lines(job)] == ["once"]
    await bed.evict(job, grace=1)
    await bed.event(GroupEnded, job)


async def test_killed_shim_is_noticed_and_its_worker_ended(bed: ExecutionBed, job: str) -> None:
    await bed.submit(job, command=("/bin/sleep", "300"))
    await bed.grant(job, 1)
    await bed.event(GroupStarted, job)
    record = bed.record(job)
    os.kill(record["shim_pid"], signal.SIGKILL)
    await bed.evict(job, grace=1)
    await bed.event(GroupEnded, job)
    assert not is_alive(record["worker_pid"])


async def test_stopped_shim_is_woken_to_finish_its_work(bed: ExecutionBed, job: str) -> None:
    await bed.submit(job, command=("/bin/sh", "-c", "sleep 1; exit 4"))
    await bed.grant(job, 1)
    await bed.event(GroupStarted, job)
    os.kill(bed.record(job)["shim_pid"], signal.SIGSTOP)
    ended = await bed.event(GroupEnded, job)
    assert (ended.exit_code, ended.attributed_to) == (4, Attribution.JOB)


async def test_logs_follow_tail_and_resume(bed: ExecutionBed, job: str) -> None:
    script = "for i in 1 2 3 4 5; do echo line $i; done; sleep 1.5; echo late; printf rest"
    await bed.submit(job, command=("/bin/sh", "-c", script))
    await bed.grant(job, 2)
    await bed.event(GroupStarted, job)

    async def written() -> bool:
        return len(await bed.log_lines(job)) >= 10

    await bed.until(written)
    tail = await bed.log_lines(job, "?tail=2&member=worker/1")
    assert [(line["line"], line["member"]) for line in tail] == [
        ("line 4", f"{job}/worker/1/1"),
        ("line 5", f"{job}/worker/1/1"),
    ]
    async with asyncio.TaskGroup() as group:
        following = group.create_task(bed.log_lines(job, f"?follow=true&cursor={tail[0]['cursor']}&member=worker/1"))
        await bed.event(GroupEnded, job)
        await bed.close(job)
    assert [line["line"] for line in following.result()] == ["line 5", "late", "rest"]
    everything = await bed.log_lines(job)
    assert len(everything) == 14
    # Any cursor goes on behind its line, over all members.
    for place in (0, 6, 13):
        rest = await bed.log_lines(job, f"?cursor={everything[place]['cursor']}")
        assert [line["line"] for line in rest] == [line["line"] for line in everything[place + 1 :]]
    text = await bed.get(f"/internal/jobs/{job}/logs?member=worker/0", accept="text/plain")
    assert text.text.splitlines()[-2:] == ["late", "rest"]
    assert (await bed.get("/internal/jobs/nobody/logs")).status_code == 404
    assert (await bed.get(f"/internal/jobs/{job}/logs?cursor=%25")).status_code == 400
    members = json.loads((await bed.get(f"/internal/jobs/{job}/members")).text)["items"]
    assert [(m["member"], m["state"], m["exit_code"]) for m in members] == [
        (f"{job}/worker/1/1", "gone", 0),
        (f"{job}/worker/0/1", "gone", 0),
    ]
