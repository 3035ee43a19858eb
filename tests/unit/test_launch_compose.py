"""The compose file: what is read from it, what is refused, and how it becomes local processes."""

import copy
from itertools import count
from pathlib import Path

import pytest
import yaml

from services.launch.compose import ComposeError, faults, interpolate, read_compose, seconds
from services.launch.process_set import plan_programs

FILE = Path(__file__).parents[2] / "docker-compose.yml"
SERVICES = ("intake", "queueing", "metrics", "scaling", "execution")


@pytest.fixture
def document():
    whole = yaml.safe_load(interpolate(FILE.read_text(), {"TIDE_POSTGRES_PASSWORD": "pw"}))
    return {name: value for name, value in whole.items() if not name.startswith("x-")}


def compose():
    return read_compose(FILE, {"TIDE_POSTGRES_PASSWORD": "pw"})


def test_the_file_is_sound_and_has_the_five_services_postgres_and_the_workers(document):
    assert faults(document) == []
    assert set(compose()) == {"postgres", "workers", *SERVICES}


def test_each_service_is_a_process_of_its_own_with_a_healthcheck_and_a_restart_policy():
    for name in SERVICES:
        service = compose()[name]
        assert service.command == ("tide", "service", name)
        assert service.restarts
        assert any("/readyz" in word for word in service.health)
        assert service.environment["TIDE_DATABASE_URL"] == "postgresql://tidewright:pw@postgres:5432/tidewright"


def test_execution_joins_the_processes_the_network_and_the_state_of_the_workers():
    services = compose()
    execution, workers = services["execution"], services["workers"]
    assert (execution.pid, execution.network_mode) == ("service:workers", "service:workers")
    assert set(workers.mounts) <= set(execution.mounts)
    assert execution.environment["TIDE_EXECUTION_ADVERTISE_HOST"] == "workers"


def test_workers_get_neither_database_nor_key():
    workers = compose()["workers"]
    assert not [name for name in workers.environment if name.startswith("TIDE_")]
    assert not [mount for mount in workers.mounts if "keys" in mount.target]


def test_nothing_runs_as_root_and_only_intake_is_published_to_this_machine(document):
    for name, body in document["services"].items():
        if name != "postgres":
            assert body["user"] == "10001:10001", name
            assert body["read_only"] is True, name
            assert body["cap_drop"] == ["ALL"], name
    published = {name: service.ports for name, service in compose().items() if service.ports}
    assert published == {"intake": ("127.0.0.1:8470:8080",)}


def test_no_secret_stands_in_the_file():
    with pytest.raises(ComposeError, match="TIDE_POSTGRES_PASSWORD: set a password"):
        read_compose(FILE, {})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda s: s["intake"].update(comand=["x"]), "services.intake.comand: unknown"),
        (lambda s: s["intake"].update(command="tide service intake"), "command: must be a list"),
        (lambda s: s["intake"]["environment"].update(TIDE_INTAKE_PORT=8080), "TIDE_INTAKE_PORT: must be text"),
        (lambda s: s["intake"].update(restart="sometimes"), "restart: one of"),
        (lambda s: s["intake"]["depends_on"].update(kafka={"condition": "service_started"}), "no such service"),
        (lambda s: s["intake"]["depends_on"].update(postgres={"condition": "ready"}), "condition: one of"),
        (lambda s: s["postgres"].pop("healthcheck"), "has no healthcheck to wait for"),
        (lambda s: s["execution"].update(pid="service:worker"), "pid: there is no service worker"),
        (lambda s: s["execution"].update(ports=["1:1"]), "cannot be published"),
        (lambda s: s["intake"]["volumes"].append("code:/x"), "volumes: code is not declared"),
        (lambda s: s["intake"]["healthcheck"].update(test=["python"]), "must begin with CMD"),
        (lambda s: s["intake"]["healthcheck"].update(interval="5"), "'5' is no duration"),
        (lambda s: (s["intake"].pop("image"), s["intake"].pop("build")), "neither image nor build"),
    ],
)
def test_faults_are_named(document, change, told):
    broken = copy.deepcopy(document)
    change(broken["services"])
    assert any(told in fault for fault in faults(broken)), faults(broken)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${A}", "1"),
        ("$A-$$A", "1-$A"),
        ("${E:-x}", "x"),
        ("${E-x}", ""),
        ("${NONE:-}", ""),
        ("${NONE-y z}", "y z"),
        ("${NONE}", ""),
        ("a ${A:?m} b", "a 1 b"),
    ],
)
def test_interpolation(text, value):
    assert interpolate(text, {"A": "1", "E": ""}) == value


@pytest.mark.parametrize("text", ["${NONE?gone}", "${E:?gone}"])
def test_interpolation_of_what_must_be_set(text):
    with pytest.raises(ComposeError, match="gone"):
        interpolate(text, {"E": ""})


def test_durations():
    assert [seconds(text) for text in ("20s", "1m30s", "500ms", "1.5h")] == [20.0, 90.0, 0.5, 5400.0]


def planned(root=Path("/r")):
    return plan_programs(compose(), root=root, database_url="postgresql:///x?host=/s", ports=iter(count(9001)))


def test_local_processes_have_the_same_commands_and_only_mapped_values_differ():
    services, programs = compose(), planned()
    assert set(programs) == set(services) - {"postgres"}
    for name in SERVICES:
        inside, outside = services[name].environment, programs[name].environment
        assert programs[name].command == services[name].command
        assert set(inside) == set(outside)
        assert outside["TIDE_DATABASE_URL"] == "postgresql:///x?host=/s"
        assert outside[f"TIDE_{name.upper()}_ADVERTISE_HOST"] == "127.0.0.1"
        assert outside[f"TIDE_{name.upper()}_HOST"] == "127.0.0.1"
        port = outside[f"TIDE_{name.upper()}_PORT"]
        assert programs[name].url == f"http://127.0.0.1:{port}"
        assert f"127.0.0.1:{port}/readyz" in programs[name].health[-1]
        assert "8080" not in " ".join(programs[name].health)
    assert len({program.url for program in programs.values()}) == 6


def test_volumes_are_shared_where_the_file_shares_them_and_nowhere_else():
    programs = planned()
    keys = {programs[name].environment["TIDE_SIGNING_KEY_FILE"] for name in SERVICES}
    assert keys == {"/r/volumes/keys/signing.key"}
    assert "/r/volumes/state/zygote.sock" in programs["workers"].command
    assert "/r/volumes/state/zygote.sock" in programs["workers"].health[-1]
    assert programs["execution"].environment["TIDE_STATE"] == "/r/volumes/state"
    states = [programs[name].environment["TIDE_STATE"] for name in SERVICES]
    assert len(set(states)) == 5
