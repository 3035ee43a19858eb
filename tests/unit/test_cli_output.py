"""What the command prints and how it exits: exit codes, spans, columns, utilisation with its measure."""

from datetime import UTC, datetime

import click
import pytest

from tidewright.cli import exits, output
from tidewright.cli.submit import _changes, _name_of
from tidewright.cli.top import slots_of


@pytest.mark.parametrize(
    ("job", "code"),
    [
        ({"phase": "Succeeded", "exit_code": 0}, 0),
        ({"phase": "Succeeded", "exit_code": None}, 0),
        ({"phase": "Failed", "exit_code": 3}, 3),
        ({"phase": "Failed", "exit_code": None}, 1),
        ({"phase": "Failed", "exit_code": 0}, 1),
        ({"phase": "Failed", "exit_code": -9}, 137),
        ({"phase": "Failed", "exit_code": 300}, 255),
        ({"phase": "Cancelled", "exit_code": 3}, 143),
    ],
)
def test_exit_code_of_a_job(job, code):
    assert exits.of_job(job) == code


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0, "0s"), (119.4, "119s"), (120, "2m"), (7199, "119m"), (7200, "2h"), (11_400, "3h10m"), (200_000, "2d")],
)
def test_spans(seconds, told):
    assert output.span(seconds) == told
    assert output.age("2026-01-01T00:00:00Z", now=datetime.fromtimestamp(1_767_225_600 + seconds, UTC)) == told


def test_columns_align_whatever_the_colors_and_cut_nothing():
    text = output.columns(["A", "B"], [[click.style("x", fg="red"), "y" * 300], ["long", "z"]])
    lines = [click.unstyle(line) for line in text.splitlines()]
    assert [line.index(char) for line, char in zip(lines, "Byz", strict=True)] == [6, 6, 6]
    assert lines[1].endswith("y" * 300)


def test_utilisation_names_its_measure():
    assert output.utilisation({"progress": {"utilisation": 0.873, "measure": "wall"}}) == "87% (wall)"
    assert output.utilisation({"progress": {"utilisation": None}}) == "-"
    assert output.utilisation({"progress": None}) == "-"


def test_zeros_that_were_given_are_sent():
    sent = _changes({"accelerators": 0, "retries": 0, "held": False, "name": None, "environment": (), "queue": "q"})
    assert sent == {"resources": {"accelerators": 0}, "restart_policy": {"limit": 0}, "queue": "q"}


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("Train_It.py", "train_it"),
        ("Räder (2).py", "r-der--2"),
        ("/a/b/mnist.py", "mnist"),
        ("._.py", "job"),
        ("x" * 99 + ".py", "x" * 63),
    ],
)
def test_names_from_scripts_are_valid(script, name):
    assert _name_of(script) == name


def test_slots_are_accelerators_less_what_others_use():
    node = {
        "allocatable": {"cpu": 8000, "tidewright.io/slot": 4000},
        "used_by_others": {"tidewright.io/slot": 1000, "cpu": 2000},
    }
    assert slots_of(node) == 3
