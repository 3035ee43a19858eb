"""Several services in one process: one that fails is restarted alone, until it fails too often."""

import asyncio
import gc
import resource
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Final

import uvloop

from schemas.vocabulary import ServiceName
from shared.bus.wakeups import Wakeups
from shared.clock import SystemClock, pause
from shared.runtime.backoff import backoff_seconds
from shared.runtime.installation import Installation
from shared.runtime.run import Build, run_service
from shared.settings import SettingsError
from shared.telemetry.logs import bind_log_fields, get_logger

FAILURES_MAX: Final = 3
FAILURE_WINDOW_SECONDS: Final = 60.0
_GC_THRESHOLDS: Final = (100_000, 50, 100)
_log = get_logger()


class FailsTooOften(Exception):
    """A service failed three times within a minute."""


async def run_all(
    services: Mapping[ServiceName, Build],
    installation: Installation,
    stopping: asyncio.Event,
    *,
    on_ready: Callable[[ServiceName, str], None] | None = None,
) -> int:
    """Run them until ``stopping``; gives the exit code: 0 after an ordered stop, 1 if one failed too often.

    Raises SettingsError. One that fails is started again alone.

    ``on_ready`` is called once for each start of a service that serves, with its URL.
    """
    ended, ready = asyncio.Event(), set[ServiceName]()
    wakeups = Wakeups(installation.database_url)

    def tell(name: ServiceName, url: str) -> None:
        ready.add(name)
        if len(ready) == len(services):
            tune_garbage_collection()
        if on_ready is not None:
            on_ready(name, url)

    failed: list[Exception] = []
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(wakeups.run(ended))
            tasks = [
                group.create_task(_supervise(name, build, installation, stopping, wakeups=wakeups, tell=tell))
                for name, build in services.items()
            ]
            await asyncio.wait(tasks)
            ended.set()
    except* (FailsTooOften, SettingsError) as group_of_failures:
        failed.extend(exc for exc in group_of_failures.exceptions if isinstance(exc, Exception))
    for exc in failed:
        if isinstance(exc, SettingsError):
            raise exc
        _log.critical("process_gives_up", detail=str(exc))
    return 1 if failed else 0


async def _supervise(
    name: ServiceName,
    build: Build,
    installation: Installation,
    stopping: asyncio.Event,
    *,
    wakeups: Wakeups,
    tell: Callable[[ServiceName, str], None],
) -> None:
    bind_log_fields({"service": name.value})
    clock, failed_at = SystemClock(), deque[float](maxlen=FAILURES_MAX)
    while not stopping.is_set():
        try:
            await run_service(
                name, build, installation, stopping, wakeups=wakeups, on_ready=lambda url: tell(name, url)
            )
        except SettingsError:
            raise
        except Exception as exc:  # the supervisor: whatever ends a service ends it alone
            failed_at.append(clock.monotonic())
            _log.error("service_failed", failures=len(failed_at), exc_info=exc)
            recent = [at for at in failed_at if clock.monotonic() - at < FAILURE_WINDOW_SECONDS]
            if len(recent) >= FAILURES_MAX:
                raise FailsTooOften(f"{name} failed {FAILURES_MAX} times in {FAILURE_WINDOW_SECONDS:.0f} s") from exc
            await pause(stopping, backoff_seconds(len(recent), first=0.2, maximum=5.0))


def tune_garbage_collection() -> None:
    """After the start: what is there stays, and young objects are looked at less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


def run_until_signalled(main: Callable[[asyncio.Event], Awaitable[int]]) -> int:
    """Run ``main`` on uvloop; SIGTERM and SIGINT set its ``stopping`` event. Gives its exit code."""
    raise_descriptor_limit()

    async def started() -> int:
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopping.set)
        return await main(stopping)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(started())


def raise_descriptor_limit() -> None:
    """As far as is allowed: three for each worker and one for each connection are more than the usual 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
