"""The state folder's lock and ``up.json``: who supervises, and what runs where."""

import fcntl
import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from services.launch.processes import ProcessId, boot_id

_FORMAT: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class UpRecord:
    """``up.json``. Its fields are read by ``tide doctor``, ``tide down`` and tests; processes are pid and start.

    ``postgres_address`` has a socket, or host and port; no password is ever written.
    ``services``: URL of each service, by name.
    """

    url: str
    port: int
    slots: int | None = None
    ready: bool = False
    supervisor: dict[str, int] | None = None
    process: dict[str, int] | None = None
    """The process that runs the five services."""
    zygote: dict[str, int] | None = None
    postgres: dict[str, int] | None = None
    postgres_address: dict[str, Any] = field(default_factory=dict)
    services: dict[str, str] = field(default_factory=dict)
    boot_id: str = field(default_factory=boot_id)
    format: int = _FORMAT

    def process_id(self, name: str) -> ProcessId | None:
        """``supervisor``, ``process``, ``zygote`` or ``postgres`` if it lives; None also after a reboot."""
        found = ProcessId.from_json(getattr(self, name))
        return found if found and self.boot_id == boot_id() and found.is_alive() else None


def record_path(state: Path) -> Path:
    return state / "up.json"


def read_record(state: Path) -> UpRecord | None:
    """None if nothing was started here, or the file is of another release."""
    try:
        value: Any = json.loads(record_path(state).read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(value, dict) or value.get("format") != _FORMAT:
        return None
    known = {item.name for item in fields(UpRecord)}
    try:
        return UpRecord(**{name: given for name, given in value.items() if name in known})
    except TypeError:
        return None


def write_record(state: Path, record: UpRecord) -> None:
    """Atomically: readers see the old one or the new one."""
    write_json(record_path(state), asdict(record))


def write_json(path: Path, value: Any) -> None:
    draft = path.with_suffix(".new")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


class StateLock:
    """One supervisor per state folder. The kernel lets go of it when its process ends, however that happens."""

    def __init__(self, state: Path) -> None:
        self._path = state / "up.lock"
        self._descriptor: int | None = None

    def take(self) -> ProcessId | None:
        """None: it is ours. Otherwise who holds it (pid 0 where that cannot be told)."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(descriptor)
            os.close(descriptor)
            return holder
        mine = ProcessId.of(os.getpid())
        assert mine is not None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(mine.as_json()).encode(), 0)
        self._descriptor = descriptor
        return None

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _holder(descriptor: int) -> ProcessId:
    try:
        found = ProcessId.from_json(json.loads(os.pread(descriptor, 4096, 0) or b"null"))
    except ValueError:
        found = None
    return found or ProcessId(pid=0, start=0)
