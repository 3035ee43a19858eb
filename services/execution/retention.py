"""Removes what is left of jobs that ended long ago: logs and ledgers first, checkpoints later, outputs never."""

import asyncio
import shutil
from datetime import timedelta
from pathlib import Path

from schemas.vocabulary import JobId
from services.execution.local.folders import Folders
from services.execution.settings import ExecutionSettings
from services.execution.store import delete_jobs, load_ended
from shared.clock import Clock, pause
from shared.errors import Conflict, Unavailable
from shared.runtime.service import Lease
from shared.telemetry.logs import get_logger

_JOBS_AT_ONCE = 100


class Retention:
    """A loop of its own, a few jobs at a time; files go before rows, so that nothing is left without a row."""

    def __init__(self, settings: ExecutionSettings, folders: Folders, *, lease: Lease, clock: Clock) -> None:
        self._settings = settings
        self._folders = folders
        self._lease = lease
        self._clock = clock
        self._log = get_logger(part="retention")

    async def run(self, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            try:
                await self._sweep()
            except (Unavailable, Conflict) as exc:
                self._log.warning("retention_failed", reason=str(exc))
            await pause(stopping, self._settings.retention_interval_seconds)

    async def _sweep(self) -> None:
        settings, now = self._settings, self._clock.now()
        logs_before = now - timedelta(seconds=settings.retention_seconds)
        all_before = now - timedelta(seconds=max(settings.retention_seconds, settings.checkpoint_retention_seconds))
        async with self._lease.transaction() as tx:
            old = await load_ended(tx.connection, before=logs_before, with_members=True, limit=_JOBS_AT_ONCE)
            older = await load_ended(tx.connection, before=all_before, with_members=False, limit=_JOBS_AT_ONCE)
        await asyncio.to_thread(self._remove, old, older)
        if old or older:
            async with self._lease.transaction() as tx:
                await delete_jobs(tx, old, keep_jobs=True)
                await delete_jobs(tx, older, keep_jobs=False)
            self._log.info("jobs_removed", logs=len(old), checkpoints=len(older))

    def _remove(self, old: list[JobId], older: list[JobId]) -> None:
        for job_id in old:
            _remove_tree(self._folders.runs_of(job_id))
        for job_id in older:
            _remove_tree(self._folders.own_checkpoints_of(job_id))


def _remove_tree(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
