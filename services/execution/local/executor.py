"""The executor of this machine: starts through the zygote, looks at folders and pidfds."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field

from schemas.resources import Resources
from schemas.vocabulary import JobId, MemberName, NodeName
from services.execution.core.seen import Process, StartError
from services.execution.core.state import Member, MemberState
from services.execution.local import proc
from services.execution.local.folders import Folders
from services.execution.local.launch import start_request, what_is_missing
from services.execution.local.machine import Machine
from services.execution.local.patience import Patience
from services.execution.local.watched import Watched
from services.execution.local.zygote import request_start
from services.execution.memory import Memory
from services.execution.settings import ExecutionSettings
from shared.clock import Clock
from shared.errors import Rejected, Unavailable
from shared.signing import trainer_token
from shared.telemetry.logs import get_logger


@dataclass(slots=True, eq=False)
class _Starts:
    """Members to be started, in order, and when each was last asked for."""

    wanted: dict[MemberName, None] = field(default_factory=dict)
    under_way: set[MemberName] = field(default_factory=set)
    asked_at: dict[MemberName, float] = field(default_factory=dict)
    some: asyncio.Event = field(default_factory=asyncio.Event)


class LocalExecutor:
    """``variables_of`` reads a job's environment values, which stand nowhere else and are never logged."""

    def __init__(
        self,
        settings: ExecutionSettings,
        memory: Memory,
        machine: Machine,
        *,
        clock: Clock,
        folders: Folders,
        signing_key: bytes,
        address: Callable[[], str],
        variables_of: Callable[[JobId], Awaitable[Mapping[str, str]]],
    ) -> None:
        self._settings = settings
        self._memory = memory
        self._machine = machine
        self._clock = clock
        self._folders = folders
        self._signing_key = signing_key
        self._address = address
        self._variables_of = variables_of
        self._boot_id = proc.boot_id()
        self._watched: dict[MemberName, Watched] = {}
        self._starts = _Starts()
        self._patience = Patience(seconds=settings.folders_answer_seconds)
        self._log = get_logger(part="executor")

    @property
    def node(self) -> NodeName:
        return self._machine.node

    @property
    def size(self) -> Resources:
        return self._machine.size

    @property
    def accelerators(self) -> int:
        return self._machine.accelerators

    # -- looking and ending ---------------------------------------------------------------------------------------

    def look(self, member: Member, *, watch_activity: bool) -> Process:
        watched = self._watched.get(member.name)
        if watched is None:
            directory = self._folders.of_member(member.name)
            watched = Watched(directory, nonce=member.nonce, boot_id=self._boot_id, on_end=self._memory.wake.set)
            self._watched[member.name] = watched
        return watched.look(
            self._clock.monotonic(),
            watch_activity=watch_activity,
            unseen_end_seconds=self._settings.unseen_end_seconds,
        )

    def terminate(self, name: MemberName) -> None:
        if name in self._watched:
            self._watched[name].terminate()

    def kill(self, name: MemberName) -> None:
        if name in self._watched:
            self._watched[name].kill()

    def keep_only(self, names: Collection[MemberName]) -> None:
        for name in [n for n in self._watched if n not in names]:
            self._watched.pop(name).close()
        for name in [n for n in self._starts.asked_at if n not in names]:
            self._starts.asked_at.pop(name)

    def close(self) -> None:
        """Let go of all descriptors; no process is touched."""
        self.keep_only(())

    # -- starting -------------------------------------------------------------------------------------------------

    def start(self, name: MemberName) -> None:
        starts, now = self._starts, self._clock.monotonic()
        if name in starts.wanted or name in starts.under_way:
            return
        if now - starts.asked_at.get(name, float("-inf")) < self._settings.start_retry_seconds:
            return
        starts.asked_at[name] = now
        starts.wanted[name] = None
        starts.some.set()

    async def run_starts(self, stopping: asyncio.Event) -> None:
        """Ask the zygote for what is wanted, a few at a time."""
        room = asyncio.Semaphore(self._settings.starts_at_once_max)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._stop_waiting(stopping))
            while not stopping.is_set():
                await self._starts.some.wait()
                self._starts.some.clear()
                while self._starts.wanted and not stopping.is_set():
                    name = next(iter(self._starts.wanted))
                    await room.acquire()
                    self._starts.wanted.pop(name, None)
                    self._starts.under_way.add(name)
                    group.create_task(self._start_one(name, room))

    async def _stop_waiting(self, stopping: asyncio.Event) -> None:
        await stopping.wait()
        self._starts.some.set()

    async def _start_one(self, name: MemberName, room: asyncio.Semaphore) -> None:
        try:
            error = await self._request(name)
        finally:
            room.release()
            self._starts.under_way.discard(name)
        view = self._memory.view_of(name)
        if view is None:
            return
        if error is None:
            view.start_errors.pop(name, None)
        else:
            view.start_errors[name] = error
            self._log.warning("start_failed", member=name, reason=error.detail)
        self._memory.wake.set()

    async def _request(self, name: MemberName) -> StartError | None:
        """One start request. None: it was taken, or is no longer wanted."""
        view = self._memory.view_of(name)
        member = view.job.member(name) if view is not None else None
        if view is None or member is None or member.state is not MemberState.COMMITTED or view.job.spec is None:
            return None
        if not self._address():
            return StartError(detail="the membership endpoint does not listen yet")
        job, spec = view.job, view.job.spec
        try:
            variables = await self._variables_of(job.job_id)
            request = await self._patience.run(
                job.job_id,
                lambda: (
                    what_is_missing(spec)
                    or start_request(
                        job,
                        member,
                        folders=self._folders,
                        address=self._address(),
                        token=trainer_token(self._signing_key, job.job_id),
                        has_gpus=self._machine.has_gpus,
                        variables=variables,
                    )
                ),
            )
            if isinstance(request, StartError):
                return request
            await request_start(
                self._folders.zygote_socket, request, seconds_max=self._settings.zygote_answer_seconds
            )
        except OSError as exc:
            return StartError(detail=f"{exc.filename or 'a folder'}: {exc.strerror or exc}")  # a full disk may pass
        except (Unavailable, Rejected) as exc:
            return StartError(detail=str(exc))
        return None
