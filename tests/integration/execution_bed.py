"""What the tests of execution stand on: the service as a process of its own, a real zygote, a real database."""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
from integration.elastic_bed import ZygoteBed, is_alive, read_json, wait_until

from schemas.events.allocation import (
    AllocationClosed,
    AllocationEvicted,
    AllocationGranted,
    AllocationResized,
    Reason,
    RoleGrant,
)
from schemas.events.job import JobEnded, JobSpec, JobSubmitted, RequestRegister, RoleRequest
from schemas.registry import EventData
from schemas.resources import SLOT, Resources
from schemas.vocabulary import (
    DEFAULT_FLAVOR,
    DEFAULT_QUEUE,
    DEFAULT_TENANT,
    DEFAULT_USER,
    WORKER_ROLE,
    DecisionCode,
    Mode,
    Outcome,
    PriorityClass,
    ServiceName,
)
from shared.clock import SystemClock
from shared.signing import InternalRequest
from shared.testing.harness import TEST_KEY, draft, publish, read_data, read_rows
from shared.testing.postgres import DatabaseServer, FreshDatabase, temporary_state_directory

ROOT = Path(__file__).parents[2]
T = TypeVar("T")
NAMES = (f"job{number}" for number in itertools.count(1))
SIZE = Resources({SLOT: 1000})
REASON = Reason(code=DecisionCode.ADMITTED_IDLE, detail="for a test")
QUICK = {"rejoin_seconds": "2", "observe_seconds": "0.05", "silent_seconds": "2", "gather_seconds": "3"}


@dataclass
class ExecutionBed:
    """One installation of execution alone; the test plays intake and queueing."""

    database: FreshDatabase
    state: Path
    zygote_socket: Path
    settings: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    epochs: dict[str, int] = field(default_factory=dict)
    zygote: ZygoteBed | None = None
    """where it is this bed's own"""

    # -- the service's process ----------------------------------------------------------------------------------

    def start(self) -> None:
        link = self.state / "zygote.sock"
        if not link.exists():
            link.symlink_to(self.zygote_socket)
        (self.state / "signing.key").write_text(TEST_KEY.hex())
        (self.state / "signing.key").chmod(0o600)
        environment = dict(os.environ)
        environment |= {f"TIDE_EXECUTION_{k.upper()}": v for k, v in {**QUICK, "slots": "8", **self.settings}.items()}
        environment |= {"TIDE_STATE": str(self.state), "TIDE_DATABASE_URL": self.database.url}
        with open(self.state / "execution.log", "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("execution_process.py"))],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=environment,
                cwd=ROOT,
            )

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def clean_up(self) -> None:
        """Whatever is left of a test."""
        if self.process is not None and self.process.poll() is None:
            self.kill()
        self.kill_all_members()

    def stop(self) -> None:
        """An ordered stop, which must be one."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            assert self.process.wait(20) == 0, self.log

    @property
    def log(self) -> str:
        return (self.state / "execution.log").read_text()[-6000:]

    # -- what intake and queueing would say -----------------------------------------------------------------------

    async def say(self, service: ServiceName, job: str, *data: EventData) -> None:
        await publish(self.database, service, *(draft(each, job) for each in data), clock=SystemClock())

    async def submit(
        self, job: str, *, mode: Mode = Mode.FIXED, workers: int = 1, minimum: int = 1, **spec: Any
    ) -> None:
        request = RequestRegister(
            version=1, priority=PriorityClass.MEDIUM, workers_min=minimum, workers_max=8, workers=workers
        )
        submitted = JobSubmitted(
            tenant=DEFAULT_TENANT,
            user=DEFAULT_USER,
            queue=DEFAULT_QUEUE,
            request=request,
            roles=(RoleRequest(name=WORKER_ROLE, elastic=True, count=workers, resources=SIZE),),
            spec=JobSpec(name=job, mode=mode, **{"working_directory": "/", **spec}),
        )
        await self.say(ServiceName.INTAKE, job, submitted)

    async def grant(self, job: str, workers: int, *, minimum: int = 1, attempt: int = 1) -> int:
        epoch = self._next_epoch(job)
        await self.say(
            ServiceName.QUEUEING,
            job,
            AllocationGranted(
                epoch=epoch,
                attempt=attempt,
                roles=roles(workers, minimum),
                flavor=DEFAULT_FLAVOR,
                reason=REASON,
            ),
        )
        return epoch

    async def resize(
        self, job: str, old: int, new: int, *, minimum: int = 1, attempt: int = 1, grace: float = 10.0
    ) -> int:
        epoch = self._next_epoch(job)
        await self.say(
            ServiceName.QUEUEING,
            job,
            AllocationResized(
                epoch=epoch,
                attempt=attempt,
                workers_from=old,
                workers_to=new,
                roles=roles(new, minimum),
                grace_seconds=grace,
                reason=REASON,
            ),
        )
        return epoch

    async def evict(self, job: str, *, attempt: int = 1, grace: float = 10.0) -> int:
        epoch = self._next_epoch(job)
        await self.say(
            ServiceName.QUEUEING,
            job,
            AllocationEvicted(epoch=epoch, attempt=attempt, grace_seconds=grace, reason=REASON, requeue=True),
        )
        return epoch

    async def close(self, job: str, *, attempt: int = 1) -> None:
        closed = AllocationClosed(
            epoch=self._next_epoch(job),
            attempt=attempt,
            outcome=Outcome.SUCCEEDED,
            exit_code=0,
            attributed_to=None,
            reason=REASON,
        )
        await self.say(ServiceName.QUEUEING, job, closed)

    async def end(self, job: str) -> None:
        ended = JobEnded(
            outcome=Outcome.SUCCEEDED,
            exit_code=0,
            attributed_to=None,
            reason="",
            image_digest=None,
            accelerator_seconds=0.0,
        )
        await self.say(ServiceName.INTAKE, job, ended)

    def _next_epoch(self, job: str) -> int:
        self.epochs[job] = self.epochs.get(job, 0) + 1
        return self.epochs[job]

    # -- looking --------------------------------------------------------------------------------------------------

    async def events(self, kind: type[T], job: str | None = None) -> list[T]:
        return await read_data(self.database, kind, job)  # type: ignore[type-var]

    async def event(self, kind: type[T], job: str, *, number: int = 1, seconds: float = 20.0) -> T:
        """The so many-th event of a kind."""

        async def look() -> T | None:
            found = await self.events(kind, job)
            return found[number - 1] if len(found) >= number else None

        return await self.until(look, seconds, f"{number}. {kind.__name__} of {job}")

    async def members(self, job: str) -> list[dict[str, Any]]:
        return await read_rows(
            self.database, "select * from execution.members where job_id = :job order by ordinal", job=job
        )

    async def until(self, condition: Callable[[], Awaitable[Any]], seconds: float = 20.0, what: str = "") -> Any:
        deadline = time.monotonic() + seconds
        while True:
            value = await condition()
            if value:
                return value
            assert self.process is None or self.process.poll() is None, self.log
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}\n{self.log}"
            await asyncio.sleep(0.05)

    def directory(self, job: str, index: int = 0, incarnation: int = 1) -> Path:
        return self.state / "run" / job / f"{WORKER_ROLE}-{index}-{incarnation}"

    def record(self, job: str, index: int = 0, incarnation: int = 1) -> dict[str, Any] | None:
        return read_json(self.directory(job, index, incarnation) / "pid.json")

    async def worker_pid(self, job: str, index: int = 0, incarnation: int = 1) -> int:
        async def look() -> Any:
            return self.record(job, index, incarnation)

        return int((await self.until(look, what="pid.json"))["worker_pid"])

    async def get(self, target: str, *, accept: str = "*/*") -> httpx.Response:
        url = (await read_rows(self.database, "select url from log.lease where service = 'execution'"))[0]["url"]
        headers = InternalRequest(method="GET", target=target).signed_headers(TEST_KEY, now_seconds=time.time())
        async with httpx.AsyncClient(base_url=url) as client:
            return await client.get(target, headers={**headers, "Accept": accept}, timeout=30)

    async def ready(self) -> None:
        """Until the service of the present process answers."""

        async def look() -> bool:
            try:
                return (await self.get("/readyz")).status_code == 200
            except (httpx.HTTPError, IndexError):
                return False

        await self.until(look, what="ready")

    async def log_lines(self, job: str, query: str = "") -> list[dict[str, Any]]:
        answer = await self.get(f"/internal/jobs/{job}/logs{query}")
        assert answer.status_code == 200, answer.text
        return [json.loads(line) for line in answer.text.splitlines()]

    def kill_all_members(self) -> None:
        """End what a test left: by recorded pid, while its start time is the recorded one. Shims end the rest."""
        for path in self.state.glob("run/*/*/pid.json"):
            record = read_json(path)
            for kind in ("shim", "worker") if record else ():
                pid = record[f"{kind}_pid"]
                if is_alive(pid) and start_of(pid) == record[f"{kind}_start"]:
                    os.kill(pid, signal.SIGCONT if kind == "shim" else signal.SIGKILL)
            if record is not None:
                wait_until(
                    lambda path=path, pid=record["shim_pid"]: path.with_name("gone").exists() or not is_alive(pid)
                )


def start_of(pid: int) -> int:
    text = Path(f"/proc/{pid}/stat").read_text()
    return int(text[text.rindex(")") + 2 :].split()[19])


def roles(workers: int, minimum: int = 1) -> tuple[RoleGrant, ...]:
    return (RoleGrant(role=WORKER_ROLE, elastic=True, members=workers, minimum=minimum, resources=SIZE),)


@contextmanager
def running_bed(postgres: DatabaseServer, settings: dict[str, str] | None = None) -> Iterator[ExecutionBed]:
    """Execution on a zygote and a database of its own, stopped in order at the end, which must be possible."""
    with (
        temporary_state_directory() as base,
        temporary_state_directory() as state,
        postgres.database() as database,
    ):
        zygote = ZygoteBed(base)
        zygote.start()
        bed = ExecutionBed(database, state, zygote.socket_path, settings=settings or {}, zygote=zygote)
        try:
            bed.start()
            yield bed
            bed.stop()
        finally:
            bed.clean_up()
            zygote.stop()
