"""The story, scene by scene. It acts only through the CLI, HTTP and signals, and believes only what it reads back."""

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from demo.claims import CHANGED, CLOSED, FIRST, GRANTED, RESIZED, STARTED, URGENT
from demo.faults import STALL_SECONDS, Fault, signal_all, start_rogue, zygote_of
from demo.installation import ROOT, Installation, is_alive, send
from demo.journal import Journal
from demo.picture import JobPicture, Picture
from demo.record import Event, Process, read_processes
from demo.screen import Screen

SCRIPTS: Final = {FIRST: "demo/nightly.py", URGENT: "examples/digits.py"}
NAMES: Final = {FIRST: "nightly", URGENT: "checkout"}
URGENT_EPOCHS: Final = 8
LAST: Final = "the first job ends"
_PUMP_SECONDS: Final = 0.05


class DidNotHappen(Exception):
    """A wait is over, and what it waited for has not happened."""


class Decided(Exception):
    """The claim that a fault is meant to fail is decided: the rest of the story would add nothing."""


class Story:
    """Plays the scenes in order, waits for what each must bring about, and shows everything on the way."""

    def __init__(
        self, installation: Installation, *, journal: Journal, screen: Screen, picture: Picture, fault: Fault | None
    ) -> None:
        self._installation, self._journal, self._screen, self._picture = installation, journal, screen, picture
        self._fault = fault
        self._events: list[Event] = []
        self._jobs: dict[str, str] = {}
        self._rogue: subprocess.Popen[bytes] | None = None
        self._stopped: list[Process] = []

    def play(self) -> None:
        """Raises DidNotHappen, Decided, or CommandFailed of the CLI."""
        self.start()
        self.submit_first()
        self.watch_growth()
        self.submit_urgent()
        self.watch_giving_back()
        self.kill_worker()
        self.kill_services()
        self.watch_the_end()

    # -- scenes -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._now("starting Tidewright in a fresh folder: Postgres, five services, a warm Python")
        self._command(*self._installation.up_command)
        self._installation.start()
        self._wait(self._installation.ready, "the services become ready", seconds=45)

    def submit_first(self) -> None:
        self._now("a job of low priority: 1 to 4 workers, starting with 1")
        size = ("--min", "1", "--max", "4", "--priority", "low")
        self._submit(FIRST, *size)
        self._wait_event(FIRST, STARTED, "the first job trains", seconds=30)

    def watch_growth(self) -> None:
        self._now("it keeps its worker busy above the band for a full window, so it should grow: 1 → 2 → 4")
        self._wait(lambda: self._running(FIRST, 2), "the first job grows to 2 workers", seconds=40)
        self._wait(lambda: self._running(FIRST, 4), "the first job grows to 4 workers", seconds=40)
        if self._fault is Fault.DOUBLE_RUN:
            self._run_twice()

    def submit_urgent(self) -> None:
        size = ("--min", "2", "--max", "2", "--priority", "critical")
        if self._fault is Fault.NO_SHRINK:
            self._now("FAULT no-shrink: the first job becomes critical, the second is of low priority")
            self._command("priority", self._jobs[FIRST], "critical")
            self._installation.tide("priority", self._jobs[FIRST], "critical")
            size = (*size[:-1], "low")
        else:
            self._now("a critical job needs 2 workers: the first one should shrink and keep its processes")
        self._submit(URGENT, *size, args=("--", "--epochs", str(URGENT_EPOCHS)))
        seconds = 5 if self._fault is Fault.NO_SHRINK else 30
        self._wait_event(
            URGENT, GRANTED, "the urgent job is granted its room", seconds=seconds, deciding=Fault.NO_SHRINK
        )
        self._now("the critical job runs beside the smaller first one")
        self._wait_event(URGENT, CLOSED, "the urgent job ends", seconds=60)

    def watch_giving_back(self) -> None:
        self._now("the room is free again: the first job should take it back")
        self._wait(lambda: self._running(FIRST, 4), "the first job trains with 4 again", seconds=30)

    def kill_worker(self) -> None:
        victim = self._victim()
        if self._fault is Fault.LOST_WORKER:
            zygote = zygote_of(self._installation)
            if zygote is None:
                raise DidNotHappen("the zygote is found among the processes of the run")
            self._now("FAULT lost-worker: the zygote is stopped, so nothing can be started")
            self._stopped = [zygote]
            send(zygote, signal.SIGSTOP)
        self._now(
            f"kill -9 of worker {victim['member'].split('/', 1)[1]} (pid {victim['pid']}): it should be replaced"
        )
        generation = self._picture.jobs[self._jobs[FIRST]].generation
        self._journal.mark("worker_killed", job=self._jobs[FIRST], member=victim["member"], pid=victim["pid"])
        send(self._process_of(victim["pid"]), signal.SIGKILL)
        seconds = 8 if self._fault is Fault.LOST_WORKER else 40
        self._wait(
            lambda: self._running(FIRST, 4) and self._picture.jobs[self._jobs[FIRST]].generation > generation,
            "another worker takes its place",
            seconds=seconds,
            deciding=Fault.LOST_WORKER,
        )

    def kill_services(self) -> None:
        services = self._installation.process(lambda command: "services.launch.process" in command)
        if services is None:
            raise DidNotHappen("the services' process is found among the processes of the run")
        self._now(f"kill -9 of all five services (pid {services.pid}): training should not notice")
        self._journal.mark("services_killed", pid=services.pid)
        send(services, signal.SIGKILL)
        if self._fault is Fault.STALLED:
            self._stall()
        self._wait(self._adopted, "the services come back and know all 4 workers", seconds=45)
        self._journal.mark("services_back")
        self._now("the services are back and have adopted what runs")
        if self._fault is Fault.STALLED:
            self._pump_for(1)
            raise Decided
        self._pump_for(2)

    def watch_the_end(self) -> None:
        self._now("kill -USR1: enough shown; the first job ends with its next epoch, and tests what it has learnt")
        signal_all((p for p in self._workers() if is_alive(p)), signal.SIGUSR1)
        self._wait_event(FIRST, CLOSED, LAST, seconds=90)
        self._pump_for(0.5)

    def clean_up(self) -> None:
        """Undo what faults have left stopped or running, so that `tide down` finds an honest installation."""
        signal_all(self._stopped, signal.SIGCONT)
        if self._rogue is not None and self._rogue.poll() is None:
            self._rogue.kill()
            self._rogue.wait()

    # -- what faults do ---------------------------------------------------------------------------------------

    def _run_twice(self) -> None:
        self._now("FAULT double-run: a second trainer of the same job is started by hand")
        job = self._jobs[FIRST]
        self._rogue = start_rogue(self._installation, job=job, script=ROOT / SCRIPTS[FIRST])
        copy = self._installation.record / "run" / job / "worker-9-1" / "ledger.jsonl"
        applied = b'"k":"applied"'
        self._wait(
            lambda: copy.exists() and copy.read_bytes().replace(b" ", b"").count(applied) >= 3,
            "the second trainer takes three steps",
            seconds=40,
        )
        raise Decided

    def _stall(self) -> None:
        self._now(f"FAULT stalled: the workers are stopped for {STALL_SECONDS:g} s")
        _, members = read_processes(self._installation.record)
        self._stopped = [p for p, member in members.items() if member.startswith(self._jobs[FIRST])]
        signal_all(self._stopped, signal.SIGSTOP)
        self._pump_for(STALL_SECONDS)
        signal_all(self._stopped, signal.SIGCONT)

    # -- waiting ----------------------------------------------------------------------------------------------

    def _wait(self, true: Callable[[], bool], what: str, *, seconds: float, deciding: Fault | None = None) -> None:
        """Show what comes in until it is true. Past its time: Decided if this was the point of the fault played."""
        deadline = time.monotonic() + seconds
        while True:
            self._pump()
            if true():
                return
            ended = self._installation.ended()
            if ended:
                raise DidNotHappen(f"{what}: {ended}")
            first = self._jobs.get(FIRST)
            if first and what != LAST and self._closed(first):
                raise DidNotHappen(f"{what}: the first job ended before")
            if time.monotonic() > deadline:
                if deciding is not None and deciding is self._fault:
                    raise Decided
                raise DidNotHappen(f"{what} (waited {seconds:g} s)")
            time.sleep(_PUMP_SECONDS)

    def _wait_event(self, part: str, kind: str, what: str, *, seconds: float, deciding: Fault | None = None) -> None:
        job = self._jobs[part]
        self._wait(
            lambda: any(e.type == kind and e.subject == job for e in self._events),
            what,
            seconds=seconds,
            deciding=deciding,
        )

    def _pump(self) -> None:
        for event in self._journal.new_events():
            self._events.append(event)
            self._picture.fold(event)
        self._screen.show(self._picture)

    def _pump_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._pump()
            time.sleep(_PUMP_SECONDS)

    # -- small things -----------------------------------------------------------------------------------------

    def _now(self, sentence: str) -> None:
        self._picture.now = sentence
        self._picture.say(time.time(), f"== {sentence}")
        self._screen.show(self._picture)

    def _command(self, *arguments: str) -> None:
        self._picture.say(time.time(), f"$ tide {' '.join(arguments)}")
        self._screen.show(self._picture)

    def _submit(self, part: str, *options: str, args: tuple[str, ...] = ()) -> None:
        words = ("submit", SCRIPTS[part], "--name", NAMES[part], *options, "--output", "name", *args)
        self._command(*words)
        at = time.time()
        answer = self._installation.tide(*words)
        job = answer.split()[-1]
        self._jobs[part] = job
        priority = options[options.index("--priority") + 1]
        self._picture.jobs[job] = JobPicture(name=NAMES[part], priority=priority)
        self._journal.mark("submitted", at=at, part=part, job=job)

    def _running(self, part: str, workers: int) -> bool:
        job = self._jobs[part]
        changes = [e for e in self._events if e.subject == job and e.type in (STARTED, CHANGED)]
        sizes = [e for e in self._events if e.subject == job and e.type in (GRANTED, RESIZED)]
        granted = self._picture.jobs[job].granted
        return bool(changes and sizes) and changes[-1].data["workers"] == workers == granted

    def _closed(self, job: str) -> bool:
        return any(e.type == CLOSED and e.subject == job for e in self._events)

    def _adopted(self) -> bool:
        """Intake is ready, and execution answers for the very processes that run."""
        if not self._installation.ready():
            return False
        known = {m["pid"] for m in self._installation.members(self._jobs[FIRST])}
        return {p.pid for p in self._workers() if is_alive(p)} <= known

    def _victim(self) -> dict[str, Any]:
        """The member of index 1: one that was there before and after the shrink."""
        found: list[dict[str, Any]] = []

        def look() -> bool:
            members = self._installation.members(self._jobs[FIRST])
            found[:] = [m for m in members if m["member"].split("/")[2] == "1" and m["pid"] is not None]
            return bool(found) and any(p.pid == found[-1]["pid"] for p in self._workers())

        self._wait(look, "the API names the worker to be killed", seconds=10)
        return found[-1]

    def _workers(self) -> list[Process]:
        _, members = read_processes(self._installation.record)
        return [p for p, member in members.items() if member.startswith(self._jobs[FIRST] + "/")]

    def _process_of(self, pid: int) -> Process:
        return max((p for p in self._workers() if p.pid == pid), key=lambda p: p.start)


def latest_log(record: Path, job: str) -> Path | None:
    """The log of a job that was written last."""
    return max((record / "run" / job).glob("*/log"), key=lambda p: p.stat().st_mtime, default=None)
