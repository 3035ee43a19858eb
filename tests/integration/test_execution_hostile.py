"""What one job's processes say and write hurts no other job: bad words, bad files, questions without end."""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import pytest_asyncio
from integration.elastic_bed import is_alive
from integration.execution_bed import NAMES, ExecutionBed, running_bed, start_of
from integration.trainer_talk import Talk, hello, run_sleeper

from schemas.events.worker import CheckpointFailed, GroupEnded, GroupStarted
from schemas.vocabulary import AttemptOutcome, Mode
from services.execution.core.seen import Process
from services.execution.local import proc
from services.execution.local.watched import Watched
from shared.errors import Unavailable
from shared.signing import trainer_token
from shared.testing.harness import TEST_KEY
from shared.testing.postgres import DatabaseServer
from tidewright import protocol

SETTINGS = {"slots": "32", "checkpoint_event_seconds": "0.1"}


@pytest.fixture(scope="module")
def bed(postgres: DatabaseServer) -> Iterator[ExecutionBed]:
    """One installation for all tests of this file; its process ends when anything fails in it."""
    with running_bed(postgres, SETTINGS) as bed:
        yield bed


@pytest.fixture
def job() -> str:
    return next(NAMES)


@pytest_asyncio.fixture(autouse=True)
async def connections() -> AsyncIterator[None]:
    yield
    await Talk.close_all()


async def others_go_on(bed: ExecutionBed) -> None:
    other = next(NAMES)
    await bed.submit(other, command=("/bin/true",))
    await bed.grant(other, 1)
    assert (await bed.event(GroupEnded, other)).outcome is AttemptOutcome.SUCCEEDED


# -- words ----------------------------------------------------------------------------------------------------------


def line(kind: str, **fields: Any) -> bytes:
    return json.dumps({"t": kind, **fields}).encode() + b"\n"


UNSTORABLE = (
    line("checkpoint_written", generation=1, step=10**40, location="/x"),
    line("checkpoint_written", generation=2**40, step=1, location="/x"),
    line("started", generation=1, step=2**70, rank=0, world=1, pause_seconds=0, resumed_generation=0, resumed_step=0),
    line("mark", generation=2**31 - 1, step=1, phase="stepping", phase_seconds=0, sync_seconds=0, waiting=True),
    line("mark", generation=1, step=1, phase="stepping", phase_seconds=float("nan"), sync_seconds=0, waiting=False),
    line("finished", generation=1, step=-(10**30)),
)


async def test_numbers_that_no_row_can_hold_end_their_connection_alone(bed: ExecutionBed, job: str) -> None:
    nonce = await run_sleeper(bed, job)
    for bad in UNSTORABLE:
        talk = await Talk.open(bed)
        talk.say(hello(job, nonce=nonce))
        assert isinstance(await talk.hear(), protocol.Welcome)
        talk.writer.write(bad)
        while await talk.hear() is not None:
            pass
    await others_go_on(bed)


async def test_a_reason_that_is_no_unicode_is_told(bed: ExecutionBed, job: str) -> None:
    """As Python's own errors are that name a file whose name is no UTF-8."""
    nonce = await run_sleeper(bed, job)
    talk = await Talk.open(bed)
    talk.say(hello(job, nonce=nonce))
    talk.say(protocol.CheckpointFailed(generation=1, step=1, reason="no room for a\udcff\0.npz"))
    assert (await bed.event(CheckpointFailed, job)).reason.startswith("no room for a?")
    await others_go_on(bed)


async def test_a_question_asked_again_takes_the_place_of_the_former(bed: ExecutionBed, job: str) -> None:
    """While nothing can be committed, and so answered, connections do not pile up."""
    link = bed.state / "zygote.sock"
    link.rename(bed.state / "away.sock")
    database = await asyncpg.connect(bed.database.url.replace("+asyncpg", ""))
    try:
        await bed.submit(job, command=("/bin/true",))
        await bed.grant(job, 1)

        async def committed() -> Any:
            return [m["nonce"] for m in await bed.members(job) if m["state"] == "committed"]

        nonce = (await bed.until(committed))[0]
        question = protocol.Admit(token=trainer_token(TEST_KEY, job), member=f"{job}/worker/0/1", nonce=nonce, pid=1)
        async with database.transaction():
            await database.execute("lock table execution.members in share row exclusive mode")
            first, second = await Talk.open(bed), await Talk.open(bed)
            first.say(question)
            with pytest.raises(TimeoutError):
                await first.hear(0.5)
            second.say(question)
            assert await first.hear() is None
        assert isinstance(await second.hear(), protocol.Admitted)
    finally:
        await database.close()
        (bed.state / "away.sock").rename(link)
    stranger = await Talk.open(bed)
    stranger.say(protocol.Admit(token=question.token, member=f"{job}/worker/99/1", nonce="n", pid=1))
    assert isinstance(await stranger.hear(), protocol.Refused)


async def test_a_jump_of_the_wall_clock_ends_nobody(bed: ExecutionBed, job: str) -> None:
    await bed.submit(job, command=("/bin/sleep", "60"), run_time_limit_seconds=7200.0)
    await bed.grant(job, 1)
    await bed.event(GroupStarted, job)
    pid = await bed.worker_pid(job)
    try:
        for seconds in (86_400, -86_400, 0):
            (bed.state / "clock_offset").write_text(str(seconds))
            await others_go_on(bed)
            assert not await bed.events(GroupEnded, job)
            assert is_alive(pid)
    finally:
        (bed.state / "clock_offset").unlink()
    await bed.evict(job, grace=1)
    await bed.event(GroupEnded, job)


# -- files ----------------------------------------------------------------------------------------------------------


SCRIBBLER = """
import os, time
folder = os.environ["TIDE_MEMBER_DIRECTORY"]
def write(name, text):
    with open(f"{folder}/{name}", "w") as file:
        file.write(text)
for text in ("{}", "[", '{"code":"zero"}', '{"code":1e300}', "[" * 60_000):
    write("exit.json", text)
    write("watch", text)
    time.sleep(0.15)
write("ledger.jsonl", '{"k":"applied","step":' + "9" * 400 + '}\\n' + "[" * 9000 + '\\n{"k":"applied","step":7.5}\\n')
os._exit(3)
"""


async def test_a_worker_that_writes_into_the_shims_records_hurts_itself_alone(bed: ExecutionBed, job: str) -> None:
    script = bed.state / "scribbler.py"
    script.write_text(SCRIBBLER)
    await bed.submit(job, mode=Mode.LIVE, script=str(script))
    await bed.grant(job, 1)
    ended = await bed.event(GroupEnded, job)
    assert (ended.outcome, ended.exit_code, ended.step) == (AttemptOutcome.FAILED, 3, None)
    await others_go_on(bed)


# -- one member's folder, looked at without a service ---------------------------------------------------------------


@dataclass
class Pair:
    """Two processes that stand for a shim and its worker."""

    directory: Path
    shim: "subprocess.Popen[bytes]"
    worker: "subprocess.Popen[bytes]"
    now: float = 0.0

    def watched(self) -> Watched:
        return Watched(self.directory, nonce="n", boot_id=proc.boot_id(), on_end=lambda: None)

    def look(self, watched: Watched, *, later: float = 0.0) -> Process:
        self.now += later
        return watched.look(self.now, watch_activity=False, unseen_end_seconds=2.0)

    def end(self) -> None:
        for process in (self.worker, self.shim):
            process.kill()
            process.wait()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    sleep = [sys.executable, "-S", "-E", "-c", "import time; time.sleep(60)"]
    pair = Pair(tmp_path, subprocess.Popen(sleep), subprocess.Popen(sleep))
    record = {"nonce": "n", "member": "m", "boot_id": proc.boot_id()}
    for name in ("shim", "worker"):
        pid = getattr(pair, name).pid
        record |= {f"{name}_pid": pid, f"{name}_start": start_of(pid)}
    (tmp_path / "pid.json").write_text(json.dumps(record))
    yield pair
    pair.end()


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """The kernel's own limit, for this very process."""
    lowest_free = os.dup(0)
    os.close(lowest_free)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_a_living_worker_is_not_taken_for_dead_when_descriptors_run_out(pair: Pair) -> None:
    told = []
    for count in range(6):
        watched = pair.watched()
        with descriptors_left(count):
            try:
                process = pair.look(watched)
                told.append((process.recorded, process.ended))
            except Unavailable:
                told.append("unknown")
        assert not pair.look(watched).ended
        watched.close()
    assert told[0] == "unknown"
    assert set(told) == {"unknown", (True, False)}


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


SCRIBBLES: tuple[Callable[[Path], Any], ...] = (
    lambda path: path.write_text("{}"),
    lambda path: path.write_text('{"code":true}'),
    lambda path: path.write_text('{"code":' + "9" * 30 + "}"),
    lambda path: path.write_text("[" * 60_000),
    lambda path: path.write_bytes(b"\xff" * 200_000),
    lambda path: path.symlink_to("/dev/zero"),
    lambda path: path.mkdir(),
    pipe,
)


@pytest.mark.parametrize(
    "scribble", SCRIBBLES, ids=["empty", "bool", "great", "deep", "bytes", "zeros", "folder", "pipe"]
)
@pytest.mark.timeout(20)
async def test_no_record_can_be_made_that_stops_who_looks(pair: Pair, scribble: Callable[[Path], Any]) -> None:
    for name in ("exit.json", "ledger.jsonl"):
        scribble(pair.directory / name)
    watched = pair.watched()
    assert not pair.look(watched).ended, "a status counts once the worker is over"
    pair.end()
    assert pair.look(watched) == Process(recorded=True, pid=pair.worker.pid, ended=True)
    final = pair.look(watched, later=2.1)
    assert final.exit_code in (None, -signal.SIGKILL), "what was scribbled, and not what the kernel says"
    assert replace(final, exit_code=None) == Process(recorded=True, pid=pair.worker.pid, ended=True, gone=True)
    (pair.directory / "pid.json").unlink()
    scribble(pair.directory / "pid.json")
    assert not pair.look(pair.watched()).recorded
