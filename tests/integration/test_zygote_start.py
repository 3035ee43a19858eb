"""Zygote and child: requests, exit codes, environment, admission, on real processes."""

import importlib.metadata
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import pytest

from tests.integration.elastic_bed import ZygoteBed, wait_until
from tidewright import protocol


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZygoteBed]:
    bed = ZygoteBed(tmp_path_factory.mktemp("zygote"))
    bed.start()
    yield bed
    bed.stop()


def test_ping_names_paddle(bed: ZygoteBed) -> None:
    wheel = next(each for each in importlib.metadata.distributions() if each.name.startswith("paddlepaddle"))
    assert bed.ask({"op": "ping"}) == {"ok": True, "pid": bed.process.pid, "paddle": wheel.version, "reason": ""}
    threads = len(list(Path(f"/proc/{bed.process.pid}/task").iterdir()))
    assert threads == (2 if wheel.name == "paddlepaddle-gpu" else 1)  # brpc's: it sleeps, and a fork goes without it


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"nonsense\n", "not a line of JSON"),
        (b"[1]\n", "a request is an object"),
        (b'{"op":"dance"}\n', "op must be start or ping"),
        (b'{"op":"start"}\n', "directory must be a text that is not empty"),
        (
            b'{"op":"start","directory":"x","member":"m","nonce":"n","script":"s"}\n',
            "directory must be an absolute path",
        ),
        (b'{"op":"start","directory":"/x","member":"m","nonce":"n"}\n', "exactly one of script and command"),
        (b'{"op":"start","directory":"/x","member":"m","nonce":"n","command":[]}\n', "command must name a program"),
        (
            b'{"op":"start","directory":"/x","member":"m","nonce":"n","command":["a"],"environment":{"A":1}}\n',
            "environment.A must be a variable's name with a text",
        ),
        (b"\xff\xfe\n", "not a line of JSON"),
        (b"[" * 100_000 + b"\n", "not a line of JSON"),
    ],
)
def test_a_bad_request_is_answered_with_its_fault(bed: ZygoteBed, line: bytes, error: str) -> None:
    answer = bed.send(line)
    assert answer["ok"] is False
    assert error in answer["error"]
    assert bed.answers()


def test_who_connects_and_says_nothing_delays_nobody(bed: ZygoteBed) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(bed.socket_path))
        began = time.monotonic()
        assert bed.answers()
        assert time.monotonic() - began < 1


@pytest.mark.parametrize(
    ("text", "code", "logged"),
    [
        ("print('fine')", 0, "fine\n"),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('no data')", 1, "no data\n"),
        ("def f():\n    raise KeyError('x')\nf()", 1, "KeyError: 'x'\n"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15, ""),
        ("raise KeyboardInterrupt", -2, ""),
        ("import os; os._exit(3)", 3, ""),
        ("def f(:", 1, "SyntaxError: invalid syntax\n"),
        ("import threading, time\nthreading.Timer(0.3, print, ('thread',)).start()", 0, "thread\n"),
        ("import atexit\natexit.register(print, 'at exit')", 0, "at exit\n"),
    ],
)
def test_exit_codes_of_scripts(bed: ZygoteBed, text: str, code: int, logged: str) -> None:
    member = bed.script(f"code-{len(bed.members)}", text)
    record = member.exit()
    assert (record["code"], record["pid"]) == (code, member.worker_pid)
    assert member.log.endswith(logged)
    assert "tidewright/elastic/child.py" not in member.log
    member.gone()


def test_script_sees_what_an_interpreter_would_give_it(bed: ZygoteBed) -> None:
    text = """
import json, os, sys, signal, threading
import beside
assert __name__ == "__main__" and sys.modules["__main__"].__file__ == __file__
fds = {}
for n in os.listdir("/proc/self/fd"):
    try: fds[n] = os.readlink(f"/proc/self/fd/{n}")
    except OSError: pass
json.dump({"argv": sys.argv[1:], "cwd": os.getcwd(), "x": os.environ["X"], "fds": fds,
  "sid": os.getsid(0) == os.getpid(), "threads": threading.active_count(), "warm": "paddle" in sys.modules,
  "chld": signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL,
  "mask": len(signal.pthread_sigmask(signal.SIG_BLOCK, ())), "beside": beside.VALUE}, sys.stdout)
"""
    (bed.base / "beside.py").write_text("VALUE = 5")
    member = bed.script("view", text, args=["a", "b c"], environment={"X": "y"}, working_directory="/usr")
    assert member.exit()["code"] == 0, member.log
    view = json.loads(member.log)
    assert (view["argv"], view["cwd"], view["x"], view["beside"]) == (["a", "b c"], "/usr", "y", 5)
    assert (view["sid"], view["threads"], view["warm"], view["chld"], view["mask"]) == (True, 1, True, True, 0)
    assert {name for name in view["fds"] if int(name) < 3} == {"0", "1", "2"}
    assert not [target for target in view["fds"].values() if target.startswith(("socket:", "pipe:", "anon_inode:"))]


def test_generators_differ_between_forks(bed: ZygoteBed) -> None:
    text = "import random, numpy, paddle; print(random.random(), numpy.random.rand(), paddle.rand([1]).item())"
    first, second = bed.script("random-1", text), bed.script("random-2", text)
    first.exit(), second.exit()
    assert not set(first.log.split()) & set(second.log.split())


def test_commands_are_executed(bed: ZygoteBed) -> None:
    shell = bed.shell("shell", "echo $A $OMP_NUM_THREADS; pwd; exit 9", environment={"A": "b"})
    python = bed.script(
        "python", "import sys; print('paddle' in sys.modules, sys.argv[1:])", interpreter="python3", args=["1"]
    )
    absent = bed.run("absent", command=["/no/such/program"])
    forbidden = bed.run("forbidden", command=["/etc/passwd"])
    assert shell.exit()["code"] == 9
    assert shell.log.split() == ["b", str(shell.directory)]
    assert python.exit()["code"] == 0
    assert python.log == "False ['1']\n"
    assert absent.exit()["code"] == 127
    assert absent.log == "cannot execute /no/such/program: No such file or directory\n"
    assert forbidden.exit()["code"] == 126


def test_faults_of_the_request_are_told_in_the_log(bed: ZygoteBed) -> None:
    no_folder = bed.shell("no-folder", "true", working_directory="/no/such/folder")
    no_script = bed.run("no-script", script="/no/such.py", working_directory="/")
    assert no_folder.exit()["code"] == 126
    assert "/no/such/folder: No such file" in no_folder.log
    assert no_script.exit()["code"] == 2
    assert "cannot open script /no/such.py" in no_script.log


def test_a_repeated_request_starts_once(bed: ZygoteBed) -> None:
    request = {
        "op": "start",
        "directory": str(bed.base / "run" / "once"),
        "member": "once",
        "nonce": "n",
        "command": ["/bin/sh", "-c", f"echo x >> {bed.base}/once; sleep 0.3"],
    }
    answers: list[dict[str, object]] = []
    threads = [threading.Thread(target=lambda: answers.append(bed.ask(request))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until((bed.base / "run" / "once" / "gone").exists)
    assert bed.ask(request) == {"ok": True, "duplicate": True}
    assert sorted("shim_pid" in answer for answer in answers) == [False] * 7 + [True]
    assert (bed.base / "once").read_text() == "x\n"


class Door:
    """A membership endpoint that answers admissions as it is told to; a stranger's if it has another ``token``."""

    def __init__(self, answers: list[protocol.Message | None], *, token: str = "t") -> None:
        self.answers = answers
        self.token = token
        self.asked: list[protocol.Message] = []
        self.refused = 0
        """times that the proof was not believed"""
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        for answer in self.answers:
            connection, _ = self.listener.accept()
            with connection, connection.makefile("rb") as lines:
                connection.sendall(prove(lines, token=self.token))
                question = lines.readline()
                if question:
                    self.asked.append(protocol.decode(question))
                else:
                    self.refused += 1
                with suppress(OSError):
                    connection.sendall(protocol.encode(answer) if answer is not None else b"")
        self.listener.close()


def prove(lines: BinaryIO, *, token: str) -> bytes:
    """The answer to a knock."""
    knock = protocol.decode(lines.readline())
    assert isinstance(knock, protocol.Knock)
    return protocol.encode(protocol.Proof.of(knock, token=token))


def environment(door: Door, token: str = "t") -> dict[str, str]:
    return {protocol.ADDRESS_VARIABLE: door.address, protocol.TOKEN_VARIABLE: token}


def test_user_code_waits_for_its_admission(bed: ZygoteBed) -> None:
    door = Door([None, None, protocol.Admitted()])
    member = bed.script("admitted", "print('ran')", environment=environment(door))
    assert member.exit()["code"] == 0
    assert member.log == "ran\n"
    assert (
        door.asked
        == [protocol.Admit(token="t", member="admitted", nonce="nonce-admitted", pid=member.worker_pid)] * 3
    )


@pytest.mark.parametrize("kind", ["script", "shell"])
def test_who_is_refused_runs_nothing(bed: ZygoteBed, kind: str) -> None:
    door = Door([protocol.Refused(reason="the row is leaving")])
    start = getattr(bed, kind)
    member = start(
        f"refused-{kind}", "print('ran')" if kind == "script" else "echo ran", environment=environment(door)
    )
    assert member.exit()["code"] == 97
    assert member.log == "not admitted: the row is leaving\n"


@pytest.mark.parametrize("answer", [protocol.Admitted(), protocol.Refused(reason="go away")])
def test_a_stranger_on_the_port_is_neither_obeyed_nor_told_the_token(
    bed: ZygoteBed, answer: protocol.Message
) -> None:
    door = Door([answer] * 3 + [protocol.Admitted()], token="a guess")
    member = bed.script(f"strangers-{answer.KIND}", "print('ran')", environment=environment(door))
    wait_until(lambda: door.refused >= 3)
    assert (member.log, door.asked) == ("", [])
    door.token = "t"
    assert member.exit()["code"] == 0
    assert member.log == "ran\n"


def test_admission_waits_for_execution_to_come_up(bed: ZygoteBed) -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    member = bed.shell("early", "echo ran", environment={protocol.ADDRESS_VARIABLE: f"127.0.0.1:{port}"})
    time.sleep(0.5)
    assert member.log == ""
    with socket.create_server(("127.0.0.1", port)) as listener:
        connection, _ = listener.accept()
        with connection:
            lines = connection.makefile("rb")
            connection.sendall(prove(lines, token=""))
            lines.readline()
            connection.sendall(protocol.encode(protocol.Admitted()))
            assert member.exit()["code"] == 0
    assert member.log == "ran\n"


def test_a_second_zygote_is_refused_its_socket_and_a_dead_ones_is_taken_over(tmp_path: Path) -> None:
    first = ZygoteBed(tmp_path)
    first.start()
    second = ZygoteBed(tmp_path)
    second.launch()
    assert second.process.wait(30) == 1
    assert "a zygote answers there already" in (tmp_path / "zygote.log").read_text()
    running = first.shell("survivor", "sleep 0.5; exit 4")
    _ = running.record
    first.process.kill()
    first.process.wait()
    third = ZygoteBed(tmp_path)
    third.start()
    assert running.exit()["code"] == 4
    running.gone()
    third.stop()


def run_python(text: str, argument: Path) -> str:
    command = [sys.executable, "-c", text, str(argument)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=True).stdout


A_FORK_FAILS = """
import os, sys
from tidewright.elastic import child, zygote
def fail():
    raise BlockingIOError(11, "no process more")
os.fork = fail
value = {"directory": sys.argv[1], "member": "m", "nonce": "n", "command": ["/bin/true"]}
try:
    zygote.start_worker(child.to_start_request(value), base_environment={})
except BlockingIOError:
    print("raised")
"""


def test_a_start_that_could_not_fork_says_so_for_good(tmp_path: Path) -> None:
    """Its folder is locked: without the word execution would wait for it until the start limit."""
    done = subprocess.run(
        [sys.executable, "-c", A_FORK_FAILS, str(tmp_path / "m")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "raised\n"
    assert "no process more" in (tmp_path / "m" / "start_error").read_text()


A_PID_COMES_BACK = """
import json, os, signal, sys, time
from pathlib import Path
from tidewright import shim
from tidewright.elastic.reaper import Reaper
folder = Path(sys.argv[1])
reaper, worker = Reaper(), os.fork()
if worker == 0:
    time.sleep(60)
ended_shim = os.fork()
if ended_shim == 0:
    os._exit(0)
record = {"worker_pid": worker, "worker_start": shim.process_stat(worker)[2]}
(folder / "pid.json").write_text(json.dumps(record))
reaper.statuses[worker] = (7 << 8, time.time() - 1000)  # what a stranger with this pid left, long ago
reaper.shims[ended_shim] = str(folder)
while reaper.shims:
    reaper.reap()
alive, told = not reaper.ended, (folder / "exit.json").exists()
os.kill(worker, signal.SIGKILL)
while not (folder / "gone").exists():
    reaper.reap()
print(alive, told, json.loads((folder / "exit.json").read_text())["code"])
"""


def test_a_living_worker_gets_no_status_of_a_stranger_that_had_its_pid(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", A_PID_COMES_BACK, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == f"True False {-signal.SIGKILL}\n"
