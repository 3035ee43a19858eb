"""What the tests of cancelling stand on: a real ``tide up`` with two slots, and what must be true afterwards."""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from integration.elastic_bed import read_json
from integration.gated_training import SCRIPT
from integration.launched import Launched, is_alive, launched, until

from shared.db.embedded import EmbeddedPostgres
from tidewright.client import TERMINAL_PHASES, Client

SLOTS = 2
GRACE_SECONDS = 2.0
BEYOND_SECONDS = 10.0
"""Nothing is left so long after the grace."""
NUMBERS = itertools.count(1)


@dataclass
class CancelBed:
    """One installation; each test has a job under test and a waiter that needs every slot."""

    up: Launched
    client: Client
    waiter: str = ""

    @property
    def database(self) -> EmbeddedPostgres:
        return EmbeddedPostgres(state=self.up.state)

    # -- jobs -------------------------------------------------------------------------------------------------

    def submit(self, **body: Any) -> str:
        named = {"name": f"job{next(NUMBERS)}", "grace_seconds": GRACE_SECONDS, **body}
        return self.client.submit(named, allow_unsatisfiable=True)["id"]

    def shell(self, text: str, **body: Any) -> str:
        return self.submit(**{"command": ["sh", "-c", text], "mode": "fixed", **body})

    def gated(self, gates: Path, *, workers: int = 1, **body: Any) -> str:
        """A live job whose script can be held; ``gates`` is its folder."""
        gates.mkdir(parents=True, exist_ok=True)
        script = gates / "gated.py"
        script.write_text(SCRIPT)
        limits = {"workers_min": workers, "workers_max": workers, "workers": workers}
        return self.submit(script=str(script), args=[str(gates), "100000", "0.05"], **{**limits, **body})

    def wait_behind(self) -> None:
        """A less urgent job for which there is room only when nobody else has any."""
        self.waiter = self.submit(
            command=["sleep", "600"], mode="fixed", workers_min=SLOTS, workers_max=SLOTS, priority="low"
        )

    def phase(self, job: str) -> str:
        return self.client.job(job)["phase"]

    def comes_to(self, job: str, phase: str, *, seconds: float = 40.0) -> None:
        until(f"{job} is {phase}", lambda: self.phase(job) == phase, seconds=seconds)

    # -- processes --------------------------------------------------------------------------------------------

    def folder(self, job: str, index: int = 0, incarnation: int = 1) -> Path:
        return self.up.state / "run" / job / f"worker-{index}-{incarnation}"

    def pid(self, job: str, index: int = 0, incarnation: int = 1) -> int | None:
        record = read_json(self.folder(job, index, incarnation) / "pid.json")
        return record["worker_pid"] if record is not None else None

    def forked(self, job: str, index: int = 0, incarnation: int = 1) -> int:
        return until(f"worker {index} of {job} is forked", lambda: self.pid(job, index, incarnation))

    def tree(self, job: str) -> set[int]:
        """Shims, workers, and all that lives below them."""
        found: set[int] = set()
        for path in (self.up.state / "run" / job).glob("*/pid.json"):
            record = read_json(path) or {}
            for pid in (record["shim_pid"], record["worker_pid"]):
                found |= {pid, *below(pid)}
        return {pid for pid in found if is_alive(pid)}

    # -- what must be true --------------------------------------------------------------------------------------

    def ends(
        self,
        job: str,
        *,
        processes: set[int],
        since: float,
        phase: str = "Cancelled",
        grace_seconds: float = GRACE_SECONDS,
        attempts: int = 1,
    ) -> dict[str, Any]:
        """Ended once, nothing of it left in time, and its room free for the next. Gives its view."""
        deadline = since + grace_seconds + BEYOND_SECONDS
        until(f"{job} has ended", lambda: self.phase(job) in TERMINAL_PHASES, seconds=deadline - time.monotonic())
        processes = processes | self.tree(job)
        until(
            f"nothing of {job} is left: {processes}",
            lambda: not any(is_alive(pid) for pid in processes),
            seconds=max(0.1, deadline - time.monotonic()),
        )
        view = self.client.job(job)
        assert view["phase"] == phase, view
        if self.waiter:
            self.comes_to(self.waiter, "Running")
            assert self.charges() == {self.waiter: SLOTS}, "its room was given back, once"
            self.client.cancel(self.waiter)
            self.comes_to(self.waiter, "Cancelled")
            self.waiter = ""
        self.told_once(job, attempts=attempts)
        return view

    def told_once(self, job: str, *, attempts: int) -> None:
        """One terminal event, one decision, one end of each attempt, whatever came when."""
        told = self.events(job)
        counts = {kind: told.count(f"tide.{kind}.v1") for kind in ENDS}
        assert counts == {"job.ended": 1, "allocation.closed": 1, "worker.group_ended": attempts}, told
        assert told[-1] == "tide.job.ended.v1"

    def events(self, job: str) -> list[str]:
        return self.database.psql(f"select type from log.outbox where key = '{job}' order by xid, id").split()

    def charges(self) -> dict[str, int]:
        rows = self.database.psql("select job_id, sum(greatest(granted, held)) from queueing.charges group by 1")
        pairs = (line.split("|") for line in rows.split())
        return {job: int(charged) for job, charged in pairs if int(charged)}

    def tidy(self) -> None:
        """Whatever a test left, so that the next one has all slots."""
        self.waiter = ""
        for job in [view["id"] for view in self.client.jobs() if view["phase"] not in TERMINAL_PHASES]:
            self.client.cancel(job)
        until("no job is left", lambda: not self.charges(), seconds=30)


ENDS = ("job.ended", "allocation.closed", "worker.group_ended")


def below(pid: int) -> set[int]:
    """All living descendants of a process."""
    found: set[int] = set()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(word) for word in path.read_text().split()]
        except OSError:
            continue
        for child in children:
            found |= {child, *below(child)}
    return found


@contextmanager
def cancel_bed(*settings: str) -> Iterator[CancelBed]:
    with launched(*settings, slots=SLOTS) as up, Client(up.url, retry_seconds=30) as client:
        yield CancelBed(up=up, client=client)
