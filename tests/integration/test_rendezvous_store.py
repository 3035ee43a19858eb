"""The rendezvous store against Paddle's own TCPStore client and its gloo group."""

import multiprocessing
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.execution.membership.rendezvous import KEY_BYTES_MAX, VALUE_BYTES_MAX, RendezvousStore

core = pytest.importorskip("paddle.base.core")


@pytest.fixture
def store() -> Iterator[tuple[RendezvousStore, int]]:
    server = RendezvousStore()
    port = server.start()
    yield server, port
    server.close()


def client(port: int):
    return core.TCPStore("127.0.0.1", port, False, 0, 20)


def test_commands_of_paddles_client(store: tuple[RendezvousStore, int]) -> None:
    _, port = store
    one, two = client(port), client(port)
    assert one.add("count", 3) == 3
    assert two.add("count", -5) == -2
    one.set("key", b"\x00value\xff" * 100)
    assert two.get("key") == b"\x00value\xff" * 100
    two.wait("key")


def test_a_value_that_comes_late_is_waited_for(store: tuple[RendezvousStore, int]) -> None:
    _, port = store
    waiter, setter = client(port), client(port)
    threading.Timer(0.2, setter.set, ("late", b"v")).start()
    began = time.monotonic()
    assert waiter.get("late") == b"v"
    assert 0.15 < time.monotonic() - began < 2


def test_closing_releases_who_waits(store: tuple[RendezvousStore, int]) -> None:
    server, port = store
    waiter = client(port)
    raised: list[float] = []

    def wait() -> None:
        with pytest.raises(ValueError, match=r"\S"):
            waiter.get("never")
        raised.append(time.monotonic())

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    closed = time.monotonic()
    server.close()
    thread.join(5)
    assert raised
    assert raised[0] - closed < 0.5


def form(port: int, rank: int, world: int, results) -> None:
    os.environ["PADDLE_TRAINER_ID"] = str(rank)
    import paddle

    began = time.monotonic()
    group = core.ProcessGroupGloo.create(client(port), rank, world, 7)
    took = time.monotonic() - began
    total = paddle.to_tensor([float(rank + 1)])
    group.all_reduce(total, core.ReduceOp.SUM, True).wait()
    results.put((took, total.item()))


def test_gloo_group_forms_and_outlives_the_store(store: tuple[RendezvousStore, int]) -> None:
    _, port = store
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=form, args=(port, rank, 3, results)) for rank in range(3)]
    for process in processes:
        process.start()
    got = [results.get(timeout=30) for _ in processes]
    for process in processes:
        process.join(10)
    assert [total for _, total in got] == [6.0, 6.0, 6.0]


def raw(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), 5)
    connection.settimeout(5)
    return connection


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<iQ", 9, 1) + b"k",
        struct.pack("<iQ", 3, KEY_BYTES_MAX + 1),
        struct.pack("<iQ", 3, 1) + b"k" + struct.pack("<Q", VALUE_BYTES_MAX + 1),
        struct.pack("<iQ", 3, 1) + b"k" + struct.pack("<Q", 1) + b"x" + struct.pack("<iQ", 0, 1) + b"k" + bytes(8),
    ],
    ids=["http", "command", "key", "value", "not a number"],
)
def test_what_is_no_request_costs_only_its_own_connection(
    store: tuple[RendezvousStore, int], request_bytes: bytes
) -> None:
    _, port = store
    good = client(port)
    with raw(port) as bad:
        bad.sendall(request_bytes)
        assert bad.recv(1) == b""
    assert good.add("count", 1) == 1


def test_a_request_may_come_byte_by_byte(store: tuple[RendezvousStore, int]) -> None:
    _, port = store
    with raw(port) as slow:
        for byte in struct.pack("<iQ", 0, 1) + b"k" + struct.pack("<q", 41):
            slow.sendall(bytes([byte]))
            time.sleep(0.001)
        assert struct.unpack("<q", slow.recv(8)) == (41,)
        # two requests in one packet, the first of which must wait
        slow.sendall(struct.pack("<iQ", 4, 1) + b"w" + struct.pack("<iQ", 0, 1) + b"k" + struct.pack("<q", 1))
        with raw(port) as other:
            other.sendall(struct.pack("<iQ", 3, 1) + b"w" + struct.pack("<Q", 0))
            other.sendall(struct.pack("<iQ", 2, 1) + b"w" + struct.pack("<iQ", 2, 1) + b"x")
            assert struct.unpack("<ii", other.recv(8, socket.MSG_WAITALL)) == (2, 3)
        assert slow.recv(4, socket.MSG_WAITALL) == struct.pack("<i", 1)
        assert struct.unpack("<q", slow.recv(8, socket.MSG_WAITALL)) == (42,)


def test_closing_twice_and_an_address_of_another_host() -> None:
    server = RendezvousStore()
    server.start()
    server.close()
    server.close()
    with pytest.raises(OSError, match="assign"):
        RendezvousStore().start("192.0.2.1")


def test_who_asks_much_and_takes_no_answer_costs_little_memory(store: tuple[RendezvousStore, int]) -> None:
    """One packet holds thousands of requests, each for a great value."""
    _, port = store
    good = client(port)
    good.set("great", b"x" * VALUE_BYTES_MAX)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = high_water_bytes()
    with raw(port) as greedy:
        greedy.sendall((struct.pack("<iQ", 1, 6) + b"/great") * 1000)
        time.sleep(0.2)  # it has arrived; the second of these comes in a later round than it
        assert [good.add("count", 1) for _ in range(2)] == [1, 2]
    assert high_water_bytes() - before < 64 << 20


def high_water_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
