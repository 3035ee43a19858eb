"""``tide doctor``: what is wrong with this installation, and the way out of each fault."""

import ctypes
import json
import os
import platform
import resource
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import click

from tidewright.cli import exits, output
from tidewright.cli.probe import ProbeError, ask_postgres, ask_zygote, is_running
from tidewright.cli.session import Session, pass_session
from tidewright.client import Client, LostContact

OPEN_FILES_MIN: Final = 4096
DISK_BYTES_MIN: Final = 1 << 30
STATE_VARIABLE: Final = "TIDE_STATE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report. ``state``: ok, warn or fail; ``way_out`` is empty where all is well."""

    check: str
    state: str
    detail: str
    way_out: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """What is looked at. ``running``: what ``tide up`` wrote about itself, {} if nothing is there."""

    state: Path
    running: dict[str, Any]
    client: Client


@click.command(
    epilog="\b\nExamples:\n  tide doctor\n  tide doctor --state /srv/tide -o json\n\nExits 1 if anything fails.\n"
)
@click.option("--state", type=click.Path(path_type=Path), envvar=STATE_VARIABLE, help="State folder of `tide up`.")
@output.output_option("table", "json", "yaml")
@pass_session
def doctor(session: Session, state: Path | None, form: str) -> None:
    """Check this installation: libraries, state folder, limits, disk, Postgres, zygote, services."""
    folder = state or default_state_directory()
    # Questions here are asked once: a doctor that waits for the patient hides the fault.
    client = Client(_server_of(session, folder), retry_seconds=0.0, timeout_seconds=3.0)
    with client:
        findings = list(examine(Installation(state=folder, running=read_running(folder), client=client)))
    if form == "table":
        for finding in findings:
            color = {"ok": "green", "warn": "yellow", "fail": "red"}[finding.state]
            click.echo(f"{click.style(f'{finding.state:<4}', fg=color)}  {finding.check:<14} {finding.detail}")
            if finding.way_out:
                click.echo(f"{'':<21}-> {finding.way_out}")
    else:
        click.echo(output.dumped([asdict(finding) for finding in findings], form))
    if any(finding.state == "fail" for finding in findings):
        click.get_current_context().exit(exits.FAILED)


def default_state_directory() -> Path:
    """As the server has it: ``/var/lib/tidewright`` for root, else the user's state folder."""
    if os.geteuid() == 0:
        return Path("/var/lib/tidewright")
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "tidewright"


def read_running(state: Path) -> dict[str, Any]:
    """``up.json`` of a state folder; {} if there is none or it cannot be read."""
    try:
        value: Any = json.loads((state / "up.json").read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def examine(installation: Installation) -> Iterator[Finding]:
    """All checks, from the machine up to the services."""
    for check in _CHECKS:
        yield from check(installation)


def _versions(_: Installation) -> Iterator[Finding]:
    server = _version("tidewright-server")
    detail = (
        f"tidewright {_version('tidewright')}, server {server or 'not installed'}, Python {platform.python_version()}"
    )
    way_out = "" if server else "to run `tide up` here: pip install tidewright-server"
    yield Finding(check="versions", state="ok", detail=detail, way_out=way_out)


def _libgomp(_: Installation) -> Iterator[Finding]:
    try:
        ctypes.CDLL("libgomp.so.1")
    except OSError:
        yield Finding(
            check="libgomp1",
            state="fail",
            detail="libgomp.so.1 is missing; Paddle cannot be imported without it",
            way_out="apt-get install libgomp1",
        )
    else:
        yield Finding(check="libgomp1", state="ok", detail="libgomp.so.1 loads")


def _paddle(_: Installation) -> Iterator[Finding]:
    found = next((name for name in ("paddlepaddle-gpu", "paddlepaddle") if _version(name)), None)
    if found:
        yield Finding(check="paddle", state="ok", detail=f"{found} {_version(found)}")
    else:
        yield Finding(
            check="paddle",
            state="warn",
            detail="not installed: scripts that train cannot run here, commands can",
            way_out="pip install paddlepaddle (or paddlepaddle-gpu)",
        )


def _open_files(_: Installation) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= OPEN_FILES_MIN:
        yield Finding(check="open files", state="ok", detail=f"limit {soft}")
    else:
        yield Finding(
            check="open files",
            state="fail",
            detail=f"the limit is {soft}; {OPEN_FILES_MIN} are needed for sockets and logs (nofile)",
            way_out=f"ulimit -n {OPEN_FILES_MIN}"
            + ("" if hard >= OPEN_FILES_MIN else ", after raising the hard limit"),
        )


def _state_folder(installation: Installation) -> Iterator[Finding]:
    state = installation.state
    try:
        status = state.stat()
    except FileNotFoundError:
        yield Finding(
            check="state folder", state="warn", detail=f"{state} does not exist yet", way_out="`tide up` makes it"
        )
        return
    except OSError as exc:
        yield _state_fault(f"{state}: {exc.strerror}", "run as the user that runs `tide up`, or give --state")
        return
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode):
        yield _state_fault(f"{state} is no folder", "move it away, or give another --state")
    elif status.st_uid != os.geteuid():
        yield _state_fault(f"{state} belongs to user {status.st_uid}", f"chown {os.geteuid()} {state}, or --state")
    elif mode & 0o077 & ~0o011:
        yield _state_fault(f"{state} has mode {mode:04o}: others can read it", f"chmod 0700 {state}")
    elif not os.access(state, os.R_OK | os.W_OK | os.X_OK):
        yield _state_fault(f"{state} cannot be written", f"chmod u+rwx {state}; is the disk mounted read-only?")
    else:
        yield Finding(check="state folder", state="ok", detail=f"{state}, mode {mode:04o}")


def _state_fault(detail: str, way_out: str) -> Finding:
    return Finding(check="state folder", state="fail", detail=detail, way_out=way_out)


def _disk(installation: Installation) -> Iterator[Finding]:
    folder = next(path for path in (installation.state, *installation.state.absolute().parents) if path.exists())
    free = shutil.disk_usage(folder).free
    if free >= DISK_BYTES_MIN:
        yield Finding(check="disk", state="ok", detail=f"{free / 1e9:.1f} GB free in {folder}")
    else:
        yield Finding(
            check="disk",
            state="fail",
            detail=f"{free / 1e6:.0f} MB free in {folder}; checkpoints, logs and the database need 1 GB",
            way_out="free space there, or choose another folder with --state",
        )


def _supervisor(installation: Installation) -> Iterator[Finding]:
    record = installation.running.get("supervisor")
    if not isinstance(record, dict):
        yield Finding(check="tide up", state="warn", detail="is not running on this state folder", way_out="tide up")
    elif is_running(record):
        yield Finding(check="tide up", state="ok", detail=f"supervises, pid {record['pid']}")
    else:
        yield Finding(
            check="tide up",
            state="fail",
            detail=f"its process ({record.get('pid')}) is gone; what it started is supervised by nobody",
            way_out="`tide up` takes it over, `tide down` stops it",
        )


def _postgres(installation: Installation) -> Iterator[Finding]:
    address = installation.running.get("postgres_address")
    if not isinstance(address, dict):
        return
    try:
        detail = ask_postgres(address)
    except ProbeError as exc:
        yield Finding(
            check="postgres",
            state="fail",
            detail=str(exc),
            way_out=f"`tide up` restarts its own server; logs are in {installation.state}",
        )
    else:
        yield Finding(check="postgres", state="ok", detail=detail)


def _zygote(installation: Installation) -> Iterator[Finding]:
    if not installation.running:
        return
    try:
        detail = ask_zygote(installation.state / "zygote.sock")
    except ProbeError as exc:
        yield Finding(
            check="zygote",
            state="fail",
            detail=f"{exc}; no worker can be started",
            way_out=f"`tide up` restarts it; log: {installation.state}/log/zygote.log",
        )
    else:
        yield Finding(check="zygote", state="ok", detail=detail)


def _services(installation: Installation) -> Iterator[Finding]:
    client = installation.client
    yield _ready("intake", client, way_out="`tide up` starts the services; --server or TIDE_SERVER names others")
    for name, url in sorted((installation.running.get("services") or {}).items()):
        if name == "intake":
            continue
        with Client(str(url), retry_seconds=0.0, timeout_seconds=3.0) as other:
            yield _ready(name, other, way_out=f"log: {installation.state}/log/services.log")


def _ready(name: str, client: Client, *, way_out: str) -> Finding:
    try:
        reason = client.readiness()
    except LostContact as exc:
        return Finding(check=name, state="fail", detail=str(exc), way_out=way_out)
    if reason is not None:
        return Finding(check=name, state="fail", detail=f"not ready: {reason}", way_out=way_out)
    return Finding(check=name, state="ok", detail=f"ready at {client.server}")


_CHECKS: Final[tuple[Callable[[Installation], Iterator[Finding]], ...]] = (
    _versions,
    _libgomp,
    _paddle,
    _open_files,
    _state_folder,
    _disk,
    _supervisor,
    _postgres,
    _zygote,
    _services,
)


def _server_of(session: Session, state: Path) -> str | None:
    """The server that was named, else the one that ``tide up`` recorded in the state folder."""
    url = read_running(state).get("url")
    return session.server or (url if isinstance(url, str) else None)


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
