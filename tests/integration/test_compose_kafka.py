"""The broker of the compose file: the image's own program reads its variables, and a real broker runs on the result.

Only ports, the host name and the data folder are those of this machine.
"""

import os
import subprocess
import time
from pathlib import Path

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from services.launch.compose import read_compose
from shared.testing.kafka import die_with_parent, free_ports, jars_of_kafka, java_program

FILE = Path(__file__).resolve().parents[2] / "docker-compose.yml"
INSIDE, CONTROLLER = 9092, 9093


@pytest.fixture(scope="module")
def ports():
    return dict(zip(("inside", "controller", "host"), free_ports(3), strict=True))


@pytest.fixture(scope="module")
def service(ports):
    variables = {"TIDE_POSTGRES_PASSWORD": "x", "TIDE_KAFKA_PORT": str(ports["host"])}
    return read_compose(FILE, variables)["kafka"]


def here(text, ports, folder):
    for inside, outside in ((INSIDE, ports["inside"]), (CONTROLLER, ports["controller"]), (9094, ports["host"])):
        text = text.replace(f":{inside}", f":{outside}")
    return (
        text.replace("//kafka:", "//127.0.0.1:").replace("//:", "//127.0.0.1:").replace("/var/lib/kafka", str(folder))
    )


@pytest.fixture(scope="module")
def broker(service, ports, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kafka")
    for name in ("default", "mounted", "final", "data"):
        (folder / name).mkdir()
    environment = {name: here(value, ports, folder) for name, value in service.environment.items()}
    heap = environment["KAFKA_HEAP_OPTS"].split()
    java = [
        java_program(),
        *heap,
        "-XX:+UseSerialGC",
        "-XX:TieredStopAtLevel=1",
        "-cp",
        os.pathsep.join(jars_of_kafka()),
    ]
    made = subprocess.run(
        [
            *java,
            "kafka.docker.KafkaDockerWrapper",
            "setup",
            *(f"--{name}-configs-dir={folder / name}" for name in ("default", "mounted", "final")),
        ],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*java, "kafka.Kafka", str(folder / "final" / "server.properties")],
            stdout=output,
            stderr=output,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - one system call
        )
    try:
        deadline = time.monotonic() + 60
        while b"Kafka Server started" not in log.read_bytes():
            assert process.poll() is None, log.read_text()[-2_000:]
            assert time.monotonic() < deadline, log.read_text()[-2_000:]
            time.sleep(0.05)
        yield folder
    finally:
        process.kill()
        process.wait()


async def nodes_seen_at(port):
    admin = AIOKafkaAdminClient(bootstrap_servers=f"127.0.0.1:{port}")
    await admin.start()
    try:
        return {(node["host"], node["port"]) for node in (await admin.describe_cluster())["brokers"]}
    finally:
        await admin.close()


async def test_each_listener_sends_its_clients_back_to_itself(broker, ports):
    assert await nodes_seen_at(ports["inside"]) == {("127.0.0.1", ports["inside"])}
    assert await nodes_seen_at(ports["host"]) == {("127.0.0.1", ports["host"])}


async def test_it_makes_no_topic_by_itself_and_writes_through_to_its_disk(broker, ports):
    admin = AIOKafkaAdminClient(bootstrap_servers=f"127.0.0.1:{ports['host']}")
    await admin.start()
    try:
        (answer,) = await admin.describe_configs([ConfigResource(ConfigResourceType.BROKER, "1")])
        found = {entry[0]: entry[1] for entry in answer.resources[0][4]}
    finally:
        await admin.close()
    assert found["auto.create.topics.enable"] == "false"
    assert found["log.flush.interval.messages"] == "1"
    assert found["log.dirs"] == str(broker / "data")


def test_its_healthcheck_says_whether_it_listens(broker, service, ports):
    def health(port):
        command = [word.replace("/9094", f"/{port}") for word in service.health]
        return subprocess.run(command, capture_output=True, check=False).returncode

    assert health(ports["host"]) == 0
    assert health(free_ports(1)[0]) != 0


def test_the_controller_listens_inside_its_container_alone(service):
    listeners = service.environment["KAFKA_LISTENERS"].split(",")
    assert [each for each in listeners if each.startswith("CONTROLLER")] == [f"CONTROLLER://127.0.0.1:{CONTROLLER}"]
