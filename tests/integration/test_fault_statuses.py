"""How a job ended, as a user meets it: status of the command line, views, history, events. Real ``tide up``."""

import json
import sys
from collections.abc import Iterator

import httpx
import pytest
from integration.launched import Launched, launched

SETTINGS = (
    "queueing.platform_retries_without_progress_max=1",
    "queueing.back_off_first_seconds=0.3",
)
GROWS = "x = []\nwhile True: x.append(b'x' * (32 << 20)); __import__('time').sleep(0.02)"


CASES = {
    # name: (script, options, status, whose, cause, attempts)
    "done": ("exit 0", (), 0, None, "Completed", 1),
    "code": ("exit 3", ("--retries", "0"), 3, "job", "ExitCode", 1),
    "retried": ("exit 255", ("--retries", "2"), 255, "job", "ExitCode", 3),
    "not-found": ("no-such-command", ("--retries", "0"), 127, "job", "CommandNotFound", 1),
    "crash": ("kill -SEGV $$", ("--retries", "0"), 139, "job", "Crashed", 1),
    # The platform's: retries of the job do not count, and yet it comes to an end.
    "killed": ("kill -KILL $$", ("--retries", "0"), 137, "platform", "NoProgress", 2),
    "memory": (
        f'{sys.executable} -c "{GROWS}"',
        ("--retries", "1", "--memory", "200Mi"),
        137,
        "job",
        "OutOfMemory",
        2,
    ),
    "run-time": ("sleep 60", ("--retries", "3", "--run-time-limit", "0.3"), 1, "job", "RunTimeLimit", 1),
}


@pytest.fixture(scope="module")
def installation() -> Iterator[Launched]:
    """With a job of each case on its way."""
    with launched(*(word for setting in SETTINGS for word in ("--set", setting))) as found:
        for name, (script, options, *_) in CASES.items():
            found.submit("--name", name, *options, "--command", "--", "/bin/sh", "-c", script)
        yield found


@pytest.mark.parametrize("name", CASES)
def test_wait_exits_as_the_job_does(installation: Launched, name: str) -> None:
    _, _, status, whose, cause, attempts = CASES[name]
    done = installation.tide("wait", name, "-o", "json")
    job = json.loads(done.stdout)
    assert (done.returncode, job["attributed_to"], job["cause"], job["attempt"]) == (
        status,
        whose,
        cause,
        attempts,
    ), job
    assert job["phase"] == ("Failed" if status else "Succeeded")
    assert job["failures"]["of_job"] == (attempts if whose == "job" else 0)
    assert job["failures"]["without_progress"] == (attempts if whose == "platform" else 0)
    if status:
        assert job["last_failure"]["attempt"] == attempts
    history = httpx.get(f"{installation.url}/v1/jobs/{job['id']}/history", timeout=20).json()["items"]
    ends = [entry["data"] for entry in history if entry["type"] == "tide.worker.group_ended.v1"]
    assert [end["attributed_to"] for end in ends] == attempts * [whose]
    (over,) = [entry["data"] for entry in history if entry["type"] == "tide.job.ended.v1"]
    assert (over["cause"], over["exit_code"], over["attributed_to"]) == (cause, job["exit_code"], whose)


def test_every_command_that_waits_exits_alike(installation: Launched) -> None:
    words = ("--retries", "0", "--command", "--", "/bin/sh", "-c", "kill -SEGV $$")
    done = installation.tide("submit", "-o", "json", "--wait", *words)
    assert done.returncode == 139, done.stderr
    assert installation.tide("logs", "-f", json.loads(done.stdout)["id"]).returncode == 139


def test_every_view_names_the_fault_and_the_way_out(installation: Launched) -> None:
    assert installation.tide("wait", "memory").returncode == 137
    for command in ("get", "why", "members", "history"):
        told = installation.tide(command, "memory").stdout
        assert "it used" in told, command
        assert "its limit is 200 MiB; ask for more (resources.memory, tide submit --memory)" in told, command
    assert "attributed to the job (OutOfMemory)" in installation.tide("get", "memory").stdout
    assert "failures: 2 of the job (1 are tried again)" in " ".join(installation.tide("get", "memory").stdout.split())


def test_cancelled_job_is_nobodys_fault(installation: Launched) -> None:
    """Also where it uses up its grace and is killed."""
    script = "trap '' TERM; while :; do sleep 0.1; done"
    job = installation.submit("--grace", "0.3", "--command", "--", "/bin/sh", "-c", script)
    assert installation.tide("wait", "--timeout", "0.1", job).returncode == 124
    installation.tide("cancel", job)
    assert installation.tide("wait", job).returncode == 143
    view = installation.job(job)
    assert (view["phase"], view["attributed_to"], view["failures"]["of_job"]) == ("Cancelled", None, 0)
    assert [m["attributed_to"] for m in installation.members(job)] in ([], [None])


def test_help_says_what_the_status_means(installation: Launched) -> None:
    told = installation.tide("--help").stdout
    for words in (
        "70   the platform gave up on the job",
        "128 + N if signal N ended it",
        "`tide logs -f` exit as the job",
    ):
        assert words in told
