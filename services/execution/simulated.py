"""An executor without processes, for load tests and for trying things out: members are timers.

Everything else is real: intents, admission, epochs, attempts, ends. A job in restart or fixed mode whose command is
``sleep SECONDS``, ``true`` or ``false`` does what that would do; any other runs for ``simulated_run_seconds`` and
exits with 0. What has begun and ended stands in a ledger, so that it outlives execution as real processes do.
"""

import asyncio
import heapq
import json
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO

from schemas.events.job import JobSpec
from schemas.resources import CPU, MEMORY, MILLI, SLOT, Resources
from schemas.vocabulary import MemberName, NodeName
from services.execution.core.seen import NO_PROCESS, Process
from services.execution.core.state import Member, MemberState
from services.execution.memory import Memory
from services.execution.settings import ExecutionSettings

NODE: Final = NodeName("simulated")
LEDGER: Final = "simulated.jsonl"
_KILLED: Final = 128 + signal.SIGKILL
_TERMINATED: Final = 128 + signal.SIGTERM


@dataclass(slots=True)
class _Timer:
    """One member that runs user code, in wall seconds. ``told``: its end stands in the ledger."""

    ends_at: float
    exit_code: int
    told: bool = False


class SimulatedExecutor:
    """Implements ``services.execution.ports.Executor``. ``wall``: seconds since 1970.

    A member asks for admission as soon as it is started, and begins to run when it is first seen admitted. The
    ledger is written before anything is told, one line a start and one an end; it is read when the lease is taken.
    """

    def __init__(
        self, settings: ExecutionSettings, memory: Memory, *, state: Path, wall: Callable[[], float] = time.time
    ) -> None:
        self._settings = settings
        self._memory = memory
        self._path = state / LEDGER
        self._wall = wall
        self._started: dict[MemberName, str] = {}
        """member -> its nonce"""
        self._timers: dict[MemberName, _Timer] = {}
        self._due: list[tuple[float, MemberName]] = []
        self._moved = asyncio.Event()
        self._file: TextIO | None = None

    @property
    def node(self) -> NodeName:
        return NODE

    @property
    def accelerators(self) -> int:
        return self._settings.slots or 64

    @property
    def size(self) -> Resources:
        milli = self.accelerators * MILLI
        return Resources({SLOT: milli, CPU: milli, MEMORY: self.accelerators * 2**30})

    # -- what the reconciler asks for -------------------------------------------------------------------------

    def start(self, name: MemberName) -> None:
        view = self._memory.view_of(name)
        member = view.job.member(name) if view is not None else None
        if view is None or member is None or name in self._started:
            return
        self._started[name] = member.nonce
        view.asking[name] = member.nonce
        self._memory.wake.set()

    def look(self, member: Member, *, watch_activity: bool) -> Process:
        timer = self._timers.get(member.name)
        if timer is None and member.name in self._started and member.state is MemberState.ADMITTED:
            timer = self._begin(member)
        if timer is None:
            return Process(recorded=True) if member.name in self._started else NO_PROCESS
        if self._wall() < timer.ends_at:
            return Process(recorded=True)
        if not timer.told:
            timer.told = True
            self._write(member.name, at=timer.ends_at, ended=True, exit_code=timer.exit_code)
        return Process(recorded=True, ended=True, gone=True, exit_code=timer.exit_code)

    def terminate(self, name: MemberName) -> None:
        self._end(name, _TERMINATED)

    def kill(self, name: MemberName) -> None:
        self._end(name, _KILLED)

    def keep_only(self, names: Collection[MemberName]) -> None:
        for known in (self._started, self._timers):
            for name in [name for name in known if name not in names]:
                del known[name]

    async def run_starts(self, stopping: asyncio.Event) -> None:
        """Read the ledger, then wake the reconciler whenever a member is due, until told to stop."""
        self._load()
        async with asyncio.TaskGroup() as group:
            waker = group.create_task(self._wake_when_due())
            await stopping.wait()
            waker.cancel()
        if self._file is not None:
            self._file.close()
            self._file = None

    # -- timers and the ledger --------------------------------------------------------------------------------

    def _begin(self, member: Member) -> _Timer:
        view = self._memory.view_of(member.name)
        seconds, exit_code = self._plan(view.job.spec if view is not None else None)
        now = self._wall()
        timer = self._timers[member.name] = _Timer(ends_at=now + seconds, exit_code=exit_code)
        self._write(member.name, at=now, seconds=seconds, plan=exit_code)
        heapq.heappush(self._due, (timer.ends_at, member.name))
        self._moved.set()
        return timer

    def _plan(self, spec: JobSpec | None) -> tuple[float, int]:
        """(run seconds, exit code)"""
        words = (*spec.command, *spec.args) if spec is not None else ()
        program = Path(words[0]).name if words else ""
        if program == "sleep" and len(words) == 2:
            try:
                return min(max(float(words[1]), 0.0), 1e9), 0
            except ValueError:
                return 0.0, 1
        if program in ("true", "false"):
            return 0.0, int(program == "false")
        return self._settings.simulated_run_seconds, 0

    def _end(self, name: MemberName, exit_code: int) -> None:
        """By a signal: at once. One that never ran user code is simply not there any more."""
        timer = self._timers.get(name)
        now = self._wall()
        if timer is None:
            if name in self._started:
                self._timers[name] = _Timer(ends_at=now, exit_code=exit_code, told=True)
        elif now < timer.ends_at:
            timer.ends_at, timer.exit_code = now, exit_code
        self._memory.wake.set()

    async def _wake_when_due(self) -> None:
        while True:
            self._moved.clear()
            now = self._wall()
            while self._due and self._due[0][0] <= now:
                heapq.heappop(self._due)
                self._memory.wake.set()
            seconds = min(self._due[0][0] - now, 1.0) if self._due else 1.0
            try:
                async with asyncio.timeout(seconds):
                    await self._moved.wait()
            except TimeoutError:
                pass

    def _load(self) -> None:
        """What has begun and not been forgotten; a line that a kill cut off is left out and ended."""
        self._started, self._timers, self._due = {}, {}, []
        content = self._path.read_bytes() if self._path.exists() else b""
        for line in content.splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            name = MemberName(f"{entry['job']}/{entry['role']}/{entry['index']}/{entry['incarnation']}")
            if entry["ended"]:
                self._timers[name] = _Timer(ends_at=entry["at"], exit_code=entry["exit_code"], told=True)
            else:
                self._timers[name] = _Timer(ends_at=entry["at"] + entry["seconds"], exit_code=entry["plan"])
        self._due = [(timer.ends_at, name) for name, timer in self._timers.items() if not timer.told]
        heapq.heapify(self._due)
        self._started = dict.fromkeys(self._timers, "")
        self._file = self._path.open("a")
        if content and not content.endswith(b"\n"):
            self._file.write("\n")

    def _write(self, name: MemberName, *, at: float, ended: bool = False, **more: Any) -> None:
        assert self._file is not None, "the ledger is read before the first look"
        job, role, index, incarnation = name.split("/")
        entry = {"job": job, "role": role, "index": int(index), "incarnation": int(incarnation), "at": at}
        self._file.write(json.dumps({**entry, "ended": ended, **more}) + "\n")
        self._file.flush()
