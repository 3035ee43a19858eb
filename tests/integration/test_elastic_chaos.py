"""Random resizes, kills and outages of the control plane; the result must be that of an undisturbed run.

Seconds and seed come from TIDE_CHAOS_SECONDS and TIDE_CHAOS_SEED; a failure names its seed.
"""

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.integration.elastic_bed import ZygoteBed, is_alive, wait_until
from tests.integration.elastic_coordinator import ElasticBed, largest_difference
from tidewright import protocol

EPOCHS = 20_000
WORKERS_MAX = 4


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[ElasticBed]:
    zygote = ZygoteBed(tmp_path / "zygote")
    zygote.start()
    bed = ElasticBed.make(zygote, tmp_path)
    yield bed
    bed.close()
    zygote.stop()


class Chaos:
    """A careless administrator and, in ``mend``, a careful one."""

    def __init__(self, bed: ElasticBed, seed: int) -> None:
        self.bed = bed
        self.rng = random.Random(seed)
        self.count = 0
        self.killed: set[str] = set()
        self.done: dict[str, int] = {}

    def alive(self) -> list[str]:
        return [n for n, m in self.bed.members.items() if n not in self.killed and is_alive(m.worker_pid)]

    def view(self, name: str) -> tuple[int, bool]:
        """Generation and whether it waits, by its newest report."""
        mark = self.bed.coordinator.peers[name].mark
        return (mark.generation, mark.waiting) if mark is not None else (0, False)

    def newcomer(self) -> str:
        self.count += 1
        name = f"m{self.count}"
        self.bed.start(name, epochs=EPOCHS, delay=0.01)
        return name

    def kill(self, name: str) -> None:
        self.killed.add(name)
        os.kill(self.bed.members[name].worker_pid, signal.SIGKILL)

    def act(self) -> None:
        action = self.rng.choice(["grow", "grow", "shrink", "kill", "kill_forming", "outage", "swap_member"])
        self.done[action] = self.done.get(action, 0) + 1
        c, alive = self.bed.coordinator, self.alive()
        if action == "grow" and len(alive) < WORKERS_MAX:
            for _ in range(self.rng.randint(1, WORKERS_MAX - len(alive))):
                self.newcomer()
        elif action == "shrink" and len(alive) > 1:
            staying = alive[: self.rng.randint(1, len(alive) - 1)]
            number = c.offer(staying, leavers=[n for n in alive if n not in staying])
            wait_until(lambda: c.peers[staying[0]].said(protocol.Started, number), 20, "shrunk")
            for name in alive[len(staying) :]:
                assert self.bed.members[name].exit()["code"] == 0
                self.killed.add(name)
        elif action == "kill" and len(alive) > 1:
            self.kill(self.rng.choice(alive))
        elif action in ("kill_forming", "swap_member") and len(alive) < WORKERS_MAX:
            name = self.newcomer()
            staying = alive[:-1] if action == "swap_member" and len(alive) > 1 else alive
            number = c.offer([*staying, name], leavers=[n for n in alive if n not in staying])
            time.sleep(self.rng.random() * 0.15)
            self.kill(name)
            for other in alive:
                if is_alive(self.bed.members[other].worker_pid):
                    c.tell(other, protocol.Abort(generation=number))
        elif action == "outage":
            c.down()
            time.sleep(self.rng.random() * 0.5)
            if self.rng.random() < 0.5 and len(alive) > 1:
                self.kill(self.rng.choice(alive))
            c.up()

    def mend(self) -> None:
        """Offer until all that live step in one generation."""
        c = self.bed.coordinator
        deadline = time.monotonic() + 60
        while True:
            assert time.monotonic() < deadline, f"not mended: {[(n, self.view(n)) for n in self.alive()]}"
            time.sleep(0.25)
            for name in self.alive():
                if not is_alive(self.bed.members[name].worker_pid):
                    continue
                if "left" in self.bed.kinds(name)[-1:]:
                    self.bed.finish_quietly(name)
                    self.killed.add(name)
            alive = self.alive()
            views = {name: self.view(name) for name in alive}
            stepping = [n for n in alive if views[n][0] and not views[n][1]]
            holding = [n for n in alive if views[n][0] and views[n][1]]
            if stepping:
                numbers = {views[n][0] for n in stepping}
                if len(numbers) > 1 or (holding and max(views[n][0] for n in holding) <= max(numbers)):
                    continue
                world = c.peers[stepping[0]].said(protocol.Started)
                group_size = world.world if world is not None else 0
                if len(stepping) == len(alive) and group_size == len(alive):
                    return
                members, source = [*stepping, *(n for n in alive if n not in stepping)], 0
            elif holding:
                members = [*holding, *(n for n in alive if n not in holding)]
                source = c.most_advanced(holding)
            else:
                members, source = alive, -1
            number = c.offer(members, source=source)
            end = time.monotonic() + 5
            while time.monotonic() < end:
                if any(c.peers[n].said(protocol.FormFailed, number) for n in members):
                    for name in self.alive():
                        c.tell(name, protocol.Abort(generation=number))
                    break
                if all(c.peers[n].said(protocol.Started, number) for n in members):
                    break
                time.sleep(0.02)


def test_chaos(bed: ElasticBed) -> None:
    seconds = float(os.environ.get("TIDE_CHAOS_SECONDS", "6"))
    seed = int(os.environ.get("TIDE_CHAOS_SEED", "1"))
    chaos = Chaos(bed, seed)
    chaos.newcomer()
    chaos.mend()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        chaos.act()
        chaos.mend()
    names = chaos.alive()
    bed.coordinator.tell(names[0], protocol.Stop(grace_seconds=10, reason="enough"))
    bed.finish(*names)
    print(f"seed {seed}: {chaos.done}, {bed.coordinator.generation} generations")
    check(bed, chaos.killed)


def check(bed: ElasticBed, killed: set[str]) -> None:
    """A step counts once; it is repeated only if all who had applied it were killed before anyone else had."""
    applied: dict[int, dict[int, list[str]]] = {}
    begun: dict[tuple[int, int], dict[int, list[int]]] = {}
    worlds: dict[int, int] = {}
    for name, member in bed.members.items():
        for entry in member.ledger():
            if entry["k"] == "applied":
                applied.setdefault(entry["step"], {}).setdefault(entry["generation"], []).append(name)
            elif entry["k"] == "begun":
                begun.setdefault((entry["step"], entry["generation"]), {})[entry["rank"]] = entry["ids"]
                worlds[entry["generation"]] = entry["world"]
    total = max(applied) + 1
    epochs: dict[int, list[int]] = {}
    for step in range(total):
        *older, last = sorted(applied[step])
        for generation in older:
            assert set(applied[step][generation]) <= killed, f"step {step}: {applied[step]}"
        ranks = begun[step, last]
        assert sorted(ranks) == list(range(worlds[last])), f"step {step}"
        epochs.setdefault(step // 7, []).extend(i for ids in ranks.values() for i in ids)
    for epoch, ids in epochs.items():
        if (epoch + 1) * 7 <= total:
            assert sorted(ids) == list(range(97)), f"data epoch {epoch}"
    stopped = [p for p in (bed.base / "checkpoints").glob("g*") if int(p.name.partition("-s")[2]) == total]
    assert len(stopped) == 1
    with np.load(stopped[0] / "tensors.npz") as archive:
        end = [archive[f"t{i}"] for i in range(4)]
    alone = bed.alone_until(total)
    assert largest_difference(end, alone) < 1e-12
    print(f"{total} steps, {len(killed)} members lost or left, worlds {sorted(set(worlds.values()))}")
