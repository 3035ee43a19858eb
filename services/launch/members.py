"""Workers on this machine, found by their shims' records: what is left when jobs should have stopped."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from services.launch.processes import ProcessId, boot_id, end_processes
from tidewright.kinship import end_marked, mark_of

_DESCENDANTS_SECONDS: Final = 5.0


def living_members(state: Path) -> Iterator[tuple[str, tuple[ProcessId, ...]]]:
    """Name and living processes (shim first) of every member whose tree is not known to be empty."""
    for value in _records(state):
        found = tuple(process for process in (_part(value, "shim"), _part(value, "worker")) if process)
        if found:
            yield str(value.get("member")), found


def end_members(state: Path, *, grace_seconds: float) -> tuple[str, ...]:
    """End every worker that still lives, its tree included; gives their names.

    The shim gets the SIGTERM, passes it on, and kills what is left below it once its worker has ended. A killed shim
    leaves its worker behind, and that one's descendants can be anywhere: they are known by their mark.
    """
    members = dict(living_members(state))
    marks = {mark_of(str(value.get("member")), str(value.get("nonce"))) for value in _records(state)}
    end_processes([found[0] for found in members.values()], grace_seconds=grace_seconds)
    left = dict(living_members(state))
    end_processes([process for found in left.values() for process in found], grace_seconds=0.2)
    deadline = time.monotonic() + _DESCENDANTS_SECONDS
    while end_marked(marks) and time.monotonic() < deadline:
        time.sleep(0.01)
    return tuple(members)


def _records(state: Path) -> Iterator[dict[str, Any]]:
    boot = boot_id()
    for path in sorted((state / "run").glob("*/*/pid.json")):
        if (path.parent / "gone").exists():
            continue
        try:
            value: Any = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if isinstance(value, dict) and value.get("boot_id") == boot:
            yield value


def _part(value: dict[str, Any], name: str) -> ProcessId | None:
    found = ProcessId.from_json({"pid": value.get(f"{name}_pid"), "start": value.get(f"{name}_start")})
    return found if found and found.is_alive() else None
