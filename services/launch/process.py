"""The services' process: all five in one (``tide up``), or one alone (``tide service NAME``)."""

import asyncio
import importlib
import sys
from collections.abc import Awaitable, Callable
from typing import Final

from schemas.vocabulary import ServiceName
from shared.db.migrate import migrate
from shared.errors import Unavailable
from shared.runtime.installation import Installation
from shared.runtime.run import Build, run_service
from shared.runtime.supervisor import run_all, run_until_signalled, tune_garbage_collection
from shared.settings import InstallationSettings, SettingsError
from shared.telemetry.logs import configure_logging, get_logger

EXIT_FAILED: Final = 1
EXIT_UNAVAILABLE: Final = 69
EXIT_SETTINGS: Final = 78
"""Nothing that a restart would mend (EX_CONFIG)."""


def build_of(service: ServiceName) -> Build:
    """``services.<name>.wiring.build``, imported only now: a process loads what it runs."""
    build: Build = importlib.import_module(f"services.{service.value}.wiring").build
    return build


def run_five() -> int:
    """All services in this process, until SIGTERM; the exit code. The database is migrated already."""

    async def main(installation: Installation, stopping: asyncio.Event) -> int:
        return await run_all({service: build_of(service) for service in ServiceName}, installation, stopping)

    return _run(main)


def run_one(name: str, *, migrating: bool) -> int:
    """One service, until SIGTERM; the exit code."""
    service = ServiceName(name)

    async def main(installation: Installation, stopping: asyncio.Event) -> int:
        if migrating:
            await migrate(installation.database_url)
        await run_service(
            service, build_of(service), installation, stopping, on_ready=lambda _: tune_garbage_collection()
        )
        return 0

    return _run(main)


def _run(main: Callable[[Installation, asyncio.Event], Awaitable[int]]) -> int:
    try:
        settings = InstallationSettings.load()
        configure_logging(level=settings.log_level, log_format=settings.log_format)
        installation = Installation.of(settings)
        return run_until_signalled(lambda stopping: main(installation, stopping))
    except SettingsError as exc:
        sys.stderr.write(f"{exc}\n")
        return EXIT_SETTINGS
    except Unavailable as exc:
        get_logger().error("not_started", detail=str(exc))
        return EXIT_UNAVAILABLE


if __name__ == "__main__":
    sys.exit(run_five())
