"""The page on operations names metrics, settings and modules that exist."""

import importlib
import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text()
UNITS = ("seconds", "bytes", "total", "ratio", "events", "info")
SERVICES = ("intake", "queueing", "metrics", "scaling", "execution")


def settings_of(service: str) -> set[str]:
    module = importlib.import_module(f"services.{service}.settings")
    made = [value for value in vars(module).values() if isinstance(value, type) and hasattr(value, "SECTION")]
    return {name for each in made for name in each.model_fields}


def test_every_setting_exists():
    named = re.findall(rf"`({'|'.join(SERVICES)})\.([a-z_]+)`", PAGE)
    assert len(named) >= 10
    assert [f"{service}.{name}" for service, name in named if name not in settings_of(service)] == []


def test_every_metric_exists():
    """A metric is made under its literal name somewhere in the services or in what they share."""
    known = {name for service in SERVICES for name in settings_of(service)} | settings_of("launch")
    named = {name for name in re.findall(r"`([a-z_]+)(?:\{[^`]*\})?`", PAGE) if name.endswith(UNITS)} - known
    assert len(named) >= 10
    sources = "".join(path.read_text() for folder in ("services", "shared") for path in (ROOT / folder).rglob("*.py"))
    assert sorted(name for name in named if f'"{name}"' not in sources) == []


def test_every_measurement_exists():
    named = set(re.findall(r"`python -m ([a-z_.]+)", PAGE))
    assert named
    assert sorted(name for name in named if importlib.util.find_spec(name) is None) == []
