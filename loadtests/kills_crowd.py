"""The users of the kill test: they submit, scale, urge and cancel all the time, and write down what they do."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from demo.installation import ROOT, CommandFailed, Installation
from demo.journal import Journal
from loadtests.installation import client_of
from tidewright.client import TERMINAL_PHASES, Client
from tidewright.client_errors import LostContact, RequestRefused

SCRIPT: Final = ROOT / "loadtests" / "kills_job.py"
ANCHOR: Final = "anchor"
"""Trains from the first kill to the last: nobody is more urgent, so that it never has to wait."""
STEADY: Final = "steady"
"""As long as the anchor, but whoever is more urgent takes its room."""
SHORT: Final = "short"
URGENT: Final = "urgent"
_EPOCHS: Final = {ANCHOR: (10**6, 10**6), STEADY: (10**6, 10**6), SHORT: (4, 14), URGENT: (3, 8)}
"""At least, at most."""
_SHORTS_MAX: Final = 2
_PAUSE_SECONDS: Final = (0.3, 1.0)
_PATIENCE_SECONDS: Final = 90.0


@dataclass(slots=True, kw_only=True)
class Crowd:
    """Acts in a thread of its own between ``acting`` and its end; ``hold`` makes it wait."""

    installation: Installation
    journal: Journal
    rng: random.Random
    work: Path
    """where the steady job looks for the word that it is enough"""
    say: Callable[[str], None]
    done: dict[str, int] = field(default_factory=dict)
    """what was asked for, and how often"""
    trouble: str = ""
    lasting: list[str] = field(default_factory=list)
    """the anchor's and the steady job's ids"""
    _count: int = 0
    _stopping: threading.Event = field(default_factory=threading.Event)
    _free: threading.Event = field(default_factory=threading.Event)
    _idle: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def acting(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run, name="crowd", daemon=True)
        self._free.set()
        thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            self._free.set()
            thread.join()

    def hold(self) -> None:
        """Wait until what is being asked for is answered, and ask for nothing more."""
        self._free.clear()
        self._idle.wait(_PATIENCE_SECONDS)

    def go_on(self) -> None:
        self._idle.clear()
        self._free.set()

    def start_lasting(self) -> None:
        with client_of(self.installation, retry_seconds=_PATIENCE_SECONDS) as client:
            anchor = self._submit(client, ANCHOR, priority="critical", workers_min=1, workers_max=2, workers=2)
            steady = self._submit(client, STEADY, priority="low", workers_min=1, workers_max=3)
        self.lasting = [anchor, steady]

    def enough(self) -> None:
        """Let the lasting jobs end with their next epoch."""
        for folder in (*self.work.glob(f"{ANCHOR}-*"), *self.work.glob(f"{STEADY}-*")):
            (folder / "enough").touch()

    def wait_for_end(self, *, seconds: float) -> list[dict[str, Any]]:
        """Jobs that have not ended by then."""
        deadline = time.monotonic() + seconds
        left: list[dict[str, Any]] = [{}]
        while left and time.monotonic() < deadline:
            try:
                left = self.unfinished()
            except (LostContact, RequestRefused):
                left = [{}]
            time.sleep(0.2)
        return left

    def unfinished(self) -> list[dict[str, Any]]:
        """As the API tells it. Raises LostContact or RequestRefused at once if it cannot."""
        with client_of(self.installation, retry_seconds=0.0) as client:
            return [job for job in client.jobs() if job["phase"] not in TERMINAL_PHASES]

    # -- what it does -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        with client_of(self.installation, retry_seconds=_PATIENCE_SECONDS) as client:
            while not self._stopping.is_set():
                self._idle.set()
                self._free.wait()
                self._idle.clear()
                if self._stopping.wait(self.rng.uniform(*_PAUSE_SECONDS)):
                    break
                try:
                    self._act(client)
                except (LostContact, CommandFailed) as exc:
                    self.trouble = f"nobody answered for {_PATIENCE_SECONDS:g} s: {exc}"
                    break
        self._idle.set()

    def _act(self, client: Client) -> None:
        jobs = [job for job in client.jobs() if job["phase"] not in TERMINAL_PHASES]
        shorts = [job["id"] for job in jobs if job["labels"]["part"] == SHORT]
        urgent = any(job["labels"]["part"] == URGENT for job in jobs)
        action = self.rng.choice(["short", "short", "urgent", "scale", "scale", "command", "cancel"])
        if action == "short" and len(shorts) < _SHORTS_MAX:
            workers = self.rng.randint(1, 2)
            self._submit(client, SHORT, priority="medium", workers_min=1, workers_max=2, workers=workers)
        elif action == "urgent" and not urgent:
            workers = self.rng.choice((1, 2, 3))
            self._submit(client, URGENT, priority="critical", workers_min=workers, workers_max=workers)
        elif action == "scale":
            self._count_of("scaled")
            job = self.rng.choice(self.lasting)
            client.patch(job, {"workers": self.rng.randint(1, 2 if job == self.lasting[0] else 3)})
        elif action == "command":
            self._scale_by_command(self.rng.randint(1, 3))
        elif action == "cancel" and shorts:
            self._cancel(client, self.rng.choice(sorted(shorts)))

    def _submit(self, client: Client, part: str, **size: Any) -> str:
        self._count += 1
        name = f"{part}-{self._count}"
        folder = self.work / name
        folder.mkdir()
        epochs = self.rng.randint(*_EPOCHS[part])
        self.journal.mark("submitting", part=part, called=name)
        job = client.submit(
            {
                "name": name,
                "script": str(SCRIPT),
                "args": ["--folder", str(folder), "--epochs", str(epochs)],
                "outputs": str(folder),
                "checkpoint_every_steps": 20,
                "grace_seconds": 5.0,
                "labels": {"part": part},
                **size,
            }
        )["id"]
        self.journal.mark("submitted", part=part, called=name, job=job)
        self._count_of(f"{part} jobs")
        return str(job)

    def _scale_by_command(self, workers: int) -> None:
        """While nobody answers the command fails in its own time, and is not repeated: a user would see that."""
        try:
            self.installation.tide("scale", self.lasting[1], str(workers), seconds=60.0)
            self._count_of("scaled by command")
        except CommandFailed:
            self._count_of("commands in vain")

    def _cancel(self, client: Client, job: str) -> None:
        self.journal.mark("cancelling", job=job)
        try:
            client.cancel(job, reason="the user has changed their mind")
        except RequestRefused as exc:
            if exc.status != 409:
                raise
            self._count_of("too late to cancel")
        else:
            self._count_of("cancelled")

    def _count_of(self, what: str) -> None:
        self.done[what] = self.done.get(what, 0) + 1
