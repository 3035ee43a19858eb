"""``tide submit`` and ``tide wait``."""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from tidewright.cli import exits, output
from tidewright.cli.manifest import ManifestError, merged, parse_manifest, read_manifest, with_paths_from
from tidewright.cli.session import Session, fail, job_argument, pass_session, resolve, watched
from tidewright.client import TERMINAL_PHASES, Client

PRIORITIES = ("critical", "high", "medium", "low")
_POLL_SECONDS = (0.2, 1.0)


@click.command(
    epilog="""\
\b
Examples:
  tide submit train.py --min 1 --max 4 --priority low -- --epochs 10
  tide submit job.yaml --name night-run      a manifest; flags win over it
  tide submit - < job.json                   from standard input
  tide submit --command -- sh -c 'exit 3'    any program instead of a Python script
  tide submit job.yaml --wait && echo done   exits as the job does (see `tide --help`)
""",
)
@click.argument("target", metavar="TARGET")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option("--command", "as_command", is_flag=True, help="TARGET and ARGS are a program to run, not a script.")
@click.option("--name", help="Name of the job; default: that of the script.")
@click.option("--min", "workers_min", type=int, metavar="N", help="Never fewer workers than this.")
@click.option("--max", "workers_max", type=int, metavar="N", help="Never more workers than this.")
@click.option("--workers", type=int, metavar="N", help="Size to start at; default: --min.")
@click.option("--priority", type=click.Choice(PRIORITIES), help="Default: medium.")
@click.option("--queue", help="Default: default.")
@click.option("--mode", type=click.Choice(["live", "restart", "fixed"]), help="How it may be resized.")
@click.option("--accelerators", type=int, metavar="N", help="GPUs (or slots) of each worker; default: 1.")
@click.option("--cpu", metavar="QUANTITY", help="CPU of each worker: 500m, 2.")
@click.option("--memory", metavar="QUANTITY", help="What each worker may use: 512Mi, 2Gi.")
@click.option("-e", "--env", "environment", multiple=True, metavar="KEY[=VALUE]", help="Without a value: yours.")
@click.option("-l", "--label", "labels", multiple=True, metavar="KEY=VALUE")
@click.option(
    "--checkpoint-path",
    metavar="PATH",
    help="Where a script keeps its own checkpoints; live jobs: each in a folder of its own there.",
)
@click.option("--checkpoint-every", "checkpoint_every_steps", type=int, metavar="STEPS")
@click.option("--outputs", metavar="PATH", help="Where results end up.")
@click.option("--grace", "grace_seconds", type=float, metavar="SECONDS", help="Time to stop in.")
@click.option("--retries", type=int, metavar="N", help="Failures of the job that are tried again.")
@click.option("--run-time-limit", "run_time_limit_seconds", type=float, metavar="SECONDS")
@click.option("--finish-by", metavar="TIME", help="When it should be done (ISO 8601, with a zone).")
@click.option("--working-directory", metavar="FOLDER", help="Default: this folder, for a script or command.")
@click.option("--interpreter", metavar="PATH", help="Another Python for the script.")
@click.option("--hold", "held", is_flag=True, help="Submit it held; `tide release` lets it go.")
@click.option("--idempotency-key", metavar="KEY", help="The same key never makes a second job. Default: random.")
@click.option("--allow-unsatisfiable", is_flag=True, help="Accept what the cluster can never hold today.")
@click.option("--wait", is_flag=True, help="Wait for the end; exit with the job's exit code.")
@click.option("--timeout", "timeout_seconds", type=float, metavar="SECONDS", help="Wait no longer; the job goes on.")
@output.output_option("table", "json", "yaml", "name")
@pass_session
def submit(session: Session, /, target: str, args: tuple[str, ...], **options: Any) -> None:
    """Submit a job: a Python script, a manifest (.yaml, .json, or - for standard input), or a command.

    Prints the job's id. A submission whose answer got lost is repeated under the same key and makes one job.
    """
    form, wait = options.pop("form"), options.pop("wait")
    timeout_seconds = options.pop("timeout_seconds")
    if timeout_seconds is not None and not wait:
        raise click.UsageError("--timeout needs --wait")
    key, unsatisfiable = options.pop("idempotency_key"), options.pop("allow_unsatisfiable")
    body = _job_of(target, args, as_command=options.pop("as_command"), changes=_changes(options))
    with session.client() as client:
        script = body.get("script")
        if client.is_local and isinstance(script, str) and script and not Path(script).is_file():
            raise click.UsageError(f"script: there is no file {script}")
        job = client.submit(body, idempotency_key=key, allow_unsatisfiable=unsatisfiable)
    for warning in job.get("warnings") or ():
        click.echo(f"{click.style('warning', fg='yellow')}: {warning}", err=True)
    _told(job, form, waiting=wait)
    if wait:
        _finish(session, job["id"], timeout_seconds=timeout_seconds, form=form)


@click.command(
    name="wait",
    epilog="""\
\b
Examples:
  tide wait train                 until it ends; exits as the job does
  tide wait train --timeout 600   exits 124 if it has not ended by then
""",
)
@job_argument
@click.option("--timeout", "timeout_seconds", type=float, metavar="SECONDS", help="Wait no longer; the job goes on.")
@output.output_option("table", "json", "yaml", "name")
@pass_session
def wait_for(session: Session, job: str, timeout_seconds: float | None, form: str) -> None:
    """Wait until a job has ended, and exit with its exit code."""
    with watched(f"The job goes on: `tide wait {job}` waits again."), session.client() as client:
        job_id = resolve(client, job)
    _finish(session, job_id, timeout_seconds=timeout_seconds, form=form)


def wait_until_ended(client: Client, job_id: str, *, timeout_seconds: float | None, told: bool) -> dict[str, Any]:
    """Poll until the job has ended, telling each change of its phase on stderr. Raises TimeoutError."""
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    pause = _POLL_SECONDS[0]
    last = ""
    while True:
        job = client.job(job_id)
        line = f"{output.phase(job)}  workers {output.workers(job)}"
        if told and line != last:
            click.echo(f"{job['name']}: {line}", err=True)
            last = line
        if job["phase"] in TERMINAL_PHASES:
            return job
        if deadline is not None and time.monotonic() + pause > deadline:
            raise TimeoutError
        time.sleep(pause)
        pause = min(pause * 1.3, _POLL_SECONDS[1])


def _finish(session: Session, job_id: str, *, timeout_seconds: float | None, form: str) -> None:
    with (
        watched(f"The job goes on: `tide wait {job_id}` waits again, `tide cancel {job_id}` ends it."),
        session.client(watching=True) as client,
    ):
        try:
            job = wait_until_ended(client, job_id, timeout_seconds=timeout_seconds, told=form == "table")
        except TimeoutError:
            fail(
                f"{job_id} has not ended within {timeout_seconds:g} s; it goes on",
                code=exits.TIMED_OUT,
                way_out=f"`tide why {job_id}` says what it waits for.",
            )
    code = exits.of_job(job)
    if form in ("json", "yaml"):
        click.echo(output.dumped(job, form))
    elif form == "table":
        reason = f": {job['reason']}" if job.get("reason") else ""
        click.echo(f"{job['name']} {output.colored_phase(job)}{reason}", err=True)
    click.get_current_context().exit(code)


def _told(job: dict[str, Any], form: str, *, waiting: bool) -> None:
    if form in ("json", "yaml"):
        if not waiting:  # one document on stdout: with --wait the last one
            click.echo(output.dumped(job, form))
        return
    click.echo(job["id"])
    if form == "table" and not waiting and sys.stderr.isatty():
        click.echo(f"{job['name']} is {job['phase']}. Next: tide logs -f {job['id']}, tide why {job['id']}", err=True)


def _job_of(target: str, args: Sequence[str], *, as_command: bool, changes: dict[str, Any]) -> dict[str, Any]:
    """The body to send. Raises click.UsageError where TARGET cannot be meant."""
    here = Path.cwd()
    if as_command:
        return merged({"command": [target, *args], "working_directory": str(here)}, changes)
    if target == "-" or target.endswith((".yaml", ".yml", ".json")):
        try:
            job = (
                with_paths_from(parse_manifest(sys.stdin.read()), here)
                if target == "-"
                else read_manifest(Path(target))
            )
        except ManifestError as exc:
            raise click.UsageError(f"{target}: {exc}") from exc
        return merged(job, {**({"args": list(args)} if args else {}), **changes})
    if not target.endswith(".py"):
        raise click.UsageError(
            f"{target}: give a Python script (.py), a manifest (.yaml, .yml, .json, -), or --command -- PROGRAM ..."
        )
    job = {"name": _name_of(target), "script": target, "args": list(args), "working_directory": str(here)}
    return merged(with_paths_from(job, here), changes)


def _name_of(script: str) -> str:
    """A valid name for a job from the name of a file."""
    stem = Path(script).stem.lower()
    name = "".join(char if char.isascii() and (char.isalnum() or char in "-._") else "-" for char in stem)
    return name.strip("-._")[:63].strip("-._") or "job"


def _changes(options: dict[str, Any]) -> dict[str, Any]:
    """What flags say, in the words of the API; flags that were not given are absent."""
    given = {name: value for name, value in options.items() if not (value is None or value is False or value == ())}
    resources = {name: given.pop(name) for name in ("accelerators", "cpu", "memory") if name in given}
    if resources:
        given["resources"] = resources
    if "retries" in given:
        given["restart_policy"] = {"limit": given.pop("retries")}
    if "environment" in given:
        given["environment"] = dict(_variable(text) for text in given["environment"])
    if "labels" in given:
        given["labels"] = dict(_label(text) for text in given["labels"])
    if "working_directory" in given:
        given["working_directory"] = str(Path(given["working_directory"]).absolute())
    return given


def _variable(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if separator:
        return name, value
    if name not in os.environ:
        raise click.UsageError(f"--env {name}: is not set here; give {name}=VALUE")
    return name, os.environ[name]


def _label(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not (separator and name):
        raise click.UsageError(f"--label {text}: give KEY=VALUE")
    return name, value
