"""The recorder on real sockets, processes and files: nothing lost, nothing twice, nobody overlooked."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from demo.installation import is_alive, send
from demo.record import Process, read_processes, read_record
from demo.recorder import MARKER_VARIABLE

ROOT = Path(__file__).parents[2]
MARKER = "acceptance-of-the-recorder"
SLEEPER = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


class Stream(BaseHTTPRequestHandler):
    """Sends five events, and breaks off in the middle of one each time; says what it was asked for."""

    asked: ClassVar[list[str]] = []

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        if self.path == "/livez":
            return
        last = self.headers["Last-Event-ID"]
        self.asked.append(last)
        number = int(last.partition("-")[2])
        self.wfile.write(b": heartbeat\n\n")
        for i in range(number + 1, min(number + 3, 6)):
            self.wfile.write(f"id: 7-{i}\nevent: e\ndata: {json.dumps(event(i))}\n\n".encode())
        if number < 5:
            self.wfile.write(b"id: 7-99\ndata: {half")
        else:
            time.sleep(0.2)

    def log_message(self, *args):
        pass


def event(number: int) -> dict:
    time = f"2026-01-01T00:00:{number:02}Z"
    return {"sequence": f"7-{number}", "type": "e", "subject": "j", "time": time, "data": {}}


@contextmanager
def recorder(tmp_path: Path, port: int):
    state, record = tmp_path / "state", tmp_path / "record"
    (state / "run").mkdir(parents=True, exist_ok=True)
    record.mkdir()
    (record / "marks.jsonl").touch()
    command = [sys.executable, "-m", "demo.recorder", f"--record={record}", f"--state={state}"]
    process = subprocess.Popen([*command, f"--port={port}", f"--marker={MARKER}"], cwd=ROOT)
    try:
        yield process
    finally:
        process.terminate()
        assert process.wait(timeout=10) == 0


@pytest.fixture
def port():
    Stream.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Stream)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def sleepers():
    """Start processes by environment; whatever still runs at the end is killed."""
    started = []

    def start(environment: dict[str, str], *, folder: Path | None = None, command=SLEEPER) -> subprocess.Popen:
        process = subprocess.Popen(command, env={**os.environ, **environment}, cwd=folder)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def until(true, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_each_event_is_written_once_over_broken_connections(tmp_path, port):
    with recorder(tmp_path, port):
        until(lambda: "7-5" in Stream.asked)
    assert [e.sequence for e in read_record(tmp_path / "record").events] == [(7, i) for i in range(1, 6)]
    assert Stream.asked[:4] == ["0-0", "7-2", "7-4", "7-5"]


def pids_seen(tmp_path: Path) -> set[int]:
    path = tmp_path / "record" / "processes.jsonl"
    return {p.pid for p in read_processes(path.parent)[0]} if path.exists() else set()


def test_processes_of_the_run_are_found_and_no_others(tmp_path, port, sleepers):
    (tmp_path / "state").mkdir()
    marked = sleepers({MARKER_VARIABLE: MARKER})
    inside = sleepers({}, folder=tmp_path / "state")
    stranger = sleepers({MARKER_VARIABLE: "another run"})
    shell = ["/bin/sh", "-c", f"env -i {' '.join(SLEEPER[:2])} -c 'import time; time.sleep(60)' & wait"]
    parent = sleepers({MARKER_VARIABLE: MARKER}, command=shell)
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    until(lambda: children.read_text().split())
    child = int(children.read_text().split()[0])
    with recorder(tmp_path, port):
        until(lambda: {marked.pid, inside.pid, parent.pid, child} <= pids_seen(tmp_path))
        time.sleep(0.5)
        assert stranger.pid not in pids_seen(tmp_path)
        os.kill(child, signal.SIGKILL)
        marked.kill()
        marked.wait()
    final = read_record(tmp_path / "record").samples[-1]
    assert final.final
    assert {p.pid for p in final.alive} & {marked.pid, inside.pid, stranger.pid} == {inside.pid}


def test_who_hides_is_found_by_an_open_file_and_by_its_own_word(tmp_path, port, sleepers):
    folder = tmp_path / "state" / "run" / "j01" / "worker-0-1"
    folder.mkdir(parents=True)
    held, named, stranger = (
        ["/bin/sh", "-c", f"exec env -i {SLEEPER[0]} -S -c 'import time; time.sleep(60)' {redirected}"]
        for redirected in (f"> {folder}/log", "", "")
    )
    held, named, stranger = sleepers({}, command=held), sleepers({}, command=named), sleepers({}, command=stranger)
    stat = Path(f"/proc/{named.pid}/stat").read_text()
    line = json.dumps({"pid": named.pid, "start": int(stat.rpartition(")")[2].split()[19])})
    (folder / "kin.jsonl").write_text(f"{line}\n{line[:9]}")
    with recorder(tmp_path, port):
        until(lambda: {held.pid, named.pid} <= pids_seen(tmp_path))
        assert stranger.pid not in pids_seen(tmp_path)


def test_ledgers_and_logs_are_followed_and_workers_named(tmp_path, port, sleepers):
    folder = tmp_path / "state" / "run" / "j01" / "worker-0-1"
    folder.mkdir(parents=True)
    worker = sleepers({})
    stat = Path(f"/proc/{worker.pid}/stat").read_bytes()
    start = int(stat[stat.rindex(b")") + 2 :].split()[19])
    shim = {"shim_pid": 1, "shim_start": -1}
    (folder / "pid.json").write_text(json.dumps({"worker_pid": worker.pid, "worker_start": start, **shim}))
    line = json.dumps({"k": "applied", "step": 0, "generation": 1, "rank": 0, "world": 1, "pid": 1, "t": 1.0})
    (folder / "ledger.jsonl").write_text(line[:20])
    with recorder(tmp_path, port):
        until(lambda: worker.pid in pids_seen(tmp_path))
        with (folder / "ledger.jsonl").open("a") as ledger:
            ledger.write(line[20:] + "\n" + line + "\n")
        (folder / "log").write_text("last words\n")
    record = read_record(tmp_path / "record")
    assert len(record.ledgers["j01"]) == 2
    assert record.logs["j01"] == {"worker-0-1": "last words\n"}
    assert record.members[Process(worker.pid, start)] == "j01/worker-0-1"


def test_worker_seen_before_its_record_is_named_later(tmp_path, port, sleepers):
    worker = sleepers({MARKER_VARIABLE: MARKER})
    stat = Path(f"/proc/{worker.pid}/stat").read_bytes()
    start = int(stat[stat.rindex(b")") + 2 :].split()[19])
    with recorder(tmp_path, port):
        until(lambda: worker.pid in pids_seen(tmp_path))
        folder = tmp_path / "state" / "run" / "j01" / "worker-2-1"
        folder.mkdir(parents=True)
        record = {"worker_pid": worker.pid, "worker_start": start, "shim_pid": 1, "shim_start": -1}
        (folder / "pid.json").write_text(json.dumps(record))
        until(lambda: read_processes(tmp_path / "record")[1])
    assert read_processes(tmp_path / "record")[1] == {Process(worker.pid, start): "j01/worker-2-1"}


def test_signal_reaches_only_the_very_process(sleepers):
    worker = sleepers({})
    stat = Path(f"/proc/{worker.pid}/stat").read_bytes()
    process = Process(worker.pid, int(stat[stat.rindex(b")") + 2 :].split()[19]))
    assert is_alive(process)
    assert not send(process._replace(start=process.start + 1), signal.SIGKILL)
    assert is_alive(process)
    assert send(process, signal.SIGKILL)
    assert worker.wait(timeout=5) == -signal.SIGKILL
    assert not send(process, signal.SIGKILL)
