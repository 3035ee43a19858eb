"""The scripts of the soak: one that does nothing, one that fails, one that sleeps, one that trains a few numbers."""

import argparse
import sys
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--exit", type=int, default=0, help="end with this code at once")
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds; then end")
    parser.add_argument("--steps", type=int, default=0, help="train so many steps with tidewright.elastic")
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds added to every step")
    options = parser.parse_args()
    if options.steps:
        train(options.steps, delay_seconds=options.step_delay)
    time.sleep(options.sleep)
    print(f"ends with {options.exit}")
    sys.exit(options.exit)


def train(steps: int, *, delay_seconds: float) -> None:
    """A linear model on eight samples: as little as a job that trains can be."""
    import numpy as np
    import paddle

    from tidewright import elastic

    paddle.seed(1)
    model = paddle.nn.Linear(4, 1)
    optimizer = paddle.optimizer.Momentum(learning_rate=0.01, parameters=model.parameters())
    features = np.linspace(-1.0, 1.0, 32, dtype="float32").reshape(8, 4)
    with elastic.join() as job:
        job.track(model, optimizer)
        for step in job.steps((features, features.sum(axis=1)), global_batch=8, epochs=steps, seed=1):
            errors = model(step.inputs).squeeze(-1) - step.labels
            job.apply((errors * errors).sum() / step.global_batch)
            time.sleep(delay_seconds)
        print(f"trained {steps} steps, loss {job.loss:.4f}")


if __name__ == "__main__":
    main()
