"""Commands that show what is: ps, get, members, why, history, logs, events."""

import json
import time
from collections.abc import Sequence
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from tidewright.cli import exits, output
from tidewright.cli.session import Session, job_argument, pass_session, resolve, watched
from tidewright.cli.submit import PRIORITIES
from tidewright.client import Client, StreamedEvent

PHASES = ("Held", "Queued", "Starting", "Running", "Draining", "Succeeded", "Failed", "Cancelled")
_UNFINISHED = PHASES[:5]


@click.command(
    epilog="""\
\b
Examples:
  tide ps                          jobs that have not ended, newest first
  tide ps -a --limit 20            also those that have
  tide ps -w                       until Ctrl-C
  tide ps --phase Queued -o name   ids, one a line
"""
)
@click.option("-a", "--all", "everything", is_flag=True, help="Also jobs that have ended.")
@click.option("-w", "--watch", is_flag=True, help="Refresh every second until Ctrl-C.")
@click.option("--phase", "phases", multiple=True, type=click.Choice(PHASES, case_sensitive=False))
@click.option("--queue")
@click.option("--priority", type=click.Choice(PRIORITIES))
@click.option("-l", "--label", "labels", multiple=True, metavar="KEY=VALUE")
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True)
@output.output_option()
@pass_session
def ps(session: Session, /, *, everything: bool, watch: bool, form: str, limit: int, **filters: Any) -> None:
    """List jobs."""
    phases: Sequence[str] = filters.pop("phases") or (() if everything else _UNFINISHED)

    def listed(client: Client) -> list[dict[str, Any]]:
        return list(client.jobs(phases=phases, limit=limit, **filters))

    if not watch:
        with session.client() as client:
            click.echo(_told_jobs(listed(client), form))
        return
    if form not in ("table", "wide"):
        raise click.UsageError("-w shows a table; `tide events` follows for programs")
    console = Console()
    with watched("`tide ps` lists the jobs."), session.client(watching=True) as client:
        if not console.is_terminal:
            _watch_plainly(client, listed, form)
        with Live(console=console, screen=False, auto_refresh=False) as live:
            while True:
                live.update(Text.from_ansi(_told_jobs(listed(client), form)), refresh=True)
                time.sleep(1.0)


@click.command(epilog="\b\nExamples:\n  tide get train\n  tide get train -o json | jq .progress.loss\n")
@job_argument
@output.output_option()
@pass_session
def get(session: Session, job: str, form: str) -> None:
    """Show one job."""
    with session.client() as client:
        view = client.job(resolve(client, job))
        if form in ("json", "yaml"):
            click.echo(output.dumped(view, form))
        elif form == "name":
            click.echo(view["id"])
        else:
            click.echo(_told_job(view))
            if form == "wide":
                click.echo(_told_members(client.members(view["id"])))


@click.command(epilog="\b\nExample:\n  tide members train\n")
@job_argument
@output.output_option()
@pass_session
def members(session: Session, job: str, form: str) -> None:
    """List the processes of a job: what each does, where, at which step."""
    with session.client() as client:
        items = client.members(resolve(client, job))
    if form in ("json", "yaml"):
        click.echo(output.dumped(items, form))
    elif form == "name":
        click.echo("\n".join(item["member"] for item in items))
    else:
        click.echo(_told_members(items))


@click.command(epilog="\b\nExample:\n  tide why train\n")
@job_argument
@output.output_option("table", "json", "yaml")
@pass_session
def why(session: Session, job: str, form: str) -> None:
    """Say why a job is as it is: what it waits for, what would unblock it, who decided what, by which measure."""
    with session.client() as client:
        view = client.why(resolve(client, job))
    if form != "table":
        click.echo(output.dumped(view, form))
        return
    click.echo(view["summary"])
    waiting, measure = view.get("waiting") or {}, view.get("measure")
    estimate = waiting.get("start_estimate_seconds")
    basis = f" ({waiting['estimate_basis']})" if waiting.get("estimate_basis") else ""
    ahead = view.get("queue_ahead")
    used = view.get("utilisation")
    click.echo(
        output.fields(
            [
                ("phase", output.colored_phase(view)),
                ("waits", f"{waiting['code']}: {waiting['detail']}" if waiting else ""),
                ("unblocked by", waiting.get("unblocked_by", "")),
                ("starts in about", "" if estimate is None else output.span(estimate) + basis),
                ("ahead in queue", "" if ahead is None else str(ahead)),
                ("last decision", _told_decision(view.get("decision"))),
                ("scaling", _told_decision(view.get("scaling"))),
                ("utilisation", "" if used is None else f"{output.percent(used)}, measured by {measure or '?'}"),
            ]
        )
    )


@click.command(epilog="\b\nExamples:\n  tide history train\n  tide history train -o json | jq '.[].type'\n")
@job_argument
@output.output_option("table", "wide", "json", "yaml")
@pass_session
def history(session: Session, job: str, form: str) -> None:
    """Tell what happened to a job, oldest first: each decision with its reason, each group, each loss."""
    with session.client() as client:
        entries = list(client.history(resolve(client, job)))
    if form in ("json", "yaml"):
        click.echo(output.dumped(entries, form))
        return
    header = ["TIME", "EPOCH", "GEN", "WORKERS", "WHAT"]
    rows = [
        [
            output.clock(entry["time"]),
            *(output.number(entry.get(name), "d") for name in ("epoch", "generation", "workers")),
            entry["summary"] + (f"  [{entry['type']} {entry['sequence']}]" if form == "wide" else ""),
        ]
        for entry in entries
    ]
    click.echo(output.columns(header, rows))


@click.command(
    epilog="""\
\b
Examples:
  tide logs train                          what it has written
  tide logs -f --tail 20 train             the last lines, then on until it ends; exits as the job does
  tide logs train --member worker/1        one worker (role/index, or a whole member name)
"""
)
@job_argument
@click.option("-f", "--follow", is_flag=True, help="Go on until the job has ended or Ctrl-C.")
@click.option("--tail", type=click.IntRange(0), metavar="N", help="Only the last N lines.")
@click.option("--since-cursor", "cursor", metavar="CURSOR", help="Resume behind a line (`-o json` shows cursors).")
@click.option("--member", metavar="MEMBER", help="Only this process.")
@output.output_option("table", "json")
@pass_session
def logs(session: Session, /, job: str, *, follow: bool, form: str, **where: Any) -> None:
    """Print the output of a job's processes, also of those that have ended."""
    with (
        watched(f"The job goes on: `tide logs -f {job}` follows again."),
        session.client(watching=follow) as client,
    ):
        job_id = resolve(client, job)
        for line in client.logs(job_id, follow=follow, **where):
            if form == "json":
                told = {"member": line.member, "cursor": line.cursor, "line": line.line}
                click.echo(json.dumps(told, ensure_ascii=False))
            else:
                click.echo(f"{click.style(_short_member(line.member), fg='cyan')} {line.line}")
        if follow:
            click.get_current_context().exit(exits.of_job(client.job(job_id)))


@click.command(
    epilog="""\
\b
Examples:
  tide events                       from now on
  tide events --job train -o json   CloudEvents, one a line
  tide events --after 901-17        behind an id (the first column)
"""
)
@click.option("--job", metavar="JOB", help="Only this job.")
@click.option("--after", metavar="ID", help="Resume behind this event.")
@output.output_option("table", "json")
@pass_session
def events(session: Session, job: str | None, after: str | None, form: str) -> None:
    """Follow what happens until Ctrl-C; a broken connection resumes where it was."""
    with watched("`tide events --after ID` resumes behind an id."), session.client(watching=True) as client:
        job_id = resolve(client, job) if job else None
        for event in client.events(job_id=job_id, after=after):
            if form == "json":
                click.echo(json.dumps(event.data, ensure_ascii=False))
            else:
                click.echo(_told_event(event))


def _watch_plainly(client: Client, listed: Any, form: str) -> None:
    """Without a terminal: print the table again whenever it changed."""
    last = ""
    while True:
        told = _told_jobs(listed(client), form)
        if told != last:
            click.echo(told)
            last = told
        time.sleep(1.0)


def _told_jobs(jobs: list[dict[str, Any]], form: str) -> str:
    if form in ("json", "yaml"):
        return output.dumped(jobs, form)
    if form == "name":
        return "\n".join(job["id"] for job in jobs)
    if not jobs:
        return "no jobs"
    wide = form == "wide"
    header = ["ID", "NAME", "PHASE", "WORKERS", "PRIORITY", "STEP", "LOSS", "UTIL", "AGE"]
    header += ["QUEUE", "MODE", "EPOCH", "ATTEMPT", "GEN", "SAMPLES/S", "LEFT", "WAITS FOR"] if wide else []
    return output.columns(header, [_job_row(job, wide=wide) for job in jobs])


def _job_row(job: dict[str, Any], *, wide: bool) -> list[str]:
    progress = job.get("progress") or {}
    row = [
        job["id"],
        job["name"],
        output.colored_phase(job),
        output.workers(job),
        job["priority"],
        output.step(job),
        output.number(progress.get("loss")),
        output.utilisation(job),
        output.age(job["submitted_at"]),
    ]
    if wide:
        waiting = job.get("waiting") or {}
        row += [job["queue"], job["mode"], *(str(job[name]) for name in ("epoch", "attempt", "generation"))]
        row += [
            output.number(progress.get("samples_per_second")),
            output.span(progress.get("remaining_seconds")),
            waiting.get("code", ""),
        ]
    return row


def _told_job(job: dict[str, Any]) -> str:
    progress, waiting = job.get("progress") or {}, job.get("waiting") or {}
    labels = ", ".join(f"{name}={value}" for name, value in (job.get("labels") or {}).items())
    share = progress.get("percent")
    ended = f"{job['outcome']}, {_told_end(job)}" if job.get("outcome") else ""
    failed = job.get("last_failure") or {}
    last = f"attempt {failed['attempt']}, {_told_end(failed)}: {failed['reason']}" if failed and not ended else ""
    return output.fields(
        [
            ("id", job["id"]),
            ("name", job["name"]),
            ("phase", output.colored_phase(job)),
            ("outcome", ended),
            ("reason", job.get("reason") or ""),
            ("failures", _told_failures(job.get("failures") or {})),
            ("last failure", last),
            ("workers", f"{output.workers(job)} (running/granted), wished {job['workers']['wished']}"),
            ("priority", f"{job['priority']}, queue {job['queue']}, mode {job['mode']}"),
            ("waits", f"{waiting['code']}: {waiting['detail']}" if waiting else ""),
            ("unblocked by", waiting.get("unblocked_by", "")),
            ("step", output.step(job) + (f" ({share:.0f} %)" if share is not None else "") if progress else ""),
            ("left", output.span(progress["remaining_seconds"]) if progress.get("remaining_seconds") else ""),
            ("loss", output.number(progress["loss"]) if progress.get("loss") is not None else ""),
            ("utilisation", output.utilisation(job) if progress.get("utilisation") is not None else ""),
            ("finish by", output.clock(job.get("finish_by")) + (" — will be late" if job.get("late") else "")),
            ("submitted", output.clock(job["submitted_at"])),
            ("started", output.clock(job.get("started_at"))),
            ("ended", output.clock(job.get("ended_at"))),
            ("counters", f"epoch {job['epoch']}, attempt {job['attempt']}, generation {job['generation']}"),
            ("accelerator time", output.span(job["accelerator_seconds"]) if job.get("accelerator_seconds") else ""),
            ("labels", labels),
            ("warnings", "; ".join(job.get("warnings") or ())),
        ]
    )


def _told_end(end: dict[str, Any]) -> str:
    """Exit code, whose fault, and its name."""
    attributed = f", attributed to the {end['attributed_to']}" if end.get("attributed_to") else ""
    cause = f" ({end['cause']})" if end.get("cause") else ""
    return f"exit code {output.number(end.get('exit_code'), 'd')}{attributed}{cause}"


def _told_failures(failures: dict[str, Any]) -> str:
    told = []
    if failures.get("of_job"):
        told.append(f"{failures['of_job']} of the job ({failures['retries']} are tried again)")
    if failures.get("without_progress"):
        told.append(f"{failures['without_progress']} by the platform in a row without one step further")
    return ", ".join(told)


def _told_members(items: list[dict[str, Any]]) -> str:
    header = ["MEMBER", "STATE", "PHASE", "PID", "NODE", "GEN", "STEP", "EXIT", "FAULT", "REASON"]
    rows = [
        [
            _short_member(item["member"]),
            item["state"],
            item.get("phase") or "-",
            output.number(item.get("pid"), "d"),
            item["node"],
            str(item["generation"]),
            str(item["step"]),
            output.number(item.get("exit_code"), "d"),
            item.get("attributed_to") or "-",
            item.get("reason") or "",
        ]
        for item in items
    ]
    return output.columns(header, rows) if rows else "no members"


def _told_decision(entry: dict[str, Any] | None) -> str:
    return f"{entry['summary']} ({output.age(entry['time'])} ago)" if entry else ""


def _told_event(event: StreamedEvent) -> str:
    if event.type == "gap":
        return click.style("gap: events before this point are no longer kept", fg="yellow")
    data = event.data.get("data") or {}
    plain = [f"{name}={value}" for name, value in data.items() if isinstance(value, str | int | float)]
    kind = event.type.removeprefix("tide.").removesuffix(".v1")
    return "  ".join(
        [
            event.id,
            output.clock(event.data.get("time")),
            click.style(f"{kind:<24}", fg="cyan"),
            str(event.data.get("subject", "")),
            " ".join(plain),
        ]
    )


def _short_member(member: str) -> str:
    """``worker/0/1`` without the job's id."""
    return member.partition("/")[2] or member
