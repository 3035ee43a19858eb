"""Many short jobs through HTTP: some succeed, some fail, some train, some are cancelled; each end is checked."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final

from tidewright.client import TERMINAL_PHASES, Client

SCRIPT: Final = str(Path(__file__).with_name("soak_worker.py"))
JOB_SECONDS_MAX: Final = 120.0
_POLL_SECONDS: Final = 0.15


class JobsWrong(Exception):
    """A job did not end as it had to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One sort of job, and how it has to end."""

    name: str
    spec: dict[str, Any]
    phase: str
    exit_code: int | None
    cancel: str = ""
    """When to cancel it: "" never, "at_once", or "running"."""


def _script(*arguments: str, **more: Any) -> dict[str, Any]:
    return {"script": SCRIPT, "args": list(arguments), "mode": "fixed", **more}


SUCCEEDS: Final = Kind(name="succeeds", spec=_script(), phase="Succeeded", exit_code=0)
COMMAND: Final = Kind(
    name="command", spec={"command": ["/bin/true"], "mode": "fixed"}, phase="Succeeded", exit_code=0
)
FAILS: Final = Kind(name="fails", spec=_script("--exit", "3"), phase="Failed", exit_code=3)
TRAINS: Final = Kind(name="trains", spec=_script("--steps", "5", mode="live"), phase="Succeeded", exit_code=0)
SLEEPS: Final = _script("--sleep", "600", grace_seconds=2)
CANCELLED_EARLY: Final = Kind(
    name="cancelled early", spec=SLEEPS, phase="Cancelled", exit_code=None, cancel="at_once"
)
CANCELLED_RUNNING: Final = Kind(
    name="cancelled running", spec=SLEEPS, phase="Cancelled", exit_code=None, cancel="running"
)
MIX: Final = (
    SUCCEEDS,
    SUCCEEDS,
    COMMAND,
    SUCCEEDS,
    FAILS,
    SUCCEEDS,
    TRAINS,
    CANCELLED_EARLY,
    SUCCEEDS,
    CANCELLED_RUNNING,
)
"""Ten jobs of which nothing stays, over and over."""


@dataclass(slots=True)
class _InFlight:
    kind: Kind
    since: float
    cancelled: bool


@dataclass(slots=True)
class JobLoad:
    """``run`` returns when all have ended. ``ended`` counts them by kind and is read by other threads."""

    client: Client
    total: int
    at_once: int
    ended: Counter[str] = field(default_factory=Counter)
    longest_seconds: float = 0.0
    _in_flight: dict[str, _InFlight] = field(default_factory=dict)

    @property
    def done(self) -> int:
        return sum(self.ended.values())

    def run(self, *, on_progress: Callable[[], None]) -> None:
        """Raises JobsWrong."""
        numbers = count()
        submitted = 0
        while self.done < self.total:
            while submitted < self.total and len(self._in_flight) < self.at_once:
                self._submit(MIX[next(numbers) % len(MIX)])
                submitted += 1
            if not self._collect():
                time.sleep(_POLL_SECONDS)
            on_progress()

    def _submit(self, kind: Kind) -> None:
        job_id = self.client.submit({"name": "soak", **kind.spec, "restart_policy": {"kind": "never"}})["id"]
        early = kind.cancel == "at_once"
        self._in_flight[job_id] = _InFlight(kind=kind, since=time.monotonic(), cancelled=early)
        if early:
            self.client.cancel(job_id, reason="soak")

    def _collect(self) -> int:
        """Look once at the newest jobs; the number that have ended."""
        found = 0
        seen = {
            view["id"]: view for view in self.client.jobs(limit=4 * self.at_once) if view["id"] in self._in_flight
        }
        for job_id, one in list(self._in_flight.items()):
            view = seen.get(job_id) or self.client.job(job_id)
            waited = time.monotonic() - one.since
            if view["phase"] in TERMINAL_PHASES:
                self._check(one.kind, view)
                del self._in_flight[job_id]
                self.ended[one.kind.name] += 1
                self.longest_seconds = max(self.longest_seconds, waited)
                found += 1
            elif one.kind.cancel == "running" and view["phase"] == "Running" and not one.cancelled:
                self.client.cancel(job_id, reason="soak")
                one.cancelled = True
            elif waited > JOB_SECONDS_MAX:
                raise JobsWrong(f"{one.kind.name} {job_id} is {view['phase']} after {waited:.0f} s")
        return found

    def _check(self, kind: Kind, view: dict[str, Any]) -> None:
        right = view["phase"] == kind.phase and kind.exit_code in (None, view["exit_code"])
        if not right:
            raise JobsWrong(f"{kind.name} {view['id']} ended as {view['phase']}, exit code {view['exit_code']}")
