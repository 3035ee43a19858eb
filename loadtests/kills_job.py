"""What the kill test trains: a small net, and a family of processes that a careless script would leave behind.

Three of the family are started at once and one more every ``--escape-steps`` steps: a child in a session of its own,
one forked twice that executes something else with an empty environment and nothing open, and one forked twice that
goes on as a fork. Each names itself in ``kin.jsonl`` in its member's folder, so that the recorder knows of it.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import paddle
from paddle.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from demo.enough import Enough
from demo.record import KIN
from tidewright import elastic

SAMPLES: Final = 96
GLOBAL_BATCH: Final = 16
LIFE_SECONDS: Final = "900"
"""Longer than any run: what is not ended is seen."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", type=Path, required=True, help="its own; the file `enough` in it ends the training"
    )
    parser.add_argument("--epochs", type=int, default=100_000)
    parser.add_argument("--step-delay", type=float, default=0.03)
    parser.add_argument("--escape-steps", type=int, default=100)
    options = parser.parse_args()

    found_family()
    generator = np.random.RandomState(0)
    inputs = generator.rand(SAMPLES, 16).astype("float32")
    labels = (inputs.sum(axis=1) > 8).astype("int64")
    paddle.seed(1)
    model = paddle.nn.Sequential(paddle.nn.Linear(16, 32), paddle.nn.ReLU(), paddle.nn.Linear(32, 2))
    optimizer = paddle.optimizer.Momentum(learning_rate=0.05, parameters=model.parameters())

    with elastic.join() as job:
        job.track(model, optimizer)
        enough = Enough(options.folder, asked=options.folder / "enough")
        for step in job.steps((inputs, labels), global_batch=GLOBAL_BATCH, epochs=options.epochs, seed=1):
            time.sleep(options.step_delay)
            losses = functional.cross_entropy(model(step.inputs), step.labels, reduction="sum")
            if not job.apply(losses / step.global_batch):
                continue
            if job.step % options.escape_steps == 0:
                subprocess.run([sys.executable, "-S", "-E", "-c", ESCAPE, *escape_arguments()], check=True)
            if step.is_epoch_end and enough.is_last(epoch=step.epoch, rank=job.rank):
                break


def found_family() -> None:
    own_session = subprocess.Popen(["sleep", LIFE_SECONDS], stdin=subprocess.DEVNULL, start_new_session=True)
    name_kin(own_session.pid, "in a session of its own")
    fork_twice("forked twice, another program", become_another)
    fork_twice("forked twice, a fork", lambda: time.sleep(float(LIFE_SECONDS)))


def fork_twice(how: str, live: Callable[[], None]) -> None:
    """The grandchild loses its parent, its session and its terminal before it does anything."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    name_kin(os.getpid(), how)
    live()
    os._exit(0)


def become_another() -> None:
    """Nothing of where it came from: no environment, no open file, no folder."""
    os.chdir("/")
    os.closerange(0, 1024)
    os.execve("/bin/sleep", ["sleep", LIFE_SECONDS], {})


ESCAPE: Final = """
import os, sys
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
start = open("/proc/self/stat").read().rpartition(")")[2].split()[19]
line = '{"pid":%d,"start":%s,"how":"escaped later"}\\n' % (os.getpid(), start)
with open(sys.argv[1], "a") as file: file.write(line)
os.chdir("/")
os.closerange(0, 1024)
os.execve("/bin/sleep", ["sleep", sys.argv[2]], {})
"""
"""As ``fork_twice`` with ``become_another``, for a process that has threads by now and must not fork itself."""


def escape_arguments() -> tuple[str, str]:
    return f"{os.environ['TIDE_MEMBER_DIRECTORY']}/{KIN}", LIFE_SECONDS


def name_kin(pid: int, how: str) -> None:
    start = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    line = json.dumps({"pid": pid, "start": int(start), "how": how})
    with Path(os.environ["TIDE_MEMBER_DIRECTORY"], KIN).open("a") as file:
        file.write(f"{line}\n")


if __name__ == "__main__":
    main()
