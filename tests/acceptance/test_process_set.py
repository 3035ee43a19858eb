"""The compose file's process set: a real training job survives SIGKILL of each service, one after the other."""

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from services.launch.process_set import Servers, process_set
from shared.testing.kafka import EmbeddedKafka
from shared.testing.postgres import DatabaseServer, temporary_state_directory
from tidewright.client import TERMINAL_PHASES, Client

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docker-compose.yml"
SERVICES = ("intake", "queueing", "metrics", "scaling", "execution")


@pytest.fixture(scope="module")
def running(postgres: DatabaseServer, kafka: EmbeddedKafka):
    """What the compose file builds; Postgres and Kafka are the tests' own servers."""
    postgres.server.psql("create database process_set", "postgres")
    with temporary_state_directory() as root:
        servers = Servers(
            database_url=postgres.server.url_of("process_set"), kafka_servers=kafka.servers, kafka_prefix="set."
        )
        programs = process_set(FILE, root=root, servers=servers, variables={"TIDE_POSTGRES_PASSWORD": "unused"})
        with programs.running():
            programs.wait_healthy(seconds=60)
            yield programs
    postgres.server.psql("drop database process_set with (force)", "postgres")


def until(what, found, *, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.1)
    return value


def ledger(root: Path, job: str) -> list[dict]:
    """Everything that the trainers of a job have written down."""
    files = sorted((root / "volumes" / "state" / "run" / job).glob("*/ledger.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines() if line.endswith("}")]


def applied_steps(root: Path, job: str) -> list[int]:
    return [entry["step"] for entry in ledger(root, job) if entry["k"] == "applied" and entry["rank"] == 0]


def test_a_job_goes_on_while_each_service_is_killed_and_comes_back(running):
    with Client(running.url("intake"), retry_seconds=30) as client:
        job = client.submit(
            {
                "name": "digits",
                "script": str(ROOT / "examples" / "digits.py"),
                "args": ["--epochs", "24", "--step-delay", "0.08"],
                "workers_min": 2,
                "workers_max": 2,
            }
        )["id"]
        until("it trains", lambda: len(applied_steps(running.root, job)) > 5)
        members = {member["member"]: member["pid"] for member in client.members(job)}
        for name in SERVICES:
            before, step = running.starts(name), max(applied_steps(running.root, job))
            os.kill(running.pid(name), signal.SIGKILL)
            until(f"{name} is started again", lambda name=name, before=before: running.starts(name) > before)
            until(f"{name} is healthy", lambda name=name: running.is_healthy(name))
            until(f"steps after {name}", lambda step=step: max(applied_steps(running.root, job)) > step + 2)
            assert client.job(job)["phase"] == "Running", (
                f"after {name}: it ended too early for the test to mean much"
            )
        assert {member["member"]: member["pid"] for member in client.members(job)} == members, "nobody was replaced"
        ended = until("it ends", lambda: (view := client.job(job))["phase"] in TERMINAL_PHASES and view, seconds=120)
        assert (ended["phase"], ended["exit_code"], ended["attempt"]) == ("Succeeded", 0, 1), ended
        history = [entry["type"] for entry in client.history(job)]
        assert Counter(history)["tide.allocation.closed.v1"] == 1
        assert Counter(history)["tide.worker.group_ended.v1"] == 1
        assert "held-out accuracy" in "".join(line.line for line in client.logs(job))
    assert_every_step_once(running.root, job)


def assert_every_step_once(root: Path, job: str) -> None:
    """One generation throughout: each step applied once by each rank, no sample twice within an epoch."""
    entries = ledger(root, job)
    applied = Counter((entry["step"], entry["rank"]) for entry in entries if entry["k"] == "applied")
    steps = 1 + max(step for step, _ in applied)
    assert applied == Counter({(step, rank): 1 for step in range(steps) for rank in range(2)})
    assert {entry["generation"] for entry in entries if entry["k"] == "applied"} == {1}
    seen = Counter(
        (entry["data_epoch"], sample) for entry in entries if entry["k"] == "begun" for sample in entry["ids"]
    )
    assert set(seen.values()) == {1}
    per_epoch = Counter(epoch for epoch, _ in seen)
    assert len(set(per_epoch.values())) == 1, per_epoch
