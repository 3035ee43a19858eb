"""Everyone who held the state is killed, disks refuse checkpoints, all of them are damaged: seen through the CLI."""

import os
import resource
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from integration.elastic_bed import read_json
from integration.elastic_coordinator import SCRIPT
from integration.launched import Launched, is_alive, launched, until

from tidewright.client import Client
from tidewright.elastic import shelf
from tidewright.elastic.proof import read_ledgers, read_training

EPOCHS = 60
STEPS = EPOCHS * 7
LARGER = SCRIPT.replace("nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5)", "nn.Linear(12, 600), nn.Linear(600, 5)")


@pytest.fixture(scope="module")
def installation() -> Iterator[Launched]:
    with launched() as found:
        yield found


@pytest.fixture(scope="module")
def client(installation: Launched) -> Iterator[Client]:
    with Client(installation.url) as found:
        yield found


@dataclass
class Run:
    """One live job that takes its time until it is told to hurry; checkpoints of 250 KB every 5 steps."""

    installation: Launched
    client: Client
    folder: Path
    job: str

    @property
    def checkpoints(self) -> Path:
        return self.installation.state / "jobs" / self.job / "checkpoints"

    @property
    def members(self) -> Path:
        return self.installation.state / "run" / self.job

    def history(self, text: str, *, seconds: float = 60) -> dict[str, Any]:
        """The last entry of the history that has the text, as soon as there is one; the CLI shows it too."""

        def look() -> dict[str, Any] | None:
            return next((e for e in reversed(list(self.client.history(self.job))) if text in e["summary"]), None)

        entry = until(f"history says {text!r}", look, seconds=seconds)
        done = self.installation.tide("history", self.job)
        assert entry["summary"] in done.stdout, done.stdout + done.stderr
        return entry

    def why(self, says: Callable[[str], bool]) -> None:
        until("why", lambda: says(self.client.why(self.job)["summary"]))
        assert says(self.installation.tide("why", self.job).stdout)

    def records(self) -> list[dict[str, Any]]:
        """Of members whose worker is alive."""
        found = [read_json(path) for path in self.members.glob("*/pid.json")]
        return [record for record in found if record and is_alive(record["worker_pid"])]

    def written(self, count: int) -> list[Path]:
        """Until so many checkpoints are there; the newest first."""

        def look() -> list[Path]:
            found = shelf.found_in(self.checkpoints)
            return found if len(found) >= count else []

        return until(f"{count} checkpoints", look, seconds=60)

    def stop_everyone(self) -> list[dict[str, Any]]:
        """From here on nobody steps, and nobody writes."""
        members = self.records()
        for record in members:
            os.kill(record["worker_pid"], signal.SIGSTOP)
        return members

    def last_step(self) -> int:
        """Steps applied by now, by the ledgers."""
        return max(entry.step + 1 for entry in read_ledgers(self.members) if entry.kind == "applied")

    def succeeds(self) -> int:
        """It ends well, with every step and every sample used once; how many steps were done again."""
        (self.folder / "hurry").touch()
        done = self.installation.tide("wait", self.job, "--timeout", "120", timeout=150)
        assert done.returncode == 0, done.stdout + done.stderr
        training = read_training(read_ledgers(self.members), finished=True)
        assert training.faults == ()
        assert len(training.steps) == STEPS
        return training.repeated


@pytest.fixture
def start(installation: Launched, client: Client, tmp_path: Path) -> Callable[[int], Run]:
    def begin(workers: int) -> Run:
        (tmp_path / "train.py").write_text(LARGER)
        size = ("--min", str(workers), "--max", str(workers), "--checkpoint-every", "5")
        script = ("--working-directory", str(tmp_path), str(tmp_path / "train.py"))
        job = installation.submit(*size, *script, "--", "--epochs", str(EPOCHS), "--delay", "0.04")
        until("it runs", lambda: client.job(job)["phase"] == "Running", seconds=60)
        return Run(installation, client, tmp_path, job)

    return begin


def kill(members: list[dict[str, Any]]) -> None:
    """Shims first, so that nobody sees the workers' end."""
    for what in ("shim_pid", "worker_pid"):
        for record in members:
            os.kill(record[what], signal.SIGKILL)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def step_of(folder: Path) -> int:
    number = shelf.parse_name(folder.name)
    assert number is not None
    return number[1]


def test_after_the_loss_of_everyone_the_newest_whole_one_goes_on_at_once(start: Callable[[int], Run]) -> None:
    run = start(2)
    run.written(3)
    members = run.stop_everyone()
    assert len(members) == 2
    newest, second, *_ = run.written(3)
    flip(newest / "tensors.npz")
    before = run.last_step()
    kill(members)
    resumed = (
        f"resumed from the checkpoint of step {step_of(second)}; {before - step_of(second)} steps to be done again; "
        f"skipped as not whole: step {step_of(newest)} (tensors.npz is not what was written)"
    )
    entry = run.history("resumed from the checkpoint")
    assert resumed in entry["summary"]
    assert entry["generation"] == 2, "one generation was offered, and it was the right one"
    run.why(lambda text: f"It was {resumed}." in text)
    assert run.succeeds() == before - step_of(second)
    assert run.client.job(run.job)["attempt"] == 1


def test_a_checkpoint_that_does_not_fit_costs_no_training_and_the_next_one_is_tried(
    start: Callable[[int], Run],
) -> None:
    """The kernel lets the workers write no file beyond 128 KiB: as a full disk, on any machine."""
    run = start(2)
    pids = {record["worker_pid"] for record in run.records()}
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (131_072, resource.RLIM_INFINITY))
    entry = run.history("failed, training goes on: [Errno 27] File too large")
    assert entry["type"] == "tide.worker.checkpoint_failed.v1"
    run.why(lambda text: "failed ([Errno 27] File too large); " in text)
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    failed = int(entry["summary"].split()[3])
    until("a later one", lambda: step_of(run.written(1)[0]) > failed)
    run.why(lambda text: "File too large" not in text)
    assert {record["worker_pid"] for record in run.records()} == pids
    assert run.succeeds() == 0


def test_when_all_are_damaged_the_attempt_ends_and_the_next_one_says_that_it_begins_anew(
    start: Callable[[int], Run],
) -> None:
    run = start(1)
    run.written(2)
    members = run.stop_everyone()
    found = run.written(2)
    for folder in found:
        (folder / "values.bin").unlink()
    before = run.last_step()
    kill(members)
    entry = run.history("The processes have ended: failed, attributed to the platform")
    assert "the state of training is lost: no whole checkpoint is left" in entry["summary"]
    entry = run.history("anew from step 0")
    assert f"anew from step 0; {before} steps to be done again; skipped as not whole: " in entry["summary"]
    assert f"step {step_of(found[0])} (values.bin: No such file or directory)" in entry["summary"]
    assert run.succeeds() == before
