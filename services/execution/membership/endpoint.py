"""The membership endpoint: admits processes, hears trainers, sends offers and requests to stop."""

import asyncio
import hmac
import socket
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

from schemas.vocabulary import JobId, MemberName, ServiceName
from services.execution.core.state import Checkpoint, Generation, Job, Member, MemberState
from services.execution.core.turn import OfferGeneration
from services.execution.membership.port import bind_kept_port
from services.execution.membership.rendezvous import RendezvousStore
from services.execution.membership.words import apply_message, is_news, to_report
from services.execution.memory import JobView, Memory
from services.execution.settings import ExecutionSettings
from shared.clock import Clock, pause
from shared.errors import TideError
from shared.runtime.service import Directory
from shared.signing import sample_token, trainer_token
from shared.telemetry.logs import get_logger
from tidewright import protocol

_FIRST_LINE_SECONDS: Final = 10.0
_METRICS_URL_SECONDS: Final = 2.0
_WRITE_BUFFER_BYTES_MAX: Final = 1 << 20


@dataclass(slots=True, eq=False)
class Connection:
    """A trainer's connection, from its ``Hello`` on."""

    member: MemberName
    writer: asyncio.StreamWriter
    asked_to_stop: bool = False

    def send(self, message: protocol.Message) -> None:
        """Queue one line. A peer that does not read is cut off; it comes back when it can."""
        if self.writer.is_closing():
            return
        if self.writer.transport.get_write_buffer_size() > _WRITE_BUFFER_BYTES_MAX:
            self.writer.transport.abort()
            return
        self.writer.write(protocol.encode(message))


@dataclass(slots=True, eq=False)
class OpenStore:
    """The rendezvous of an offer, with what its members are told."""

    store: RendezvousStore
    port: int
    offer: OfferGeneration


class MembershipEndpoint:
    """Serves trainers while the lease is held. It decides nothing: it notes what is said and wakes the reconciler."""

    def __init__(
        self,
        settings: ExecutionSettings,
        memory: Memory,
        *,
        clock: Clock,
        directory: Directory,
        signing_key: bytes,
        port_file: Path,
        checkpoint_directory_of: Callable[[Job], Path],
    ) -> None:
        self._settings = settings
        self._memory = memory
        self._clock = clock
        self._directory = directory
        self._signing_key = signing_key
        self._port_file = port_file
        self._checkpoint_directory_of = checkpoint_directory_of
        self._connections: dict[MemberName, Connection] = {}
        self._writers: set[asyncio.StreamWriter] = set()
        self._answers: dict[tuple[MemberName, str], asyncio.Future[str]] = {}
        self._stores: dict[tuple[JobId, int], OpenStore] = {}
        self._metrics_url = ""
        self._log = get_logger(part="membership")
        self.address = ""
        """``host:port`` for trainers; empty until it listens."""

    # -- life ---------------------------------------------------------------------------------------------------

    async def run(self, stopping: asyncio.Event) -> None:
        """Listen until told to stop. Connections that break then are the trainers' to renew."""
        settings = self._settings
        listening = await bind_kept_port(
            self._port_file,
            host=settings.membership_host,
            port=settings.membership_port,
            seconds_max=settings.membership_bind_seconds_max,
            clock=self._clock,
        )
        port = listening.getsockname()[1]
        self.address = f"{self.host}:{port}"
        server = await asyncio.start_server(self._serve, sock=listening, limit=protocol.LINE_BYTES_MAX)
        self._log.info("membership_listens", address=self.address)
        self._memory.wake.set()
        try:
            while not stopping.is_set():
                await self._refresh_metrics_url()
                await pause(stopping, _METRICS_URL_SECONDS)
        finally:
            self.address = ""
            server.close()
            self._close_all()

    @property
    def host(self) -> str:
        return self._settings.membership_advertise_host or self._settings.membership_host

    def _close_all(self) -> None:
        for future in self._answers.values():
            _leave_unanswered(future)
        for writer in list(self._writers):
            writer.transport.abort()
        for key in list(self._stores):
            self._close_store(key)

    async def _refresh_metrics_url(self) -> None:
        """Trainers are told when metrics has come up, or has moved."""
        try:
            url = await self._directory.url_of(ServiceName.METRICS) or self._metrics_url
        except TideError:
            return
        if url != self._metrics_url:
            self._metrics_url = url
            for name, connection in self._connections.items():
                view = self._memory.view_of(name)
                if view is not None:
                    connection.send(self._welcome(view.job))

    # -- what the reconciler asks for -------------------------------------------------------------------------

    def answer_admission(self, name: MemberName, nonce: str, refusal: str) -> None:
        future = self._answers.pop((name, nonce), None)
        if future is not None and not future.done():
            future.set_result(refusal)

    def stores_of(self, job_id: JobId) -> frozenset[int]:
        return frozenset(number for owner, number in self._stores if owner == job_id)

    def offer(self, job: Job, offer: OfferGeneration) -> None:
        """Open the store first, so that the address that is told listens. A store that cannot be opened is no offer:
        the next look finds none and calls it off.
        """
        generation, store = offer.generation, RendezvousStore()
        try:
            port = store.start(self._settings.membership_host)
        except OSError as exc:
            self._log.error("store_failed", job_id=job.job_id, generation=generation.number, error=str(exc))
            return
        self._stores[job.job_id, generation.number] = OpenStore(store=store, port=port, offer=offer)
        for name in (*generation.members, *generation.leavers):
            self._send_form(name, job, generation)

    def withdraw(self, job: Job, number: int) -> None:
        self._close_store((job.job_id, number))
        for member in job.members:
            self._send(member.name, protocol.Abort(generation=number))

    def ask_to_stop(self, name: MemberName, *, grace_seconds: float, reason: str) -> None:
        """Once a connection: a trainer that comes back is asked again."""
        connection = self._connections.get(name)
        if connection is not None and not connection.asked_to_stop:
            connection.asked_to_stop = True
            connection.send(protocol.Stop(grace_seconds=grace_seconds, reason=reason))

    def tidy(self, job: Job) -> None:
        """Close stores that no group needs any more, and connections of members that are gone."""
        keep = {g.number for g in (job.offered, job.running) if g is not None and not job.is_over}
        for key in [k for k in self._stores if k[0] == job.job_id and k[1] not in keep]:
            self._close_store(key)
        for member in job.members:
            if member.state is MemberState.GONE and member.name in self._connections:
                self._connections.pop(member.name).writer.close()

    def _close_store(self, key: tuple[JobId, int]) -> None:
        found = self._stores.pop(key, None)
        if found is not None:
            found.store.close()

    def _send(self, name: MemberName, message: protocol.Message) -> None:
        connection = self._connections.get(name)
        if connection is not None:
            connection.send(message)

    def _send_form(self, name: MemberName, job: Job, generation: Generation) -> None:
        opened = self._stores.get((job.job_id, generation.number))
        if opened is None:
            return
        message = protocol.Form(
            generation=generation.number,
            rank=generation.members.index(name) if name in generation.members else -1,
            world=len(generation.members),
            store_host=self.host,
            store_port=opened.port,
            source=generation.source,
            checkpoint=generation.checkpoint,
            older=opened.offer.older,
            may_begin_anew=opened.offer.may_begin_anew,
        )
        self._send(name, message)

    def _welcome(self, job: Job) -> protocol.Welcome:
        spec = job.spec
        return protocol.Welcome(
            metrics_url=self._metrics_url,
            sample_token=sample_token(self._signing_key, job.job_id, job.attempt),
            mark_seconds=self._settings.mark_seconds,
            checkpoint_directory=str(self._checkpoint_directory_of(job)),
            checkpoint_every_steps=spec.checkpoint_every_steps if spec is not None else 200,
            reconnect_seconds_max=self._settings.reconnect_seconds_max,
        )

    # -- connections ------------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection. Whatever is wrong with it ends it, and nothing else."""
        if len(self._writers) >= self._settings.connections_max:
            writer.transport.abort()
            return
        self._writers.add(writer)
        try:
            writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(_FIRST_LINE_SECONDS):
                knock = protocol.decode(await reader.readuntil(b"\n"))
                if not isinstance(knock, protocol.Knock):
                    raise protocol.ProtocolError(f"a connection does not begin with {knock.KIND}")
                writer.write(protocol.encode(self._proof_for(knock)))
                first = protocol.decode(await reader.readuntil(b"\n"))
            match first:
                case protocol.Admit():
                    await self._admit(first, writer)
                case protocol.Hello():
                    await self._converse(first, reader, writer)
                case _:
                    raise protocol.ProtocolError(f"{first.KIND} is no question")
        except protocol.ProtocolError as exc:
            self._log.warning("bad_line", reason=str(exc))
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
            pass  # it broke: the trainer comes back
        finally:
            self._writers.discard(writer)
            writer.close()

    def _proof_for(self, knock: protocol.Knock) -> protocol.Proof:
        """Given to whoever asks, also about a job that is not known any more: its trainers are to hear that."""
        job_id, _, _ = knock.member.partition("/")
        return protocol.Proof.of(knock, token=trainer_token(self._signing_key, job_id))

    async def _admit(self, message: protocol.Admit, writer: asyncio.StreamWriter) -> None:
        """Hold the question until the commit that answers it.

        Whoever asks again has given up its former connection. That one is let go, or a long outage of Postgres would
        fill this process with them. Names that were never committed are refused here, and so take no room.
        """
        name = MemberName(message.member)
        view = self._known(name, message.token)
        if view is None or view.job.member(name) is None:
            await self._refuse(writer, "the job has ended, or the token is wrong")
            return
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        key = (name, message.nonce)
        former = self._answers.get(key)
        if former is not None:
            _leave_unanswered(former)
        self._answers[key] = answer
        view.asking[name] = message.nonce
        self._memory.wake.set()
        try:
            refusal = await answer
        finally:
            if self._answers.get(key) is answer:
                del self._answers[key]
        if refusal:
            await self._refuse(writer, refusal)
        else:
            writer.write(protocol.encode(protocol.Admitted()))
            await writer.drain()

    async def _converse(
        self, hello: protocol.Hello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        name = MemberName(hello.member)
        view = self._known(name, hello.token)
        refusal = self._refusal_of(hello, view)
        if view is None or refusal:
            await self._refuse(writer, refusal)
            return
        former = self._connections.pop(name, None)
        if former is not None:
            former.writer.transport.abort()
        connection = Connection(member=name, writer=writer)
        self._connections[name] = connection
        view.reports[name] = to_report(hello, view.reports.get(name), now=self._clock.monotonic())
        connection.send(self._welcome(view.job))
        self._repeat_offer(view, name)
        self._memory.wake.set()
        try:
            while True:
                self._hear(name, protocol.decode(await reader.readuntil(b"\n")))
        finally:
            if self._connections.get(name) is connection:
                del self._connections[name]
                self._memory.report(name, connected=False)
                self._memory.wake.set()

    def _repeat_offer(self, view: JobView, name: MemberName) -> None:
        """A member that lost its connection may not have heard of the offer that is out."""
        offered, report = view.job.offered, view.reports[name]
        if offered is None or name not in (*offered.members, *offered.leavers):
            return
        if offered.number not in (report.formed, report.generation):
            self._send_form(name, view.job, offered)

    def _hear(self, name: MemberName, message: protocol.Message) -> None:
        view = self._memory.view_of(name)
        before = view.reports.get(name) if view is not None else None
        if view is None or before is None:
            return
        match message:
            case protocol.CheckpointWritten():
                written = Checkpoint(generation=message.generation, step=message.step, location=message.location)
                view.note_checkpoint(written)
            case protocol.CheckpointFailed():
                view.failure = (message.generation, message.step, message.reason)
                self._log.warning("checkpoint_failed", job_id=view.job.job_id, step=message.step)
            case _:
                pass
        after = apply_message(before, message, now=self._clock.monotonic())
        view.reports[name] = after
        if is_news(message, before, after):
            self._memory.wake.set()

    def _refusal_of(self, hello: protocol.Hello, view: JobView | None) -> str:
        member: Member | None = view.job.member(MemberName(hello.member)) if view is not None else None
        if hello.version != protocol.PROTOCOL_VERSION:
            return f"this server speaks version {protocol.PROTOCOL_VERSION} of the trainer's protocol"
        if view is None or member is None:
            return "the job has ended, or the token is wrong"
        if member.nonce != hello.nonce:
            return "another process has this name"
        if member.state is not MemberState.ADMITTED or member.attempt != hello.attempt:
            return "this member is gone"
        return ""

    def _known(self, name: MemberName, token: str) -> JobView | None:
        """The job that the token belongs to, compared in constant time."""
        view = self._memory.view_of(name)
        given = sha256(token.encode("utf-8", "replace")).digest()
        expected = view.stored.token_hash if view is not None else bytes(32)
        return view if hmac.compare_digest(given, expected) and view is not None else None

    async def _refuse(self, writer: asyncio.StreamWriter, reason: str) -> None:
        self._log.info("refused", reason=reason)
        writer.write(protocol.encode(protocol.Refused(reason=reason)))
        await writer.drain()


def _leave_unanswered(answer: asyncio.Future[str]) -> None:
    """End its connection: whoever asks stays without an answer, and asks again."""
    if not answer.done():
        answer.set_exception(ConnectionAbortedError())
