"""Handwritten digits of scikit-learn, 8 x 8 pixels, with a small convolution net: trained in seconds.

Runs alone (`python examples/digits.py`) and, resized while it trains, under Tidewright
(`tide submit examples/digits.yaml`).
"""

import argparse
import importlib.util
import time
from pathlib import Path

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional

from tidewright import elastic

HELD_OUT = 360


def load() -> tuple[np.ndarray, np.ndarray]:
    """1,797 images and labels in one fixed random order, from the package's file: importing it takes two seconds."""
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise SystemExit("this example reads a file of scikit-learn: pip install scikit-learn")
    table = np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    table = table[np.random.RandomState(0).permutation(len(table))]
    return (table[:, :-1] / 16).astype("float32").reshape(-1, 1, 8, 8), table[:, -1].astype("int64")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--global-batch", type=int, default=96)
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds added to every step, to watch it")
    options = parser.parse_args()

    images, labels = load()
    paddle.seed(1)
    model = nn.Sequential(
        nn.Conv2D(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2D(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2D(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    optimizer = paddle.optimizer.Momentum(learning_rate=0.05, parameters=model.parameters())

    with elastic.join() as job:
        job.track(model, optimizer)
        training = (images[:-HELD_OUT], labels[:-HELD_OUT])
        for step in job.steps(training, global_batch=options.global_batch, epochs=options.epochs, seed=1):
            scores = model(step.inputs)
            job.apply(functional.cross_entropy(scores, step.labels, reduction="sum") / step.global_batch)
            if step.is_epoch_end and job.rank == 0:
                print(f"epoch {step.epoch + 1}/{options.epochs}  workers {job.world}  loss {job.loss:.4f}")
            time.sleep(options.step_delay)
        if job.rank == 0:
            with job.phase("evaluating"), paddle.no_grad():
                model.eval()
                guesses = model(paddle.to_tensor(images[-HELD_OUT:])).argmax(axis=1).numpy()
            print(f"held-out accuracy {float((guesses == labels[-HELD_OUT:]).mean()):.3f}")


if __name__ == "__main__":
    main()
