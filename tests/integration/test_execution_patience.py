"""On real trainers: who takes its time where it may is waited for, who does so where it may not is replaced.

The limits are seconds here instead of a minute, so the waits are several times the limit, as two minutes would be.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from integration.elastic_bed import is_alive
from integration.execution_bed import NAMES, ExecutionBed, running_bed

from schemas.events.worker import GroupChanged, GroupEnded, GroupStarted
from schemas.vocabulary import AttemptOutcome, GroupChangeCause, Mode
from shared.testing.postgres import DatabaseServer

STEPS = 40
SCRIPT = f"""
import contextlib, os, sys, time
import numpy as np
import paddle
from tidewright import elastic

phase, seconds = sys.argv[1], float(sys.argv[2])
me = os.environ["TIDE_MEMBER"].split("/")[2:]
inputs = np.random.RandomState(0).rand({STEPS} * 4, 8).astype("float32")
paddle.seed(1)
model = paddle.nn.Linear(8, 1)
optimizer = paddle.optimizer.Momentum(learning_rate=0.01, parameters=model.parameters())
slept = False  # a step that broke comes again
with elastic.join() as job:
    job.track(model, optimizer)
    for step in job.steps((inputs, inputs[:, 0]), global_batch=4, epochs=1):
        if step.index == 12 and me == ["1", "1"] and not slept:
            slept = True
            with job.phase(phase) if phase != "stepping" else contextlib.nullcontext():
                time.sleep(seconds)
        job.apply(((model(step.inputs)[:, 0] - step.labels) ** 2).sum() / step.global_batch)
        time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def bed(postgres: DatabaseServer) -> Iterator[ExecutionBed]:
    limits = {"sync_wait_seconds": "3", "stepping_seconds": "3", "silent_seconds": "30"}
    with running_bed(postgres, limits) as bed:
        yield bed


async def run(bed: ExecutionBed, folder: Path, phase: str, seconds: float) -> str:
    script = folder / "takes_its_time.py"
    script.write_text(SCRIPT)
    job = next(NAMES)
    await bed.submit(job, mode=Mode.LIVE, script=str(script), args=(phase, str(seconds)), checkpoint_every_steps=1000)
    await bed.grant(job, 3)
    await bed.event(GroupStarted, job, seconds=40)
    return job


def steps_applied(bed: ExecutionBed, job: str) -> set[int]:
    lines = [line for path in bed.state.glob(f"run/{job}/*/ledger.jsonl") for line in path.read_text().splitlines()]
    return {record["step"] for record in map(json.loads, lines) if record["k"] == "applied"}


@pytest.mark.parametrize("phase", ["evaluating", "checkpointing", "compiling"])
async def test_a_long_phase_that_allows_it_replaces_nobody(bed: ExecutionBed, tmp_path: Path, phase: str) -> None:
    job = await run(bed, tmp_path, phase, 10)
    pids = [await bed.worker_pid(job, index) for index in range(3)]
    ended = await bed.event(GroupEnded, job, seconds=60)
    assert ended.outcome is AttemptOutcome.SUCCEEDED
    assert [change.lost for change in await bed.events(GroupChanged, job)] == []
    assert [bed.record(job, index)["worker_pid"] for index in range(3)] == pids
    assert steps_applied(bed, job) == set(range(STEPS))


async def test_beyond_the_patience_of_gloo_the_same_members_form_the_next_group(
    bed: ExecutionBed, tmp_path: Path
) -> None:
    """Gloo gives up after 30 s by itself: the others hold their state until the one that evaluates is back."""
    job = await run(bed, tmp_path, "evaluating", 34)
    ended = await bed.event(GroupEnded, job, seconds=90)
    assert ended.outcome is AttemptOutcome.SUCCEEDED
    changes = await bed.events(GroupChanged, job)
    assert [(change.workers, change.cause, change.lost) for change in changes] == [(3, GroupChangeCause.RESYNCED, ())]
    assert {m["incarnation"] for m in await bed.members(job)} == {1}
    assert steps_applied(bed, job) == set(range(STEPS))


async def test_who_is_late_in_a_step_alone_is_replaced(bed: ExecutionBed, tmp_path: Path) -> None:
    job = await run(bed, tmp_path, "stepping", 60)
    late = await bed.worker_pid(job, 1)
    ended = await bed.event(GroupEnded, job, seconds=60)
    assert ended.outcome is AttemptOutcome.SUCCEEDED
    lost = [each.member for change in await bed.events(GroupChanged, job) for each in change.lost]
    assert lost == [f"{job}/worker/1/1"]
    assert not is_alive(late)
    assert steps_applied(bed, job) == set(range(STEPS))
