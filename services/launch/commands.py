"""The commands that the server adds to ``tide``: up, down, service. Heavy imports wait until one of them runs."""

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from services.launch.record import UpRecord
    from services.launch.supervisor import UpOptions
    from shared.settings import SectionSettings

DEFAULT_PORT: Final = 8470
SERVICES: Final = ("intake", "queueing", "metrics", "scaling", "execution")
_SECTIONS: Final = (*SERVICES, "launch", "installation")

state_option = click.option(
    "--state",
    type=click.Path(path_type=Path, file_okay=False),
    help="State folder. Default: TIDE_STATE, else /var/lib/tidewright (root) or ~/.local/state/tidewright.",
)


@click.command(
    epilog="""\
\b
Examples:
  tide up                                    in the foreground; Ctrl-C stops everything in order
  tide up --detach && tide submit train.py   in the background; `tide down` stops it
  tide up --slots 8 --set scaling.window_seconds=60
  tide up --database-url postgresql://user:password@db/tide

\b
Ctrl-C, SIGTERM and `tide down` do the same: running jobs get their grace to write a checkpoint, stay in the
queue, and go on at the next `tide up`. A second Ctrl-C does not wait for them. With --keep-jobs workers go on
training alone. If the supervisor itself is killed everything goes on, and the next `tide up` takes it over.
"""
)
@click.option("--slots", type=click.IntRange(1), help="Accelerators to share; default: the GPUs, else max(4, cores).")
@state_option
@click.option("--host", help="Address the API listens on; default: 127.0.0.1. It has no access control yet.")
@click.option("--port", type=click.IntRange(0, 65_535), help=f"Port of the API; default: {DEFAULT_PORT}; 0: any.")
@click.option("--database-url", metavar="URL", help="A PostgreSQL of yours; default: an embedded one.")
@click.option("--set", "overrides", multiple=True, metavar="SECTION.NAME=VALUE", help="A setting of a service.")
@click.option("--detach", is_flag=True, help="Return once it is ready; it goes on in the background.")
@click.option("--keep-jobs", is_flag=True, help="When stopped later, leave running jobs alone.")
def up(**given: Any) -> None:
    """Start the whole control plane on this machine: Postgres, the zygote, the five services.

    Restarts what dies, and says so in one line.
    """
    detach = given.pop("detach")
    options = _options(**given)
    _run_up_detached(options) if detach else _run_up(options)


@click.command(
    epilog="""\
\b
Examples:
  tide down               running jobs write a checkpoint and go on at the next `tide up`
  tide down --keep-jobs   workers go on training; the next `tide up` finds them
"""
)
@state_option
@click.option("--keep-jobs", is_flag=True, help="Leave running jobs alone.")
def down(state: Path | None, keep_jobs: bool) -> None:
    """Stop what `tide up` started: running jobs with their grace, then services, zygote and Postgres.

    Works as well if the supervisor was killed.
    """
    from services.launch.processes import ProcessId, wait_for_end
    from services.launch.record import StateLock
    from services.launch.supervisor import Supervisor

    options = _options(state=state, keep_jobs=keep_jobs)
    if not options.state.is_dir():
        click.echo(f"nothing runs in {options.state}: there is no such folder")
        return
    lock = StateLock(options.state)
    holder = lock.take()
    lock.release()
    if holder is None:
        found = Supervisor(options=options, settings=_launch_settings()).stop_leftovers()
        click.echo("stopped" if found else f"nothing runs in {options.state}")
        return
    if not holder.signal(signal.SIGUSR1 if keep_jobs else signal.SIGTERM):
        raise click.ClickException(f"whoever holds {options.state}/up.lock (pid {holder.pid}) cannot be reached")
    click.echo(f"stopping (pid {holder.pid}) ...")
    settings = _launch_settings()
    limit = settings.jobs_stop_seconds + settings.services_stop_seconds + 60.0
    left: tuple[ProcessId, ...] = wait_for_end([holder], seconds=limit)
    if left:
        raise click.ClickException(f"pid {holder.pid} has not ended within {limit:g} s; see {options.state}/log")
    click.echo("stopped")


@click.command(
    epilog="""\
\b
Example:
  TIDE_DATABASE_URL=postgresql://... TIDE_INTAKE_HOST=0.0.0.0 tide service intake

Settings come from the environment (TIDE_<SERVICE>_<NAME>) and the file that TIDE_CONFIG names.
"""
)
@click.argument("name", type=click.Choice(SERVICES))
@click.option("--migrate/--no-migrate", default=True, help="Bring the database up to date first (default).")
def service(name: str, migrate: bool) -> None:
    """Run one service as a process of its own, until SIGTERM or Ctrl-C; both stop it in order."""
    from services.launch.process import run_one

    click.get_current_context().exit(run_one(name, migrating=migrate))


def _options(
    *,
    state: Path | None,
    keep_jobs: bool,
    slots: int | None = None,
    host: str | None = None,
    port: int | None = None,
    database_url: str | None = None,
    overrides: tuple[str, ...] = (),
) -> "UpOptions":
    """Flags over environment over file. Raises click.UsageError naming the setting."""
    from schemas.vocabulary import ServiceName
    from services.launch.supervisor import UpOptions
    from shared.settings import InstallationSettings, ServiceSettings, SettingsError

    variables = dict(_variable(text) for text in overrides)
    os.environ.update(variables)
    if state is not None:
        os.environ["TIDE_STATE"] = str(state.absolute())
    if database_url is not None:
        os.environ["TIDE_DATABASE_URL"] = database_url
    try:
        installation = InstallationSettings.load()
        intake = ServiceSettings.of(ServiceName.INTAKE)
        for each in ServiceName:
            _settings_class(each.value).load()
    except SettingsError as exc:
        raise click.UsageError(str(exc)) from exc
    url = installation.database_url
    return UpOptions(
        state=installation.state.absolute(),
        host=host or intake.host,
        port=intake.port if port is None else port,
        slots=slots,
        database_url=url.get_secret_value() if url else None,
        environment=variables,
        keep_jobs=keep_jobs,
    )


def _settings_class(service: str) -> "type[SectionSettings]":
    """``services.<name>.settings.<Name>Settings``: a wrong setting is told before anything is started."""
    module = importlib.import_module(f"services.{service}.settings")
    found: type[SectionSettings] = getattr(module, f"{service.title()}Settings")
    return found


def _variable(text: str) -> tuple[str, str]:
    """``scaling.window_seconds=4`` as the environment variable that says the same."""
    place, equals, value = text.partition("=")
    section, dot, name = place.partition(".")
    if not (equals and dot and name.isidentifier()):
        raise click.UsageError(f"--set {text}: write SECTION.NAME=VALUE, such as scaling.window_seconds=60")
    if section not in _SECTIONS:
        raise click.UsageError(f"--set {text}: there is no section {section}; it is one of {', '.join(_SECTIONS)}")
    prefix = "TIDE_" if section == "installation" else f"TIDE_{section.upper()}_"
    return f"{prefix}{name.upper()}", value


def _launch_settings() -> Any:
    from services.launch.settings import LaunchSettings
    from shared.settings import SettingsError

    try:
        return LaunchSettings.load()
    except SettingsError as exc:
        raise click.UsageError(str(exc)) from exc


def _run_up(options: "UpOptions") -> None:
    from services.launch.supervisor import LaunchError, Supervisor, say_line

    supervisor = Supervisor(options=options, settings=_launch_settings(), on_ready=_greet)
    say_line(f"starting in {options.state}")
    try:
        code = supervisor.run()
    except LaunchError as exc:
        raise click.ClickException(str(exc)) from exc
    click.get_current_context().exit(code)


def _run_up_detached(options: "UpOptions") -> None:
    """Run the same command in a session of its own, and wait until it is ready or has failed."""
    from services.launch.record import read_record
    from shared.db.state import prepare_state_directory
    from shared.settings import SettingsError

    try:
        log = prepare_state_directory(options.state) / "log" / "up.log"
        log.parent.mkdir(mode=0o700, exist_ok=True)
    except SettingsError as exc:
        raise click.ClickException(str(exc)) from exc
    command = [sys.executable, "-m", "services.launch", "up", "--host", options.host, "--port", str(options.port)]
    command += [] if options.slots is None else ["--slots", str(options.slots)]
    command += ["--keep-jobs"] if options.keep_jobs else []
    with log.open("ab") as output:
        begin = output.tell()
        child = subprocess.Popen(  # noqa: S603 - our own program; settings travel in the environment
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    deadline = time.monotonic() + float(_launch_settings().start_seconds) + 30.0
    while child.poll() is None and time.monotonic() < deadline:
        record = read_record(options.state)
        if record and record.ready and (record.supervisor or {}).get("pid") == child.pid:
            _greet(record)
            return
        time.sleep(0.1)
    said = log.read_bytes()[begin:].decode(errors="replace").strip()
    raise click.ClickException(f"it did not come up:\n{said}\n(log: {log})")


def _greet(record: "UpRecord") -> None:
    slots = f", {record.slots} slots" if record.slots is not None else ""
    lines = [f"Tidewright is ready: {record.url}{slots}"]
    if record.port != DEFAULT_PORT:
        lines.append(f"  export TIDE_SERVER={record.url}")
    lines += [
        "  tide submit train.py --min 1 --max 4    tide ps    tide top    tide logs -f JOB    tide why JOB",
        "  tide doctor checks it, tide down stops it",
    ]
    click.echo("\n".join(lines))
    sys.stdout.flush()
