"""Commands that change what is wanted of a job: scale, hold, release, cancel, priority."""

from typing import Any

import click

from tidewright.cli import output
from tidewright.cli.session import Session, job_argument, pass_session, resolve
from tidewright.cli.submit import PRIORITIES

reason_option = click.option("--reason", default="", help="Kept in the job's history.")
answer_option = output.output_option("table", "json", "yaml", "name")


@click.command(
    epilog="""\
\b
Examples:
  tide scale train 4               ask for 4 workers now
  tide scale train --max 8         let it grow up to 8
  tide scale train --min 2 --max 2
""",
)
@job_argument
@click.argument("workers", required=False, type=int, metavar="[N]")
@click.option("--min", "workers_min", type=int, metavar="N", help="Never fewer workers than this.")
@click.option("--max", "workers_max", type=int, metavar="N", help="Never more workers than this.")
@reason_option
@answer_option
@pass_session
def scale(session: Session, /, job: str, form: str, reason: str, **wanted: int | None) -> None:
    """Ask for another number of workers, or change the limits of what the job may have."""
    changes = {name: value for name, value in wanted.items() if value is not None}
    if not changes:
        raise click.UsageError("give N, --min or --max")
    _patch(session, job, changes, reason=reason, form=form)


@click.command(epilog="\b\nExample:\n  tide hold train --reason 'until the data is there'\n")
@job_argument
@reason_option
@answer_option
@pass_session
def hold(session: Session, job: str, reason: str, form: str) -> None:
    """Keep a job from running. One that runs writes a checkpoint, stops, and stays held until `tide release`."""
    _patch(session, job, {"held": True}, reason=reason, form=form)


@click.command(epilog="\b\nExample:\n  tide release train\n")
@job_argument
@reason_option
@answer_option
@pass_session
def release(session: Session, job: str, reason: str, form: str) -> None:
    """Let a held job run again, from its newest checkpoint."""
    _patch(session, job, {"held": False}, reason=reason, form=form)


@click.command(epilog="\b\nExample:\n  tide priority train critical\n")
@job_argument
@click.argument("priority", metavar="CLASS", type=click.Choice(PRIORITIES))
@reason_option
@answer_option
@pass_session
def priority(session: Session, job: str, priority: str, reason: str, form: str) -> None:
    """Change a job's priority class: critical, high, medium or low."""
    _patch(session, job, {"priority": priority}, reason=reason, form=form)


@click.command(epilog="\b\nExamples:\n  tide cancel train\n  tide cancel $(tide ps -o name --queue night)\n")
@click.argument("jobs", metavar="JOB...", nargs=-1, required=True)
@reason_option
@answer_option
@pass_session
def cancel(session: Session, jobs: tuple[str, ...], reason: str, form: str) -> None:
    """End jobs for good. One that runs gets its grace to write a checkpoint."""
    with session.client() as client:
        for job in jobs:
            _answer(client.cancel(resolve(client, job), reason=reason), form)


def _patch(session: Session, job: str, changes: dict[str, Any], *, reason: str, form: str) -> None:
    with session.client() as client:
        job_id = resolve(client, job)
        _answer(client.patch(job_id, {**changes, **({"reason": reason} if reason else {})}), form)


def _answer(job: dict[str, Any], form: str) -> None:
    if form in ("json", "yaml"):
        click.echo(output.dumped(job, form))
    elif form == "name":
        click.echo(job["id"])
    else:
        click.echo(
            f"{job['name']} ({job['id']}): {output.colored_phase(job)}, {job['priority']},"
            f" workers {output.workers(job)}, wished {job['workers']['wished']}"
        )
