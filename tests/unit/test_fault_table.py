"""Whose fault: the table of the manual is what the code does, and each exit is judged for a reason that is told."""

from dataclasses import replace
from pathlib import Path

import pytest
from unit.execution_builders import look, make_job, make_member, make_seen, name

from schemas.vocabulary import Attribution, EndCause, Mode
from services.execution.core.attribution import ExitKind, attribute_exit, shell_code
from services.execution.core.seen import MemoryEnd, MemoryWitness, Process
from services.execution.core.state import Ending
from services.execution.local.watched import NO_STATUS, ExitStatus, to_exit_status
from tests.unit.fault_table import GIB, gone, table
from tidewright.cli import exits

PAGE = Path(__file__).parents[2] / "docs" / "failures.md"
JOB, PLATFORM, NOBODY = Attribution.JOB, Attribution.PLATFORM, None


def test_manual_shows_what_the_code_decides() -> None:
    """``python -m tests.unit.fault_table`` prints the table; whether each row is right is for its reader to say."""
    assert table() in PAGE.read_text()


@pytest.mark.parametrize(
    ("code", "ending", "kind", "attributed", "cause"),
    [
        (0, None, ExitKind.DONE, JOB, EndCause.COMPLETED),
        (1, None, ExitKind.FAILED, JOB, EndCause.EXIT_CODE),
        (125, None, ExitKind.FAILED, JOB, EndCause.EXIT_CODE),
        (126, None, ExitKind.FAILED, JOB, EndCause.COMMAND_NOT_EXECUTABLE),
        (127, None, ExitKind.FAILED, JOB, EndCause.COMMAND_NOT_FOUND),
        (128, None, ExitKind.FAILED, JOB, EndCause.EXIT_CODE),
        (129, None, ExitKind.LOST, PLATFORM, EndCause.KILLED),
        (137, None, ExitKind.LOST, PLATFORM, EndCause.KILLED),
        (139, None, ExitKind.FAILED, JOB, EndCause.CRASHED),
        (255, None, ExitKind.FAILED, JOB, EndCause.EXIT_CODE),
        (-1, None, ExitKind.LOST, PLATFORM, EndCause.KILLED),
        (-2, None, ExitKind.LOST, PLATFORM, EndCause.KILLED),
        (-4, None, ExitKind.CRASHED, JOB, EndCause.CRASHED),
        (-6, None, ExitKind.CRASHED, JOB, EndCause.CRASHED),
        (-7, None, ExitKind.CRASHED, JOB, EndCause.CRASHED),
        (-8, None, ExitKind.CRASHED, JOB, EndCause.CRASHED),
        (-9, None, ExitKind.LOST, PLATFORM, EndCause.KILLED),
        (-10, None, ExitKind.CRASHED, JOB, EndCause.CRASHED),
        (-11, None, ExitKind.CRASHED, JOB, EndCause.CRASHED),
        (-15, None, ExitKind.LOST, PLATFORM, EndCause.KILLED),
        (None, None, ExitKind.LOST, PLATFORM, EndCause.UNSEEN),
        (0, Ending.LEAVER, ExitKind.ASKED, NOBODY, EndCause.STOPPED),
        (1, Ending.ATTEMPT_OVER, ExitKind.ASKED, NOBODY, EndCause.STOPPED),
        (-9, Ending.ATTEMPT_OVER, ExitKind.ASKED, NOBODY, EndCause.STOPPED),
        (-9, Ending.ABNORMAL, ExitKind.LOST, PLATFORM, EndCause.STUCK),
    ],
)
def test_exit_is_attributed(
    code: int | None, ending: Ending | None, kind: ExitKind, attributed: Attribution | None, cause: EndCause
) -> None:
    judged = attribute_exit(make_member(ending=ending), Process(exit_code=code))
    assert (judged.kind, judged.attributed_to, judged.cause) == (kind, attributed, cause)


def test_stop_that_nobody_of_us_asked_for_came_from_outside() -> None:
    """A live trainer answers SIGTERM with a checkpoint and exit 0: without this, that would be the job's failure."""
    stopped = Process(exit_code=0, ledger_stopped=True)
    judged = attribute_exit(make_member(), stopped)
    assert (judged.kind, judged.attributed_to, judged.cause) == (ExitKind.LOST, PLATFORM, EndCause.KILLED)
    assert attribute_exit(make_member(), stopped, mode=Mode.FIXED).kind is ExitKind.DONE
    assert attribute_exit(make_member(ending=Ending.ATTEMPT_OVER), stopped).kind is ExitKind.ASKED


@pytest.mark.parametrize(
    ("witness", "used", "asked", "attributed", "says"),
    [
        (MemoryWitness.LIMIT, 2 * GIB, GIB, JOB, ("2.0 GiB", "1.0 GiB", "--memory")),
        (MemoryWitness.KERNEL, 2 * GIB, GIB, JOB, ("2.0 GiB", "8.0 GiB", "--memory")),
        (MemoryWitness.KERNEL, 2 * GIB, 0, JOB, ("2.0 GiB", "8.0 GiB")),
        (MemoryWitness.KERNEL, GIB, 2 * GIB, PLATFORM, ("1.0 GiB of the 2.0 GiB", "its machine")),
        (MemoryWitness.KERNEL, 0, 2 * GIB, JOB, ("not known",)),
        (MemoryWitness.ALLOCATION, 300 << 20, 2 * GIB, JOB, ("300 MiB", "smaller batch")),
    ],
)
def test_out_of_memory_says_how_much_and_what_to_do(
    witness: MemoryWitness, used: int, asked: int, attributed: Attribution, says: tuple[str, ...]
) -> None:
    limit = 8 * GIB if witness is MemoryWitness.KERNEL else asked
    end = MemoryEnd(witness=witness, used_bytes=used, limit_bytes=limit)
    judged = attribute_exit(make_member(), Process(exit_code=-9, memory=end), memory_bytes=asked)
    assert judged.attributed_to is attributed
    assert judged.cause is (EndCause.OUT_OF_MEMORY if attributed is JOB else EndCause.NODE_OUT_OF_MEMORY)
    assert [text for text in says if text not in judged.reason] == []


def test_our_own_kill_is_not_a_lack_of_memory() -> None:
    end = MemoryEnd(witness=MemoryWitness.KERNEL, used_bytes=GIB)
    judged = attribute_exit(make_member(ending=Ending.LEAVER), Process(exit_code=-9, memory=end))
    assert judged.kind is ExitKind.ASKED


def test_shell_code() -> None:
    assert [shell_code(code) for code in (0, 7, -9, None)] == [0, 7, 137, None]


@pytest.mark.parametrize(
    ("view", "status"),
    [
        ({"phase": "Succeeded", "exit_code": 0}, 0),
        ({"phase": "Failed", "exit_code": 3, "attributed_to": "job"}, 3),
        ({"phase": "Failed", "exit_code": 255, "attributed_to": "job"}, 255),
        ({"phase": "Failed", "exit_code": -11, "attributed_to": "job"}, 139),
        ({"phase": "Failed", "exit_code": 137, "attributed_to": "platform"}, 137),
        ({"phase": "Failed", "exit_code": None, "attributed_to": "job"}, 1),
        ({"phase": "Failed", "exit_code": 0, "attributed_to": "job"}, 1),
        ({"phase": "Failed", "exit_code": None, "attributed_to": "platform"}, 70),
        ({"phase": "Cancelled", "exit_code": None}, 143),
    ],
)
def test_command_line_exits_as_the_job_does(view: dict[str, object], status: int) -> None:
    assert exits.of_job(view) == status


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({}, NO_STATUS),
        ({"code": True}, NO_STATUS),
        ({"code": 10**9}, NO_STATUS),
        ({"code": -9}, ExitStatus(code=-9)),
        ({"code": 3, "used_bytes": 7}, ExitStatus(code=3, used_bytes=7)),
        ({"code": -9, "out_of_memory": ["limit"], "used_bytes": "7"}, ExitStatus(code=-9)),
        ({"code": -9, "out_of_memory": "allocation"}, ExitStatus(code=-9)),
        (
            {"code": -9, "out_of_memory": "limit", "used_bytes": 7, "limit_bytes": -1},
            ExitStatus(code=-9, used_bytes=7, memory=MemoryEnd(witness=MemoryWitness.LIMIT, used_bytes=7)),
        ),
    ],
)
def test_exit_record_is_read_as_far_as_it_can_be(value: dict[str, object], expected: ExitStatus) -> None:
    """It lies in a folder that the worker may write to."""
    assert to_exit_status(value) == expected


def test_a_job_that_crashes_with_all_its_state_has_failed_by_itself() -> None:
    """Nobody is left to go on with: a failure of the platform would be tried again without being counted."""
    crashed = look(make_job(1), make_seen(1, processes={name(0): gone(-11)})).job
    assert crashed.verdict is not None
    assert (crashed.verdict.attributed_to, crashed.verdict.cause) == (JOB, EndCause.CRASHED)
    assert crashed.verdict.exit_code == 139
    killed = look(make_job(1), make_seen(1, processes={name(0): gone(-9)})).job
    assert killed.verdict is not None
    assert (killed.verdict.attributed_to, killed.verdict.cause) == (PLATFORM, EndCause.STATE_LOST)
    assert "worker/0/1 was killed from outside by SIGKILL" in killed.verdict.reason


@pytest.mark.parametrize("mode", list(Mode))
def test_a_failure_waits_until_it_is_known_how_its_peer_has_ended(mode: Mode) -> None:
    """The status of a process is on the disk some milliseconds after its end."""
    job = make_job(2)
    job = replace(job, spec=replace(job.spec, mode=mode))
    processes = {name(0): gone(1), name(1): Process(recorded=True, pid=2, ended=True)}
    waiting = look(job, make_seen(2, processes=processes)).job
    assert (waiting.verdict, waiting.losses, len(waiting.held())) == (None, (), 2)
    own = look(waiting, make_seen(2, processes={**processes, name(1): gone(0)})).job
    assert own.verdict is not None
    assert (own.verdict.attributed_to, own.verdict.exit_code) == (JOB, 1)
    taken = look(waiting, make_seen(2, processes={**processes, name(1): gone(-9)})).job
    assert taken.verdict is None or taken.verdict.attributed_to is PLATFORM
