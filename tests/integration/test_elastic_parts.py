"""Connection, watchdog, samples and gradients, each with the real thing at its other end."""

import http.server
import json
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from services.execution.membership.rendezvous import RendezvousStore
from tests.integration.elastic_bed import wait_until
from tidewright import protocol
from tidewright.elastic import calls as calls_module
from tidewright.elastic import control as control_module
from tidewright.elastic.agreement import Flags
from tidewright.elastic.backend import paddle, prepare_backend
from tidewright.elastic.control import Control, Speaker
from tidewright.elastic.errors import GroupBroken
from tidewright.elastic.gradients import reduce_gradients
from tidewright.elastic.group import Group, form_group
from tidewright.elastic.samples import Sampler, Section, Stopwatch, Where
from tidewright.elastic.standing import Identity, Standing

# -- the connection -------------------------------------------------------------------------------------------


class Line:
    """The other end of a trainer's connection; a stranger's if it knows another ``token``."""

    def __init__(self, listener: socket.socket, *, token: str = "t") -> None:
        self.connection, _ = listener.accept()
        self.connection.settimeout(5)
        self.lines = self.connection.makefile("rb")
        self.say(protocol.Proof.of(self.hear(protocol.Knock), token=token))

    def hear(self, kind: type[protocol.Message]) -> Any:
        while True:
            word = protocol.decode(self.lines.readline())
            if isinstance(word, kind):
                return word

    def say(self, *words: protocol.Message | bytes) -> None:
        for word in words:
            self.connection.sendall(word if isinstance(word, bytes) else protocol.encode(word))

    def close(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.lines.close()
        self.connection.close()


WELCOME = protocol.Welcome(
    metrics_url="",
    sample_token="",
    mark_seconds=0.02,
    checkpoint_directory="",
    checkpoint_every_steps=1,
    reconnect_seconds_max=0.05,
)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(5)
        yield listener


@pytest.fixture
def accept(listener: socket.socket) -> Iterator[Callable[..., Line]]:
    lines: list[Line] = []

    def accept(**options: str) -> Line:
        lines.append(Line(listener, **options))
        return lines[-1]

    yield accept
    for line in lines:
        line.close()


@pytest.fixture
def standing() -> Standing:
    return Standing(Identity(token="t", member="j/worker/0/1", nonce="n", attempt=2, pid=7))


@pytest.fixture
def quick_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "PROOF_SECONDS", 0.1)


@pytest.fixture
def control(listener: socket.socket, standing: Standing) -> Iterator[tuple[Control, list[protocol.Message]]]:
    heard: list[protocol.Message] = []
    speaker = Speaker(
        hello=lambda: standing.hello(formed=4),
        standing=standing.kept,
        mark=lambda: standing.mark(generations=1),
        on_message=heard.append,
    )
    control = Control(("127.0.0.1", listener.getsockname()[1]), speaker)
    control.start()
    yield control, heard
    control.close(1)


def test_hello_tells_what_is_held_and_marks_follow(
    accept: Callable[[], Line], standing: Standing, control: tuple[Control, list[protocol.Message]]
) -> None:
    standing.set(generation=3, rank=1, world=2, step=17, waiting=True)
    line = accept()
    first = protocol.decode(line.lines.readline())
    assert isinstance(first, protocol.Hello)
    line.close()
    line = accept()  # the first hello may have been made before the state was set
    hello = line.hear(protocol.Hello)
    assert (hello.generation, hello.formed, hello.step, hello.rank, hello.world) == (3, 4, 17, 1, 2)
    assert (hello.waiting, hello.attempt, hello.version) == (True, 2, protocol.PROTOCOL_VERSION)
    line.say(WELCOME)
    standing.enter_phase("evaluating")
    began = time.monotonic()
    while line.hear(protocol.Mark).phase != "evaluating":
        pass
    for _ in range(10):
        line.hear(protocol.Mark)
    assert time.monotonic() - began < 2


def test_a_stranger_on_the_port_is_neither_obeyed_nor_told_anything(
    accept: Callable[..., Line], control: tuple[Control, list[protocol.Message]]
) -> None:
    orders = (WELCOME, protocol.Stop(grace_seconds=0, reason="go"), protocol.Refused(reason="go"))
    for _ in range(2):
        line = accept(token="a guess")
        with suppress(OSError):
            line.say(*orders)
        with suppress(ConnectionResetError):
            assert line.lines.read() == b""
    line = accept()
    line.hear(protocol.Hello)
    line.say(WELCOME)
    wait_until(lambda: control[1] == [WELCOME])


def test_who_listens_and_says_nothing_is_let_go(
    quick_proof: None,
    listener: socket.socket,
    accept: Callable[..., Line],
    control: tuple[Control, list[protocol.Message]],
) -> None:
    silent = [listener.accept()[0] for _ in range(2)]
    accept().hear(protocol.Hello)
    for connection in silent:
        connection.close()


def test_words_that_count_are_said_after_every_welcome(
    accept: Callable[[], Line], standing: Standing, control: tuple[Control, list[protocol.Message]]
) -> None:
    finished = protocol.Finished(generation=2, step=9)
    control[0].send(standing.keep(finished))
    for _ in range(3):
        line = accept()
        line.hear(protocol.Hello)
        line.say(WELCOME)
        assert line.hear(protocol.Finished) == finished
        line.close()


def test_lines_of_a_later_version_are_passed_over(
    accept: Callable[[], Line], control: tuple[Control, list[protocol.Message]]
) -> None:
    line = accept()
    line.hear(protocol.Hello)
    line.say(WELCOME, b'{"t":"of_the_future"}\n', b"nonsense\n", protocol.Abort(generation=4))
    wait_until(lambda: protocol.Abort(generation=4) in control[1])


def test_a_line_without_end_costs_the_connection_only(
    accept: Callable[[], Line], control: tuple[Control, list[protocol.Message]]
) -> None:
    line = accept()
    line.hear(protocol.Hello)
    line.say(WELCOME, b"x" * (protocol.LINE_BYTES_MAX + 70_000))
    again = accept()
    again.hear(protocol.Hello)
    again.say(protocol.Abort(generation=5))
    wait_until(lambda: protocol.Abort(generation=5) in control[1])


def test_sending_never_waits_for_one_who_does_not_read(
    accept: Callable[[], Line], control: tuple[Control, list[protocol.Message]]
) -> None:
    line = accept()
    line.hear(protocol.Hello)
    line.say(WELCOME)
    wait_until(lambda: WELCOME in control[1])
    began = time.monotonic()
    for number in range(60_000):
        control[0].send(protocol.Waiting(generation=number, step=0, reason="x" * 100))
    assert time.monotonic() - began < 5
    accept()  # it has given the silent one up and comes anew


# -- the watchdog ---------------------------------------------------------------------------------------------


def make_group(world: int = 2) -> Group:
    form = protocol.Form(generation=1, rank=0, world=world, store_host="", store_port=0, source=0, checkpoint="")
    return Group(form, backend=prepare_backend(), store=None, process_group=None, side_group=None)


@pytest.fixture
def cut_off() -> Iterator[tuple[Group, socket.socket]]:
    """A group with one peer, and the peer's end: closing it is the peer's death."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        own = socket.create_connection(listener.getsockname())
        peer, _ = listener.accept()
    group = make_group()
    group.adopt_sockets([os.dup(own.fileno())], to_store=[])
    yield group, peer
    group.drop_broken()
    own.close()
    peer.close()


class Collective:
    """Under way until ``released``."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.released = threading.Event()

    def wait(self) -> None:
        self.begun.set()
        self.released.wait()


def test_a_collective_that_never_comes_back_is_given_up_and_the_process_goes_on(
    cut_off: tuple[Group, socket.socket],
) -> None:
    group, peer = cut_off
    said: list[str] = []
    group.watch(lambda _: said.append("broken"))
    stuck = Collective()
    threading.Thread(target=lambda: stuck.begun.wait() and peer.close(), daemon=True).start()
    with pytest.raises(GroupBroken, match="did not come back"):
        group._run(lambda: stuck)
    assert said == ["broken"]
    with pytest.raises(GroupBroken, match="a peer is gone"):
        group._run(Collective)
    stuck.released.set()


def test_a_collective_that_raises_after_the_cut_says_why(cut_off: tuple[Group, socket.socket]) -> None:
    group, peer = cut_off
    group.watch(lambda _: None)

    class Raises(Collective):
        def wait(self) -> None:
            peer.close()
            time.sleep(0.05)
            raise RuntimeError("headline\nconnection closed by peer")

    with pytest.raises(GroupBroken, match=r"^connection closed by peer$"):
        group._run(Raises)


def test_who_recovers_does_not_wait_for_the_watchdog(
    cut_off: tuple[Group, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls_module, "HUNG_SECONDS", 60.0)
    group, peer = cut_off
    said: list[str] = []
    group.watch(lambda _: said.append("broken"))
    slow = Collective()

    def release() -> None:
        slow.begun.wait()
        peer.close()
        wait_until(lambda: said == ["broken"])
        time.sleep(0.05)  # the watchdog sees the call through
        slow.released.set()

    threading.Thread(target=release, daemon=True).start()
    group._run(lambda: slow)
    began = time.monotonic()
    group.drop_broken()
    assert time.monotonic() - began < 30


# -- samples --------------------------------------------------------------------------------------------------


class Metrics(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    reports: list[tuple[str, str | None, dict[str, Any]]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.reports.append((self.path, self.headers["Authorization"], body))
        self.send_response(202)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


FIELDS = (
    *("job_id", "attempt", "member", "generation", "rank", "world", "sequence", "wall_seconds", "step_seconds"),
    *(
        "sync_seconds",
        "input_wait_seconds",
        "steps",
        "samples",
        "loss",
        "step",
        "total_steps",
        "utilisation",
        "measure",
    ),
)


def test_samples_say_where_the_time_went(standing: Standing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidewright.elastic.samples.REPORT_SECONDS", 0.2)
    Metrics.reports = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metrics)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    watch = Stopwatch()
    sampler = Sampler(watch, standing.sample, on_gpu=False)
    sampler.start()
    sampler.send_to(Where(url="http://127.0.0.1:1", token="x"))  # nobody is there: dropped
    time.sleep(0.3)
    assert Metrics.reports == []
    sampler.send_to(Where(url=f"http://127.0.0.1:{server.server_address[1]}", token="secret"))
    time.sleep(0.3)
    assert Metrics.reports == [], "nothing to tell before the first generation"
    standing.set(generation=2, rank=1, world=4, step=30, total_steps=100, loss=0.5)
    for _ in range(30):
        for section in (Section.STEP, Section.SYNC, Section.INPUT):
            watch.enter(section)
            time.sleep(0.01)
        standing.count(samples=8)
    watch.enter(Section.IDLE)
    wait_until(lambda: sum(body["steps"] for *_, body in Metrics.reports) == 30, 5)
    sampler.stop()
    time.sleep(0.3)
    path, authorization, body = Metrics.reports[1]
    assert (path, authorization) == ("/v1/samples", "Bearer secret")
    assert set(body) == {*FIELDS}
    assert (body["job_id"], body["member"], body["attempt"], body["measure"]) == ("j", "j/worker/0/1", 2, "wall")
    assert (body["generation"], body["rank"], body["world"], body["utilisation"]) == (2, 1, 4, None)
    assert sum(body["samples"] for *_, body in Metrics.reports) == 240
    assert [body["sequence"] for *_, body in Metrics.reports] == list(range(1, len(Metrics.reports) + 1))
    for *_, body in Metrics.reports:
        busy = body["step_seconds"] + body["sync_seconds"] + body["input_wait_seconds"]
        assert busy <= body["wall_seconds"] * 1.001
    server.shutdown()
    server.server_close()


# -- gradients ------------------------------------------------------------------------------------------------


def member(port: int, rank: int, results: Any) -> None:
    """Three parameters: used by all, by rank 0 only, by nobody. Rank 2 has borrowed its sample."""
    form = protocol.Form(
        generation=3, rank=rank, world=3, store_host="127.0.0.1", store_port=port, source=0, checkpoint=""
    )
    group = form_group(form, prepare_backend(), on_store=os.close)
    parameters = [paddle.create_parameter([2], "float32") for _ in range(3)]
    half = paddle.create_parameter([2], "float32").astype("float16")
    half.stop_gradient = False
    loss = parameters[0].sum() * (rank + 1)
    if rank == 0:
        loss = loss + parameters[1].sum()
    loss.backward()
    agreement = reduce_gradients(
        parameters,
        paddle.to_tensor(float(rank + 1)),
        group,
        Flags(samples=2 - rank, ready_generation=9, stop=rank == 1),
        counts=rank != 2,
        read_flags=True,
    )
    gradients = [None if p.grad is None else p.grad.numpy().tolist() for p in parameters]
    results.put((rank, agreement, gradients))
    results.close()
    results.join_thread()
    group.meet()
    os._exit(0)


def test_gradients_are_summed_and_what_nobody_uses_stays_without() -> None:
    store = RendezvousStore()
    port = store.start()
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=member, args=(port, rank, results)) for rank in range(3)]
    for process in processes:
        process.start()
    got = sorted((results.get(timeout=20) for _ in processes), key=lambda entry: entry[0])
    for process in processes:
        process.join(10)
    store.close()
    for _, agreement, gradients in got:
        assert (agreement.loss, agreement.samples, agreement.swap, agreement.stop) == (3.0, 3, True, True)
        assert gradients == [[3.0, 3.0], [1.0, 1.0], None]
