"""What the dashboard and the alert rules ask Prometheus for."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

DEPLOY: Final = Path(__file__).resolve().parents[2] / "deploy"
_RANGE: Final = "$__rate_interval"
_NAME: Final = re.compile(r'__name__=~"([^"]+)"|\b((?:tidewright|process)_\w+)')
_CHOICE: Final = re.compile(r"\(([^()]*\|[^()]*)\)")
_PART: Final = re.compile(r"_(bucket|sum|count)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One expression of one panel. Grafana's own variable is filled with a minute."""

    title: str
    expression: str
    legend: str


def _read_panels() -> tuple[Panel, ...]:
    board: Any = json.loads((DEPLOY / "dashboards" / "tidewright.json").read_text())
    return tuple(
        Panel(title=panel["title"], expression=target["expr"].replace(_RANGE, "1m"), legend=target["legendFormat"])
        for panel in board["panels"]
        for target in panel.get("targets", ())
    )


PANELS: Final = _read_panels()


def alert_expressions() -> dict[str, str]:
    """By the alert's name."""
    return {
        rule["alert"]: rule["expr"]
        for path in sorted((DEPLOY / "alerts").glob("*.yml"))
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
    }


def names_in(expression: str) -> set[str]:
    """Names of metrics, as patterns to be matched whole, one for each alternative; parts of a histogram as one."""
    found = {match[1] or match[2] for match in _NAME.finditer(expression)}
    expanded = {name for each in found for name in _alternatives(each)}
    return {_PART.sub("", name) for name in expanded}


def _alternatives(pattern: str) -> list[str]:
    choice = _CHOICE.search(pattern)
    if choice is None:
        return [pattern]
    return [pattern[: choice.start()] + each + pattern[choice.end() :] for each in choice[1].split("|")]
