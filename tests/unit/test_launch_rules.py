"""The launcher's decisions: back-off, identities, records, overrides."""

import os

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.launch.commands import _variable
from services.launch.parts import ChildPart
from services.launch.processes import ProcessId
from services.launch.record import UpRecord, read_record, record_path, write_record
from services.launch.restarts import Restarts


def restarts(**given_values):
    return Restarts(**{"seconds_min": 0.1, "seconds_max": 15.0, "steady_seconds": 30.0, **given_values})


def test_back_off_doubles_up_to_its_limit():
    waits, state = [], restarts()
    assert state.wait_seconds == 0
    for _ in range(10):
        state = state.after(ran_seconds=0.0, was_ready=False)
        waits.append(state.wait_seconds)
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 15.0, 15.0]


def test_what_becomes_ready_again_and_again_never_stays_away_for_long():
    """Fifty kills in quick succession: it was ready before each, so there is nothing wrong with it."""
    state = restarts()
    for _ in range(50):
        state = state.after(ran_seconds=2.0, was_ready=True)
        assert state.wait_seconds <= 0.8


@given(st.lists(st.floats(0, 100), max_size=200))
def test_a_steady_run_forgets_what_was_before(runs):
    state = restarts()
    for ran in runs:
        before = state.wait_seconds
        state = state.after(ran_seconds=ran, was_ready=False)
        assert 0.1 <= state.wait_seconds <= 15.0
        if ran >= 30:
            assert state.wait_seconds == 0.1
        else:
            assert state.wait_seconds >= min(before, 15.0)


def test_a_process_is_known_by_pid_and_start_time():
    mine = ProcessId.of(os.getpid())
    assert mine is not None
    assert mine.is_alive()
    later = ProcessId(pid=mine.pid, start=mine.start + 1)
    assert not later.is_alive()
    assert later.open() is None
    assert not later.signal(0)


@pytest.mark.parametrize("value", [None, 3, {}, {"pid": "1", "start": 1}, {"pid": -1, "start": 1}, {"pid": 1}])
def test_what_is_no_process_is_none(value):
    assert ProcessId.from_json(value) is None


def test_a_record_is_read_as_it_was_written(tmp_path):
    mine = ProcessId.of(os.getpid())
    record = UpRecord(url="http://127.0.0.1:1", port=1, supervisor=mine.as_json(), services={"intake": "http://x"})
    write_record(tmp_path, record)
    assert read_record(tmp_path) == record
    assert record.process_id("supervisor") == mine
    assert record.process_id("zygote") is None
    assert oct(record_path(tmp_path).stat().st_mode & 0o777) == "0o600"


def test_pids_of_an_earlier_boot_mean_nothing():
    mine = ProcessId.of(os.getpid())
    record = UpRecord(url="", port=1, supervisor=mine.as_json(), boot_id="another")
    assert record.process_id("supervisor") is None


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": 2}', '{"format": 1}', '{"format": 1, "url": "x"}'])
def test_a_record_that_cannot_be_read_is_none(tmp_path, text):
    record_path(tmp_path).write_text(text)
    assert read_record(tmp_path) is None


def test_overrides_are_the_variables_that_services_read():
    assert _variable("scaling.window_seconds=4") == ("TIDE_SCALING_WINDOW_SECONDS", "4")
    assert _variable("installation.log_level=debug") == ("TIDE_LOG_LEVEL", "debug")
    assert _variable("intake.host=a=b") == ("TIDE_INTAKE_HOST", "a=b")


@pytest.mark.parametrize("text", ["scaling", "scaling.window", "window=4", "nobody.window=4", "scaling.win dow=4"])
def test_overrides_that_are_none_say_how_to_write_them(text):
    with pytest.raises(click.UsageError, match=r"SECTION\.NAME=VALUE|there is no section"):
        _variable(text)


def test_last_words_are_of_the_last_start_and_few_however_long_the_log_is(tmp_path):
    log = tmp_path / "services.log"
    part = ChildPart(name="x", command=(), environment={}, log=log, stop_seconds=1.0, log_bytes_max=1 << 20)
    assert part.last_words() == []
    log.write_text("of an earlier start\n")
    part.log_begin = log.stat().st_size
    with log.open("a") as file:
        file.write('{"level": "info"}\nfirst\n')
    assert part.last_words() == ["first"]
    with log.open("a") as file:
        file.truncate(1 << 32)  # a hole of gigabytes: who reads all of it has no memory left
        file.seek(0, 2)
        file.write("\n" + "y" * 1000 + "\nlast\n")
    assert part.last_words()[-2:] == ["y" * 300, "last"]
    assert all(len(line) <= 300 for line in part.last_words())
