"""The command line itself: help that teaches, the server's commands, what is missing without it."""

import click
import pytest
from click.testing import CliRunner

from tidewright.cli import main as module
from tidewright.cli.main import main


def run(*words):
    return CliRunner().invoke(main, list(words))


def test_help_names_every_command_the_first_steps_and_the_exit_codes():
    told = run("--help").output
    for name in ("up", "down", "service", "submit", "ps", "get", "logs", "why", "history", "scale", "hold"):
        assert f"\n  {name} " in told
    for name in ("release", "cancel", "priority", "top", "events", "doctor", "wait"):
        assert f"\n  {name} " in told
    assert "First steps" in told
    assert "69   lost contact" in told


@pytest.mark.parametrize("name", ["up", "down", "service", *main.commands])
def test_the_help_of_every_command_has_an_example(name):
    told = run(name, "--help")
    assert told.exit_code == 0
    assert "Example" in told.output
    assert f"tide {name}" in told.output


@pytest.mark.parametrize("words", [("up", "--slots", "4"), ("down",), ("service", "intake"), ("up", "--help")])
def test_without_the_server_its_commands_say_what_to_install(monkeypatch, words):
    monkeypatch.setattr(module, "entry_points", lambda **_: [])
    done = run(*words)
    assert done.exit_code == 2
    assert "pip install tidewright-server" in done.stderr
    assert "Traceback" not in done.output


def test_a_server_that_cannot_be_loaded_leaves_the_other_commands_usable(monkeypatch):
    class Broken:
        def load(self):
            raise ImportError("No module named 'asyncpg'")

    monkeypatch.setattr(module, "entry_points", lambda **_: [Broken()])
    done = run("up")
    assert done.exit_code == 2
    assert "asyncpg" in done.stderr
    assert run("--help").exit_code == 0


def test_an_interrupt_is_an_exit_code_and_no_traceback(monkeypatch):
    @click.command()
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setitem(main.commands, "interrupted", interrupted)
    done = run("interrupted")
    assert done.exit_code == 130
    assert done.stderr == "\nInterrupted.\n"
