"""The job of the outage: trains until it is cancelled; files in a folder hold it at chosen places.

While ``join-<index>-<incarnation>`` is there, that worker does not join; while ``form-<index>-<incarnation>`` is
there, an offer of a group that has come to it is not taken up. ``<name>.at`` tells that a worker stands there.
"""

import os
import sys
import time
from pathlib import Path

import numpy as np
import paddle

from tidewright import elastic, protocol
from tidewright.elastic import offers

GATES = Path(sys.argv[1])
STEP_SECONDS = 0.1


def pass_gate(name: str) -> None:
    while (GATES / name).exists():
        (GATES / f"{name}.at").touch()
        time.sleep(0.01)


def main() -> None:
    _, _, index, incarnation = os.environ[protocol.MEMBER_VARIABLE].split("/")
    on_form = offers.Offers.on_form

    def hesitate(self: offers.Offers, form: protocol.Form) -> None:
        pass_gate(f"form-{index}-{incarnation}")
        on_form(self, form)

    offers.Offers.on_form = hesitate  # type: ignore[method-assign]  # to be held in the middle of forming
    paddle.seed(1)
    inputs = np.random.RandomState(0).rand(1200, 4).astype("float32")
    model = paddle.nn.Linear(4, 1)
    optimizer = paddle.optimizer.Momentum(learning_rate=0.01, parameters=model.parameters())
    pass_gate(f"join-{index}-{incarnation}")
    with elastic.join() as job:
        job.track(model, optimizer)
        for step in job.steps((inputs, inputs[:, 0]), global_batch=12, epochs=1_000_000):
            job.apply(((model(step.inputs)[:, 0] - step.labels) ** 2).sum() / step.global_batch)
            time.sleep(STEP_SECONDS)


if __name__ == "__main__":
    main()
