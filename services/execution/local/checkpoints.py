"""Lists the checkpoints on disk, folders ``g<generation>-s<step>``, and the marks of started generations."""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from schemas.vocabulary import JobId
from services.execution.core.checkpoints import Shelf
from services.execution.core.state import Checkpoint, Job

_NAME: Final = re.compile(r"g(\d{1,9})-s(\d{1,15})")
_THREADS: Final = 4
_MARK: Final = re.compile(r"\.g(\d{1,9})\.started")


def look_at_shelf(directory: Path) -> Shelf:
    """By name alone: cheap, and blocking for as long as the file system does."""
    try:
        names = sorted(path.name for path in directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return Shelf(directory=str(directory))
    except OSError as exc:
        return Shelf(directory=str(directory), trouble=f"{directory}: {exc.strerror}")
    found = tuple(
        Checkpoint(generation=int(match[1]), step=int(match[2]), location=str(directory / name))
        for name in names
        if (match := _NAME.fullmatch(name)) is not None
    )
    marks = (int(match[1]) for name in names if (match := _MARK.fullmatch(name)) is not None)
    youngest = max((*marks, *(each.generation for each in found)), default=0)
    return Shelf(directory=str(directory), found=found, youngest=youngest)


class ShelfReader:
    """Looks at the folders of several jobs at once. One that hangs keeps waiting its own job, and no other."""

    def __init__(self, look: Callable[[Job], Shelf], *, patience_seconds: float = 1.0) -> None:
        self._look = look
        self._patience_seconds = patience_seconds
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="shelf")
        self._hanging: dict[JobId, asyncio.Future[Shelf]] = {}

    async def look(self, jobs: Sequence[Job]) -> Mapping[JobId, Shelf]:
        """What there is to see now; of a folder that does not answer, that it does not."""
        loop = asyncio.get_running_loop()
        self._hanging = {job_id: future for job_id, future in self._hanging.items() if not future.done()}
        begun = {
            job.job_id: loop.run_in_executor(self._threads, self._look, job)
            for job in jobs
            if job.job_id not in self._hanging
        }
        if begun:
            await asyncio.wait(begun.values(), timeout=self._patience_seconds)
        self._hanging |= {job_id: future for job_id, future in begun.items() if not future.done()}
        silent = Shelf(trouble="the file system does not answer")
        return {job.job_id: silent if job.job_id in self._hanging else begun[job.job_id].result() for job in jobs}
