"""A plain Paddle script that knows nothing of Tidewright: it keeps its own checkpoint and goes on from it.

Submitted with `mode: restart` and a `checkpoint_path`, it is resized by ending it with SIGTERM and starting it anew
with another number of workers, each of which sees PADDLE_TRAINER_ID and PADDLE_TRAINERS_NUM. Here the first worker
trains and the others are idle, to keep the example short; a real script would use `paddle.distributed`.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import paddle
from paddle import nn

STOPPING = []


def save(path: Path, model: nn.Layer, optimizer: paddle.optimizer.Optimizer, step: int) -> None:
    """Written beside it and renamed, so that a killed process never leaves half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    paddle.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, str(temporary))
    temporary.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=Path("plain.pdparams"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--step-delay", type=float, default=0.02)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: STOPPING.append(True))
    rank, world = int(os.environ.get("PADDLE_TRAINER_ID", "0")), int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))

    paddle.seed(1)
    model = nn.Linear(8, 1)
    optimizer = paddle.optimizer.Adam(0.05, parameters=model.parameters())
    step = 0
    if options.checkpoint.exists():
        state = paddle.load(str(options.checkpoint))
        model.set_state_dict(state["model"])
        optimizer.set_state_dict(state["optimizer"])
        step = state["step"]
    print(f"worker {rank} of {world} goes on at step {step}", flush=True)
    weights = np.arange(8, dtype="float32").reshape(8, 1)
    while step < options.steps and not STOPPING:
        if rank == 0:
            inputs = paddle.to_tensor(np.random.RandomState(step).randn(32, 8).astype("float32"))
            loss = ((model(inputs) - inputs @ paddle.to_tensor(weights)) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
        step += 1
        if rank == 0 and step % options.every == 0:
            save(options.checkpoint, model, optimizer, step)
            print(f"step {step}  workers {world}  loss {loss.item():.4f}", flush=True)
        time.sleep(options.step_delay)
    if rank == 0:
        save(options.checkpoint, model, optimizer, step)
    return 143 if STOPPING else 0


if __name__ == "__main__":
    sys.exit(main())
