"""Work in a file system that hangs keeps its own job waiting, and no other."""

import asyncio
import threading
import time

import pytest

from schemas.vocabulary import JobId
from services.execution.local.patience import Patience
from shared.errors import Unavailable

STUCK, OTHER = JobId("stuck"), JobId("other")


async def test_what_hangs_holds_up_its_own_job_alone_and_uses_one_thread() -> None:
    patience, answers = Patience(seconds=0.05), threading.Event()
    before = threading.active_count()
    for _ in range(20):
        with pytest.raises(Unavailable, match="did not answer"):
            await patience.run(STUCK, lambda: answers.wait(30))
        assert await patience.run(OTHER, lambda: 7) == 7
    assert threading.active_count() <= before + 5  # one that hangs, and the few of the loop's pool
    answers.set()
    deadline = time.monotonic() + 10
    while True:
        try:
            assert await patience.run(STUCK, lambda: "again") == "again"
            break
        except Unavailable:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)


async def test_what_the_work_raises_is_raised_and_the_loop_goes_on_meanwhile() -> None:
    patience, ticks = Patience(seconds=5), 0

    def work() -> None:
        time.sleep(0.2)
        raise FileNotFoundError(2, "no such folder", "/x")

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    async with asyncio.TaskGroup() as group:
        ticking = group.create_task(tick())
        with pytest.raises(FileNotFoundError, match="no such folder"):
            await patience.run(STUCK, work)
        ticking.cancel()
    assert ticks >= 5
