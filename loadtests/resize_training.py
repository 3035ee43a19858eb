"""The job that is resized: trains until it is cancelled, as fast as it can. ``tide`` runs it as a script."""

from loadtests.resize_model import GLOBAL_BATCH, loss_sum, make_images, make_model, make_optimizer
from tidewright import elastic

EPOCHS = 1_000_000


def main() -> None:
    images, labels = make_images()
    model = make_model()
    optimizer = make_optimizer(model)
    with elastic.join() as job:
        job.track(model, optimizer)
        for step in job.steps((images, labels), global_batch=GLOBAL_BATCH, epochs=EPOCHS):
            job.apply(loss_sum(model, step.inputs, step.labels) / step.global_batch)


if __name__ == "__main__":
    main()
