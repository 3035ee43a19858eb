"""Execution as a process of its own, for tests that kill it."""

import asyncio
import sys
from datetime import datetime, timedelta
from pathlib import Path

from schemas.vocabulary import ServiceName
from services.execution.wiring import build
from shared.clock import SystemClock
from shared.runtime.installation import Installation
from shared.runtime.run import run_service
from shared.runtime.supervisor import run_until_signalled
from shared.settings import InstallationSettings
from shared.telemetry.logs import configure_logging


class JumpingClock(SystemClock):
    """The machine's clocks; the wall clock is off by as many seconds as a file says."""

    def __init__(self, offset: Path) -> None:
        self._offset = offset

    def now(self) -> datetime:
        return super().now() + timedelta(seconds=float(self._offset.read_text()) if self._offset.exists() else 0.0)


async def main(stopping: asyncio.Event) -> int:
    settings = InstallationSettings.load()
    clock = JumpingClock(settings.state / "clock_offset")
    await run_service(ServiceName.EXECUTION, build, Installation.of(settings), stopping, clock=clock)
    return 0


if __name__ == "__main__":
    configure_logging(level="info", log_format="json")
    sys.exit(run_until_signalled(main))
