"""Keeps an installation running on this machine: starts the parts in order, restarts what ends, stops in order."""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Final

import httpx

from services.launch.jobs import release_jobs, stop_jobs
from services.launch.members import end_members, living_members
from services.launch.parts import (
    ChildPart,
    Part,
    PostgresPart,
    free_port,
    ping_zygote,
    postgres_address,
    service_urls,
    services_part,
    unready,
    zygote_part,
)
from services.launch.processes import ProcessId, end_processes
from services.launch.record import StateLock, UpRecord, read_record, record_path, write_record
from services.launch.restarts import Restarts
from services.launch.settings import LaunchSettings
from services.launch.wakeups import Stop, Wakeups
from shared.db.embedded import EmbeddedPostgres
from shared.db.migrate import migrate
from shared.db.state import prepare_state_directory
from shared.errors import Unavailable
from shared.settings import SettingsError

_LOOK_SECONDS: Final = 0.2
_IDLE_SECONDS: Final = 5.0
_CAPACITY_SECONDS: Final = 5.0


class LaunchError(Exception):
    """The installation cannot be started: in a line or two, with the way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """What ``tide up`` was told. ``database_url`` None: the embedded server; ``port`` 0: any free one."""

    state: Path
    host: str
    port: int
    slots: int | None
    database_url: str | None
    environment: Mapping[str, str]
    """Settings of the services, as variables."""
    keep_jobs: bool = False


@dataclass(slots=True)
class _Kept:
    """One part and how it fares. ``due``: when to start it again (monotonic); ``down_since``: until it is ready."""

    part: Part
    restarts: Restarts
    process: ProcessId | None = None
    descriptor: int | None = None
    began: float = 0.0
    due: float | None = None
    down_since: float | None = None


def say_line(text: str) -> None:
    """One line with the time of day. A terminal that is gone is no reason to stop."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.write(f"{datetime.now().astimezone():%H:%M:%S} {text}\n")
        sys.stdout.flush()


@dataclass(slots=True)
class Supervisor:
    """One installation. ``run`` blocks until it is told to stop by SIGTERM, SIGINT or SIGUSR1 (keep jobs)."""

    options: UpOptions
    settings: LaunchSettings
    say: Callable[[str], None] = say_line
    on_ready: Callable[[UpRecord], None] = lambda _: None
    _record: UpRecord = field(init=False)
    _kept: dict[str, _Kept] = field(default_factory=dict)
    _wakeups: Wakeups = field(default_factory=Wakeups)

    def run(self) -> int:
        """The exit code. Raises LaunchError if it cannot begin; then nothing is left running."""
        state = prepare_state_directory(self.options.state)
        (state / "log").mkdir(mode=0o700, exist_ok=True)
        lock = StateLock(state)
        holder = lock.take()
        if holder is not None:
            raise LaunchError(
                f"already running on {state} (pid {holder.pid}): `tide down` stops it, --state names another folder"
            )
        try:
            with self._wakeups.listening():
                self._begin()
                self._watch()
                self._finish(keep_jobs=self.options.keep_jobs or self._wakeups.asked is Stop.KEEP_JOBS)
        finally:
            lock.release()
        return 0

    # -- starting -----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        began = time.monotonic()
        try:
            self._take_over()
            self._launch()
            self._await_ready(began + self.settings.start_seconds)
        except (LaunchError, SettingsError, Unavailable, OSError) as exc:
            self._finish(keep_jobs=True)
            raise LaunchError(str(exc)) from exc
        if self._wakeups.asked is None:
            self._set_record(ready=True, slots=self._slots())
            self._release_jobs()
            self.say(f"ready after {time.monotonic() - began:.1f} s")
            self.on_ready(self._record)

    def _take_over(self) -> None:
        """What an earlier supervisor left: the services' process ends, zygote, Postgres and workers are kept."""
        options, before = self.options, read_record(self.options.state)
        stray = before.process_id("process") if before else None
        if stray is not None:
            self.say("an earlier supervisor was killed: its services are started anew, training goes on")
            end_processes([stray], grace_seconds=self.settings.services_stop_seconds)
        try:
            port = free_port(options.host, options.port)
        except OSError as exc:
            raise LaunchError(
                f"port {options.port} of {options.host} cannot be had ({exc.strerror}): choose another by --port"
            ) from exc
        host = "127.0.0.1" if options.host in ("0.0.0.0", "::") else options.host  # noqa: S104
        self._record = UpRecord(url=f"http://{host}:{port}", port=port)
        mine = ProcessId.of(os.getpid())
        assert mine is not None
        self._set_record(supervisor=mine.as_json())

    def _launch(self) -> None:
        state, settings = self.options.state, self.settings
        self._keep("zygote", zygote_part(state, settings))
        url = self.options.database_url
        if url is None:
            server = EmbeddedPostgres(state=state)
            self._keep("postgres", PostgresPart(server=server))
            url = server.url
            self._set_record(postgres_address=postgres_address(server, url))
        else:
            self._set_record(postgres_address=postgres_address(None, url))
        with asyncio.Runner() as runner:
            runner.run(migrate(url))
        self._keep("process", services_part(state, settings, self._environment(url)))

    def _environment(self, url: str) -> dict[str, str]:
        options = self.options
        environment = {
            **options.environment,
            "TIDE_STATE": str(options.state),
            "TIDE_DATABASE_URL": url,
            "TIDE_INTAKE_HOST": options.host,
            "TIDE_INTAKE_PORT": str(self._record.port),
        }
        if options.slots is not None:
            environment["TIDE_EXECUTION_SLOTS"] = str(options.slots)
        return environment

    def _keep(self, name: str, part: Part) -> None:
        settings = self.settings
        restarts = Restarts(
            seconds_min=settings.restart_seconds_min,
            seconds_max=settings.restart_seconds_max,
            steady_seconds=settings.steady_seconds,
        )
        kept = _Kept(part=part, restarts=restarts)
        self._kept[name] = kept
        self._start(name, kept)

    def _start(self, name: str, kept: _Kept) -> None:
        kept.process = kept.part.start()
        kept.descriptor = kept.process.open()
        kept.began = time.monotonic()
        kept.due = None
        self._set_record(**{name: kept.process.as_json()})

    def _await_ready(self, deadline: float) -> None:
        """Raises LaunchError if a part ends meanwhile, or the time is over."""
        while self._wakeups.asked is None:
            reasons = []
            for name, kept in self._kept.items():
                self._check_first_life(kept)
                reason = self._unready(name)
                if reason:
                    reasons.append(reason)
            if not reasons:
                return
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"not ready within {self.settings.start_seconds:g} s ({'; '.join(reasons)}): "
                    f"see {self.options.state}/log, or `tide doctor`"
                )
            self._sleep(_LOOK_SECONDS)

    def _check_first_life(self, kept: _Kept) -> None:
        if kept.process is None or kept.process.is_alive():
            return
        how = kept.part.how_it_ended(kept.process)
        kept.process = None
        told = kept.part.last_words() if isinstance(kept.part, ChildPart) else []
        raise LaunchError("\n  ".join([f"{kept.part.name} {how} while starting", *told]))

    def _unready(self, name: str) -> str | None:
        """Why a part is not ready; None if it is."""
        process = self._kept[name].process
        if process is None:
            return f"{name} is not running"
        if name == "zygote":
            return None if ping_zygote(self.options.state / "zygote.sock") else "the zygote is still importing"
        if name == "postgres":
            return None
        try:
            urls = service_urls(self._url(), of_process=process)
        except Unavailable as exc:
            return str(exc)
        reason = unready(urls)
        if reason is None and urls != self._record.services:
            self._set_record(services=urls)
        return reason

    def _url(self) -> str:
        return self.options.database_url or EmbeddedPostgres(state=self.options.state).url

    def _slots(self) -> int | None:
        """What execution has reported, in whole accelerators; None if intake has not heard of it in time."""
        deadline = time.monotonic() + _CAPACITY_SECONDS
        while self._wakeups.asked is None and time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError, KeyError, ValueError):
                capacity = httpx.get(f"{self._record.url}/v1/capacity", trust_env=False).raise_for_status().json()
                if capacity["revision"]:
                    nodes = [node["allocatable"] for node in capacity["nodes"]]
                    return int(sum(amount for node in nodes for name, amount in node.items() if "/" in name)) // 1000
            self._sleep(_LOOK_SECONDS)
        return None

    def _release_jobs(self) -> None:
        try:
            count = release_jobs(self._record.url, self.options.state)
        except httpx.HTTPError as exc:
            self.say(f"jobs that `tide down` held stay held for now ({exc}): `tide release JOB`")
        else:
            if count:
                self.say(f"{count} job(s) that `tide down` had stopped go on")

    # -- watching -----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Until told to stop: start again what ends, and tell when it is ready."""
        while self._wakeups.asked is None:
            for name, kept in self._kept.items():
                self._attend(name, kept)
            waits = [kept.due - time.monotonic() for kept in self._kept.values() if kept.due is not None]
            recovering = any(kept.down_since is not None for kept in self._kept.values())
            self._sleep(max(0.0, min([*waits, _LOOK_SECONDS if recovering else _IDLE_SECONDS])))

    def _attend(self, name: str, kept: _Kept) -> None:
        now = time.monotonic()
        if kept.process is not None and not kept.process.is_alive():
            self._let_go(kept)
            kept.restarts = kept.restarts.after(ran_seconds=now - kept.began, was_ready=kept.down_since is None)
            how = kept.part.how_it_ended(kept.process)
            kept.process = None
            kept.down_since = kept.down_since or now
            kept.due = now + kept.restarts.wait_seconds
            self.say(f"{kept.part.name} {how}; starting again in {kept.restarts.wait_seconds:.1f} s")
        if kept.process is None and kept.due is not None and now >= kept.due:
            self._start_again(name, kept)
        elif kept.process is not None and kept.down_since is not None and self._unready(name) is None:
            self.say(f"{kept.part.name}: ready again after {time.monotonic() - kept.down_since:.1f} s")
            kept.down_since = None

    def _start_again(self, name: str, kept: _Kept) -> None:
        try:
            self._start(name, kept)
        except (SettingsError, Unavailable, OSError) as exc:
            kept.restarts = kept.restarts.after(ran_seconds=0.0, was_ready=False)
            kept.due = time.monotonic() + kept.restarts.wait_seconds
            self.say(f"{kept.part.name}: {exc}; once more in {kept.restarts.wait_seconds:.1f} s")

    # -- stopping -----------------------------------------------------------------------------------------------

    def stop_leftovers(self) -> bool:
        """For ``tide down`` without a living supervisor: stop what it left; False if there was nothing."""
        lock = StateLock(self.options.state)
        if lock.take() is not None:
            return False
        try:
            with self._wakeups.listening():
                self._adopt_leftovers()
                workers = any(True for _ in living_members(self.options.state))
                found = workers or any(kept.process is not None for kept in self._kept.values())
                self._finish(keep_jobs=self.options.keep_jobs)
        finally:
            lock.release()
        return found

    def _adopt_leftovers(self) -> None:
        """The record says where the services' process is; zygote and Postgres are found by asking, too."""
        state, settings = self.options.state, self.settings
        record = read_record(state) or UpRecord(url="", port=0)
        server = EmbeddedPostgres(state=state)
        self._record = record
        parts: dict[str, tuple[Part, ProcessId | None]] = {
            "zygote": (
                zygote_part(state, settings),
                record.process_id("zygote") or ping_zygote(state / "zygote.sock"),
            ),
            "postgres": (PostgresPart(server=server), ProcessId.of(server.postmaster_pid() or 0)),
            "process": (services_part(state, settings, {}), record.process_id("process")),
        }
        for name, (part, process) in parts.items():
            restarts = Restarts(seconds_min=1, seconds_max=1, steady_seconds=1)
            self._kept[name] = _Kept(part=part, restarts=restarts, process=process)

    def _finish(self, *, keep_jobs: bool) -> None:
        """Jobs, services, workers that are left, zygote, Postgres: in this order."""
        if not keep_jobs:
            self._stop_jobs()
        self._stop_part("process")
        if not keep_jobs:
            left = end_members(self.options.state, grace_seconds=self.settings.members_stop_seconds)
            if left:
                self.say(f"{len(left)} worker(s) were still there and were ended: {', '.join(left[:3])}")
        self._stop_part("zygote")
        self._stop_part("postgres")
        if self._kept:  # else nothing was touched, and the record of an earlier supervisor still holds
            record_path(self.options.state).unlink(missing_ok=True)

    def _stop_jobs(self) -> None:
        process = self._kept["process"].process if "process" in self._kept else None
        if process is None or not process.is_alive():
            return
        self.say("stopping: running jobs write their checkpoints and go on at the next `tide up`")
        before = self._wakeups.count
        try:
            stopped = stop_jobs(
                self._record.url,
                self.options.state,
                seconds=self.settings.jobs_stop_seconds,
                impatient=lambda: self._wakeups.count > before,
            )
        except (httpx.HTTPError, ValueError, KeyError) as exc:
            self.say(f"intake does not answer ({exc}); workers are ended by signal")
            return
        if stopped.held or stopped.running:
            self.say(f"{stopped.held} job(s) held until the next `tide up`, {stopped.running} still running")

    def _stop_part(self, name: str) -> None:
        kept = self._kept.get(name)
        if kept is None or kept.process is None:
            return
        self._let_go(kept)
        try:
            kept.part.stop(kept.process)
        except (Unavailable, SettingsError, OSError) as exc:
            self.say(f"{kept.part.name} could not be stopped: {exc}")
        kept.process = None

    def _sleep(self, seconds: float) -> None:
        kept = self._kept.values()
        self._wakeups.sleep(seconds, [each.descriptor for each in kept if each.descriptor is not None])

    def _let_go(self, kept: _Kept) -> None:
        if kept.descriptor is not None:
            os.close(kept.descriptor)
            kept.descriptor = None

    def _set_record(self, **changes: object) -> None:
        self._record = replace(self._record, **changes)  # type: ignore[arg-type]  # names and types are ours
        write_record(self.options.state, self._record)
