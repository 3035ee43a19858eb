"""Kills one thing after the other at random moments, and waits each time until everything is whole again."""

import json
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from demo.installation import Installation, is_alive, send
from demo.journal import Journal
from demo.record import Process, read_processes
from loadtests.installation import until
from loadtests.kills_crowd import Crowd
from services.launch.parts import ping_zygote
from tidewright.client_errors import LostContact, RequestRefused
from tidewright.shim import STANDBY, children_of

WHOLE_SECONDS: Final = 60.0
_END_SECONDS: Final = 60.0
_CLEAN_SECONDS: Final = 15.0
"""Grace of the jobs (5 s) and ten more: what is there after that was left over."""
_DELAY_SECONDS: Final = 1.5
_UNSETTLED: Final = {"recovering", "resizing", "short_of_workers", "ending", "cancelling"}


class Victim(StrEnum):
    """What gets SIGKILL. ``everything``: supervisor, services, zygote, Postgres and every shim, but no trainer."""

    SERVICES = "services"
    POSTGRES = "postgres"
    ZYGOTE = "zygote"
    SHIM = "shim"
    WORKER = "worker"
    EVERYTHING = "everything"


PARTS: Final = {
    Victim.SERVICES: ("process",),
    Victim.POSTGRES: ("postgres",),
    Victim.ZYGOTE: ("zygote",),
    Victim.EVERYTHING: ("supervisor", "process", "zygote", "postgres"),
}


class NotBack(Exception):
    """The system has not come back by itself after a kill: which one, and what was missing."""


def plan_victims(rng: random.Random, kills: int) -> list[Victim]:
    """Each equally often, as far as that goes, in random order within each round."""
    victims: list[Victim] = []
    while len(victims) < kills:
        victims += rng.sample(list(Victim), len(Victim))
    return victims[:kills]


@dataclass(slots=True, kw_only=True)
class Storm:
    """One run. ``blow`` raises NotBack; whatever happens, the record says what was done."""

    installation: Installation
    journal: Journal
    crowd: Crowd
    rng: random.Random
    say: Callable[[str], None]
    done: int = 0
    _since: float = field(default_factory=time.monotonic)

    def blow(self, victims: list[Victim]) -> None:
        self.crowd.start_lasting()
        with self.crowd.acting():
            self._await_whole("at the start")
            for number, victim in enumerate(victims, start=1):
                self.crowd.go_on()
                time.sleep(self.rng.uniform(0.0, _DELAY_SECONDS))
                self._strike(number, victim)
                self.done = number
        self._end()

    def _strike(self, number: int, victim: Victim) -> None:
        targets = self._targets(victim)
        self.journal.mark("killed", number=number, victim=victim, processes=[list(p) for p in targets])
        began = time.monotonic()
        for process in targets:
            send(process, signal.SIGKILL)
        if victim is Victim.EVERYTHING:
            self.installation.start_up()  # as an init system would; all else comes back by itself
        names = PARTS.get(victim, ())
        what = f"kill {number} ({victim})"
        try:
            until(what, lambda: self._is_back(names, targets), seconds=WHOLE_SECONDS, trouble=self._trouble)
        except (TimeoutError, RuntimeError) as exc:
            raise NotBack(str(exc)) from exc
        back = time.monotonic() - began
        self.journal.mark("back", number=number, seconds=back)
        time.sleep(max(0.0, 1.0 - back))
        self.crowd.hold()
        self._await_whole(what)
        whole = time.monotonic() - began
        self.journal.mark("whole", number=number, seconds=whole)
        count = f" ({len(targets)} processes)" if len(targets) > 1 else ""
        self.say(f"{number:3d}  {victim + count:28s} answers after {back:5.2f} s, all whole after {whole:5.2f} s")

    def _targets(self, victim: Victim) -> list[Process]:
        """Raises NotBack if there is nothing of the kind within the time everything has to be whole."""

        def find() -> list[Process]:
            found = [self.installation.part(name) for name in PARTS.get(victim, ())]
            members = list(self._members())
            if victim in (Victim.SHIM, Victim.WORKER):
                found = [self.rng.choice(sorted(members))[0 if victim is Victim.SHIM else 1]] if members else [None]
            elif victim is Victim.EVERYTHING:
                found += [shim for shim, _ in members]
            living = [process for process in found if process is not None and is_alive(process)]
            return living if len(living) == len(found) else []

        try:
            return until(f"a {victim} to kill", find, seconds=WHOLE_SECONDS)
        except TimeoutError as exc:
            raise NotBack(str(exc)) from exc

    def _members(self) -> Iterator[tuple[Process, Process]]:
        """(shim, worker) of every member of which both live."""
        for path in (self.installation.state / "run").glob("*/*/pid.json"):
            try:
                record = json.loads(path.read_bytes())
            except (OSError, ValueError):
                continue
            shim = Process(record["shim_pid"], record["shim_start"])
            worker = Process(record["worker_pid"], record["worker_start"])
            if is_alive(shim) and is_alive(worker):
                yield shim, worker

    # -- coming back ------------------------------------------------------------------------------------------

    def _trouble(self) -> str:
        return self.crowd.trouble or self.installation.ended()

    def _is_back(self, names: tuple[str, ...], killed: list[Process]) -> bool:
        """What was killed runs again, and the API answers."""
        for name in names:
            process = self.installation.part(name)
            if process is None or process in killed:
                return False
        if "zygote" in names and ping_zygote(self.installation.state / "zygote.sock") is None:
            return False
        return self.installation.ready()

    def _await_whole(self, what: str) -> None:
        last: list[str] = []

        def whole() -> bool:
            last[:] = self._unsettled()
            return not last

        try:
            until(f"{what}: whole", whole, seconds=WHOLE_SECONDS, look_seconds=0.1, trouble=self._trouble)
        except (TimeoutError, RuntimeError) as exc:
            raise NotBack(f"{exc}: {'; '.join(last)}") from exc

    def _unsettled(self) -> list[str]:
        """Jobs that are on their way to another state."""
        try:
            jobs = self.crowd.unfinished()
        except (LostContact, RequestRefused) as exc:
            return [str(exc)]
        return [f"{job['name']} is {state}" for job in jobs if (state := _unsettled(job))]

    # -- the end ----------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Let everything end, and mark the moment at which nothing of any job may be left."""
        self.crowd.enough()
        left = self.crowd.wait_for_end(seconds=_END_SECONDS)
        if left:
            raise NotBack(f"not ended: {', '.join(str(job.get('name', '?')) for job in left)}")
        parts = self.parts()
        deadline = time.monotonic() + _CLEAN_SECONDS
        while time.monotonic() < deadline and self._strays([*parts, *self._standbys()]):
            time.sleep(0.25)
        self.journal.mark("quiet", parts=[list(process) for process in [*parts, *self._standbys()]])
        time.sleep(1.0)  # for a sample or two

    def parts(self) -> list[Process]:
        found = (self.installation.part(name) for name in PARTS[Victim.EVERYTHING])
        return [process for process in found if process is not None]

    def _standbys(self) -> list[Process]:
        """Workers forked ahead and their shims: parts of the zygote as long as they are nobody's."""
        zygote = self.installation.part("zygote")
        members = [json.loads(path.read_bytes()) for path in (self.installation.state / "run").glob("*/*/pid.json")]
        taken = {Process(each["shim_pid"], each["shim_start"]) for each in members}
        commands, _ = read_processes(self.installation.record)
        living = {process.pid: process for process in commands if is_alive(process)}
        found: list[Process] = []
        for pid in children_of(zygote.pid) if zygote is not None else ():
            shim = living.get(pid)
            if shim is not None and shim not in taken and _is_standby(pid):
                found += [shim, *(living[child] for child in children_of(pid) if child in living)]
        return found

    def _strays(self, parts: list[Process]) -> list[str]:
        commands, _ = read_processes(self.installation.record)
        return [c for p, c in commands.items() if p not in parts and "postgres" not in c and is_alive(p)]


def _unsettled(job: dict[str, Any]) -> str:
    workers = job["workers"]
    if job["phase"] in ("Starting", "Draining"):
        return str(job["phase"])
    flags = _UNSETTLED & set(job["flags"])
    if job["phase"] == "Running" and (flags or workers["granted"] != workers["running"]):
        return f"{', '.join(sorted(flags))} with {workers['running']} of {workers['granted']} workers"
    return ""


def _is_standby(pid: int) -> bool:
    try:
        return STANDBY.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def make_folder(state: Path) -> Path:
    """For what the jobs write, outside of the state folder."""
    folder = state.with_name(f"{state.name}-work")
    folder.mkdir()
    return folder
