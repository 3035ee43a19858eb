"""Write what is generated from the event models: JSON Schemas and ``docs/events.md``.

``python -m schemas.generate`` writes the files; with ``--check`` it writes nothing and fails if one differs.
"""

import argparse
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from schemas.registry import ADAPTERS, EVENT_CLASSES, EventData
from schemas.vocabulary import Topic

ROOT: Final = Path(__file__).resolve().parent.parent
SCHEMA_DIRECTORY: Final = ROOT / "schemas" / "jsonschema"
EVENTS_PAGE: Final = ROOT / "docs" / "events.md"
_PUBLISHERS: Final = {
    Topic.JOB: "intake",
    Topic.ALLOCATION: "queueing",
    Topic.WORKER: "execution",
    Topic.METRIC: "metrics",
    Topic.SCALING: "scaling",
    Topic.CAPACITY: "execution",
}
_HEADER: Final = """# Events

Generated from `schemas/events` by `python -m schemas.generate`: change the models, not this page.

Events are CloudEvents. `source` is the publishing service and the id of its log, `subject` is the key (the job id
unless said), `sequence` is the event's place in the log (transaction id and row id: it orders events, and repeats
carry the same one), `tenant` the owner, `dataschema` the file in `schemas/jsonschema`, `traceparent` the trace.
No event carries a secret or the value of an environment variable. Intake folds every event of allocation, worker,
metric, scaling and capacity into its read model, beside those that "For" names.
Within a version only optional fields are added; readers ignore fields they do not know.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file differs")
    check: bool = parser.parse_args().check
    files = dict(generated_files())
    stale = {path for path in SCHEMA_DIRECTORY.glob("*.json") if path not in files}
    differing = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    if check:
        for path in sorted(stale | set(differing)):
            sys.stderr.write(f"{path.relative_to(ROOT)} is not what the models say: run python -m schemas.generate\n")
        return 1 if stale or differing else 0
    for path in stale:
        path.unlink()
    for path in differing:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files[path])
    return 0


def generated_files() -> Iterator[tuple[Path, str]]:
    """(path, content) of every generated file, in a fixed order."""
    for cls in EVENT_CLASSES:
        yield SCHEMA_DIRECTORY / f"{cls.TYPE}.json", json.dumps(_schema(cls), indent=2, sort_keys=True) + "\n"
    yield EVENTS_PAGE, _events_page()


def _schema(cls: type[EventData]) -> dict[str, Any]:
    schema = ADAPTERS[cls.TYPE].json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"urn:tidewright:{cls.TYPE}", **schema}


def _events_page() -> str:
    parts = [_HEADER]
    for topic in Topic:
        classes = [cls for cls in EVENT_CLASSES if topic == cls.TOPIC]
        parts.append(f"## `{topic.value}`\n\nPublished by {_PUBLISHERS[topic]} alone.\n")
        parts.extend(_event_section(cls) for cls in classes)
    return "\n".join(parts)


def _event_section(cls: type[EventData]) -> str:
    schema = ADAPTERS[cls.TYPE].json_schema()
    rows = [f"| `{name}` | {_type_of(value)} |" for name, value in schema["properties"].items()]
    return "\n".join([f"### `{cls.TYPE}`\n", inspect.getdoc(cls) or "", "\n| Field | Type |", "|---|---|", *rows, ""])


def _type_of(value: dict[str, Any]) -> str:
    """A few words for one property of a JSON Schema."""
    if "$ref" in value:
        return _words(value["$ref"].rsplit("/", 1)[-1])
    if "anyOf" in value:
        return " or ".join(_type_of(option) for option in value["anyOf"])
    if value.get("type") == "array":
        item = value.get("items") or (value.get("prefixItems") or [{}])[0]
        return f"list of {_type_of(item)}"
    return "null" if value.get("type") == "null" else str(value.get("type", "any"))


def _words(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", " ", name).lower()


if __name__ == "__main__":
    raise SystemExit(main())
