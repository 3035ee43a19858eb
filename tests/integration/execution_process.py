"""Execution as a process of its own, for tests that kill it."""

import asyncio
import sys

from schemas.vocabulary import ServiceName
from services.execution.wiring import build
from shared.runtime.installation import Installation
from shared.runtime.run import run_service
from shared.runtime.supervisor import run_until_signalled
from shared.settings import InstallationSettings
from shared.telemetry.logs import configure_logging


async def main(stopping: asyncio.Event) -> int:
    await run_service(ServiceName.EXECUTION, build, Installation.of(InstallationSettings.load()), stopping)
    return 0


if __name__ == "__main__":
    configure_logging(level="info", log_format="json")
    sys.exit(run_until_signalled(main))
