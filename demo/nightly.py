"""The demo's long job: the net and the digits of `examples/mnist.py`, trained until SIGUSR1 says that it is enough.

The story decides when that is, so that it takes as long as a machine needs and no longer.
"""

import argparse
import sys
from pathlib import Path

import paddle
from paddle.nn import functional

from tidewright import elastic

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from mnist import TRAINING, accuracy, load, make_model  # type: ignore[import-not-found]  # noqa: E402 - by the line above

from demo.enough import Enough  # noqa: E402

EPOCHS_MAX = 250
GLOBAL_BATCH = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=EPOCHS_MAX, help="at most so many")
    options = parser.parse_args()

    images, labels = load()
    paddle.seed(1)
    model = make_model()
    schedule = paddle.optimizer.lr.ExponentialDecay(learning_rate=0.05, gamma=0.997)
    optimizer = paddle.optimizer.Momentum(learning_rate=schedule, parameters=model.parameters())

    with elastic.join() as job:
        job.track(model, optimizer)
        enough = Enough(job.output_directory)
        training = (images[:TRAINING], labels[:TRAINING])
        for step in job.steps(training, global_batch=GLOBAL_BATCH, epochs=options.epochs, seed=1):
            losses = functional.cross_entropy(model(step.inputs), step.labels, reduction="sum")
            if not job.apply(losses / step.global_batch):
                continue
            schedule.step()
            if step.is_epoch_end:
                if job.rank == 0:
                    print(f"epoch {step.epoch + 1}  workers {job.world}  loss {job.loss:.4f}")
                if enough.is_last(epoch=step.epoch, rank=job.rank):
                    break
        if job.rank == 0:
            with job.phase("evaluating"):
                print(f"held-out accuracy {accuracy(model, images[TRAINING:], labels[TRAINING:]):.3f}")


if __name__ == "__main__":
    main()
