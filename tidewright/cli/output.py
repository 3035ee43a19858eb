"""How answers look: tables for people, JSON and YAML for programs, names for shells."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

import click
import yaml

FORMATS: Final = ("table", "wide", "json", "yaml", "name")
_PHASE_COLORS: Final = {
    "Running": "green",
    "Succeeded": "green",
    "Starting": "cyan",
    "Draining": "yellow",
    "Queued": "yellow",
    "Held": "magenta",
    "Failed": "red",
    "Cancelled": "bright_black",
}
F = TypeVar("F", bound=Callable[..., Any])


def output_option(*formats: str, default: str = "table") -> Callable[[F], F]:
    """``-o``; only the formats that make sense for the command."""
    return click.option(
        "-o",
        "--output",
        "form",
        type=click.Choice(formats or FORMATS),
        default=default,
        show_default=True,
        help="How to print the answer.",
    )


def dumped(value: Any, form: str) -> str:
    """JSON or YAML text of an answer, as the server gave it."""
    if form == "json":
        return json.dumps(value, indent=2, ensure_ascii=False)
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True).rstrip("\n")


def columns(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Left-aligned columns, two blanks apart; nothing is cut, so that output can be piped."""
    cells = [list(header), *(list(row) for row in rows)]
    widths = [max(len(click.unstyle(row[index])) for row in cells) for index in range(len(header))]
    lines = []
    for row in cells:
        padded = [cell + " " * (width - len(click.unstyle(cell))) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def fields(pairs: Iterable[tuple[str, str]]) -> str:
    """``name: value`` lines, aligned; empty values are left out."""
    shown = [(name, value) for name, value in pairs if value]
    width = max((len(name) for name, _ in shown), default=0) + 1
    return "\n".join(f"{name + ':':<{width}} {value}" for name, value in shown)


def colored_phase(job: Mapping[str, Any]) -> str:
    return click.style(phase(job), fg=_PHASE_COLORS.get(job["phase"]))


def phase(job: Mapping[str, Any]) -> str:
    """``Running (resizing)``."""
    flags = ", ".join(str(flag).replace("_", " ") for flag in job.get("flags") or ())
    return f"{job['phase']} ({flags})" if flags else str(job["phase"])


def workers(job: Mapping[str, Any]) -> str:
    """``2/4 of 1..8``: running, granted, limits."""
    view = job["workers"]
    return f"{view['running']}/{view['granted']} of {view['min']}..{view['max']}"


def number(value: Any, form: str = ".4g") -> str:
    return "-" if value is None else format(value, form)


def percent(fraction: Any) -> str:
    return "-" if fraction is None else f"{fraction * 100:.0f}%"


def utilisation(job: Mapping[str, Any]) -> str:
    """``87% (wall)``: with the measure it was taken by."""
    progress = job.get("progress") or {}
    if progress.get("utilisation") is None:
        return "-"
    return f"{percent(progress['utilisation'])} ({progress.get('measure') or '?'})"


def step(job: Mapping[str, Any]) -> str:
    progress = job.get("progress")
    if not progress:
        return "-"
    total = progress.get("total_steps")
    return f"{progress['step']}/{total}" if total else str(progress["step"])


def age(timestamp: Any, *, now: datetime | None = None) -> str:
    """Since an instant of the server, as ``45s``, ``12m``, ``3h``, ``5d``; ``-`` for none."""
    if not timestamp:
        return "-"
    return span(((now or datetime.now(UTC)) - instant(timestamp)).total_seconds())


def instant(timestamp: str) -> datetime:
    return datetime.fromisoformat(timestamp)


def clock(timestamp: Any) -> str:
    """Local date and time, to the second."""
    return instant(timestamp).astimezone().strftime("%Y-%m-%d %H:%M:%S") if timestamp else ""


def span(seconds: Any) -> str:
    """``45s``, ``12m``, ``3h10m``, ``5d``."""
    if seconds is None:
        return "-"
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole}s"
    if whole < 7200:
        return f"{whole // 60}m"
    if whole < 172_800:
        minutes = whole % 3600 // 60
        return f"{whole // 3600}h{minutes:02}m" if minutes else f"{whole // 3600}h"
    return f"{whole // 86_400}d"
