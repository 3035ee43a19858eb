"""Unit: of a round only what changed is written, and nothing that changed is left out."""

import asyncio
from dataclasses import fields, replace
from typing import Any, cast

import pytest
from execution_builders import NOON, make_job, make_member

from services.execution.core.state import Desired, Job
from services.execution.memory import JobView
from services.execution.store import StoredJob, save_jobs
from shared.runtime.service import Transaction


class _Written:
    """Keeps what is executed: how many rows of which table."""

    def __init__(self) -> None:
        self.tables: list[str] = []

    async def execute(self, statement: Any, parameters: Any) -> None:
        self.tables.append(str(statement).split("(")[0].split(".")[1].strip())


def written(old: Job, new: Job) -> list[str]:
    tx = _Written()
    pair = (StoredJob(job=old, token_hash=b""), StoredJob(job=new, token_hash=b""))
    asyncio.run(save_jobs(cast("Transaction", tx), [pair]))
    return tx.tables


OTHER = {
    "step": 7,
    "epoch": 9,
    "desired": Desired.EVICTED,
    "ended_at": NOON,
    "group_started": False,
    "unanswered": (3,),
    "desired_reason": "x",
}


@pytest.mark.parametrize("name", sorted(OTHER))
def test_each_change_of_a_job_is_written(name: str) -> None:
    assert name in {field.name for field in fields(Job)}
    job = make_job()
    assert written(job, replace(job, **{name: OTHER[name]})) == ["jobs"]


def test_a_member_alone_is_one_row_and_an_equal_job_none() -> None:
    job = make_job()
    assert written(job, replace(job)) == []
    assert written(job, replace(job, members=(make_member(0, finished=True), job.members[1]))) == ["members"]


def test_a_step_that_was_not_saved_is_known() -> None:
    view = JobView(stored=StoredJob(job=make_job(), token_hash=b""))
    view.stored = replace(view.stored, job=replace(view.job, step=view.saved_step + 5))
    assert view.saved.job.step == view.saved_step
