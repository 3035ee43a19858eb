"""One run with at least twenty random resizes, kills and outages; its result must be that of an undisturbed one.

How many, and the seed, come from TIDE_CHAOS_COUNT and TIDE_CHAOS_SEED; a failure names its seed.
"""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.integration.elastic_bed import ZygoteBed, is_alive
from tests.integration.elastic_coordinator import ElasticBed, largest_difference
from tidewright import protocol

COUNT = int(os.environ.get("TIDE_CHAOS_COUNT", "20"))
SEED = int(os.environ.get("TIDE_CHAOS_SEED", "1"))
EPOCHS = 20_000
STEPS_PER_EPOCH = 7
WORKERS_MAX = 4
KILLS = ("kill", "kill_newcomer", "kill_in_swap", "kill_in_outage")


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZygoteBed]:
    bed = ZygoteBed(tmp_path_factory.mktemp("chaos"))
    bed.start()
    yield bed
    bed.stop()


class Chaos:
    """A careless administrator and, in ``mend``, a careful one."""

    def __init__(self, bed: ElasticBed, seed: int, **options: str) -> None:
        self.bed = bed
        self.rng = random.Random(seed)
        self.options = options
        self.count = 0
        self.gone: set[str] = set()
        self.done: Counter[str] = Counter()

    def alive(self) -> list[str]:
        return [n for n, m in self.bed.members.items() if n not in self.gone and is_alive(m.worker_pid)]

    def view(self, name: str) -> tuple[int, bool]:
        """Generation and whether it waits, by its newest report; a start may be told before any."""
        peer = self.bed.coordinator.peers[name]
        if peer.mark is not None and peer.mark.generation:
            return peer.mark.generation, peer.mark.waiting
        started = peer.said(protocol.Started)
        return (started.generation, False) if started is not None else (0, False)

    def newcomer(self) -> str:
        self.count += 1
        name = f"m{self.count}"
        self.bed.start(name, epochs=EPOCHS, delay=0.01, **self.options)
        return name

    def kill(self, name: str) -> None:
        self.gone.add(name)
        os.kill(self.bed.members[name].worker_pid, signal.SIGKILL)

    # -- what is done ----------------------------------------------------------------------------------------------

    def act(self) -> None:
        alive = self.alive()
        possible = ["outage"]
        if len(alive) > 1:
            possible += ["shrink", "shrink", "kill", "kill_in_outage"]
        if len(alive) < WORKERS_MAX:
            possible += ["grow", "grow", "exchange", "kill_newcomer"]
        if 1 < len(alive) < WORKERS_MAX:
            possible += ["kill_in_swap", "kill_in_swap"]
        action = self.rng.choice(possible)
        self.done[action] += 1
        getattr(self, f"do_{action}")(alive)

    def do_grow(self, alive: list[str]) -> None:
        newcomers = [self.newcomer() for _ in range(self.rng.randint(1, WORKERS_MAX - len(alive)))]
        self.resize([*alive, *newcomers], leavers=[])

    def do_shrink(self, alive: list[str]) -> None:
        staying = self.rng.sample(alive, self.rng.randint(1, len(alive) - 1))
        self.resize(staying, leavers=[n for n in alive if n not in staying])

    def do_exchange(self, alive: list[str]) -> None:
        """A newcomer for a member, in one change; a single member first grows to two."""
        if len(alive) == 1:
            self.do_grow(alive)
            alive = self.alive()
        leaver = self.rng.choice(alive)
        newcomers = [self.newcomer()] if len(alive) < WORKERS_MAX else []
        self.resize([*(n for n in alive if n != leaver), *newcomers], leavers=[leaver])

    def do_kill(self, alive: list[str]) -> None:
        time.sleep(self.rng.random() * 0.05)
        self.kill(self.rng.choice(alive))

    def do_kill_newcomer(self, alive: list[str]) -> None:
        """Any time from before it has formed to after its first steps; sometimes a member is leaving for it."""
        name = self.newcomer()
        staying = alive[:-1] if len(alive) > 1 and self.rng.random() < 0.5 else alive
        number = self.bed.coordinator.offer([*staying, name], leavers=[n for n in alive if n not in staying])
        time.sleep(self.rng.random() * 0.2)
        self.kill(name)
        self.abort(number)

    def do_kill_in_swap(self, alive: list[str]) -> None:
        """An old member, rank 0 and the source of the state included."""
        name = self.newcomer()
        number = self.bed.coordinator.offer([*alive, name])
        time.sleep(self.rng.random() * 0.2)
        self.kill(self.rng.choice(alive))
        self.abort(number)

    def do_outage(self, alive: list[str]) -> None:
        self.bed.coordinator.down()
        time.sleep(self.rng.random() * 0.3)
        self.bed.coordinator.up()

    def do_kill_in_outage(self, alive: list[str]) -> None:
        self.bed.coordinator.down()
        self.kill(self.rng.choice(alive))
        time.sleep(self.rng.random() * 0.3)
        self.bed.coordinator.up()

    def resize(self, members: list[str], *, leavers: list[str]) -> None:
        number = self.bed.coordinator.resize(members, leavers=leavers)
        for name in leavers:
            self.bed.finish_quietly(name)
            self.gone.add(name)
        assert all(self.bed.coordinator.peers[n].said(protocol.Started, number) for n in members)

    def abort(self, number: int) -> None:
        """As execution does when it sees that a member of its offer has died."""
        for name in self.alive():
            self.bed.coordinator.tell(name, protocol.Abort(generation=number))

    # -- what is made good -----------------------------------------------------------------------------------------

    def mend(self) -> None:
        """Offer until all that live step in one generation."""
        c = self.bed.coordinator
        deadline = time.monotonic() + 60
        while True:
            assert time.monotonic() < deadline, f"not mended: {[(n, self.view(n)) for n in self.alive()]}"
            time.sleep(0.1)
            self.see_who_left()
            alive = self.alive()
            views = {name: self.view(name) for name in alive}
            stepping = [n for n in alive if views[n][0] and not views[n][1]]
            holding = [n for n in alive if views[n][0] and views[n][1]]
            numbers = {views[n][0] for n in stepping}
            if len(numbers) > 1 or (stepping and holding and max(views[n][0] for n in holding) <= max(numbers)):
                continue  # they have not all noticed yet
            if len(stepping) == len(alive) and self.group_size(stepping[0]) == len(alive):
                return
            assert stepping or holding, f"the state is lost: {self.unexpected_ends() or views}"
            members = [*(stepping or holding), *(n for n in alive if n not in (stepping or holding))]
            source = 0 if stepping else c.most_advanced(holding)
            self.wait_for(c.offer(members, source=source), members)

    def unexpected_ends(self) -> dict[str, str]:
        """Whoever ended by itself, with its exit record and the end of its log."""
        ended = [n for n, m in self.bed.members.items() if n not in self.gone and not is_alive(m.worker_pid)]
        return {n: f"{self.bed.members[n].exit()}: {self.bed.members[n].log[-500:]}" for n in ended}

    def see_who_left(self) -> None:
        for name in self.alive():
            if "left" in self.bed.kinds(name)[-1:]:
                self.bed.finish_quietly(name)
                self.gone.add(name)

    def group_size(self, name: str) -> int:
        word = self.bed.coordinator.peers[name].said(protocol.Started, self.view(name)[0])
        return word.world if word is not None else 0

    def wait_for(self, number: int, members: list[str]) -> None:
        peers = self.bed.coordinator.peers
        end = time.monotonic() + 5
        while time.monotonic() < end:
            if any(peers[n].said(protocol.FormFailed, number) for n in members):
                self.abort(number)
                return
            if all(peers[n].said(protocol.Started, number) for n in members):
                return
            time.sleep(0.02)


@pytest.mark.parametrize(
    ("dtype", "optimizer", "tolerance"), [("float64", "adam", 1e-12), ("float32", "momentum", 1e-5)]
)
def test_twenty_resizes_and_kills_equal_an_undisturbed_run(
    zygote: ZygoteBed, tmp_path: Path, dtype: str, optimizer: str, tolerance: float
) -> None:
    bed = ElasticBed.make(zygote, tmp_path)
    chaos = Chaos(bed, SEED, dtype=dtype, optimizer=optimizer)
    print(f"TIDE_CHAOS_SEED={SEED} TIDE_CHAOS_COUNT={COUNT}")
    bed.coordinator.resize([chaos.newcomer()], source=-1)
    while chaos.done.total() - chaos.done["outage"] < COUNT:
        chaos.act()
        chaos.mend()
    names = chaos.alive()
    bed.coordinator.tell(names[0], protocol.Stop(grace_seconds=10, reason="enough"))
    bed.finish(*names)
    check(bed, chaos, tolerance)
    bed.close()


def check(bed: ElasticBed, chaos: Chaos, tolerance: float) -> None:
    training = bed.training(finished=False)
    assert training.faults == ()
    total = len(training.steps)
    changes = sum(a.generation != b.generation for a, b in pairwise(training.steps))
    assert changes >= chaos.done.total() - chaos.done["outage"] - chaos.done["kill_newcomer"]
    whole = total // STEPS_PER_EPOCH
    assert training.samples == whole * 97 + min(16 * (total % STEPS_PER_EPOCH), 97)
    stopped = [p for p in (bed.base / "checkpoints").glob("g*") if int(p.name.partition("-s")[2]) == total]
    assert len(stopped) == 1
    with np.load(stopped[0] / "tensors.npz") as archive:
        end = [archive[f"t{i}"] for i in range(4)]
    difference = largest_difference(end, bed.alone_until(total, **chaos.options))
    kills = sum(chaos.done[kind] for kind in KILLS)
    print(
        f"{total} steps in {changes + 1} generations, worlds {sorted({s.world for s in training.steps})}, "
        f"{kills} kills, {training.repeated} steps done again, "
        f"{sum(e['k'] == 'fell_back' for e in bed.entries())} falls back, difference {difference:.1e}; "
        f"{dict(chaos.done)}"
    )
    assert difference < tolerance
