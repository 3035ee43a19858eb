"""Whose fault, on real processes: each end of a worker, as execution says it. Real zygote, shim, kernel, Postgres."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from integration.elastic_bed import ZygoteBed, is_alive, wait_until
from integration.execution_bed import NAMES, REASON, ROOT, ExecutionBed

from schemas.events.allocation import AllocationGranted, RoleGrant
from schemas.events.worker import GroupChanged, GroupEnded, GroupStarted
from schemas.resources import MEMORY, SLOT, Resources
from schemas.vocabulary import DEFAULT_FLAVOR, WORKER_ROLE, AttemptOutcome, Attribution, EndCause, Mode, ServiceName
from shared.testing.postgres import DatabaseServer, temporary_state_directory
from tidewright import shim

DIGITS = str(ROOT / "examples" / "digits.py")
MIB = 2**20
GROWS = "x = []\nwhile True: x.append(b'x' * (32 << 20)); __import__('time').sleep(0.02)"
"""Takes 32 MiB after 32 MiB, and uses them."""


@pytest.fixture(scope="module")
def zygote() -> Iterator[ZygoteBed]:
    with temporary_state_directory() as base:
        zygote = ZygoteBed(base)
        zygote.start()
        try:
            yield zygote
        finally:
            zygote.stop()


@pytest.fixture(scope="module")
def bed(postgres: DatabaseServer, zygote: ZygoteBed) -> Iterator[ExecutionBed]:
    """One installation for all tests of this file; each has a job of its own."""
    with temporary_state_directory() as state, postgres.database() as database:
        bed = ExecutionBed(database, state, zygote.socket_path, settings={"quiet_seconds": "6"})
        try:
            bed.start()
            asyncio.run(be_stuck(bed))
            yield bed
            bed.stop()
        finally:
            bed.clean_up()


async def be_stuck(bed: ExecutionBed) -> None:
    """A job that does nothing; it takes a while until that is noticed, and other tests run meanwhile."""
    await bed.submit("stuck", command=("/bin/sleep", "600"))
    await bed.grant("stuck", 1)


@pytest.fixture
def job() -> str:
    return next(NAMES)


async def grant_with_memory(bed: ExecutionBed, job: str, memory_bytes: int) -> None:
    role = RoleGrant(
        role=WORKER_ROLE,
        elastic=True,
        members=1,
        minimum=1,
        resources=Resources({SLOT: 1000, MEMORY: memory_bytes}),
    )
    granted = AllocationGranted(
        epoch=bed._next_epoch(job), attempt=1, roles=(role,), flavor=DEFAULT_FLAVOR, reason=REASON
    )
    await bed.say(ServiceName.QUEUEING, job, granted)


# -- exit codes and signals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "code", "whose", "cause"),
    [
        ("exit 3", 3, Attribution.JOB, EndCause.EXIT_CODE),
        ("no-such-command", 127, Attribution.JOB, EndCause.COMMAND_NOT_FOUND),
        ("/etc/passwd", 126, Attribution.JOB, EndCause.COMMAND_NOT_EXECUTABLE),
        ("kill -SEGV $$", 139, Attribution.JOB, EndCause.CRASHED),
        ("kill -ABRT $$", 134, Attribution.JOB, EndCause.CRASHED),
        ("kill -KILL $$", 137, Attribution.PLATFORM, EndCause.KILLED),
        ("kill -TERM $$", 143, Attribution.PLATFORM, EndCause.KILLED),
        ("sleep 60 & kill -TERM $!; wait $!", 143, Attribution.PLATFORM, EndCause.KILLED),
        (f"exec {sys.executable} -c 'bytearray(1 << 60)'", 1, Attribution.JOB, EndCause.OUT_OF_MEMORY),
    ],
)
async def test_end_is_judged(
    bed: ExecutionBed, job: str, script: str, code: int, whose: Attribution, cause: EndCause
) -> None:
    await bed.submit(job, command=("/bin/sh", "-c", script))
    await bed.grant(job, 1)
    ended = await bed.event(GroupEnded, job)
    assert (ended.outcome, ended.exit_code, ended.attributed_to, ended.cause) == (
        AttemptOutcome.FAILED,
        code,
        whose,
        cause,
    ), ended.reason
    (member,) = await bed.members(job)
    assert (member["attributed_to"], member["exit_reason"] in ended.reason) == (whose.value, True)


async def test_command_that_does_not_exist_is_told_as_such(bed: ExecutionBed, job: str) -> None:
    await bed.submit(job, command=("/nowhere/train",))
    await bed.grant(job, 1)
    ended = await bed.event(GroupEnded, job)
    assert (ended.exit_code, ended.cause) == (127, EndCause.COMMAND_NOT_FOUND)
    assert "cannot execute /nowhere/train: No such file" in (bed.directory(job) / "log").read_text()


async def test_peers_that_trip_over_a_killed_one_are_not_at_fault(bed: ExecutionBed, job: str) -> None:
    """Worker 0 raises because worker 1 is killed, and its end is seen first."""
    script = (
        "if [ $PADDLE_TRAINER_ID = 0 ]; then while [ ! -e $OUT ]; do sleep 0.02; done; exit 1; fi;"
        " (trap '' TERM; exec sleep 300) & sleep 300"
    )
    go = bed.state / f"{job}.go"
    await bed.submit(job, command=("/bin/sh", "-c", script.replace("$OUT", str(go))))
    await bed.grant(job, 2)
    await bed.event(GroupStarted, job)
    pid = await bed.worker_pid(job, 1)
    os.kill(bed.record(job, 1)["shim_pid"], signal.SIGSTOP)  # the end of worker 1 is not wound up before the other's
    os.kill(pid, signal.SIGKILL)
    go.touch()
    wait_until((bed.directory(job, 0) / "exit.json").exists, what="worker 0 raised")
    os.kill(bed.record(job, 1)["shim_pid"], signal.SIGCONT)
    ended = await bed.event(GroupEnded, job)
    assert (ended.attributed_to, ended.cause, ended.exit_code) == (Attribution.PLATFORM, EndCause.KILLED, 137), (
        bed.log
    )


async def test_run_time_limit_is_final(bed: ExecutionBed, job: str) -> None:
    await bed.submit(job, command=("/bin/sleep", "60"), run_time_limit_seconds=0.2)
    await bed.grant(job, 1)
    ended = await bed.event(GroupEnded, job)
    assert (ended.attributed_to, ended.cause, ended.final, ended.exit_code) == (
        Attribution.JOB,
        EndCause.RUN_TIME_LIMIT,
        True,
        None,
    )
    (member,) = await bed.members(job)
    assert (member["attributed_to"], member["exit_code"]) == (None, -signal.SIGTERM)  # our own signal is nobody's


async def test_allocation_that_paddle_refuses_is_a_want_of_memory(bed: ExecutionBed, job: str) -> None:
    script = bed.state / "large.py"
    script.write_text("import paddle\npaddle.zeros([1 << 42])\n")
    await bed.submit(job, script=str(script))
    await bed.grant(job, 1)
    ended = await bed.event(GroupEnded, job)
    assert (ended.attributed_to, ended.cause, ended.exit_code) == (Attribution.JOB, EndCause.OUT_OF_MEMORY, 1)
    assert "could not allocate memory: it used" in ended.reason


# -- memory --------------------------------------------------------------------------------------------------------


async def test_worker_above_its_memory_is_ended_and_told_how_much_it_used(bed: ExecutionBed, job: str) -> None:
    """The process that grows is not the worker itself: all that it starts counts."""
    await bed.submit(job, command=("/bin/sh", "-c", f'{sys.executable} -c "{GROWS}"; exit 5'))
    await grant_with_memory(bed, job, 200 * MIB)
    ended = await bed.event(GroupEnded, job)
    assert (ended.attributed_to, ended.cause, ended.exit_code) == (Attribution.JOB, EndCause.OUT_OF_MEMORY, 137)
    assert "its limit is 200 MiB" in ended.reason
    used = int(ended.reason.split("it used ")[1].split()[0])
    assert 200 < used < 900
    assert "--memory" in ended.reason


async def test_worker_within_its_memory_is_left_alone(bed: ExecutionBed, job: str) -> None:
    """A fork of the zygote shares its pages: much is in its memory that is not its own, and does not count."""
    free = next(NAMES)
    script = bed.state / "small.py"
    script.write_text("import time, paddle\nx = b'x' * (32 << 20)\nprint('ready', flush=True)\ntime.sleep(1.5)\n")
    await bed.submit(free, script=str(script))
    await bed.grant(free, 1)
    pid = await bed.worker_pid(free)
    wait_until(lambda: "ready" in (bed.directory(free) / "log").read_text(), what="it uses what it needs")
    resident, own = shim.resident_bytes([pid]), shim.used_bytes([pid])
    assert resident > own + 20 * MIB
    await bed.submit(job, script=str(script))
    await grant_with_memory(bed, job, (resident + own) // 2)
    ended = await bed.event(GroupEnded, job)
    assert (ended.outcome, ended.exit_code) == (AttemptOutcome.SUCCEEDED, 0), (ended.reason, resident, own)


@contextlib.contextmanager
def memory_limit(pid: int, limit_bytes: int) -> Iterator[None]:
    """Put a process, and what it will start, below a limit of the kernel's, as a container would. Skips where nobody
    may make one."""
    mount, folder, counter = shim.memory_cgroup(os.getpid())
    parent, name = (Path(mount or "/sys/fs/cgroup"), f"tide-test-{os.getpid()}")
    version_1 = counter.endswith("memory.oom_control")
    own = parent / name
    try:
        own.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        if version_1:
            (own / "memory.limit_in_bytes").write_text(str(limit_bytes))
        else:
            with contextlib.suppress(OSError):
                (parent / "cgroup.subtree_control").write_text("+memory")
            if not (own / "memory.max").exists():
                pytest.skip("the memory controller is not to be had here")
            (own / "memory.max").write_text(str(limit_bytes))
            with contextlib.suppress(FileNotFoundError):  # a kernel that does not count swap
                (own / "memory.swap.max").write_text("0")
        (own / "cgroup.procs").write_text(str(pid))
        try:
            yield
        finally:
            (Path(folder or parent) / "cgroup.procs").write_text(str(pid))
    finally:
        wait_until(lambda: not (own / "cgroup.procs").read_text().split(), 20, "the cgroup is empty")
        own.rmdir()


async def test_kill_by_the_kernel_for_want_of_memory_is_known(bed: ExecutionBed, zygote: ZygoteBed, job: str) -> None:
    """Who asked for nothing is at fault; who kept to what it asked for is not."""
    modest = next(NAMES)
    assert zygote.process is not None
    with memory_limit(zygote.process.pid, 700 * MIB):
        await bed.submit(job, command=(sys.executable, "-c", GROWS))
        await bed.grant(job, 1)
        ended = await bed.event(GroupEnded, job)
        assert (ended.attributed_to, ended.cause, ended.exit_code) == (Attribution.JOB, EndCause.OUT_OF_MEMORY, 137)
        assert "killed by the kernel" in ended.reason
        assert "its limit is 700 MiB" in ended.reason
        await bed.submit(modest, command=(sys.executable, "-c", GROWS))
        await grant_with_memory(bed, modest, 2048 * MIB)
        ended = await bed.event(GroupEnded, modest)
        assert (ended.attributed_to, ended.cause) == (Attribution.PLATFORM, EndCause.NODE_OUT_OF_MEMORY), ended.reason
        assert "of the 2.0 GiB that it asked for" in ended.reason


# -- the machine ---------------------------------------------------------------------------------------------------


def forget_as_after_a_restart(directory: Path) -> None:
    """What a machine that lost its power shows: a record of another boot, no process, and nobody's word of an end."""
    record = json.loads((directory / "pid.json").read_text())
    for kind in ("worker", "shim"):
        os.kill(record[f"{kind}_pid"], signal.SIGKILL)
    wait_until(lambda: not is_alive(record["worker_pid"]) and not is_alive(record["shim_pid"]), what="gone")
    wait_until((directory / "gone").exists, what="the zygote has wound it up")
    for name in ("exit.json", "gone"):
        (directory / name).unlink(missing_ok=True)
    (directory / "pid.json").write_text(json.dumps({**record, "boot_id": "of-another-boot"}))


async def test_machine_that_restarts_is_one_loss_and_training_goes_on(bed: ExecutionBed, job: str) -> None:
    fixed = next(NAMES)
    await bed.submit(
        job,
        mode=Mode.LIVE,
        script=DIGITS,
        args=("--epochs", "9", "--step-delay", "0.02"),
        checkpoint_every_steps=20,
    )
    await bed.grant(job, 3, minimum=2)
    await bed.submit(fixed, command=("/bin/sh", "-c", "while :; do sleep 0.1; done"))
    await bed.grant(fixed, 1)
    await bed.event(GroupStarted, fixed)
    await bed.event(GroupStarted, job, seconds=40)
    checkpoints = bed.state / "jobs" / job / "checkpoints"

    async def has_checkpoint() -> bool:
        return any(checkpoints.glob("*/manifest.json"))

    await bed.until(has_checkpoint, 30, "a checkpoint")
    bed.kill()
    for index in range(3):
        forget_as_after_a_restart(bed.directory(job, index))
    forget_as_after_a_restart(bed.directory(fixed))
    bed.start()
    ended = await bed.event(GroupEnded, fixed)
    assert (ended.attributed_to, ended.cause) == (Attribution.PLATFORM, EndCause.NODE_RESTARTED)
    assert "its machine was restarted" in ended.reason
    changed = await bed.event(GroupChanged, job, seconds=40)
    assert [(lost.cause, lost.attributed_to) for lost in changed.lost] == 3 * [
        (EndCause.NODE_RESTARTED, Attribution.PLATFORM)
    ]
    assert changed.step >= 20
    register = bed.database.psql(f"select register->>'fruitless' from execution.jobs where job_id = '{job}'")
    assert register.strip() == "1"
    ended = await bed.event(GroupEnded, job, seconds=60)
    assert (ended.outcome, ended.step, ended.attempt) == (AttemptOutcome.SUCCEEDED, 9 * 15, 1)


async def test_live_worker_that_somebody_stops_is_replaced_and_is_no_failure(bed: ExecutionBed, job: str) -> None:
    """SIGTERM from outside: all write a checkpoint and exit with 0, which would look like the end of the training."""
    await bed.submit(
        job,
        mode=Mode.LIVE,
        script=DIGITS,
        args=("--epochs", "6", "--step-delay", "0.02"),
        checkpoint_every_steps=20,
    )
    await bed.grant(job, 2)
    await bed.event(GroupStarted, job, seconds=40)
    os.kill(await bed.worker_pid(job, 1), signal.SIGTERM)
    changed = await bed.event(GroupChanged, job, seconds=40)
    assert {(lost.cause, lost.attributed_to) for lost in changed.lost} == {(EndCause.KILLED, Attribution.PLATFORM)}
    ended = await bed.event(GroupEnded, job, seconds=60)
    assert (ended.outcome, ended.step, ended.attempt) == (AttemptOutcome.SUCCEEDED, 6 * 15, 1), ended.reason


async def test_stuck_whole_is_the_platforms_and_has_no_code(bed: ExecutionBed) -> None:
    ended = await bed.event(GroupEnded, "stuck", seconds=30)
    assert (ended.attributed_to, ended.cause, ended.exit_code) == (Attribution.PLATFORM, EndCause.STUCK, None)
    (member,) = await bed.members("stuck")
    assert (member["exit_code"], member["attributed_to"]) == (-signal.SIGKILL, "platform")
