"""The services' process: all five in one (``tide up``), or one alone (``tide service NAME``)."""

import asyncio
import importlib
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from schemas.vocabulary import ServiceName
from shared.db.migrate import migrate
from shared.errors import Unavailable
from shared.runtime.service import ServiceContext, ServiceParts
from shared.settings import InstallationSettings, SettingsError
from shared.telemetry.logs import configure_logging, get_logger

EXIT_UNAVAILABLE: Final = 69
EXIT_SETTINGS: Final = 78
"""Nothing that a restart would mend (EX_CONFIG)."""

Build = Callable[[ServiceContext], ServiceParts]


def build_of(service: ServiceName) -> Build:
    """``services.<name>.wiring.build``, imported only now: a process loads what it runs."""
    build: Build = importlib.import_module(f"services.{service.value}.wiring").build
    return build
