"""The deployment form on this machine without Docker: a real Postgres and Kafka, and the compose file's processes.

``python -m loadtests.deployment [--scale intake=2] [--carrier postgres]`` starts it, says where everything is, and
keeps it until Ctrl-C.
"""

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import yaml

from services.launch.process_set import ProcessSet, Servers, process_set
from shared.db.embedded import EmbeddedPostgres
from shared.testing.kafka import EmbeddedKafka, running_kafka
from shared.testing.postgres import temporary_state_directory
from shared.testing.prometheus import EmbeddedPrometheus, PrometheusMissing, running_prometheus
from tidewright.client import Client

ROOT: Final = Path(__file__).resolve().parents[1]
COMPOSE: Final = ROOT / "docker-compose.yml"
START_SECONDS: Final = 120.0
Carrier = Literal["postgres", "kafka"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """All of it, running. ``kafka``: None on the Postgres carrier. ``root``: logs, volumes, the database's files."""

    root: Path
    processes: ProcessSet
    postgres: EmbeddedPostgres
    database_url: str
    kafka: EmbeddedKafka | None

    @property
    def url(self) -> str:
        """The first door."""
        return self.processes.url("intake")

    def client(self, *, retry_seconds: float = 30.0) -> Client:
        """A call is repeated for so long while nobody answers."""
        return Client(self.url, retry_seconds=retry_seconds)

    def kill(self, name: str) -> None:
        """SIGKILL; the restart policy starts it again."""
        os.kill(self.processes.pid(name), signal.SIGKILL)


@contextmanager
def deployment(
    *,
    carrier: Carrier = "kafka",
    scale: Mapping[str, int] | None = None,
    settings: Mapping[str, str] | None = None,
    durable: bool = True,
    start_seconds: float = START_SECONDS,
) -> Iterator[Deployment]:
    """Up and healthy, down at the end with everything that it started, the folder included.

    ``scale``: by service, as for ``docker compose up --scale``. ``settings``: environment variables for every process
    besides those of the compose file. ``durable`` is Postgres' fsync. Raises TimeoutError or BrokerNotStarted.
    """
    with ExitStack() as stack:
        root = stack.enter_context(temporary_state_directory())
        postgres = EmbeddedPostgres(state=root, durable=durable, connections_max=200)
        url = postgres.start()
        kafka = stack.enter_context(running_kafka()) if carrier == "kafka" else None
        programs = process_set(
            COMPOSE,
            root=root,
            servers=Servers(database_url=url, kafka_servers=kafka.servers if kafka else None),
            variables={"TIDE_POSTGRES_PASSWORD": "unused"},
            scale=scale,
            settings=settings,
        )
        stack.enter_context(programs.running())
        programs.wait_healthy(seconds=start_seconds)
        yield Deployment(root=root, processes=programs, postgres=postgres, database_url=url, kafka=kafka)


@contextmanager
def watched(running: Deployment, folder: Path) -> Iterator[EmbeddedPrometheus]:
    """Our Prometheus configuration, but for where it finds the processes. Raises PrometheusMissing."""
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(local_prometheus(running.processes)))
    with running_prometheus(path, folder) as found:
        yield found


def local_prometheus(processes: ProcessSet, *, every_seconds: int = 1) -> dict[str, Any]:
    """``deploy/prometheus/prometheus.yml`` with the addresses of this machine, looking more often."""
    found: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    found["global"] = {"scrape_interval": f"{every_seconds}s", "evaluation_interval": f"{every_seconds}s"}
    found["rule_files"] = [str(ROOT / "deploy" / "alerts" / "*.yml")]
    for job in found["scrape_configs"]:
        del job["dns_sd_configs"]
        urls = [
            program.url
            for program in processes.programs.values()
            if program.service == job["job_name"] and program.url is not None
        ]
        job["static_configs"] = [{"targets": [url.removeprefix("http://") for url in urls]}]
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--carrier", choices=("postgres", "kafka"), default="kafka")
    parser.add_argument("--scale", action="append", default=[], metavar="SERVICE=N")
    options = parser.parse_args(arguments)
    scale = {name: int(count) for name, _, count in (each.partition("=") for each in options.scale)}
    print("Postgres, Kafka, the zygote and the services start: half a minute ...", flush=True)
    with deployment(carrier=options.carrier, scale=scale) as running, ExitStack() as stack:
        try:
            prometheus = stack.enter_context(watched(running, running.root)).url
        except PrometheusMissing as exc:
            prometheus = str(exc)
        _tell(running, prometheus)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            signal.pause()
        except KeyboardInterrupt:
            print("stopping ...", flush=True)
    return 0


def _tell(running: Deployment, prometheus: str) -> None:
    rows = {
        "door": running.url,
        **{name: program.url for name, program in running.processes.programs.items() if program.url},
        "Prometheus": prometheus,
        "Kafka": running.kafka.servers if running.kafka else "(the log in Postgres)",
        "Postgres": running.database_url,
        "logs": f"{running.root}/*.log",
    }
    for name, where in rows.items():
        print(f"  {name:<12} {where}")
    tide = Path(sys.executable).parent / "tide"
    example = ROOT / "examples" / "digits.yaml"
    print(f"\nTry: TIDE_SERVER={running.url} {tide} submit {example}\nCtrl-C ends it.", flush=True)


if __name__ == "__main__":
    sys.exit(main())
