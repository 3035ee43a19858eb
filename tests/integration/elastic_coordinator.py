"""A scripted stand-in for execution's membership: it speaks the real protocol and hosts the real rendezvous store."""

import socket
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from services.execution.membership.rendezvous import RendezvousStore
from tests.integration.elastic_bed import Member, ZygoteBed, wait_until
from tidewright import protocol
from tidewright.elastic.proof import Training, read_ledgers, read_training

TOKEN = "token"
SCRIPT = '''
"""A job whose result does not depend on how it was resized; with ``--noise`` only if random numbers go along too."""
import argparse, os, time
import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional
from tidewright import elastic

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--samples", type=int, default=97)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--delay", type=float, default=0.02)
parser.add_argument("--evaluate", type=float, default=0.0)
parser.add_argument("--until", type=int, default=-1)
parser.add_argument("--dtype", default="float64")
parser.add_argument("--optimizer", default="adam")
parser.add_argument("--noise", type=float, default=0.0)
o = parser.parse_args()

paddle.set_default_dtype(o.dtype)
rng = np.random.RandomState(7)
inputs, labels = rng.randn(o.samples, 12).astype(o.dtype), rng.randint(0, 5, o.samples)
paddle.seed(int(os.environ.get("SEED", 3)))
model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5))
schedule = paddle.optimizer.lr.ExponentialDecay(0.02, 0.99)
kind = {"adam": paddle.optimizer.Adam, "momentum": paddle.optimizer.Momentum}[o.optimizer]
optimizer = kind(schedule, parameters=model.parameters(), grad_clip=nn.ClipGradByGlobalNorm(1.0))
with elastic.join() as job:
    job.track(model, optimizer)
    for step in job.steps((inputs, labels), global_batch=o.batch, epochs=o.epochs, seed=5):
        seen = step.inputs + o.noise * paddle.randn([12]) if o.noise else step.inputs  # the same for every rank
        job.apply(functional.cross_entropy(model(seen), step.labels, reduction="sum") / step.global_batch)
        schedule.step()
        if step.index + 1 == o.until:
            break
        time.sleep(0 if os.path.exists("hurry") else o.delay)
    if job.rank == 0:
        with job.phase("evaluating"):
            time.sleep(o.evaluate)
    out = os.environ["TIDE_OUTPUT_DIRECTORY"]
    np.savez(f"{out}/{os.getpid()}.npz", *[p.numpy() for p in model.parameters()], np.array(schedule.last_epoch))
'''


@dataclass
class Peer:
    """What one member has said."""

    name: str
    hello: protocol.Hello | None = None
    mark: protocol.Mark | None = None
    connection: socket.socket | None = None
    words: list[protocol.Message] = field(default_factory=list)

    @property
    def step(self) -> int:
        return max(self.hello.step if self.hello else 0, self.mark.step if self.mark else 0)

    @property
    def waiting(self) -> bool:
        return bool(self.words) and any(isinstance(w, protocol.Waiting) for w in self.words[-2:])

    def said(self, kind: type[protocol.Message], generation: int | None = None) -> Any:
        found = [
            w for w in self.words if isinstance(w, kind) and generation in (None, getattr(w, "generation", None))
        ]
        return found[-1] if found else None


class Coordinator:
    """Listens, admits everyone, notes what is said, and offers what the test tells it to."""

    def __init__(self, checkpoints: Path, *, checkpoint_every_steps: int = 0, metrics_url: str = "") -> None:
        self.welcome = protocol.Welcome(
            metrics_url=metrics_url,
            sample_token="sample-token",
            mark_seconds=0.05,
            checkpoint_directory=str(checkpoints),
            checkpoint_every_steps=checkpoint_every_steps,
            reconnect_seconds_max=0.1,
        )
        self.peers: dict[str, Peer] = {}
        self.generation = 0
        self.port = 0
        self._lock = threading.Lock()
        self._stores: list[RendezvousStore] = []
        self._listener: socket.socket | None = None
        self.up()

    def up(self) -> None:
        listener = socket.create_server(("127.0.0.1", self.port), reuse_port=False)
        self.port = listener.getsockname()[1]
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def down(self) -> None:
        """As a killed process would: every connection is cut, stores included, and nobody listens."""
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        for store in self._stores:
            store.close()
        self._stores.clear()
        for peer in self.peers.values():
            if peer.connection is not None:
                with suppress(OSError):
                    peer.connection.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        peer: Peer | None = None
        with connection, suppress(OSError), connection.makefile("rb") as lines:
            for line in lines:
                word = protocol.decode(line)
                if isinstance(word, protocol.Knock):
                    connection.sendall(protocol.encode(protocol.Proof.of(word, token=TOKEN)))
                elif isinstance(word, protocol.Admit):
                    connection.sendall(protocol.encode(protocol.Admitted()))
                elif isinstance(word, protocol.Hello):
                    peer = self.peers.setdefault(word.member, Peer(word.member))
                    peer.hello, peer.connection = word, connection
                    connection.sendall(protocol.encode(self.welcome))
                elif isinstance(word, protocol.Mark):
                    assert peer is not None
                    peer.mark = word
                else:
                    assert peer is not None
                    peer.words.append(word)

    def tell(self, name: str, word: protocol.Message) -> None:
        """Lost if its connection has just ended, as in reality."""
        connection = self.peers[name].connection
        assert connection is not None
        with suppress(OSError):
            connection.sendall(protocol.encode(word))

    # -- what tests say --------------------------------------------------------------------------------------------

    def connected(self, *names: str, seconds: float = 20) -> None:
        wait_until(lambda: all(n in self.peers for n in names), seconds, f"{names} connect")

    def offer(self, members: Iterable[str], *, leavers: Iterable[str] = (), source: int = 0, **more: Any) -> int:
        """Offer the next generation and return its number. ``more``: further fields of the offer."""
        members = list(members)
        self.generation += 1
        store = RendezvousStore()
        self._stores.append(store)
        port = store.start()
        for rank, name in [*enumerate(members), *((-1, name) for name in leavers)]:
            form = protocol.Form(
                generation=self.generation,
                rank=rank,
                world=len(members),
                store_host="127.0.0.1",
                store_port=port,
                source=source,
                **{"checkpoint": "", **more},
            )
            self.tell(name, form)
        return self.generation

    def started(self, names: Iterable[str], generation: int | None = None, seconds: float = 20) -> None:
        number = self.generation if generation is None else generation
        for name in names:
            wait_until(
                lambda name=name: self.peers[name].said(protocol.Started, number),
                seconds,
                f"{name} starts {number}; it said {self.peers[name].words[-3:]}",
            )

    def resize(self, members: Iterable[str], *, leavers: Iterable[str] = (), source: int = 0, **more: Any) -> int:
        members = list(members)
        number = self.offer(members, leavers=leavers, source=source, **more)
        self.started(members, number)
        return number

    def is_waiting(self, name: str) -> bool:
        peer = self.peers[name]
        return (peer.mark is not None and peer.mark.waiting) or (peer.hello is not None and peer.hello.waiting)

    def waiting(self, names: Iterable[str], seconds: float = 10) -> None:
        for name in names:
            wait_until(lambda name=name: self.is_waiting(name), seconds, f"{name} waits")

    def most_advanced(self, names: Iterable[str]) -> int:
        """Index of the one with the most steps."""
        steps = [self.peers[name].step for name in names]
        return steps.index(max(steps))

    def step(self, name: str) -> int:
        return self.peers[name].step


@dataclass
class ElasticBed:
    """A zygote, a coordinator, and one job's folders."""

    zygote: ZygoteBed
    base: Path
    coordinator: Coordinator
    script: Path
    members: dict[str, Member] = field(default_factory=dict)

    @classmethod
    def make(cls, zygote: ZygoteBed, base: Path, **options: Any) -> "ElasticBed":
        for name in ("out", "checkpoints"):
            (base / name).mkdir()
        script = base / "train.py"
        script.write_text(SCRIPT)
        return cls(zygote, base, Coordinator(base / "checkpoints", **options), script)

    def start(
        self,
        *names: str,
        seed: int = 3,
        interpreter: str | None = None,
        moments: Mapping[str, str] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        """Start workers of the job; ``options`` are the script's. With ``interpreter`` they are not forked.

        ``moments``: what befalls them and when, see ``elastic_moments``.
        """
        arguments = [text for key, value in options.items() for text in (f"--{key.replace('_', '-')}", str(value))]
        for name in names:
            environment = {
                protocol.ADDRESS_VARIABLE: f"127.0.0.1:{self.coordinator.port}",
                protocol.TOKEN_VARIABLE: TOKEN,
                protocol.ATTEMPT_VARIABLE: "1",
                protocol.OUTPUT_DIRECTORY_VARIABLE: str(self.base / "out"),
                "SEED": str(seed),
                **moments,
            }
            member = self.zygote.ask(
                {
                    "op": "start",
                    "directory": str(self.base / "run" / name),
                    "member": name,
                    "nonce": f"n-{name}",
                    "script": str(self.script),
                    "interpreter": interpreter,
                    "args": arguments,
                    "environment": environment,
                    "working_directory": str(self.base),
                }
            )
            self.members[name] = Member(self.base / "run" / name, member)
            self.zygote.members.append(self.members[name])
        self.coordinator.connected(*names)

    def alone(self, **options: Any) -> list[np.ndarray]:
        """The result of the same script without a control plane; run once for all tests of a zygote."""
        key = tuple(sorted(options.items()))
        if key not in self.zygote.undisturbed:
            self.zygote.undisturbed[key] = self._run_alone(options)
        return self.zygote.undisturbed[key]

    def _run_alone(self, options: Mapping[str, Any]) -> list[np.ndarray]:
        arguments = [text for key, value in options.items() for text in (f"--{key}", str(value))]
        folder = self.base / "alone"
        folder.mkdir()
        request = {
            "op": "start",
            "directory": str(folder / "run"),
            "member": "alone",
            "nonce": "n",
            "script": str(self.script),
            "args": [*arguments, "--delay", "0"],
            "environment": {protocol.OUTPUT_DIRECTORY_VARIABLE: str(folder), "SEED": "3"},
        }
        member = Member(folder / "run", self.zygote.ask(request))
        assert member.exit(120)["code"] == 0, member.log
        return load(next(folder.glob("*.npz")))

    def alone_until(self, step: int, **options: Any) -> list[np.ndarray]:
        """The weights after so many steps of one worker that is never disturbed."""
        return self.alone(epochs=20_000, until=step, **options)[:4]

    def finish_quietly(self, name: str) -> None:
        assert self.members[name].exit()["code"] == 0, self.members[name].log

    def results(self) -> list[list[np.ndarray]]:
        return [load(path) for path in sorted((self.base / "out").glob("*.npz"))]

    def finish(self, *names: str, seconds: float = 30) -> None:
        """Have training go on without delays, and see that these end with 0."""
        (self.base / "hurry").touch()
        for name in names:
            record = self.members[name].exit(seconds)
            assert record["code"] == 0, self.members[name].log

    def entries(self) -> list[dict[str, Any]]:
        """All ledgers of the job, in the order of time."""
        found = [entry for member in self.members.values() for entry in member.ledger()]
        return sorted(found, key=lambda entry: entry["t"])

    def training(self, *, finished: bool = True) -> Training:
        """What the ledgers prove."""
        return read_training(read_ledgers(self.base / "run"), finished=finished)

    def applied_once(self, *, samples: int, steps_per_epoch: int, total_steps: int) -> Training:
        """Each step counts in one generation, begun there by all ranks, and each epoch used each sample once."""
        training = self.training()
        assert training.faults == ()
        assert [step.step for step in training.steps] == list(range(total_steps))
        assert training.data_epochs == total_steps // steps_per_epoch
        assert training.samples == samples * training.data_epochs
        return training

    def kinds(self, name: str) -> list[str]:
        return [entry["k"] for entry in self.members[name].ledger()]

    def close(self) -> None:
        self.coordinator.down()


def load(path: Path) -> list[np.ndarray]:
    with np.load(path) as archive:
        return [archive[name] for name in archive.files]


def largest_difference(one: list[np.ndarray], other: list[np.ndarray]) -> float:
    assert [a.shape for a in one] == [b.shape for b in other]
    return max(float(np.max(np.abs(a - b))) for a, b in zip(one, other, strict=True))
