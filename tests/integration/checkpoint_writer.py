"""Programs that write checkpoints and die, or stop, at a chosen point: run by tests as processes of their own.

``every BASE``: copies ``BASE/before`` once for every point of a write, kills a writer there, and ends when one came
through. A point is each call that opens, makes, renames, removes or lists something, each ``fsync``, and the end.
``bytes BASE LIMIT``: the kernel kills the writer in the middle of a file, when it has reached LIMIT bytes.
``stop BASE CALL``: the writer of generation 1 stops itself (SIGSTOP) right before its first CALL; goes on at SIGCONT.
"""

import os
import resource
import shutil
import signal
import sys
from pathlib import Path

import numpy as np

from tidewright.elastic.checkpoint import Snapshot, write_checkpoint
from tidewright.elastic.shelf import Fenced

CALLS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "shutil.rmtree")
FENCED = 3
FAILED = 4


def snapshot(generation: int, step: int, *, numbers: int = 4) -> Snapshot:
    """The tensors say which step they are of."""
    return Snapshot(
        generation=generation,
        step=step,
        world=2,
        layout="l",
        tensors=[np.full((numbers,), float(step)), np.array(generation, "int64")],
        values=f"values of {step}".encode(),
        plan={"seed": 1},
    )


def on_each_call(react, *calls: str) -> None:
    """``react`` is called before each of these calls of this process, and each fsync."""
    really = os.fsync

    def fsync(descriptor: int) -> None:
        react("fsync")
        really(descriptor)

    if "fsync" in calls:
        os.fsync = fsync
    sys.addaudithook(lambda event, _: react(event) if event in calls else None)


def die_at(point: int) -> None:
    seen = iter(range(1_000_000))

    def react(_: str) -> None:
        if next(seen) == point:
            os.kill(os.getpid(), signal.SIGKILL)

    on_each_call(react, *CALLS, "fsync")


def every(base: Path) -> None:
    for point in range(1000):
        directory = base / f"{point:03}"
        shutil.copytree(base / "before", directory)
        pid = os.fork()
        if pid == 0:
            die_at(point)
            write_checkpoint(directory, snapshot(2, 50))
            os._exit(0)
        if os.waitpid(pid, 0)[1] == 0:
            return


def in_a_file(base: Path, limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    write_checkpoint(base, snapshot(2, 50, numbers=100_000))


def stop_at(base: Path, call: str) -> None:
    pending = [call]

    def react(event: str) -> None:
        if event == call and pending:
            pending.clear()
            os.kill(os.getpid(), signal.SIGSTOP)

    on_each_call(react, call)
    try:
        write_checkpoint(base, snapshot(1, 40))
    except Fenced:
        sys.exit(FENCED)
    except OSError:
        sys.exit(FAILED)


if __name__ == "__main__":
    what, base, *rest = sys.argv[1:]
    if what == "every":
        every(Path(base))
    elif what == "bytes":
        in_a_file(Path(base), int(rest[0]))
    else:
        stop_at(Path(base), rest[0])
