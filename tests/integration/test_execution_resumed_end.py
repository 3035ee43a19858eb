"""A retry of a job whose training was complete already: there is no step left, and that is no failure."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from integration.execution_bed import NAMES, ExecutionBed, running_bed

from schemas.events.worker import GroupEnded, GroupStarted
from schemas.vocabulary import AttemptOutcome, Attribution, Mode
from shared.testing.postgres import DatabaseServer

SCRIPT = """
import sys
from pathlib import Path
import numpy as np
import paddle
from tidewright import elastic

x = np.arange(64, dtype="float32").reshape(16, 4)
paddle.seed(1)
model = paddle.nn.Linear(4, 1)
optimizer = paddle.optimizer.SGD(learning_rate=1e-4, parameters=model.parameters())
with elastic.join() as job:
    job.track(model, optimizer)
    for step in job.steps((x, x[:, :1]), global_batch=4, epochs=3):
        job.apply(((model(step.inputs) - step.labels) ** 2).sum() / step.global_batch)
tried = Path(sys.argv[1])
if not tried.exists():
    if job.rank == 0:
        tried.touch()
    sys.exit(3)
"""


@pytest.fixture
def bed(postgres: DatabaseServer) -> Iterator[ExecutionBed]:
    with running_bed(postgres) as bed:
        yield bed


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_job_that_failed_after_its_last_step_succeeds_when_it_is_tried_again(
    bed: ExecutionBed, tmp_path: Path, workers: int
) -> None:
    job = next(NAMES)
    script, tried = tmp_path / "evaluates.py", tmp_path / "tried"
    script.write_text(SCRIPT)
    await bed.submit(job, mode=Mode.LIVE, script=str(script), args=(str(tried),), workers=workers)
    await bed.grant(job, workers)
    failed = await bed.event(GroupEnded, job, seconds=60)
    assert (failed.outcome, failed.exit_code, failed.attributed_to) == (AttemptOutcome.FAILED, 3, Attribution.JOB)
    assert failed.step == 12
    await bed.grant(job, workers, attempt=2)
    ended = await bed.event(GroupEnded, job, number=2, seconds=60)
    assert (ended.outcome, ended.exit_code, ended.step) == (AttemptOutcome.SUCCEEDED, 0, 12), ended
    resumed = await bed.event(GroupStarted, job, number=2)
    assert resumed.resumed_from is not None
    assert resumed.resumed_from.step == 12
