"""Runs ``docker-compose.yml`` without Docker: the same commands and environment, as processes of this machine.

Only what a container would bring is mapped: host names, ports, paths of volumes, and the addresses of Postgres and
Kafka. So the compose file is what is tested, and the two cannot drift apart.
"""

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from services.launch.compose import ComposeService, read_compose
from services.launch.members import end_members
from services.launch.processes import ProcessId, end_processes

_RESTART_SECONDS: Final = 0.1
_LOOK_SECONDS: Final = 0.05
_LOOPBACK: Final = "127.0.0.1"
_KAFKA: Final = "TIDE_KAFKA_SERVERS"
_KAFKA_PREFIX: Final = "TIDE_KAFKA_PREFIX"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalProgram:
    """One service of the compose file as it is started here. ``url``: where its HTTP answers, if it has any.

    ``name``: that of the service, with a number from the second replica on.
    """

    name: str
    service: str
    command: tuple[str, ...]
    environment: dict[str, str]
    health: tuple[str, ...]
    restarts: bool
    stop_seconds: float
    url: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """What stands for the images that are not ours. Without Kafka the services use the Postgres carrier.

    ``kafka_prefix``: before every topic, where several process sets share a broker.
    """

    database_url: str
    kafka_servers: str | None = None
    kafka_prefix: str = ""


def plan_programs(
    services: Mapping[str, ComposeService],
    *,
    root: Path,
    servers: Servers,
    ports: Iterator[int],
    scale: Mapping[str, int] | None = None,
) -> dict[str, LocalProgram]:
    """Map every service that is built from this source; ``ports`` yields free ones.

    ``scale``: how many of a service, as for ``docker compose up --scale``; the second is called ``<name>-2``.
    """
    scale = scale or {}
    return {
        name: _plan_program(service, services, name=name, root=root, servers=servers, ports=ports)
        for service in services.values()
        if service.is_ours
        for name in replica_names(service.name, scale.get(service.name, 1))
    }


def replica_names(service: str, count: int) -> list[str]:
    return [service if index == 1 else f"{service}-{index}" for index in range(1, count + 1)]


def _plan_program(
    service: ComposeService,
    services: Mapping[str, ComposeService],
    *,
    name: str,
    root: Path,
    servers: Servers,
    ports: Iterator[int],
) -> LocalProgram:
    port_name = f"TIDE_{service.name.upper()}_PORT"
    inside = service.environment.get(port_name)
    outside = str(next(ports)) if inside else ""

    def mapped(text: str) -> str:
        if text.startswith("postgresql://"):
            return servers.database_url
        text = _with_paths(text, service, root / "volumes", own=root / "containers" / name)
        return text.replace(f"{_LOOPBACK}:{inside}", f"{_LOOPBACK}:{outside}") if inside else text

    environment = {key: mapped(value) for key, value in service.environment.items()}
    for key, value in environment.items():
        if value == "0.0.0.0" or (key.endswith("_HOST") and value in services):  # noqa: S104
            environment[key] = _LOOPBACK
    if inside:
        environment[port_name] = outside
    return LocalProgram(
        name=name,
        service=service.name,
        command=tuple(mapped(word) for word in service.command),
        environment=_with_kafka(environment, servers),
        health=tuple(mapped(word) for word in service.health),
        restarts=service.restarts,
        stop_seconds=service.stop_seconds,
        url=f"http://{_LOOPBACK}:{outside}" if inside else None,
    )


def _with_kafka(environment: dict[str, str], servers: Servers) -> dict[str, str]:
    """Where the file names a broker, the one that is given; or none."""
    if environment.pop(_KAFKA, None) is None or servers.kafka_servers is None:
        return environment
    prefix = {_KAFKA_PREFIX: servers.kafka_prefix} if servers.kafka_prefix else {}
    return {**environment, _KAFKA: servers.kafka_servers, **prefix}


def _with_paths(text: str, service: ComposeService, volumes: Path, *, own: Path) -> str:
    """Container paths become local ones; a folder that is no volume is the container's ``own``."""
    places = {
        mount.target: str(volumes / mount.source) if mount.is_named else mount.source for mount in service.mounts
    }
    state = service.environment.get("TIDE_STATE")
    if state and state not in places:
        places[state] = str(own)
    if not places:
        return text
    alternatives = "|".join(re.escape(place) for place in sorted(places, key=len, reverse=True))
    return re.sub(rf"(?<![\w./-])({alternatives})(?![\w.-])", lambda match: places[match[1]], text)


@dataclass(slots=True)
class _Running:
    program: LocalProgram
    child: "subprocess.Popen[bytes]"
    starts: int = 1


@dataclass(slots=True)
class ProcessSet:
    """The process set, running. A thread restarts what ends, as the restart policy says."""

    programs: Mapping[str, LocalProgram]
    root: Path
    _running: dict[str, _Running] = field(default_factory=dict)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _turn: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        for program in self.programs.values():
            self._running[program.name] = _Running(program=program, child=self._launch(program))

    def url(self, name: str) -> str:
        """Raises KeyError for a service without HTTP."""
        found = self.programs[name].url
        if found is None:
            raise KeyError(name)
        return found

    def pid(self, name: str) -> int:
        with self._turn:
            return self._running[name].child.pid

    def starts(self, name: str) -> int:
        """How often it has been started."""
        with self._turn:
            return self._running[name].starts

    def log(self, name: str) -> Path:
        return self.root / f"{name}.log"

    def is_healthy(self, name: str) -> bool:
        """What the healthcheck of the compose file says."""
        program = self.programs[name]
        done = subprocess.run(  # noqa: S603 - the compose file's own command
            _local(program.health), env=_environment(program), capture_output=True, check=False
        )
        return done.returncode == 0

    def wait_healthy(self, *, seconds: float) -> None:
        """Raises TimeoutError naming who is not, with the end of its log."""
        deadline = time.monotonic() + seconds
        for name in self.programs:
            while not self.is_healthy(name):
                if time.monotonic() > deadline:
                    tail = self.log(name).read_text(errors="replace").splitlines()[-5:]
                    raise TimeoutError(f"{name} is not healthy after {seconds:g} s: {' / '.join(tail)}")
                time.sleep(0.2)

    @contextmanager
    def running(self) -> Iterator["ProcessSet"]:
        """Start, restart what ends inside the block, then stop everything."""
        self.start()
        keeper = threading.Thread(target=self._keep, name="restart-policy", daemon=True)
        keeper.start()
        try:
            yield self
        finally:
            self._stopping.set()
            keeper.join()
            self.stop()

    def stop(self) -> None:
        """SIGTERM in the reverse order of the file, each with its grace; workers end with their container."""
        for running in reversed(list(self._running.values())):
            process = ProcessId.of(running.child.pid)
            if process is not None:
                end_processes([process], grace_seconds=running.program.stop_seconds)
            running.child.wait()
        for volume in (self.root / "volumes").iterdir():
            end_members(volume, grace_seconds=0.5)

    def _keep(self) -> None:
        while not self._stopping.wait(_LOOK_SECONDS):
            for running in self._running.values():
                if running.program.restarts and running.child.poll() is not None:
                    if self._stopping.wait(_RESTART_SECONDS):
                        return
                    child = self._launch(running.program)
                    with self._turn:
                        running.child, running.starts = child, running.starts + 1

    def _launch(self, program: LocalProgram) -> "subprocess.Popen[bytes]":
        with self.log(program.name).open("ab") as log:
            return subprocess.Popen(  # noqa: S603 - the compose file's own command
                _local(program.command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(program),
                start_new_session=True,
            )


def process_set(
    path: Path,
    *,
    root: Path,
    servers: Servers,
    variables: Mapping[str, str],
    scale: Mapping[str, int] | None = None,
    settings: Mapping[str, str] | None = None,
) -> ProcessSet:
    """The process set of a compose file under ``root`` (short: sockets lie in it). Raises ComposeError.

    ``settings``: variables for every service besides those of the file, for a run that needs others.
    """
    services = read_compose(path, variables)
    programs = plan_programs(services, root=root, servers=servers, ports=_free_ports(), scale=scale)
    for program in programs.values():
        if program.url is not None:
            program.environment.update(settings or {})
    ours = [service for service in services.values() if service.is_ours]
    volumes = {mount.source for service in ours for mount in service.mounts if mount.is_named}
    for folder in (*(f"volumes/{name}" for name in volumes), *(f"containers/{name}" for name in programs)):
        (root / folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    return ProcessSet(programs=programs, root=root)


def _environment(program: LocalProgram) -> dict[str, str]:
    """Nothing of ours leaks in from this process: only the compose file speaks."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith("TIDE_")}
    folder = str(Path(sys.executable).parent)
    return {**outer, "PATH": f"{folder}{os.pathsep}{outer.get('PATH', '')}", **program.environment}


def _local(command: tuple[str, ...]) -> list[str]:
    """``python`` and ``tide`` are the ones of this environment."""
    folder = Path(sys.executable).parent
    program = folder / command[0]
    return [str(program) if program.exists() else command[0], *command[1:]]


def _free_ports() -> Iterator[int]:
    """Free ports, no two the same: each stays bound until the next is drawn."""
    held: list[socket.socket] = []
    try:
        while True:
            probe = socket.socket()
            held.append(probe)
            probe.bind((_LOOPBACK, 0))
            yield int(probe.getsockname()[1])
    finally:
        for each in held:
            each.close()
