"""``tide top``: nodes, who holds which slots, and how each job gets on, live."""

import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tidewright.cli import output
from tidewright.cli.session import Session, pass_session, watched
from tidewright.client import Client

_PALETTE: Final = ("green", "blue", "magenta", "cyan", "yellow", "bright_red", "bright_green", "bright_blue")
_PHASE_STYLES: Final = {"Running": "green", "Starting": "cyan", "Draining": "yellow", "Queued": "yellow"}
_MILLI: Final = 1000
_JOBS_MAX: Final = 40
_PIPE_COLUMNS: Final = 200


@click.command(
    epilog="""\
\b
Examples:
  tide top            until Ctrl-C
  tide top --once     one picture; also what a pipe gets
"""
)
@click.option("--once", is_flag=True, help="Print one picture and end.")
@click.option("--interval", "interval_seconds", type=click.FloatRange(0.2), default=1.0, show_default=True)
@pass_session
def top(session: Session, once: bool, interval_seconds: float) -> None:
    """Show the cluster: which job holds which slots, and each job's workers, step, loss and utilisation.

    Utilisation names its measure: nvml (of the GPU) or wall (busy time over wall time).
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPE_COLUMNS)
    with watched("`tide top` shows it again."), session.client(watching=not once) as client:
        if once or not console.is_terminal:
            console.print(picture(client))
            return
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(picture(client), refresh=True)
                time.sleep(interval_seconds)


def picture(client: Client) -> RenderableType:
    """Nodes above, jobs below."""
    capacity = client.capacity()
    jobs = list(client.jobs(phases=("Running", "Starting", "Draining"), limit=_JOBS_MAX))
    waiting = list(client.jobs(phases=("Queued", "Held"), limit=_JOBS_MAX))
    colors = {job["id"]: _PALETTE[index % len(_PALETTE)] for index, job in enumerate(sorted(jobs, key=_by_id))}
    stamp = Text(f"{client.server}  {datetime.now().astimezone():%H:%M:%S}", style="dim")
    return Group(stamp, nodes_table(capacity, colors), Text(), jobs_table([*jobs, *waiting], colors))


def nodes_table(capacity: Mapping[str, Any], colors: Mapping[str, str]) -> RenderableType:
    if not capacity["revision"]:
        return Text("no node has reported yet", style="yellow")
    table = Table(box=None, pad_edge=False)
    for name in ("NODE", "FLAVOR", "SLOTS", "WHO HOLDS THEM"):
        table.add_column(name)
    for node in sorted(capacity["nodes"], key=lambda item: str(item["name"])):
        total, holders = slots_of(node), node["holders"]
        bar, legend = Text(), Text()
        for holder in holders:
            style = colors.get(holder["job_id"], "white")
            bar.append("█" * holder["members"], style)
            legend.append(f"{holder['name']}×{holder['members']} ", style)
        used = sum(holder["members"] for holder in holders)
        bar.append("·" * max(0, total - used), "dim")
        bar.append(f" {used}/{total}")
        table.add_row(node["name"], node["flavor"], bar, legend)
    for name in capacity.get("lost_nodes") or ():
        table.add_row(name, "", Text("does not answer", style="red"), "")
    return table


def slots_of(node: Mapping[str, Any]) -> int:
    """Accelerators of a node that are not used by others; slots where there are none."""
    names = [name for name in node["allocatable"] if "/" in name]
    return int(sum(node["allocatable"][name] - node["used_by_others"].get(name, 0) for name in names)) // _MILLI


def jobs_table(jobs: Iterable[Mapping[str, Any]], colors: Mapping[str, str]) -> RenderableType:
    table = Table(box=None, pad_edge=False)
    for name in ("JOB", "PHASE", "WORKERS", "PRIORITY"):
        table.add_column(name)
    for name in ("STEP", "LOSS", "SAMPLES/S", "UTILISATION", "LEFT"):
        table.add_column(name, justify="right")
    table.add_column("WAITS FOR")
    for job in jobs:
        progress, waits = job.get("progress") or {}, job.get("waiting") or {}
        table.add_row(
            Text(job["name"], style=colors.get(job["id"], "")),
            Text(output.phase(job), style=_PHASE_STYLES.get(job["phase"], "")),
            output.workers(job),
            job["priority"],
            output.step(job),
            output.number(progress.get("loss")),
            output.number(progress.get("samples_per_second")),
            output.utilisation(job),
            output.span(progress.get("remaining_seconds")),
            f"{waits['code']}: {waits['detail']}" if waits else "",
        )
    return table if table.row_count else Text("no jobs: `tide submit train.py`", style="dim")


def _by_id(job: Mapping[str, Any]) -> str:
    return str(job["id"])
