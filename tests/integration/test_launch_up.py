"""``tide up`` and ``tide down``: what dies is started again, who may start, and what is left afterwards."""

import json
import os
import signal
import stat
import subprocess
import time
from pathlib import Path

import httpx
import pytest
from integration.launched import TIDE, Launched, is_alive, launched, processes_of, until, workers_of

from shared.testing.postgres import temporary_state_directory


@pytest.fixture(scope="module")
def installation():
    with launched() as found:
        yield found


@pytest.fixture
def sleeper(installation: Launched):
    """A running job and the pid of its worker."""
    job = installation.submit("--name", f"sleeper-{os.urandom(3).hex()}", "--command", "--", "sleep", "600")
    yield job, worker_of(installation, job)
    installation.tide("cancel", job)
    until("it has ended", lambda: installation.job(job)["phase"] == "Cancelled")


def worker_of(installation: Launched, job: str) -> int:
    until("it runs", lambda: installation.job(job)["phase"] == "Running")
    return installation.members(job)[0]["pid"]


def is_ready(installation: Launched) -> bool:
    try:
        return httpx.get(f"{installation.url}/readyz", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def test_it_is_ready_when_it_says_so_and_names_the_next_commands(installation):
    assert is_ready(installation)
    told = installation.told()
    assert f"Tidewright is ready: {installation.url}, 4 slots" in told
    assert f"export TIDE_SERVER={installation.url}" in told
    assert "tide submit" in told


def test_the_state_folder_is_closed_to_others(installation):
    assert stat.S_IMODE(installation.state.stat().st_mode) & 0o707 == 0o700
    for path in (installation.state / "up.json", installation.state / "log", installation.state / "up.lock"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    assert b"password" not in (installation.state / "up.json").read_bytes()


def test_a_second_up_is_refused_and_told_who_holds_it(installation):
    done = installation.tide("up", "--port", "0")
    assert done.returncode == 1
    assert f"pid {installation.pid('supervisor')}" in done.stderr
    assert "tide down" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert is_ready(installation)


def test_a_port_that_is_taken_is_named(installation):
    port = installation.record["port"]
    with temporary_state_directory() as state:
        other = Launched(state=state)
        done = other.tide("up", "--port", str(port))
        assert done.returncode == 1
        assert f"port {port}" in done.stderr
        assert "--port" in done.stderr
        assert processes_of(state) == {}


def test_workers_inherit_none_of_the_servers_secrets(installation, sleeper):
    _, worker = sleeper
    environment = Path(f"/proc/{worker}/environ").read_bytes()
    for name in (b"TIDE_DATABASE_URL", b"TIDE_SIGNING_KEY", b"TIDE_STATE="):
        assert name not in environment


@pytest.mark.parametrize("part", ["process", "zygote", "postgres"])
def test_what_is_killed_is_started_again_while_the_job_goes_on(installation, sleeper, part):
    job, worker = sleeper
    before = installation.pid(part)
    os.kill(before, signal.SIGKILL)
    until("another process", lambda: installation.pid(part) != before and is_alive(installation.pid(part)))
    until("ready again", lambda: is_ready(installation))
    view = until("intake answers", lambda: installation.job(job))
    assert view["phase"] == "Running"
    assert (is_alive(worker), installation.members(job)[0]["pid"]) == (True, worker)
    after = installation.submit("--command", "--", "true")
    assert installation.tide("wait", after, "--timeout", "60").returncode == 0
    name = {"process": "the services", "zygote": "the zygote", "postgres": "Postgres"}[part]
    told = until("it is said", lambda: f"{name}: ready again after" in (text := installation.told()) and text)
    assert f"{name} " in told
    assert "starting again in 0.1 s" in told
    assert len([line for line in told.splitlines() if line.split(" ", 1)[-1].startswith(f"{name} ")]) == 1


def test_a_killed_supervisor_is_followed_by_one_that_takes_over(sleeper, installation):
    job, worker = sleeper
    before = installation.record
    os.kill(before["supervisor"]["pid"], signal.SIGKILL)
    until("it is gone", lambda: not is_alive(before["supervisor"]["pid"]))
    assert is_ready(installation), "services go on without their supervisor"
    doctor = installation.tide("doctor")
    assert doctor.returncode == 1
    assert "supervised by nobody" in doctor.stdout
    done = installation.up("--port", str(before["port"]))
    assert done.returncode == 0, done.stdout
    after = installation.record
    assert after["zygote"] == before["zygote"]
    assert after["postgres"] == before["postgres"]
    assert after["process"] != before["process"]
    assert after["url"] == before["url"]
    assert installation.job(job)["phase"] == "Running"
    assert installation.members(job)[0]["pid"] == worker
    assert is_alive(worker)


def test_down_stops_everything_and_the_next_up_goes_on_with_the_jobs():
    with launched(slots=1) as installation:
        script = "trap 'exit 0' TERM; sleep 600 & wait"
        running = installation.submit("--name", "running", "--command", "--", "sh", "-c", script)
        worker_of(installation, running)
        waiting = installation.submit("--name", "waiting", "--command", "--", "sleep", "600")
        held = installation.submit("--name", "held", "--hold", "--command", "--", "sleep", "600")
        until("it waits", lambda: installation.job(waiting)["phase"] == "Queued")
        done = installation.down()
        assert done.returncode == 0, done.stderr
        assert processes_of(installation.state) == {}
        assert not (installation.state / "up.json").exists()
        assert installation.down().stdout.startswith("nothing runs")
        again = installation.up(slots=1)
        assert again.returncode == 0, again.stdout
        assert "2 job(s) that `tide down` had stopped go on" in installation.told()
        until("it runs again", lambda: installation.job(running)["phase"] == "Running")
        assert installation.job(waiting)["phase"] == "Queued"
        assert installation.job(held)["phase"] == "Held"
        assert installation.tide("cancel", waiting, held).returncode == 0
        assert_down_when_only_workers_are_left(installation)


def assert_down_when_only_workers_are_left(installation: Launched) -> None:
    assert any("sleep 600" in command for command in workers_of(installation.state).values())
    for part in ("supervisor", "process", "zygote"):
        os.kill(installation.pid(part), signal.SIGKILL)
    (installation.state / "up.json").unlink()
    done = installation.down()
    assert done.returncode == 0, done.stderr
    assert processes_of(installation.state) == {}
    assert workers_of(installation.state) == {}


def test_kept_jobs_are_found_by_the_next_up_and_ctrl_c_stops_them_in_order():
    with launched() as installation:
        job = installation.submit("--command", "--", "sleep", "600")
        worker = worker_of(installation, job)
        assert installation.down("--keep-jobs").returncode == 0
        assert is_alive(worker)
        left = processes_of(installation.state)
        assert not [command for command in left.values() if "postgres" in command or "zygote" in command]
        child = foreground(installation)
        try:
            until("it is known again", lambda: installation.job(job)["phase"] == "Running")
            assert installation.members(job)[0]["pid"] == worker
            os.killpg(child.pid, signal.SIGINT)  # as the terminal does: to the whole foreground group
            told, _ = child.communicate(timeout=120)
        finally:
            child.kill()
        assert child.returncode == 0, told
        assert "1 job(s) held until the next `tide up`, 0 still running" in told
        assert not is_alive(worker)
        assert processes_of(installation.state) == {}


def foreground(installation: Launched) -> "subprocess.Popen[str]":
    """``tide up`` in a terminal's foreground group, ready."""
    child = subprocess.Popen(
        [TIDE, "up", "--port", "0", "--slots", "2"],
        env=installation.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    line = ""
    while "tide doctor" not in line:
        line = child.stdout.readline()
        assert line, "it ended before it was ready"
    return child


def test_settings_that_are_wrong_end_the_start_with_their_names():
    with temporary_state_directory() as state:
        installation = Launched(state=state)
        for override, name in (
            ("scaling.windw_seconds=4", "TIDE_SCALING_WINDW_SECONDS"),
            ("scaling.window_seconds=-4", "TIDE_SCALING_WINDOW_SECONDS"),
            ("intake.port=x", "TIDE_INTAKE_PORT"),
            ("launch.start_seconds=soon", "TIDE_LAUNCH_START_SECONDS"),
            ("installation.log_level=loud", "TIDE_LOG_LEVEL"),
        ):
            done = installation.tide("up", "--port", "0", "--set", override)
            assert (done.returncode, done.stdout) == (2, ""), override
            assert name in done.stderr
        assert list(state.iterdir()) == []


def test_a_database_that_is_away_is_named_without_its_password():
    with temporary_state_directory() as state:
        installation = Launched(state=state)
        done = installation.tide("up", "--port", "0", "--database-url", "postgresql://me:secret@127.0.0.1:9/x")
        assert done.returncode == 1
        assert "127.0.0.1" in done.stderr or "database" in done.stderr.lower()
        assert "secret" not in done.stderr + done.stdout
        assert processes_of(state) == {}


def test_doctor_on_a_broken_installation():
    with temporary_state_directory() as state:
        installation = Launched(state=state)
        done = installation.tide("doctor", "-o", "json")
        findings = {item["check"]: item for item in json.loads(done.stdout)}
        assert done.returncode == 1
        assert findings["intake"]["state"] == "fail"
        assert "tide up" in findings["tide up"]["way_out"]
        state.chmod(0o755)
        (state / "up.json").write_text(
            json.dumps(
                {
                    "format": 1,
                    "url": "http://127.0.0.1:9",
                    "supervisor": {"pid": 1, "start": -1},
                    "postgres_address": {"socket": f"{state}/nowhere", "user": "postgres", "database": "x"},
                    "services": {"scaling": "http://127.0.0.1:9"},
                }
            )
        )
        (state / "zygote.sock").touch()
        done = installation.tide("doctor", "-o", "json")
        findings = {item["check"]: item for item in json.loads(done.stdout)}
        failed = {check for check, item in findings.items() if item["state"] == "fail"}
        assert failed >= {"state folder", "tide up", "postgres", "zygote", "intake", "scaling"}
        assert all(findings[check]["way_out"] for check in failed)
        assert "chmod 0700" in findings["state folder"]["way_out"]
        (state / "up.json").unlink()


def test_doctor_sees_a_low_limit_on_open_files(tmp_path):
    command = f"ulimit -n 256; exec {TIDE} doctor --state {tmp_path}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "the limit is 256" in done.stdout
    assert "ulimit -n 4096" in done.stdout


def test_a_service_alone_stops_in_order_on_sigterm(database, tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TIDE_")}
    environment |= {"TIDE_DATABASE_URL": database.url, "TIDE_STATE": str(tmp_path / "s"), "TIDE_SCALING_PORT": "0"}
    child = subprocess.Popen(
        [TIDE, "service", "scaling"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines = []
    while not lines or "service_active" not in lines[-1]:
        lines.append(child.stdout.readline())
        assert lines[-1], lines
    child.send_signal(signal.SIGTERM)
    began = time.monotonic()
    rest, _ = child.communicate(timeout=30)
    assert child.returncode == 0, rest
    assert "service_stopped" in rest
    assert time.monotonic() - began < 5


def test_a_service_without_its_database_says_so(tmp_path):
    environment = {**os.environ, "TIDE_DATABASE_URL": "postgresql://127.0.0.1:9/x", "TIDE_STATE": str(tmp_path / "s")}
    done = subprocess.run(
        [TIDE, "service", "scaling"], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 69
    assert "not_started" in done.stderr
    assert "Traceback" not in done.stderr
