"""Server of Paddle's TCPStore (3.3.1) in pure Python: where the members of one generation find each other."""

import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from enum import IntEnum
from typing import Final

KEY_BYTES_MAX: Final = 4096
VALUE_BYTES_MAX: Final = 1 << 20
STORE_BYTES_MAX: Final = 64 << 20
OUTBOUND_BYTES_MAX: Final = 4 * VALUE_BYTES_MAX
CONNECTIONS_MAX: Final = 4096
_ACCEPT_PAUSE_SECONDS: Final = 0.01
_LENGTH: Final = struct.Struct("<Q")
_INT32: Final = struct.Struct("<i")
_INT64: Final = struct.Struct("<q")


class _Command(IntEnum):
    ADD = 0
    GET = 1
    CHECK = 2
    SET = 3
    WAIT = 4


class _Reply(IntEnum):
    STOP_WAIT = 1
    READY = 2
    NOT_READY = 3


class _BadRequest(Exception):
    """Not this protocol, or beyond a limit: the connection is closed."""


class _Client:
    """One connection: bytes that came and are not yet a request, bytes that are not yet taken."""

    __slots__ = ("awaited", "inbound", "outbound", "socket")

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.inbound = bytearray()
        self.outbound = bytearray()
        self.awaited: tuple[_Command, bytes] | None = None
        """The request that waits for its key; what was sent behind it stays in ``inbound``."""


class RendezvousStore:
    """The store of one generation. ``close`` cancels a half-formed rendezvous: every blocked member raises at once.

    One thread of its own, so that a busy event loop does not slow the forming of a group. Whatever is sent is
    answered without delay: Paddle's client keeps Nagle's algorithm on, and each answer that the kernel would hold
    back to be merged costs it 40 ms.
    """

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._stored_bytes = 0
        self._waiting: dict[bytes, list[_Client]] = {}
        self._clients: set[_Client] = set()
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="rendezvous", daemon=True)

    def start(self, host: str = "127.0.0.1") -> int:
        """Listen on a free port of ``host`` and return it. Raises OSError if the address cannot be bound."""
        try:
            self._listener.bind((host, 0))
            self._listener.listen(512)
        except OSError:
            for handle in (self._listener, self._wake, self._woken, self._selector):
                handle.close()
            raise
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        port: int = self._listener.getsockname()[1]
        self._thread.start()
        return port

    def close(self) -> None:
        """Stop answering and drop every connection. Idempotent; returns once the port is free again."""
        if self._thread.is_alive():
            with suppress(OSError):
                self._wake.send(b"x")
            self._thread.join()
        for handle in (self._listener, self._wake, self._woken):
            handle.close()

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                for key, events in self._selector.select():
                    if key.fileobj is self._woken:
                        return
                    if key.fileobj is self._listener:
                        self._accept()
                    else:
                        self._serve(key.data, events)
        finally:
            for client in list(self._clients):
                self._drop(client)
            self._selector.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it gave up before its turn, or no descriptor is left: others go on
            time.sleep(_ACCEPT_PAUSE_SECONDS)  # the second shows again at once
            return
        if len(self._clients) >= CONNECTIONS_MAX:
            connection.close()
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _acknowledge_at_once(connection)
        client = _Client(connection)
        self._clients.add(client)
        self._selector.register(connection, selectors.EVENT_READ, client)

    def _serve(self, client: _Client, events: int) -> None:
        if client not in self._clients:  # dropped earlier in this round
            return
        try:
            if events & selectors.EVENT_READ:
                chunk = client.socket.recv(65_536)
                _acknowledge_at_once(client.socket)
                if not chunk:
                    self._drop(client)
                    return
                client.inbound += chunk
                self._answer_all(client)
            self._flush(client)
        except BlockingIOError:
            return
        except (OSError, _BadRequest):
            self._drop(client)

    def _answer_all(self, client: _Client) -> None:
        """Answer the whole requests that have come; stop at one that must wait for its key."""
        while client.awaited is None:
            request = _parse(client.inbound)
            if request is None:
                return
            command, key, argument, size = request
            del client.inbound[:size]
            self._answer(client, command, key, argument)
            if len(client.outbound) > OUTBOUND_BYTES_MAX:  # within the loop: one packet holds thousands of requests
                self._flush(client)
        if len(client.inbound) > KEY_BYTES_MAX + VALUE_BYTES_MAX:
            raise _BadRequest("sends on without waiting for its answer")

    def _answer(self, client: _Client, command: _Command, key: bytes, argument: bytes) -> None:
        if command is _Command.SET:
            self._put(key, argument)
        elif command is _Command.ADD:
            total = self._counter(key) + _INT64.unpack(argument)[0]
            if not -(1 << 63) <= total < 1 << 63:
                raise _BadRequest("the counter overflows")
            self._put(key, str(total).encode())
            client.outbound += _INT64.pack(total)
        elif command is _Command.CHECK:
            client.outbound += _INT32.pack(_Reply.READY if key in self._values else _Reply.NOT_READY)
        elif key in self._values:
            client.outbound += self._found(command, key)
        else:
            client.awaited = (command, key)
            self._waiting.setdefault(key, []).append(client)

    def _counter(self, key: bytes) -> int:
        try:
            return int(self._values.get(key, b"0"))
        except ValueError as exc:
            raise _BadRequest("ADD to a value that is no number") from exc

    def _found(self, command: _Command, key: bytes) -> bytes:
        if command is _Command.WAIT:
            return _INT32.pack(_Reply.STOP_WAIT)
        return _LENGTH.pack(len(self._values[key])) + self._values[key]

    def _put(self, key: bytes, value: bytes) -> None:
        before = len(key) + len(self._values[key]) if key in self._values else 0
        stored = self._stored_bytes - before + len(key) + len(value)
        if stored > STORE_BYTES_MAX:
            raise _BadRequest("the store is full")
        self._stored_bytes = stored
        self._values[key] = value
        for waiter in self._waiting.pop(key, ()):
            self._release(waiter)

    def _release(self, waiter: _Client) -> None:
        if waiter not in self._clients or waiter.awaited is None:
            return
        waiter.outbound += self._found(*waiter.awaited)
        waiter.awaited = None
        try:
            self._answer_all(waiter)
            self._flush(waiter)
        except (OSError, _BadRequest):
            self._drop(waiter)

    def _flush(self, client: _Client) -> None:
        if client.outbound:
            with suppress(BlockingIOError):
                del client.outbound[: client.socket.send(client.outbound)]
        if len(client.outbound) > OUTBOUND_BYTES_MAX:
            raise _BadRequest("takes no answers")
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.outbound else 0)
        if self._selector.get_key(client.socket).events != wanted:
            self._selector.modify(client.socket, wanted, client)

    def _drop(self, client: _Client) -> None:
        self._clients.discard(client)
        if client.awaited is not None:
            others = self._waiting.get(client.awaited[1], [])
            if client in others:
                others.remove(client)
        self._selector.unregister(client.socket)
        with suppress(OSError):
            client.socket.shutdown(socket.SHUT_RDWR)
        client.socket.close()


def _acknowledge_at_once(connection: socket.socket) -> None:
    """The kernel forgets this option, so it is set anew after every read."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


def _parse(buffer: bytearray) -> tuple[_Command, bytes, bytes, int] | None:
    """The first request of ``buffer`` as (command, key, argument, its size in bytes); None while it is not whole."""
    if len(buffer) < 12:
        return None
    try:
        command = _Command(_INT32.unpack_from(buffer)[0])
    except ValueError as exc:
        raise _BadRequest("unknown command") from exc
    parts = _lengths(buffer, command)
    key = next(parts)
    argument = next(parts) if key is not None else None
    if key is None or argument is None:
        return None
    return command, bytes(buffer[key]), bytes(buffer[argument]), argument.stop


def _lengths(buffer: bytearray, command: _Command) -> Iterator[slice | None]:
    """Where the key stands, then where the argument stands; None for what has not come yet."""
    key = _counted(buffer, 4, KEY_BYTES_MAX)
    yield key
    if key is None:
        return
    if command is _Command.SET:
        yield _counted(buffer, key.stop, VALUE_BYTES_MAX)
        return
    end = key.stop + (_INT64.size if command is _Command.ADD else 0)
    yield slice(key.stop, end) if len(buffer) >= end else None


def _counted(buffer: bytearray, start: int, limit: int) -> slice | None:
    """A length and so many bytes, at ``start``."""
    begin = start + _LENGTH.size
    if len(buffer) < begin:
        return None
    (length,) = _LENGTH.unpack_from(buffer, start)
    if length > limit:
        raise _BadRequest(f"{length} bytes exceed the limit of {limit}")
    return slice(begin, begin + length) if len(buffer) >= begin + length else None
