"""Records a run while it happens: events, processes, ledgers and logs. Standard library only.

``python -m demo.recorder --record FOLDER --state FOLDER --port N --marker TEXT``. It looks from outside: at /proc,
at the files that trainers write, and at the public API. SIGTERM, or the end of its parent, makes it take a last
sample and exit. A process belongs to the run if its environment carries the marker (``MARKER_VARIABLE``), if its
working folder lies in the state folder, if it holds a file there open, if a member's record names it, if its parent
belongs to the run, or if a script has named it in a file ``kin.jsonl`` in its member's folder (lines of ``pid`` and
``start``): whoever forks twice, cleared its environment and closed its files cannot be told in another way.
"""

import argparse
import http.client
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from demo.record import EVENTS, KIN, PROCESSES, RUN, Process

MARKER_VARIABLE: Final = "TIDEWRIGHT_DEMO_RUN"
SAMPLE_SECONDS: Final = 0.25
_COPIED: Final = ("ledger.jsonl", "log")
_LOOKS: Final = 20
"""How often a stranger is looked at again: between fork and exec a process still carries its parent's environment."""
_EVENT_SILENCE_SECONDS: Final = 40.0
"""Above the server's heartbeat: a stream that is silent for longer is opened anew."""


@dataclass(kw_only=True)
class Seen:
    """What the walk over /proc has learnt so far."""

    state: Path
    marker: bytes
    known: dict[Process, str] = field(default_factory=dict)
    """process -> its command line"""
    members: dict[Process, str] = field(default_factory=dict)
    strangers: dict[Process, int] = field(default_factory=dict)
    records: set[Path] = field(default_factory=set)
    kin: dict[Path, int] = field(default_factory=dict)
    """file of named processes -> how many of its lines are known"""

    def walk(self) -> tuple[dict[Process, str], list[Process]]:
        """Who of the run is alive (process -> state letter), and who is new, or newly known as a worker.

        Costs about 50 µs a process.
        """
        named = self._read_member_records()
        self._read_kin()
        everyone = {process: (state, parent) for process, state, parent in _all_processes()}
        by_pid = {process.pid: process for process in everyone}
        new = [p for p in everyone if p not in self.known and self._is_ours(p)]
        new += [p for p in named if p in self.known]
        for process in new:
            self.known[process] = command_of(process.pid)
        found = True
        while found:
            found = False
            for process, (_, parent) in everyone.items():
                if process not in self.known and by_pid.get(parent) in self.known:
                    self.known[process] = command_of(process.pid)
                    new.append(process)
                    found = True
        return {process: state for process, (state, _) in everyone.items() if process in self.known}, new

    def _is_ours(self, process: Process) -> bool:
        if process in self.members:
            return True
        looks = self.strangers.get(process, 0)
        if looks >= _LOOKS:
            return False
        self.strangers[process] = looks + 1
        folder = Path("/proc") / str(process.pid)
        try:
            if self.marker in (folder / "environ").read_bytes():
                return True
            if (folder / "cwd").readlink().is_relative_to(self.state):
                return True
            return any(Path(entry.path).readlink().is_relative_to(self.state) for entry in os.scandir(folder / "fd"))
        except OSError:
            return False

    def _read_kin(self) -> None:
        for path in (self.state / RUN).glob(f"*/*/{KIN}"):
            try:
                lines = path.read_bytes().split(b"\n")[:-1]
            except OSError:
                continue
            for line in lines[self.kin.get(path, 0) :]:
                named = json.loads(line)
                self.members.setdefault(Process(named["pid"], named["start"]), "")
            self.kin[path] = len(lines)

    def _read_member_records(self) -> list[Process]:
        """The workers whose records have appeared."""
        named = []
        for path in (self.state / RUN).glob("*/*/pid.json"):
            if path in self.records:
                continue
            try:
                record = json.loads(path.read_bytes())
                worker = Process(record["worker_pid"], record["worker_start"])
                shim = Process(record["shim_pid"], record["shim_start"])
            except (OSError, ValueError, KeyError):
                continue
            self.records.add(path)
            self.members[worker] = f"{path.parts[-3]}/{path.parts[-2]}"
            self.members.setdefault(shim, "")
            named.append(worker)
        return named


class Copies:
    """Follows files that grow, and appends what is new to their copies."""

    def __init__(self, *, source: Path, target: Path) -> None:
        self._source, self._target = source, target
        self._offsets: dict[Path, int] = {}

    def follow(self) -> None:
        for name in _COPIED:
            for path in sorted(self._source.glob(f"*/*/{name}")):
                self._append(path)

    def _append(self, path: Path) -> None:
        offset = self._offsets.get(path, 0)
        try:
            with path.open("rb") as file:
                file.seek(offset)
                content = file.read()
        except OSError:
            return
        copy = self._target / path.relative_to(self._source)
        if offset == 0:
            copy.parent.mkdir(parents=True, exist_ok=True)
        if content or offset == 0:
            with copy.open("ab") as file:
                file.write(content)
        self._offsets[path] = offset + len(content)


class EventStream(threading.Thread):
    """Writes every event once, whatever becomes of the connection: it goes on after the last id it has written."""

    def __init__(self, *, port: int, path: Path) -> None:
        super().__init__(name="events", daemon=True)
        self._port, self._path = port, path
        self._last = "0-0"
        self.gap = ""

    def run(self) -> None:
        with self._path.open("ab", buffering=0) as file:
            while not self.gap:
                connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_EVENT_SILENCE_SECONDS)
                try:
                    for name, event_id, data in self._stream(connection):
                        if name == "gap":
                            self.gap = data
                            break
                        file.write(data.encode() + b"\n")
                        self._last = event_id
                except (OSError, http.client.HTTPException, ValueError):
                    time.sleep(0.1)
                finally:
                    connection.close()

    def _stream(self, connection: http.client.HTTPConnection) -> Iterator[tuple[str, str, str]]:
        connection.request("GET", "/v1/events", headers={"Last-Event-ID": self._last, "Accept": "text/event-stream"})
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(f"the event stream answered {response.status}")
        fields: dict[str, str] = {}
        while line := response.readline():
            text = line.decode().rstrip("\r\n")
            if not text and fields:
                if "data" in fields:
                    yield fields.get("event", ""), fields.get("id", self._last), fields["data"]
                fields = {}
            elif text and not text.startswith(":"):
                name, _, value = text.partition(":")
                value = value.removeprefix(" ")
                fields[name] = f"{fields[name]}\n{value}" if name == "data" and name in fields else value


def run_recorder(*, record: Path, state: Path, port: int, marker: str, stopping: threading.Event) -> int:
    """Sample until told to stop, then once more. Returns the exit status: 1 if the event stream had a gap."""
    parent = os.getppid()
    seen = Seen(state=state.resolve(), marker=f"{MARKER_VARIABLE}={marker}".encode())
    copies = Copies(source=state / RUN, target=record / RUN)
    (record / RUN).mkdir(parents=True, exist_ok=True)
    (record / EVENTS).touch()
    stream = EventStream(port=port, path=record / EVENTS)
    stream.start()
    with (record / PROCESSES).open("ab", buffering=0) as file:
        while not stopping.is_set() and os.getppid() == parent and not stream.gap:
            copies.follow()
            _write_sample(file, seen, api=_answers(port), final=False)
            stopping.wait(SAMPLE_SECONDS)
        copies.follow()
        _write_sample(file, seen, api=False, final=True)
    if stream.gap:
        print(f"the event stream has a gap: {stream.gap}", file=sys.stderr)
    return 1 if stream.gap else 0


def _write_sample(file: Any, seen: Seen, *, api: bool, final: bool) -> None:
    at = time.time()
    alive, new = seen.walk()
    lines: list[dict[str, Any]] = [
        {
            "k": "process",
            "pid": process.pid,
            "start": process.start,
            "command": seen.known[process],
            "member": seen.members.get(process) or None,
        }
        for process in new
    ]
    present = [[process.pid, process.start, state] for process, state in sorted(alive.items())]
    lines.append({"k": "sample", "t": at, "api": api, "final": final, "alive": present})
    file.write(b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines))


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=0.5)
    try:
        connection.request("GET", "/livez")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _all_processes() -> Iterator[tuple[Process, str, int]]:
    """(process, state letter, parent's pid) of everyone on this machine who is still there when read."""
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            stat = Path(entry.path, "stat").read_bytes()
        except OSError:
            continue
        fields = stat[stat.rindex(b")") + 2 :].split()
        yield Process(int(entry.name), int(fields[19])), fields[0].decode(), int(fields[1])


def command_of(pid: int) -> str:
    """The first 200 characters of its command line; between fork and exec, that of its parent."""
    try:
        return Path("/proc", str(pid), "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    except OSError:
        return ""


def main() -> int:
    parser = argparse.ArgumentParser(description="Record a run of the demo.")
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--marker", required=True)
    options = parser.parse_args()
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return run_recorder(
        record=options.record, state=options.state, port=options.port, marker=options.marker, stopping=stopping
    )


if __name__ == "__main__":
    sys.exit(main())
