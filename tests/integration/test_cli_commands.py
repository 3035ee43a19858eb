"""The ``tide`` command against a real installation: what it prints, and how it exits."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
import yaml
from click.testing import CliRunner
from integration.launched import ROOT, TIDE, Launched, launched, until

from tidewright.cli.main import main

SLEEP = ("--command", "--", "sleep", "600")


@pytest.fixture(scope="module")
def installation():
    with launched() as found:
        yield found


@pytest.fixture
def run(installation: Launched, monkeypatch):
    """Click's runner, in this process, against the running server."""
    monkeypatch.setenv("TIDE_STATE", str(installation.state))

    def invoke(*words: str, **more):
        return CliRunner().invoke(main, ["--server", installation.url, *words], **more)

    return invoke


@pytest.fixture
def sleeper(installation: Launched):
    """A job that runs until it is cancelled."""
    name = f"sleeper-{os.urandom(3).hex()}"
    job = installation.submit("--name", name, "--command", "--", "sh", "-c", "echo here; exec sleep 600")
    until("it runs", lambda: installation.job(job)["phase"] == "Running")
    yield job, name
    installation.tide("cancel", job)
    until("it has ended", lambda: installation.job(job)["phase"] == "Cancelled")


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (3, 3), (200, 200)])
def test_wait_exits_with_the_jobs_own_code(run, code, expected):
    done = run("submit", "--retries", "0", "--wait", "--timeout", "60", "--command", "--", "sh", "-c", f"exit {code}")
    assert done.exit_code == expected, done.output


def test_wait_with_a_timeout_leaves_the_job_alone(run, sleeper):
    job, _ = sleeper
    done = run("wait", job, "--timeout", "0.5")
    assert done.exit_code == 124
    assert "it goes on" in done.stderr
    assert json.loads(run("get", job, "-o", "json").output)["phase"] == "Running"


def test_wait_for_a_cancelled_job(run):
    job = run("submit", "--hold", "-o", "name", *SLEEP).output.strip()
    assert run("cancel", job, "--reason", "not needed").exit_code == 0
    assert run("wait", job).exit_code == 143


def test_a_repeated_key_is_one_job(run):
    words = ("submit", "-o", "name", "--hold", "--idempotency-key", f"key-{os.getpid()}", *SLEEP)
    first, second = run(*words), run(*words)
    assert first.exit_code == second.exit_code == 0
    assert first.output == second.output
    run("cancel", first.output.strip())


def test_scripts_manifests_and_standard_input(run, tmp_path):
    (tmp_path / "hello.py").write_text("import sys; print('hello', *sys.argv[1:])\n")
    manifest = tmp_path / "job.yaml"
    manifest.write_text("name: from-file\nscript: hello.py\nargs: [a, b]\nworkers_max: 2\nlabels: {team: x}\n")
    script = run("submit", str(tmp_path / "hello.py"), "-o", "json", "--hold", "--", "--flag", "1")
    assert script.exit_code == 0, script.output
    assert json.loads(script.output)["name"] == "hello"
    filed = run("submit", str(manifest), "--name", "flags-win", "--hold", "-l", "more=y", "-o", "yaml")
    view = yaml.safe_load(filed.output)
    assert (view["name"], view["workers"]["max"], view["labels"]) == ("flags-win", 2, {"team": "x", "more": "y"})
    piped = run("submit", "-", "--hold", "-o", "json", input=json.dumps({"command": ["true"], "name": "piped"}))
    assert json.loads(piped.output)["name"] == "piped"
    for job in ("hello", "flags-win", "piped"):
        assert run("cancel", job).exit_code == 0


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("submit", "--min", "3", "--max", "2", "--command", "--", "true"), 65, "workers_max"),
        (("submit", "--min", "0", "--command", "--", "true"), 65, "workers_min"),
        (("submit", "--cpu", "nan", "--command", "--", "true"), 65, "resources.cpu"),
        (("submit", "--accelerators", "900", "--command", "--", "true"), 65, "slot"),
        (("submit", "--name", "No Good", "--command", "--", "true"), 65, "name"),
        (("submit", "nothing-here.py"), 2, "there is no file"),
        (("submit", "nothing-here.yaml"), 2, "No such file"),
        (("submit", "train.txt"), 2, "give a Python script"),
        (("submit", "--timeout", "1", "--command", "--", "true"), 2, "--timeout needs --wait"),
        (("submit", "--env", "NOT_SET_ANYWHERE", "--command", "--", "true"), 2, "NOT_SET_ANYWHERE=VALUE"),
        (("submit", "--priority", "urgent", "--command", "--", "true"), 2, "critical"),
        (("get", "j0000000000000000000000000z"), 65, "j0000000000000000000000000z"),
        (("get", "nobody"), 65, "tide ps"),
        (("cancel", "nobody"), 65, "no job is named 'nobody'"),
        (("scale", "x"), 2, "give N, --min or --max"),
        (("events", "--after", "yesterday"), 65, "Last-Event-ID"),
        (("ps", "-w", "-o", "json"), 2, "tide events"),
        (("frobnicate",), 2, "No such command"),
    ],
)
def test_refusals_name_the_field_and_the_way_out_in_few_lines(run, words, code, told):
    done = run(*words)
    assert done.exit_code == code, done.output
    assert told in done.stderr, done.stderr
    assert "Traceback" not in done.output
    assert len(done.stderr.strip().splitlines()) <= 5


def test_allow_unsatisfiable_is_accepted_and_why_says_so(run):
    words = ("--accelerators", "900", "--allow-unsatisfiable", "-o", "name", "--command", "--", "true")
    job = run("submit", *words).output.strip()
    told = until("why says it", lambda: (out := run("why", job).output) and "NEVER_FITS" in out and out)
    assert "unblocked by" in told
    run("cancel", job)


def test_jobs_are_known_by_id_by_its_beginning_and_by_name(run, sleeper):
    job, name = sleeper
    for word in (job, name, job[:22]):
        done = run("get", word, "-o", "name")
        assert (done.exit_code, done.output.strip()) == (0, job), done.output


def test_a_name_of_several_jobs_means_the_one_that_has_not_ended(run):
    first = run("submit", "--hold", "--name", "twice", "-o", "name", *SLEEP).output.strip()
    second = run("submit", "--hold", "--name", "twice", "-o", "name", *SLEEP).output.strip()
    ambiguous = run("get", "twice")
    assert ambiguous.exit_code == 65
    assert first in ambiguous.stderr
    assert second in ambiguous.stderr
    run("cancel", first)
    assert run("wait", first, "--timeout", "20").exit_code == 143
    assert run("get", "twice", "-o", "name").output.strip() == second
    run("cancel", second)


def test_every_format_of_ps(run, sleeper):
    job, name = sleeper
    table = run("ps").output
    assert table.splitlines()[0].split()[:3] == ["ID", "NAME", "PHASE"]
    assert re.search(rf"{job}\s+{name}\s+Running\s+1/1 of 1..1\s+medium", table), table
    assert "QUEUE" in run("ps", "-o", "wide").output
    assert job in [item["id"] for item in json.loads(run("ps", "-o", "json").output)]
    assert job in [item["id"] for item in yaml.safe_load(run("ps", "-o", "yaml").output)]
    assert job in run("ps", "-o", "name", "--phase", "Running").output.split()
    assert job not in run("ps", "-o", "name", "--phase", "Queued").output.split()
    assert job not in run("ps", "-o", "name", "--priority", "low").output.split()


def test_changes_show_at_once(run):
    job = run(
        "submit", "--hold", "--max", "4", "-o", "name", "--mode", "restart", "--checkpoint-path", "/tmp", *SLEEP
    )
    job = job.output.strip()
    assert json.loads(run("priority", job, "critical", "-o", "json").output)["priority"] == "critical"
    assert json.loads(run("scale", job, "3", "-o", "json").output)["workers"]["wished"] == 3
    limits = json.loads(run("scale", job, "--min", "2", "--max", "3", "-o", "json").output)["workers"]
    assert (limits["min"], limits["max"]) == (2, 3)
    assert json.loads(run("get", job, "-o", "json").output)["phase"] == "Held"
    run("release", job)
    until("it was let go", lambda: json.loads(run("get", job, "-o", "json").output)["phase"] != "Held")
    assert run("hold", job, "--reason", "wait").exit_code == 0
    until("held again", lambda: json.loads(run("get", job, "-o", "json").output)["phase"] == "Held")
    assert run("cancel", job).exit_code == 0
    late = run("scale", job, "3")
    assert late.exit_code == 65, late.output


def test_why_and_history_tell_the_decisions(run, sleeper):
    job, _ = sleeper
    why = until("the decision", lambda: (out := run("why", job).output) and "last decision" in out and out)
    assert "Running" in why
    entries = json.loads(run("history", job, "-o", "json").output)
    types = [entry["type"] for entry in entries]
    assert "tide.job.submitted.v1" in types
    assert "tide.allocation.granted.v1" in types
    told = run("history", job).output.splitlines()
    assert told[0].split() == ["TIME", "EPOCH", "GEN", "WORKERS", "WHAT"]
    assert len(told) == len(entries) + 1


def test_logs_of_a_job_that_has_ended(run, installation):
    script = "for n in 1 2 3; do echo line $n; done"
    job = installation.submit("--command", "--", "sh", "-c", script)
    assert run("wait", job, "--timeout", "60").exit_code == 0
    assert [line.split(" ", 1)[1] for line in run("logs", job).output.splitlines()] == ["line 1", "line 2", "line 3"]
    assert [line.split(" ", 1)[1] for line in run("logs", "--tail", "1", job).output.splitlines()] == ["line 3"]
    lines = [json.loads(line) for line in run("logs", "-o", "json", job).output.splitlines()]
    rest = run("logs", job, "--since-cursor", lines[0]["cursor"]).output.splitlines()
    assert [line.split(" ", 1)[1] for line in rest] == ["line 2", "line 3"]
    assert run("logs", "-f", job).output.count("line") == 3


def test_an_example_runs_from_its_manifest_as_it_stands(run):
    done = run("submit", str(ROOT / "examples" / "digits.yaml"), "--wait", "--timeout", "90", "-o", "json")
    assert done.exit_code == 0, done.output
    view = json.loads(done.output)
    assert (view["phase"], view["priority"], view["workers"]["min"]) == ("Succeeded", "critical", 2)
    assert "held-out accuracy 0.9" in run("logs", view["id"]).output


def test_following_logs_shows_lines_as_they_come_and_ends_with_the_job(installation, tmp_path):
    gate = tmp_path / "gate"
    script = f"echo line 1; while ! [ -e {gate} ]; do sleep 0.1; done; echo line 2; echo line 3"
    job = installation.submit("--command", "--", "sh", "-c", script)
    child = watching(installation, "logs", "-f", job)
    assert "line 1" in child.stdout.readline()
    assert installation.job(job)["phase"] == "Running"
    gate.touch()
    rest, _ = child.communicate(timeout=60)
    assert [line.split(" ", 1)[1] for line in rest.splitlines()] == ["line 2", "line 3"]
    assert child.returncode == 0


@pytest.mark.parametrize("words", [("logs", "-f"), ("wait",), ("events", "--after", "0-0", "--job"), ("ps", "-w")])
def test_ctrl_c_while_watching_cancels_nothing_and_says_so(installation, sleeper, words):
    job, _ = sleeper
    child = watching(installation, *words, *([] if words[0] == "ps" else [job]))
    first = (child.stderr if words[0] == "wait" else child.stdout).readline()
    assert first.strip(), "it watches now"
    child.send_signal(signal.SIGINT)
    _, told = child.communicate(timeout=20)
    assert child.returncode == 130, told
    assert "nothing was cancelled" in told
    assert "Traceback" not in told
    assert installation.job(job)["phase"] == "Running"


def watching(installation: Launched, *words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [TIDE, *words],
        env=installation.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
    )


def test_events_are_followed_and_resumed(installation):
    job = installation.submit("--command", "--", "true")
    installation.tide("wait", job)
    seen = []
    child = watching(installation, "events", "--job", job, "--after", "0-0", "-o", "json")
    while not seen or seen[-1]["type"] != "tide.job.ended.v1":
        seen.append(json.loads(child.stdout.readline()))
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=20)
    assert [event["subject"] for event in seen] == [job] * len(seen)
    assert seen[0]["type"] == "tide.job.submitted.v1"
    middle = seen[len(seen) // 2]["sequence"]
    child = watching(installation, "events", "--job", job, "--after", middle, "-o", "json")
    again = json.loads(child.stdout.readline())
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=20)
    assert again == seen[len(seen) // 2 + 1]


def test_top_shows_who_holds_which_slots(run, sleeper):
    _, name = sleeper
    told = until("the holder", lambda: (out := run("top", "--once").output) and f"{name}×1" in out and out)
    assert re.search(r"█+·+ \d/4", told), told
    assert "UTILISATION" in told


def test_nobody_answers(run):
    done = CliRunner().invoke(main, ["--server", "http://127.0.0.1:9", "--retry-seconds", "0.3", "ps"])
    assert done.exit_code == 69
    assert "http://127.0.0.1:9" in done.stderr
    assert "tide up" in done.stderr
    assert len(done.stderr.splitlines()) == 2


@pytest.mark.parametrize("server", ["nonsense", "ftp://x"])
def test_a_server_that_is_none_is_wrong_usage(server):
    done = CliRunner().invoke(main, ["--server", server, "ps"])
    assert done.exit_code == 2
    assert "TIDE_SERVER" in done.stderr


def test_color_only_on_terminals(installation, sleeper):
    assert "\x1b" not in installation.tide("ps").stdout
    script = "import pty,sys,os; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    for no_color, expected in (("", True), ("1", False)):
        environment = {**installation.environment(), "NO_COLOR": no_color, "TERM": "xterm"}
        done = subprocess.run(
            [sys.executable, "-c", script, TIDE, "ps"],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        assert ("\x1b[3" in done.stdout) is expected, done.stdout


def test_doctor_finds_nothing_wrong_with_a_sound_installation(run):
    done = run("doctor", "-o", "json")
    findings = json.loads(done.output)
    assert {item["check"]: item["state"] for item in findings if item["state"] != "ok"} == {}
    assert done.exit_code == 0
    checks = {item["check"] for item in findings}
    assert checks >= {"libgomp1", "state folder", "open files", "postgres", "zygote", "disk", "versions", "tide up"}
    assert checks >= {"intake", "queueing", "metrics", "scaling", "execution"}
