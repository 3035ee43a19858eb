"""How long a change of size takes if a job is stopped and started anew from a checkpoint: plain Paddle alone.

``python -m loadtests.cold_restart [--from 2] [--to 4]``. Trains with ``paddle.DataParallel`` in that many processes;
then, at once after each other: all are told to stop, write a checkpoint at the next step boundary and end; the new
number is started, imports Paddle, connects, loads, and takes its first step. Nothing is waited for that need not be.
"""

import argparse
import importlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

STEPS_BEFORE: Final = 30
"""Steps that a group takes before it is stopped, so that nothing is cold then."""
WORKER_SECONDS_MAX: Final = 120.0
_STEP: Final = b"step "


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Instants of one restart, in seconds since the request."""

    stopped: float
    """the last process of the old group has ended"""
    first_step: float
    """the first step at the new size is applied in every process"""
    gap: float
    """from the last step of the old group to the first of the new one"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="before", type=int, default=2, metavar="N", help="workers before (2)")
    parser.add_argument("--to", dest="after", type=int, default=4, metavar="N", help="workers after (4)")
    parser.add_argument("--repeats", type=int, default=5, help="restarts (5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the seconds of every restart")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        train(options.worker)
        return
    restarts = measure(before=options.before, after=options.after, repeats=options.repeats)
    for name in ("stopped", "first_step", "gap"):
        seconds = [float(getattr(each, name)) for each in restarts]
        print(
            f"{options.before}->{options.after} {name:10} median {statistics.median(seconds):6.3f} s"
            f"   {min(seconds):6.3f} .. {max(seconds):6.3f}"
        )
    if options.json is not None:
        options.json.write_text(json.dumps([{n: getattr(r, n) for n in Restart.__slots__} for r in restarts]))


def measure(*, before: int, after: int, repeats: int) -> list[Restart]:
    """Restart so often, each time from a group of ``before`` that is under way."""
    restarts = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="tide-cold-") as name:
            old = _Group(folder=Path(name) / "old", checkpoint=Path(name) / "checkpoint", world=before)
            new = _Group(folder=Path(name) / "new", checkpoint=Path(name) / "checkpoint", world=after)
            try:
                old.start()
                old.wait_for_step(STEPS_BEFORE)
                asked = time.time()
                last = old.stop()
                stopped = time.time()
                new.start()
                first = new.wait_for_step(1)
                restarts.append(Restart(stopped=stopped - asked, first_step=first - asked, gap=first - last))
            finally:
                old.kill()
                new.kill()
    return restarts


# -- the launcher ---------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Group:
    """Processes of one size. They tell their steps through a pipe, so that nothing is polled."""

    folder: Path
    checkpoint: Path
    world: int
    processes: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    instants: dict[int, list[float]] = field(default_factory=dict)
    """by rank: when it had applied each step"""

    def start(self) -> None:
        self.folder.mkdir()
        ports = _free_ports(self.world)
        addresses = [f"127.0.0.1:{port}" for port in ports]
        for rank in range(self.world):
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "GLOG_minloglevel": "2",
                "PADDLE_DISTRI_BACKEND": "gloo",
                "PADDLE_TRAINER_ID": str(rank),
                "PADDLE_TRAINERS_NUM": str(self.world),
                "PADDLE_TRAINER_ENDPOINTS": ",".join(addresses),
                "PADDLE_CURRENT_ENDPOINT": addresses[rank],
                "PADDLE_MASTER": addresses[0],
            }
            with (self.folder / f"{rank}.log").open("wb") as log:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "loadtests.cold_restart", "--worker", str(self.checkpoint)],
                        env=environment,
                        cwd=Path(__file__).parents[1],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        stderr=log,
                    )
                )

    def wait_for_step(self, count: int) -> float:
        """When the last process had applied its step number ``count``, counted from its start."""
        for rank in range(self.world):
            self._read(rank, count)
            if len(self.instants[rank]) < count:
                self._fail(rank)
        return max(own[count - 1] for own in self.instants.values())

    def stop(self) -> float:
        """Ask all to stop and wait for their ends; gives when the last step was applied."""
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        for rank, process in enumerate(self.processes):
            self._read(rank, sys.maxsize)
            if process.wait(WORKER_SECONDS_MAX) != 0:
                self._fail(rank)
        return max(own[-1] for own in self.instants.values())

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def _read(self, rank: int, count: int) -> None:
        """Until so many steps of this process are known, or it has ended."""
        stream, instants = self.processes[rank].stdout, self.instants.setdefault(rank, [])
        assert stream is not None
        while len(instants) < count and (line := stream.readline()):
            if line.startswith(_STEP):  # Paddle writes to standard output, too
                instants.append(float(line.removeprefix(_STEP)))

    def _fail(self, rank: int) -> NoReturn:
        code = self.processes[rank].wait(WORKER_SECONDS_MAX)
        said = (self.folder / f"{rank}.log").read_text(errors="replace")
        raise SystemExit(f"{said}worker {rank} of {self.world} ended with {code}")


def _free_ports(count: int) -> Sequence[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


# -- a worker -------------------------------------------------------------------------------------------------


def train(checkpoint: Path) -> None:
    """Go on from the checkpoint, if there is one, until SIGTERM; tell the instant of each step that was applied."""
    import numpy as np

    paddle: Any = importlib.import_module("paddle")
    distributed: Any = importlib.import_module("paddle.distributed")

    from loadtests.resize_model import GLOBAL_BATCH, SAMPLES, loss_sum, make_images, make_model, make_optimizer

    stop: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))  # only now: Paddle sets one of its own when imported
    distributed.init_parallel_env()
    rank, world = distributed.get_rank(), distributed.get_world_size()
    images, labels = make_images()
    model = make_model()
    optimizer = make_optimizer(model)
    step = 0
    if checkpoint.exists():
        state: Any = paddle.load(str(checkpoint))
        model.set_state_dict(state["model"])
        optimizer.set_state_dict(state["optimizer"])
        step = int(state["step"])
    parallel = paddle.DataParallel(model)
    while True:
        order = np.random.RandomState(step // (SAMPLES // GLOBAL_BATCH)).permutation(SAMPLES)
        begin = step % (SAMPLES // GLOBAL_BATCH) * GLOBAL_BATCH
        own = np.array_split(order[begin : begin + GLOBAL_BATCH], world)[rank]
        # DataParallel gives the mean over the workers: times their number it is the sum.
        loss = loss_sum(parallel, paddle.to_tensor(images[own]), paddle.to_tensor(labels[own])) * world / GLOBAL_BATCH
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        step += 1
        sys.stdout.write(f"{_STEP.decode()}{time.time():.6f}\n")
        sys.stdout.flush()
        stopping = paddle.to_tensor(np.array([len(stop)], np.int64))
        distributed.all_reduce(stopping)  # all stop after the same step
        if int(stopping) > 0:
            break
    if rank == 0:
        temporary = checkpoint.with_suffix(".part")
        paddle.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, str(temporary))
        temporary.rename(checkpoint)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
