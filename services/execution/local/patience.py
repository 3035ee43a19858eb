"""Does what may hang, in somebody's file system, where it holds up nobody else."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from schemas.vocabulary import JobId
from shared.errors import Unavailable

T = TypeVar("T")


class Patience:
    """A thread for each piece of work: one that hangs takes none away. At most one hangs for each job."""

    def __init__(self, *, seconds: float) -> None:
        self._seconds = seconds
        self._hanging: dict[JobId, asyncio.Future[object]] = {}

    async def run(self, job_id: JobId, work: Callable[[], T]) -> T:
        """What ``work`` gives or raises. Raises Unavailable if that takes longer, and again until it has ended."""
        hangs = Unavailable(f"a folder of the job did not answer within {self._seconds:g} s")
        if job_id in self._hanging:
            raise hangs
        threads = ThreadPoolExecutor(1, thread_name_prefix="folders")
        future = asyncio.get_running_loop().run_in_executor(threads, work)
        threads.shutdown(wait=False)
        await asyncio.wait((future,), timeout=self._seconds)
        if future.done():
            return future.result()
        self._hanging[job_id] = future  # type: ignore[assignment]  # nobody asks what it gives any more
        future.add_done_callback(lambda ended: self._forget(job_id, ended))
        raise hangs

    def _forget(self, job_id: JobId, ended: asyncio.Future[T]) -> None:
        del self._hanging[job_id]
        if not ended.cancelled():
            ended.exception()  # looked at, or the event loop would complain
