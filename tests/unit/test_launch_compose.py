"""The compose file: what is read from it, what is refused, and how it becomes local processes."""

import copy
import json
from itertools import count
from pathlib import Path

import jsonschema
import pytest
import yaml

from services.launch.compose import ComposeError, faults, interpolate, read_compose, seconds
from services.launch.process_set import Servers, plan_programs

FILE = Path(__file__).parents[2] / "docker-compose.yml"
SCHEMA = Path(__file__).parents[1] / "contracts" / "compose-spec" / "compose-spec.json"
SERVICES = ("intake", "queueing", "metrics", "scaling", "execution")


@pytest.fixture
def document():
    whole = yaml.safe_load(interpolate(FILE.read_text(), {"TIDE_POSTGRES_PASSWORD": "pw"}))
    return {name: value for name, value in whole.items() if not name.startswith("x-")}


def compose():
    return read_compose(FILE, {"TIDE_POSTGRES_PASSWORD": "pw"})


def test_the_file_is_sound_and_has_all_parts_of_the_deployment_form(document):
    assert faults(document) == []
    assert set(compose()) == {"postgres", "kafka", "workers", *SERVICES, "prometheus", "grafana"}
    assert {name for name, service in compose().items() if service.is_ours} == {"workers", *SERVICES}


def test_the_official_schema_accepts_the_file(document):
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    assert [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)] == []
    document["services"]["kafka"]["tmpfs"] = {"size": 1}
    assert "$.services.kafka.tmpfs" in {error.json_path for error in validator.iter_errors(document)}


def test_each_service_is_a_process_of_its_own_with_a_healthcheck_and_a_restart_policy():
    for name in SERVICES:
        service = compose()[name]
        assert service.command == ("tide", "service", name)
        assert service.restarts
        assert any("/readyz" in word for word in service.health)
        assert service.environment["TIDE_DATABASE_URL"] == "postgresql://tidewright:pw@postgres:5432/tidewright"
        assert service.environment["TIDE_KAFKA_SERVERS"] == "kafka:9092"
        assert {"postgres", "kafka"} <= set(service.depends_on)


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


@pytest.mark.parametrize("name", ["postgres", "kafka", "workers", *SERVICES, "prometheus", "grafana"])
def test_every_container_is_confined(document, name):
    body = document["services"][name]
    assert body["read_only"] is True
    assert body["cap_drop"] == ["ALL"]
    assert "cap_add" not in body
    assert body["security_opt"] == ["no-new-privileges:true"]
    assert {"memory", "pids"} <= set(body["deploy"]["resources"]["limits"])
    assert body["logging"]["options"] == {"max-size": "50m", "max-file": "3"}
    if name != "kafka":  # its image has a user of its own
        assert int(body["user"].partition(":")[0]) > 0
    if compose()[name].is_ours:
        assert body["user"] == "10001:10001"


def test_whatever_is_published_is_for_this_machine_alone():
    published = {name: service.ports for name, service in compose().items() if service.ports}
    assert published == {
        "intake": ("127.0.0.1:8470:8080",),
        "kafka": ("127.0.0.1:9094:9094",),
        "prometheus": ("127.0.0.1:9090:9090",),
        "grafana": ("127.0.0.1:3000:3000",),
    }


def test_several_intakes_get_a_range_of_ports():
    variables = {"TIDE_POSTGRES_PASSWORD": "pw", "TIDE_PORT": "8470-8471"}
    assert read_compose(FILE, variables)["intake"].ports == ("127.0.0.1:8470-8471:8080",)


def test_kafka_sends_subscribers_on_this_machine_to_the_published_port():
    variables = {"TIDE_POSTGRES_PASSWORD": "pw", "TIDE_KAFKA_PORT": "19094"}
    kafka = read_compose(FILE, variables)["kafka"]
    assert kafka.ports == ("127.0.0.1:19094:9094",)
    assert "HOST://127.0.0.1:19094" in kafka.environment["KAFKA_ADVERTISED_LISTENERS"].split(",")


def test_a_service_of_which_there_may_be_several_is_reached_by_its_own_name():
    """The host name of a container is its own; that of the service would be any of them."""
    for name in ("intake", "metrics", "queueing", "scaling"):
        assert f"TIDE_{name.upper()}_ADVERTISE_HOST" not in compose()[name].environment


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
        (lambda s: s["intake"]["depends_on"].update(kafko={"condition": "service_started"}), "no such service"),
        (lambda s: s["intake"]["depends_on"].update(postgres={"condition": "ready"}), "condition: one of"),
        (lambda s: s["postgres"].pop("healthcheck"), "has no healthcheck to wait for"),
        (lambda s: s["execution"].update(pid="service:worker"), "pid: there is no service worker"),
        (lambda s: s["execution"].update(ports=["1:1"]), "cannot be published"),
        (lambda s: s["intake"]["volumes"].append("code:/x"), "volumes: code is not declared"),
        (lambda s: s["intake"]["networks"].append("moon"), "networks: moon is not declared"),
        (lambda s: s["execution"].update(networks=["control"]), "networks: not together with network_mode"),
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


SERVERS = Servers(database_url="postgresql:///x?host=/s", kafka_servers="127.0.0.1:9", kafka_prefix="t1.")


def planned(root=Path("/r"), servers=SERVERS, **scale):
    return plan_programs(compose(), root=root, servers=servers, ports=iter(count(9001)), scale=scale)


def test_local_processes_have_the_same_commands_and_only_mapped_values_differ():
    services, programs = compose(), planned()
    assert set(programs) == {"workers", *SERVICES}
    for name in SERVICES:
        inside, outside = services[name].environment, programs[name].environment
        assert programs[name].command == services[name].command
        assert set(inside) | {"TIDE_KAFKA_PREFIX"} == set(outside)
        assert outside["TIDE_DATABASE_URL"] == "postgresql:///x?host=/s"
        assert outside["TIDE_KAFKA_SERVERS"] == "127.0.0.1:9"
        assert outside["TIDE_KAFKA_PREFIX"] == "t1."
        assert outside[f"TIDE_{name.upper()}_HOST"] == "127.0.0.1"
        port = outside[f"TIDE_{name.upper()}_PORT"]
        assert programs[name].url == f"http://127.0.0.1:{port}"
        assert f"127.0.0.1:{port}/readyz" in programs[name].health[-1]
        assert "8080" not in " ".join(programs[name].health)
    assert programs["execution"].environment["TIDE_EXECUTION_ADVERTISE_HOST"] == "127.0.0.1"
    assert len({program.url for program in programs.values()}) == 6


def test_without_a_broker_the_services_use_the_log_in_postgres():
    programs = planned(servers=Servers(database_url="postgresql:///x?host=/s"))
    assert [name for name in SERVICES if "TIDE_KAFKA_SERVERS" in programs[name].environment] == []


def test_replicas_have_the_same_environment_but_their_own_ports_and_folders():
    programs = planned(intake=2, metrics=3)
    assert set(programs) == {"workers", *SERVICES, "intake-2", "metrics-2", "metrics-3"}
    first, second = programs["intake"], programs["intake-2"]
    assert first.command == second.command
    assert first.url != second.url
    assert second.environment["TIDE_SERVER"] == second.url
    differing = {key for key, value in first.environment.items() if second.environment[key] != value}
    assert differing == {"TIDE_INTAKE_PORT", "TIDE_STATE", "TIDE_SERVER"}


def test_volumes_are_shared_where_the_file_shares_them_and_nowhere_else():
    programs = planned()
    keys = {programs[name].environment["TIDE_SIGNING_KEY_FILE"] for name in SERVICES}
    assert keys == {"/r/volumes/keys/signing.key"}
    assert "/r/volumes/state/zygote.sock" in programs["workers"].command
    assert "/r/volumes/state/zygote.sock" in programs["workers"].health[-1]
    assert programs["execution"].environment["TIDE_STATE"] == "/r/volumes/state"
    states = [programs[name].environment["TIDE_STATE"] for name in SERVICES]
    assert len(set(states)) == 5
