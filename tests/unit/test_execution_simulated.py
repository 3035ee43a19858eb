"""Unit: what a simulated member has begun outlives the executor, and is never begun a second time."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

import pytest
from execution_builders import make_job, make_member, make_spec, name

from schemas.vocabulary import Mode
from services.execution.memory import JobView, Memory
from services.execution.settings import ExecutionSettings
from services.execution.simulated import LEDGER, SimulatedExecutor
from services.execution.store import StoredJob

MEMBER = make_member(0)


class Bed:
    """One executor over a ledger, at an hour of the test's own."""

    def __init__(self, state: Path, *command: str) -> None:
        self.now = 1000.0
        self.state = state
        self.files: list[TextIO] = []
        spec = make_spec(mode=Mode.FIXED, script=None, command=command)
        self.memory = Memory()
        job = make_job(1, spec=spec, members=(MEMBER,))
        self.memory.jobs[job.job_id] = JobView(stored=StoredJob(job=job, token_hash=b""))

    def executor(self) -> SimulatedExecutor:
        """As after a start of the process: the ledger was read."""
        made = SimulatedExecutor(ExecutionSettings(), self.memory, state=self.state, wall=lambda: self.now)
        made._load()
        assert made._file is not None
        self.files.append(made._file)
        return made

    def close(self) -> None:
        for file in self.files:
            file.close()

    def ledger(self) -> list[bool]:
        return [json.loads(line)["ended"] for line in (self.state / LEDGER).read_text().splitlines()]


@pytest.fixture
def bed_of(tmp_path: Path) -> Iterator[Callable[..., Bed]]:
    with ExitStack() as stack:

        def make(*command: str) -> Bed:
            bed = Bed(tmp_path, *command)
            stack.callback(bed.close)
            return bed

        yield make


@pytest.mark.parametrize(("command", "code"), [(("sleep", "5"), 0), (("false",), 1), (("true",), 0)])
def test_it_runs_as_long_as_its_command_says(bed_of: Callable[..., Bed], command: tuple[str, ...], code: int) -> None:
    bed = bed_of(*command)
    executor = bed.executor()
    executor.start(name())
    executor.look(MEMBER, watch_activity=True)
    bed.now += 4.9
    early = executor.look(MEMBER, watch_activity=True)
    assert early.ended is (command[0] != "sleep")
    bed.now += 0.1
    end = executor.look(MEMBER, watch_activity=True)
    assert (end.ended, end.gone, end.exit_code) == (True, True, code)
    assert bed.ledger() == [False, True]


def test_a_restart_goes_on_where_it_was(bed_of: Callable[..., Bed]) -> None:
    bed = bed_of("sleep", "5")
    first = bed.executor()
    first.start(name())
    first.look(MEMBER, watch_activity=True)
    bed.now += 3.0
    second = bed.executor()
    second.start(name())
    assert not second.look(MEMBER, watch_activity=True).ended
    bed.now += 2.0
    assert second.look(MEMBER, watch_activity=True).ended
    third = bed.executor()
    third.start(name())
    assert third.look(MEMBER, watch_activity=True).exit_code == 0
    assert bed.ledger() == [False, True]


def test_a_signal_ends_it_at_once(bed_of: Callable[..., Bed]) -> None:
    bed = bed_of("sleep", "500")
    executor = bed.executor()
    executor.start(name())
    executor.look(MEMBER, watch_activity=True)
    executor.kill(name())
    assert executor.look(MEMBER, watch_activity=True).exit_code == 137
    assert bed.ledger() == [False, True]


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path, bed_of: Callable[..., Bed]) -> None:
    (tmp_path / LEDGER).write_text('{"job": "j1", "ro')
    bed = bed_of("sleep", "5")
    executor = bed.executor()
    executor.start(name())
    assert not executor.look(MEMBER, watch_activity=True).ended
    assert (tmp_path / LEDGER).read_text().splitlines()[1].startswith('{"job": "j1", "role"')
