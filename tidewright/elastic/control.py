"""The connection to execution: a thread that says hello, reports, listens, and comes back when it is cut."""

import os
import random
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from tidewright import protocol

CONNECT_SECONDS: Final = 5.0
BACK_OFF_SECONDS_FIRST: Final = 0.02
RECONNECT_SECONDS_MAX: Final = 0.25
PROOF_SECONDS: Final = 10.0
"""Who listens and says nothing for so long is let go."""
PROOF_LOOK_SECONDS: Final = 0.5
MARK_SECONDS: Final = 0.5
UNSENT_BYTES_MAX: Final = 1 << 20
UNACKNOWLEDGED_MILLISECONDS_MAX: Final = 15_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Speaker:
    """Where the connection gets what it says, each made when it is sent.

    ``hello`` opens every connection, once the other side has proven to know its token; ``standing`` follows it: words
    that must not be lost with a connection; ``mark`` is the regular report.
    """

    hello: Callable[[], protocol.Hello]
    standing: Callable[[], Sequence[protocol.Message]]
    mark: Callable[[], protocol.Mark]
    on_message: Callable[[protocol.Message], None]


class Control:
    """While the connection is cut nothing is queued: the next hello tells all. Training never waits for it."""

    def __init__(self, address: tuple[str, int], speaker: Speaker) -> None:
        self._address = address
        self._speaker = speaker
        self._lock = threading.Lock()
        self._words: deque[protocol.Message] = deque()
        self._connected = False
        self._closing = False
        self._flushed = threading.Event()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._mark_seconds = MARK_SECONDS
        self._reconnect_seconds_max = RECONNECT_SECONDS_MAX
        self._jitter = random.SystemRandom()
        self._thread = threading.Thread(target=self._run, name="tide-control", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, word: protocol.Message) -> None:
        """From any thread, without waiting."""
        with self._lock:
            if self._connected:
                self._words.append(word)
        self._rouse()

    def flush(self, seconds: float) -> bool:
        """Wait until what was said has been handed to the kernel; False if it was not within ``seconds``."""
        self._flushed.clear()
        self._rouse()
        return self._flushed.wait(seconds)

    def close(self, seconds: float) -> None:
        self.flush(seconds)
        self._closing = True
        self._rouse()
        self._thread.join(seconds)

    def _rouse(self) -> None:
        with suppress(OSError):
            os.eventfd_write(self._wake, 1)

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        back_off = BACK_OFF_SECONDS_FIRST
        while not self._closing:
            try:
                connection = self._connect()
            except OSError:
                time.sleep(back_off * (0.5 + self._jitter.random()))
                back_off = min(2 * back_off, self._reconnect_seconds_max)
                continue
            with connection:
                if self._talk(connection):
                    back_off = BACK_OFF_SECONDS_FIRST
            with self._lock:
                self._connected = False
                self._words.clear()
            if not self._closing:
                time.sleep(back_off * (0.5 + self._jitter.random()))
                back_off = min(2 * back_off, self._reconnect_seconds_max)

    def _connect(self) -> socket.socket:
        connection = socket.create_connection(self._address, CONNECT_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MILLISECONDS_MAX)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setblocking(False)
        return connection

    def _talk(self, connection: socket.socket) -> bool:
        """One connection until it is cut; True if it was answered."""
        talk = _Talk(connection)
        if not self._is_execution(talk):
            return False
        with self._lock:
            self._words.clear()
            self._connected = True
        talk.say(self._speaker.hello())
        next_mark = time.monotonic() + self._mark_seconds
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        while not self._closing and talk.is_open:
            with self._lock:
                words = list(self._words)
                self._words.clear()
            for word in words:
                talk.say(word)
            now = time.monotonic()
            if now >= next_mark:
                next_mark = now + self._mark_seconds
                if talk.welcomed:
                    talk.say(self._speaker.mark())
            talk.write()
            if not talk.unsent and not self._words:
                self._flushed.set()
            poll.register(connection, select.POLLIN | (select.POLLOUT if talk.unsent else 0))
            poll.poll(max(0.0, next_mark - time.monotonic()) * 1000)
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            for message in talk.read():
                self._hear(talk, message)
        return talk.welcomed

    def _is_execution(self, talk: "_Talk") -> bool:
        """Whether the one who listens proves it in time: a stranger is neither obeyed nor told anything."""
        hello = self._speaker.hello()
        knock = protocol.Knock(member=hello.member)
        talk.say(knock)
        talk.write()
        give_up = time.monotonic() + PROOF_SECONDS
        poll = select.poll()
        poll.register(talk.connection, select.POLLIN)
        while talk.is_open and not self._closing and time.monotonic() < give_up:
            poll.poll(PROOF_LOOK_SECONDS * 1000)
            match talk.read():
                case []:
                    continue
                case [protocol.Proof() as proof]:
                    return proof.is_of(knock, token=hello.token)
                case _:
                    return False
        return False

    def _hear(self, talk: "_Talk", message: protocol.Message) -> None:
        if isinstance(message, protocol.Welcome):
            self._mark_seconds = min(10.0, max(0.01, message.mark_seconds))
            self._reconnect_seconds_max = min(60.0, max(0.02, message.reconnect_seconds_max))
            if not talk.welcomed:
                talk.welcomed = True
                for word in self._speaker.standing():
                    talk.say(word)
        self._speaker.on_message(message)


class _Talk:
    """Lines over one connection that does not block."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._received = bytearray()
        self.unsent = bytearray()
        self.is_open = True
        self.welcomed = False

    def say(self, message: protocol.Message) -> None:
        self.unsent += protocol.encode(message)
        if len(self.unsent) > UNSENT_BYTES_MAX:  # nobody reads: begin anew
            self.is_open = False

    def write(self) -> None:
        try:
            while self.unsent:
                del self.unsent[: self.connection.send(self.unsent)]
        except BlockingIOError:
            return
        except OSError:
            self.is_open = False

    def read(self) -> list[protocol.Message]:
        messages: list[protocol.Message] = []
        try:
            while chunk := self.connection.recv(65_536):
                self._received += chunk
            self.is_open = False
        except BlockingIOError:
            pass
        except OSError:
            self.is_open = False
        *lines, rest = bytes(self._received).split(b"\n")
        self._received = bytearray(rest)
        if len(rest) > protocol.LINE_BYTES_MAX:
            self.is_open = False
        for line in lines:
            try:
                messages.append(protocol.decode(line))
            except protocol.ProtocolError:  # of a later version: its meaning is unknown here
                continue
        return messages
