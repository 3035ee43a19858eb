"""Reads ``docker-compose.yml``: interpolation, the part of its schema that we use, and what is inconsistent in it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

_VARIABLE: Final = re.compile(
    r"\$(?:(?P<escaped>\$)|(?P<plain>[A-Za-z_]\w*)"
    r"|\{(?P<name>[A-Za-z_]\w*)(?:(?P<operator>:?[-?])(?P<word>[^}]*))?\})"
)
_TOP: Final = frozenset({"name", "services", "volumes", "networks"})
_SERVICE: Final[dict[str, tuple[type, ...]]] = {
    "image": (str,),
    "build": (dict,),
    "user": (str,),
    "command": (list,),
    "environment": (dict,),
    "volumes": (list,),
    "ports": (list,),
    "depends_on": (dict,),
    "healthcheck": (dict,),
    "restart": (str,),
    "stop_grace_period": (str,),
    "read_only": (bool,),
    "tmpfs": (list,),
    "cap_drop": (list,),
    "security_opt": (list,),
    "shm_size": (str,),
    "pid": (str,),
    "network_mode": (str,),
    "networks": (list,),
    "deploy": (dict,),
    "logging": (dict,),
}
_HEALTHCHECK: Final = frozenset({"test", "interval", "timeout", "retries", "start_period", "start_interval"})
_RESTART: Final = ("no", "always", "on-failure", "unless-stopped")
_CONDITIONS: Final = ("service_started", "service_healthy", "service_completed_successfully")
_DURATION: Final = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>ms|s|m|h)")
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class ComposeError(Exception):
    """The file cannot be used: one line per fault, each naming its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """``source`` is a named volume, or a folder (absolute)."""

    source: str
    target: str
    is_named: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ComposeService:
    """One service as it would be started. ``is_ours``: built from this source. Durations in seconds."""

    name: str
    image: str
    is_ours: bool
    command: tuple[str, ...]
    environment: dict[str, str]
    mounts: tuple[Mount, ...]
    ports: tuple[str, ...]
    depends_on: tuple[str, ...]
    health: tuple[str, ...]
    restarts: bool
    stop_seconds: float
    pid: str | None
    network_mode: str | None


def read_compose(path: Path, variables: Mapping[str, str]) -> dict[str, ComposeService]:
    """The services by name, in the file's order. Raises ComposeError with everything that is wrong."""
    document: Any = yaml.safe_load(path.read_text())
    if not isinstance(document, dict):
        raise ComposeError(f"{path}: no mapping")
    document = {name: value for name, value in document.items() if not str(name).startswith("x-")}
    document = _interpolated(document, variables)
    wrong = faults(document)
    if wrong:
        raise ComposeError("\n".join(wrong))
    return {name: _service(name, body, path.resolve().parent) for name, body in document["services"].items()}


def interpolate(text: str, variables: Mapping[str, str]) -> str:
    """``${NAME:-default}``, ``${NAME:?message}``, ``${NAME}``, ``$NAME``, ``$$``. Raises ComposeError."""

    def value(match: re.Match[str]) -> str:
        if match["escaped"]:
            return "$"
        name, operator, word = match["name"] or match["plain"], match["operator"] or "", match["word"] or ""
        found = variables.get(name)
        missing = found is None or (operator.startswith(":") and not found)
        if not missing:
            return found or ""
        if operator.endswith("?"):
            raise ComposeError(f"{name}: {word or 'must be set'}")
        return word if operator.endswith("-") else ""

    return _VARIABLE.sub(value, text)


def faults(document: Mapping[str, Any]) -> list[str]:
    """What Compose would refuse, or what could not work, in the part of the format that is used here."""
    wrong = [f"{name}: unknown at the top" for name in document if name not in _TOP]
    services: Any = document.get("services")
    if not isinstance(services, dict) or not services:
        return [*wrong, "services: none"]
    for name, body in services.items():
        wrong += [f"services.{name}.{fault}" for fault in _service_faults(body, services, document)]
    return wrong


def seconds(text: str) -> float:
    """``20s``, ``1m30s``, ``500ms``. Raises ComposeError."""
    parts = list(_DURATION.finditer(text))
    if not parts or "".join(part[0] for part in parts) != text:
        raise ComposeError(f"{text!r} is no duration")
    return sum(float(part["number"]) * _SECONDS[part["unit"]] for part in parts)


def _service_faults(body: Any, services: Mapping[str, Any], document: Mapping[str, Any]) -> list[str]:
    if not isinstance(body, dict):
        return ["is no mapping"]
    wrong = [f"{key}: unknown" for key in body if key not in _SERVICE]
    wrong += [
        f"{key}: must be a {kinds[0].__name__}"
        for key, kinds in _SERVICE.items()
        if key in body and not isinstance(body[key], kinds)
    ]
    if wrong:
        return wrong
    if "image" not in body and "build" not in body:
        wrong.append("image: neither image nor build")
    if body.get("restart", "no") not in _RESTART:
        wrong.append(f"restart: one of {', '.join(_RESTART)}")
    wrong += [
        f"environment.{name}: must be text in quotes"
        for name, value in body.get("environment", {}).items()
        if not isinstance(value, str)
    ]
    wrong += _health_faults(body.get("healthcheck"))
    wrong += _reference_faults(body, services)
    wrong += _declared_faults(body, document)
    return wrong


def _health_faults(health: Mapping[str, Any] | None) -> list[str]:
    if health is None:
        return []
    wrong = [f"healthcheck.{key}: unknown" for key in health if key not in _HEALTHCHECK]
    test = health.get("test")
    if not isinstance(test, list) or len(test) < 2 or test[0] not in ("CMD", "CMD-SHELL"):
        wrong.append("healthcheck.test: must begin with CMD or CMD-SHELL")
    for key in ("interval", "timeout", "start_period", "start_interval"):
        if key in health:
            try:
                seconds(str(health[key]))
            except ComposeError as exc:
                wrong.append(f"healthcheck.{key}: {exc}")
    return wrong


def _reference_faults(body: Mapping[str, Any], services: Mapping[str, Any]) -> list[str]:
    wrong = []
    for name, condition in body.get("depends_on", {}).items():
        if name not in services:
            wrong.append(f"depends_on.{name}: there is no such service")
        elif condition.get("condition") not in _CONDITIONS:
            wrong.append(f"depends_on.{name}.condition: one of {', '.join(_CONDITIONS)}")
        elif condition["condition"] == "service_healthy" and "healthcheck" not in services[name]:
            wrong.append(f"depends_on.{name}: has no healthcheck to wait for")
    for key in ("pid", "network_mode"):
        kind, _, other = str(body.get(key, "")).partition(":")
        if kind == "service" and other not in services:
            wrong.append(f"{key}: there is no service {other}")
    if str(body.get("network_mode", "")).startswith("service:") and "ports" in body:
        wrong.append("ports: cannot be published by a container that joins another's network")
    if "network_mode" in body and "networks" in body:
        wrong.append("networks: not together with network_mode")
    return wrong


def _declared_faults(body: Mapping[str, Any], document: Mapping[str, Any]) -> list[str]:
    sources = [str(text).partition(":")[0] for text in body.get("volumes", [])]
    named = [source for source in sources if not source.startswith((".", "/"))]
    return [
        f"{kind}: {name} is not declared"
        for kind, names in (("volumes", named), ("networks", body.get("networks", [])))
        for name in names
        if name not in (document.get(kind) or {})
    ]


def _service(name: str, body: Mapping[str, Any], folder: Path) -> ComposeService:
    test = tuple(str(word) for word in body.get("healthcheck", {}).get("test", ()))
    health = ("sh", "-c", test[1]) if test[:1] == ("CMD-SHELL",) else test[1:]
    return ComposeService(
        name=name,
        image=str(body.get("image", "")),
        is_ours="build" in body,
        command=tuple(str(word) for word in body.get("command", ())),
        environment=dict(body.get("environment", {})),
        mounts=tuple(_mount(str(text), folder) for text in body.get("volumes", ())),
        ports=tuple(str(port) for port in body.get("ports", ())),
        depends_on=tuple(body.get("depends_on", {})),
        health=health,
        restarts=body.get("restart", "no") != "no",
        stop_seconds=seconds(body.get("stop_grace_period", "10s")),
        pid=body.get("pid"),
        network_mode=body.get("network_mode"),
    )


def _mount(text: str, folder: Path) -> Mount:
    source, target, *_ = text.split(":")
    is_named = not source.startswith((".", "/"))
    return Mount(source=source if is_named else str((folder / source).resolve()), target=target, is_named=is_named)


def _interpolated(value: Any, variables: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return interpolate(value, variables)
    if isinstance(value, dict):
        return {key: _interpolated(item, variables) for key, item in value.items()}
    if isinstance(value, list):
        return [_interpolated(item, variables) for item in value]
    return value
