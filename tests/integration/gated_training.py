"""A real training script that a test can hold at chosen places, and what its ledgers say afterwards."""

import asyncio
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from integration.elastic_bed import is_alive, wait_until
from integration.execution_bed import NAMES, ExecutionBed

from schemas.events.worker import GroupChanged, GroupEnded, GroupStarted
from schemas.vocabulary import Mode

SCRIPT = '''
import os, signal, sys, threading, time
from pathlib import Path
import numpy as np
import paddle
from tidewright import elastic
from tidewright.elastic import offers

gates, steps, delay = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
index, incarnation = os.environ["TIDE_MEMBER"].split("/")[2:]
me = f"{index}-{incarnation}"


def pass_gate(name):
    """While the gate is there, stay; ``.at`` files tell who does."""
    while (gates / name).exists():
        (gates / f"{name}.at.{me}").touch()
        time.sleep(0.01)


def tell_formed(job):
    while True:
        generation = job._offers.formed_generation if job._offers is not None else 0
        if generation:
            (gates / f"formed-{generation}.at.{me}").touch()
        time.sleep(0.01)


on_form = offers.Offers.on_form


def stop_in_formation(self, form):
    """An offer has come, and this process stands still before it takes part in it."""
    if (gates / f"forming-{me}").exists():
        (gates / f"forming-{me}").unlink()
        os.kill(os.getpid(), signal.SIGSTOP)
    on_form(self, form)


offers.Offers.on_form = stop_in_formation
inputs = np.random.RandomState(0).rand(steps * 12, 4).astype("float64")
paddle.seed(1)
paddle.set_default_dtype("float64")
model = paddle.nn.Linear(4, 1)
optimizer = paddle.optimizer.Momentum(learning_rate=0.01, parameters=model.parameters())
pass_gate(f"join-{me}")
pass_gate("join")
with elastic.join() as job:
    job.track(model, optimizer)
    seen = {}
    threading.Thread(target=tell_formed, args=(job,), daemon=True).start()
    for step in job.steps((inputs, inputs[:, 0]), global_batch=12, epochs=1):
        seen[job.generation] = seen.get(job.generation, 0) + 1
        pass_gate(f"step-{step.index}")
        pass_gate(f"world-{job.world}")
        pass_gate(f"world-{job.world}-{seen[job.generation]}")
        with job.phase("evaluating"):
            pass_gate(f"evaluating-{me}")
        job.apply(((model(step.inputs)[:, 0] - step.labels) ** 2).sum() / step.global_batch)
        time.sleep(delay)
    pass_gate("finished")
'''


@dataclass
class GatedJob:
    """One job on an execution bed; its gates are files of a folder of its own."""

    bed: ExecutionBed
    gates: Path
    name: str = field(default_factory=lambda: next(NAMES))
    steps: int = 100_000
    delay: float = 0.05
    workers: int = 2

    async def begin(self, *, minimum: int = 1, trains: bool = True, **spec: Any) -> None:
        self.gates.mkdir(parents=True, exist_ok=True)
        script = self.gates / "gated.py"
        script.write_text(SCRIPT)
        await self.bed.submit(
            self.name,
            mode=Mode.LIVE,
            script=str(script),
            args=(str(self.gates), str(self.steps), str(self.delay)),
            **{"checkpoint_every_steps": 1_000_000, **spec},
        )
        await self.bed.grant(self.name, self.workers, minimum=minimum)
        if trains:
            await self.trains()

    async def begin_without_admission(self) -> None:
        """Worker 0 is forked and recorded, and never asks for admission: it waits for a reader of its log."""
        log = self.bed.directory(self.name) / "log"
        log.parent.mkdir(parents=True)
        os.mkfifo(log)
        await self.begin(trains=False)
        await self.until(lambda: self.pid(0) is not None, "it is forked")

    async def trains(self) -> None:
        await self.bed.event(GroupStarted, self.name, seconds=60)

    # -- gates ------------------------------------------------------------------------------------------------

    def close(self, *gates: str) -> None:
        for gate in gates:
            (self.gates / gate).touch()

    def open(self, *gates: str) -> None:
        for gate in gates:
            (self.gates / gate).unlink(missing_ok=True)

    async def at(self, gate: str, *members: str, seconds: float = 30.0) -> None:
        """Until so many as are named (``index-incarnation``) stand at the gate, or have passed the mark."""
        await self.until(
            lambda: all((self.gates / f"{gate}.at.{who}").exists() for who in members),
            f"{members} at {gate}",
            seconds,
        )

    async def until(self, condition: Any, what: str, seconds: float = 30.0) -> None:
        """Asks nothing of execution, which may be dead."""
        await asyncio.to_thread(wait_until, condition, seconds, f"{self.name}: {what}")

    # -- looking ------------------------------------------------------------------------------------------------

    def pid(self, index: int, incarnation: int = 1) -> int | None:
        record = self.bed.record(self.name, index, incarnation)
        return record["worker_pid"] if record is not None else None

    def pids(self, *indices: int) -> dict[int, int | None]:
        return {index: self.pid(index) for index in indices}

    def assert_alive(self, pids: dict[int, int | None]) -> None:
        """The same processes as before, still there."""
        assert self.pids(*pids) == pids, self.name
        assert all(pid is not None and is_alive(pid) for pid in pids.values()), self.name

    def ledger(self) -> list[dict[str, Any]]:
        paths = sorted(self.bed.state.glob(f"run/{self.name}/*/ledger.jsonl"))
        return [json.loads(line) for path in paths for line in path.read_text().splitlines() if line.endswith("}")]

    def applied(self) -> dict[int, set[int]]:
        """Generations in which each step was applied."""
        found: dict[int, set[int]] = {}
        for line in self.ledger():
            if line["k"] == "applied":
                found.setdefault(line["step"], set()).add(line["generation"])
        return found

    async def steps_beyond(self, step: int, *, seconds: float = 30.0) -> None:
        await self.until(lambda: max(self.applied(), default=0) > step, f"steps beyond {step}", seconds)

    def assert_each_step_once(self) -> None:
        found = self.applied()
        assert sorted(found) == list(range(len(found))), self.name
        assert not {step: generations for step, generations in found.items() if len(generations) > 1}, self.name

    async def incarnations(self) -> dict[int, int]:
        """The highest incarnation that was ever committed, by index."""
        found: dict[int, int] = {}
        for member in await self.bed.members(self.name):
            found[member["index"]] = max(found.get(member["index"], 0), member["incarnation"])
        return found

    async def lost(self) -> list[str]:
        return [each.member for change in await self.bed.events(GroupChanged, self.name) for each in change.lost]

    async def is_whole(self, workers: int, *, seconds: float = 60.0) -> None:
        """Until the last group that is known to have started has so many."""

        async def look() -> bool:
            changes = await self.bed.events(GroupChanged, self.name)
            return bool(changes) and changes[-1].workers == workers

        await self.bed.until(look, seconds, f"{self.name} trains with {workers}")

    async def end(self, *, seconds: float = 30.0) -> GroupEnded:
        """Evict it, and give the end."""
        await self.bed.evict(self.name, grace=10)
        return await self.bed.event(GroupEnded, self.name, seconds=seconds)
