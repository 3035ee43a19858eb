"""The compose file's process set on a real Kafka: a training job survives SIGKILL of each service in turn."""

import asyncio
import json
import os
import re
import signal
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest
import yaml

from loadtests.deployment import local_prometheus
from services.launch.process_set import Servers, process_set
from shared.bus.brokers import Brokers
from shared.testing.kafka import EmbeddedKafka
from shared.testing.postgres import DatabaseServer, temporary_state_directory
from shared.testing.prometheus import running_prometheus
from tests.acceptance.panels import PANELS, alert_expressions, names_in
from tests.integration.kafka_bed import read_topics
from tidewright.client import TERMINAL_PHASES, Client

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docker-compose.yml"
SERVICES = ("intake", "queueing", "metrics", "scaling", "execution")
PREFIX = "set."
SCALE = {"intake": 2, "metrics": 2}
KILLED = ("intake", "queueing", "metrics", "scaling", "execution", "metrics-2")
RARE = {
    "What went wrong",
}


@pytest.fixture(scope="module")
def running(postgres: DatabaseServer, kafka: EmbeddedKafka):
    """What the compose file builds, with two doors and two of metrics; Postgres and Kafka are the tests' own."""
    postgres.server.psql("create database process_set", "postgres")
    with temporary_state_directory() as root:
        servers = Servers(
            database_url=postgres.server.url_of("process_set"), kafka_servers=kafka.servers, kafka_prefix=PREFIX
        )
        variables = {"TIDE_POSTGRES_PASSWORD": "unused"}
        programs = process_set(FILE, root=root, servers=servers, variables=variables, scale=SCALE)
        with programs.running():
            programs.wait_healthy(seconds=90)
            yield programs
    postgres.server.psql("drop database process_set with (force)", "postgres")


@pytest.fixture(scope="module")
def prometheus(running, tmp_path_factory):
    """Ours, but for where it finds the processes, and that it looks every second."""
    folder = tmp_path_factory.mktemp("prometheus")
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(local_prometheus(running)))
    with running_prometheus(path, folder) as found:
        yield found


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


def test_a_job_goes_on_while_each_service_is_killed_and_comes_back(running, prometheus, kafka, postgres):
    with Client(running.url("intake"), retry_seconds=30) as client:
        job = client.submit(
            {
                "name": "digits",
                "script": str(ROOT / "examples" / "digits.py"),
                "args": ["--epochs", "28", "--step-delay", "0.08"],
                "workers_min": 2,
                "workers_max": 2,
            }
        )["id"]
        until("it trains", lambda: len(applied_steps(running.root, job)) > 5)
        members = {member["member"]: member["pid"] for member in client.members(job)}
        for name in KILLED:
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
    assert_it_went_over_kafka(kafka, postgres, job=job, history=history)
    with Client(running.url("intake-2"), retry_seconds=30) as other_door:
        assert other_door.job(job)["phase"] == "Succeeded"
        other_door.cancel(other_door.submit({"script": str(ROOT / "examples" / "digits.py"), "held": True})["id"])
    assert_every_panel_shows_something(prometheus)


def test_every_metric_that_dashboard_and_alerts_name_is_there(running, prometheus):
    known = set(until("it was looked at", lambda: asked(prometheus, "metadata")))
    expressions = {**alert_expressions(), **{f"{panel.title}: {panel.legend}": panel.expression for panel in PANELS}}
    named = {where: names_in(expression) - {"up"} for where, expression in expressions.items()}
    assert sum(map(len, named.values())) > 40
    missing = {
        where: unknown
        for where, names in named.items()
        if (unknown := {name for name in names if not any(re.fullmatch(name, each) for each in known)})
    }
    assert missing == {}


def assert_it_went_over_kafka(kafka, postgres, *, job, history):
    """A subscriber from outside finds the job's whole history; every reader keeps where it stands in Kafka."""
    with asyncio.Runner() as runner:
        records = runner.run(read_topics(Brokers(servers=kafka.servers, prefix=PREFIX)))
    once = {record.sequence: record for record in records if record.key == job}
    told = Counter(record.type for record in once.values())
    assert told.pop("tide.metric.window.v1") > 0, "these are no part of a job's history"
    assert told == Counter(history)
    rows = postgres.server.psql(
        "select reader, count(\"offset\") from log.position where topic <> '' group by reader", "process_set"
    )
    offsets = {reader: int(count) for reader, count in (row.split("|") for row in rows.split())}
    assert set(SERVICES) <= set(offsets)
    assert [reader for reader in SERVICES if offsets[reader] == 0] == []


def asked(prometheus, path, **parameters):
    answer = httpx.get(f"{prometheus.url}/api/v1/{path}", params=parameters, timeout=20).json()
    assert answer["status"] == "success", (parameters, answer)
    return answer["data"]


def assert_every_panel_shows_something(prometheus):
    """Prometheus understands every expression; what is asked for has values, and the labels that a legend names."""
    for panel in PANELS:

        def series_of(panel=panel):
            return asked(prometheus, "query", query=panel.expression)["result"]

        series = series_of() if panel.title in RARE else until(f"values of {panel}", series_of, seconds=20)
        wanted = set(re.findall(r"\{\{(\w+)\}\}", panel.legend))
        assert all(wanted <= set(each["metric"]) for each in series), (panel, series[:2])
    for alert, expression in alert_expressions().items():
        assert asked(prometheus, "query", query=expression)["resultType"] == "vector", alert


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
