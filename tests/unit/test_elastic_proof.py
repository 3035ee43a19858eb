"""What ledgers prove: every way in which a step may come to count, and every damage that must be noticed."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tidewright.elastic.proof import Entry, Training, main, read_ledgers, read_training

SAMPLES = 8
BATCH = 4
STEPS_PER_EPOCH = 2


@dataclass
class Ledgers:
    """Ledgers as trainers would write them, one second a step. Processes are their pids, in the order of ranks."""

    entries: list[Entry] = field(default_factory=list)
    clock: float = 0.0

    def _write(self, kind: str, step: int, generation: int, rank: int, world: int, pid: int, **more: object) -> None:
        entry = Entry(kind=kind, member=f"m{pid}", at=self.clock, step=step, generation=generation, rank=rank,
                      world=world, pid=pid, **more)  # fmt: skip
        self.entries.append(entry)

    def adopt(
        self, generation: int, step: int, pids: tuple[int, ...], *, parent: int, source: str = "member"
    ) -> None:
        for rank, pid in enumerate(pids):
            self._write("adopted", step, generation, rank, len(pids), pid, parent=parent, source=source)

    def fall_back(self, generation: int, step: int, pids: tuple[int, ...], *, parent: int) -> None:
        for rank, pid in enumerate(pids):
            self._write("fell_back", step, generation, rank, len(pids), pid, parent=parent)

    def finish(self, generation: int, step: int, pids: tuple[int, ...]) -> None:
        for rank, pid in enumerate(pids):
            self._write("finished", step, generation, rank, len(pids), pid)

    def step(
        self, generation: int, step: int, pids: tuple[int, ...], *, applied_by: Iterable[int] | None = None
    ) -> None:
        first = step % STEPS_PER_EPOCH * BATCH
        ids, epoch = tuple(range(first, first + BATCH)), step // STEPS_PER_EPOCH
        for rank, pid in enumerate(pids):
            self._write("begun", step, generation, rank, len(pids), pid, ids=ids[rank :: len(pids)], data_epoch=epoch)
        self.clock += 0.9
        for rank, pid in enumerate(pids):
            if applied_by is None or pid in applied_by:
                self._write("applied", step, generation, rank, len(pids), pid, loss=1.0)
        self.clock += 0.1

    def steps(self, generation: int, steps: range, pids: tuple[int, ...]) -> None:
        for step in steps:
            self.step(generation, step, pids)

    def prove(self, *, finished: bool = True) -> Training:
        return read_training(self.entries, finished=finished)


def two_workers(steps: int) -> Ledgers:
    told = Ledgers()
    told.adopt(1, 0, (11, 12), parent=0, source="fresh")
    told.steps(1, range(steps), (11, 12))
    return told


def generations(training: Training) -> list[int]:
    assert training.faults == ()
    assert [s.step for s in training.steps] == list(range(len(training.steps)))
    return [s.generation for s in training.steps]


# -- how a step may come to count -------------------------------------------------------------------------------


def test_a_step_begun_in_a_failed_generation_counts_where_it_was_applied() -> None:
    """Begun in 2, applied in 1 after falling back: the highest generation does not decide."""
    told = two_workers(2)
    told.adopt(2, 2, (11, 12, 13), parent=1)
    told.step(2, 2, (11, 12, 13), applied_by=())
    told.fall_back(1, 2, (11, 12), parent=1)
    told.steps(1, range(2, 4), (11, 12))
    told.finish(1, 4, (11, 12))
    assert generations(told.prove()) == [1, 1, 1, 1]
    assert told.prove().repeated == 0


@pytest.mark.parametrize("applied_by", [(11,), (12,), (11, 12), (11, 12, 13)])
def test_a_step_applied_in_a_failed_generation_stays_applied(applied_by: tuple[int, ...]) -> None:
    """Some had the sum of 2's first step when its newcomer died; the others get the state in the old group."""
    told = two_workers(2)
    told.adopt(2, 2, (11, 12, 13), parent=1)
    told.step(2, 2, (11, 12, 13), applied_by=applied_by)
    told.fall_back(1, 3, (11, 12), parent=2)
    told.step(1, 3, (11, 12))
    assert generations(told.prove()) == [1, 1, 2, 1]
    assert told.prove().repeated == 0


def test_a_step_that_only_the_dead_had_applied_in_a_failed_generation_is_done_again() -> None:
    told = two_workers(2)
    told.adopt(2, 2, (11, 12, 13), parent=1)
    told.step(2, 2, (11, 12, 13), applied_by=(13,))
    told.fall_back(1, 2, (11, 12), parent=1)
    told.steps(1, range(2, 4), (11, 12))
    assert generations(told.prove()) == [1, 1, 1, 1]
    assert told.prove().repeated == 1


def test_a_step_applied_by_one_rank_counts_when_all_had_begun_it() -> None:
    """Pid 12 was killed between all-reduce and optimizer step."""
    told = two_workers(2)
    told.step(1, 2, (11, 12), applied_by=(11,))
    told.adopt(2, 3, (11, 13), parent=1)
    told.step(2, 3, (11, 13))
    assert generations(told.prove()) == [1, 1, 1, 2]


def test_a_step_that_only_the_dead_had_applied_is_done_again() -> None:
    told = two_workers(2)
    told.step(1, 2, (11, 12), applied_by=(12,))
    told.adopt(2, 2, (11,), parent=1)
    told.steps(2, range(2, 4), (11,))
    assert generations(told.prove()) == [1, 1, 2, 2]
    assert told.prove().repeated == 1


def test_a_newcomer_may_give_up_the_step_of_a_group_that_never_started() -> None:
    """It alone had the sum of its first step; of the old group 12 is left, which may not trust a group unproven."""
    told = two_workers(2)
    told.adopt(2, 2, (11, 13), parent=1)
    told.step(2, 2, (11, 13), applied_by=(13,))
    told.adopt(3, 2, (12, 13), parent=1)
    told.steps(3, range(2, 4), (12, 13))
    assert generations(told.prove()) == [1, 1, 3, 3]
    assert told.prove().repeated == 1


def test_who_goes_on_from_a_checkpoint_repeats_what_nobody_holds() -> None:
    told = two_workers(6)
    told.adopt(2, 2, (21,), parent=1, source="checkpoint")
    told.steps(2, range(2, 8), (21,))
    assert generations(told.prove()) == [1, 1, 2, 2, 2, 2, 2, 2]
    assert told.prove().repeated == 4


def test_a_checkpoint_written_before_its_group_had_stepped_names_the_same_state() -> None:
    """A group that shrinks to one writes at once, under its own number; the state was made in the one before."""
    told = two_workers(2)
    told.adopt(2, 2, (11,), parent=1)
    told.adopt(3, 2, (21, 22), parent=2, source="checkpoint")
    told.steps(3, range(2, 4), (21, 22))
    assert generations(told.prove()) == [1, 1, 3, 3]


def test_a_job_that_lost_everything_begins_anew() -> None:
    told = two_workers(1)
    told.adopt(2, 0, (21,), parent=0, source="fresh")
    told.steps(2, range(2), (21,))
    assert generations(told.prove()) == [2, 2]
    assert told.prove().repeated == 1


def test_what_is_told_counts_samples_and_data_epochs_of_the_line() -> None:
    training = two_workers(4).prove()
    assert (training.samples, training.data_epochs, training.repeated) == (16, 2, 0)
    assert [(s.world, s.loss) for s in training.steps] == [(2, 1.0)] * 4


def test_a_ledger_of_nothing_proves_nothing() -> None:
    assert read_training([], finished=True) == Training(
        steps=(), faults=(), missing=(), repeated=0, samples=0, data_epochs=0
    )


def test_the_last_data_epoch_may_be_incomplete_while_the_job_goes_on() -> None:
    told = two_workers(3)
    assert told.prove(finished=False).faults == ()
    assert told.prove().faults == ("data epoch 1 left out 4 of 8 samples",)


# -- what must be noticed ---------------------------------------------------------------------------------------


def resized() -> Ledgers:
    """1 → 2 workers, a death, a replacement, an end."""
    told = two_workers(4)
    told.adopt(2, 4, (11, 12, 13), parent=1)
    told.steps(2, range(4, 6), (11, 12, 13))
    told.adopt(3, 6, (11, 12), parent=2)
    told.steps(3, range(6, 8), (11, 12))
    told.finish(3, 8, (11, 12))
    return told


def without(kind: str, **where: int) -> Callable[[Ledgers], None]:
    def damage(told: Ledgers) -> None:
        kept = [e for e in told.entries if e.kind != kind or any(getattr(e, k) != v for k, v in where.items())]
        assert len(kept) < len(told.entries)
        told.entries = kept

    return damage


def changed(kind: str, change: dict[str, object], **where: int) -> Callable[[Ledgers], None]:
    def damage(told: Ledgers) -> None:
        before = list(told.entries)
        told.entries = [
            replace(e, **change) if e.kind == kind and all(getattr(e, k) == v for k, v in where.items()) else e
            for e in before
        ]
        assert told.entries != before

    return damage


def applied_twice(told: Ledgers) -> None:
    index = next(i for i, e in enumerate(told.entries) if (e.kind, e.step, e.pid) == ("applied", 2, 12))
    told.entries.insert(index, told.entries[index])


def two_lines_at_once(told: Ledgers) -> None:
    """Generation 2 is cut off and steps on while 3 has begun."""
    told.step(2, 6, (13,))


def rogue(told: Ledgers) -> None:
    """A second trainer that nobody asked for trains alone, from step 0."""
    told.adopt(1, 0, (99,), parent=0, source="fresh")
    told.steps(1, range(8), (99,))


def gone_back(told: Ledgers) -> None:
    """The survivors held step 8, and were handed the state of a checkpoint."""
    told.entries = [e for e in told.entries if e.kind != "finished"]
    told.adopt(4, 6, (11, 12), parent=2, source="checkpoint")
    told.steps(4, range(6, 8), (11, 12))


def tried_again(told: Ledgers) -> None:
    told.adopt(4, 6, (21,), parent=2, source="checkpoint")
    told.steps(4, range(6, 8), (21,))
    told.finish(4, 8, (21,))


def two_ends(told: Ledgers) -> None:
    tried_again(told)
    late = told.clock - 0.5
    told.entries = [replace(e, at=late) if (e.kind, e.generation) == ("finished", 3) else e for e in told.entries]


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (without("begun", step=5, rank=2), "step 5 was begun by ranks 0, 1 of a world of 3"),
        (without("begun", step=5), "step 5 was begun by ranks  of a world of "),
        (without("applied", step=5), "what generation 2 held at step 6 comes from nowhere"),
        (without("applied", step=4), "by pid 13, which held step 4 of generation 2"),
        (without("adopted", generation=2), "which held step 4 of generation 1"),
        (without("adopted", generation=2), "what generation 2 held at step 4 comes from nowhere"),
        (without("adopted", generation=1), "which held no state"),
        (changed("adopted", {"parent": 9}, generation=3), "what generation 9 held at step 6 comes from nowhere"),
        (
            changed("adopted", {"parent": 1}, generation=3, pid=12),
            "generation 3 went on at step 6 from generation 2 and from generation 1",
        ),
        (changed("begun", {"ids": (0, 1)}, step=3, rank=1), "data epoch 1 used 2 samples more than once: 0, 1"),
        (changed("begun", {"ids": ()}, step=3, rank=1), "data epoch 1 left out 2 of 8 samples"),
        (changed("begun", {"ids": (5, 99)}, step=7, rank=1), "sample ids are not 0..n-1"),
        (changed("begun", {"rank": 0}, step=5, pid=13), "step 5 was begun by ranks 0, 1 of a world of 3"),
        (changed("begun", {"world": 2}, step=5, pid=13), "step 5 was begun by ranks 0, 1, 2 of a world of 2, 3"),
        (applied_twice, "step 2 was applied 2 times as rank 1 of generation 1"),
        (two_lines_at_once, "step 6 was applied in generation 2 after generation 3 had gone another way at step 6"),
        (rogue, "step 0 was begun by 3 processes for 2 ranks"),
        (rogue, "step 0 was applied 2 times as rank 0 of generation 1"),
        (rogue, "step 4 was applied in generation 1 after generation 2 had gone another way at step 4"),
        (gone_back, "pid 11 held step 8 of generation 3 and went back to step 6 in generation 4"),
        (two_ends, "generation 3 finished at step 8, generation 4 otherwise"),
    ],
)
def test_damage_is_noticed(damage: Callable[[Ledgers], None], fault: str) -> None:
    told = resized()
    assert told.prove().faults == ()
    damage(told)
    faults = told.prove().faults
    assert any(fault in text for text in faults), faults


def test_a_group_whose_end_nobody_saw_is_tried_again_from_its_last_checkpoint() -> None:
    told = resized()
    tried_again(told)
    training = told.prove()
    assert generations(training)[6:] == [4, 4]
    assert training.repeated == 2


def test_a_group_that_went_on_after_it_had_finished_counts_to_its_last_end() -> None:
    """Its end was not seen, and a script that decides itself when it is enough trains for another epoch."""
    told = resized()
    told.adopt(4, 8, (21,), parent=3, source="checkpoint")
    told.steps(4, range(8, 10), (21,))
    told.finish(4, 10, (21,))
    training = told.prove()
    assert generations(training)[8:] == [4, 4]
    assert training.repeated == 0


def test_a_first_epoch_that_is_not_over_says_nothing_of_the_samples() -> None:
    told = Ledgers()
    told.adopt(1, 0, (11,), parent=0, source="fresh")
    told.step(1, 0, (11,))
    told.entries = [replace(e, ids=(5, 2, 7)) if e.kind == "begun" else e for e in told.entries]
    assert told.prove(finished=False).faults == ()
    assert "sample ids are not 0..n-1" in told.prove().faults[0]


def test_a_record_that_was_written_late_is_no_second_line() -> None:
    """Pid 13 was not scheduled between the sum of 2's first step and its record, while 1 stepped on."""
    told = two_workers(2)
    told.adopt(2, 2, (11, 12, 13), parent=1)
    told.step(2, 2, (11, 12, 13), applied_by=(13,))
    late = told.entries.pop()
    told.fall_back(1, 2, (11, 12), parent=1)
    told.steps(1, range(2, 4), (11, 12))
    told.entries.append(replace(late, at=told.clock))
    assert generations(told.prove(finished=False)) == [1, 1, 1, 1]


# -- from files -------------------------------------------------------------------------------------------------


def write(told: Ledgers, folder: Path) -> None:
    for entry in told.entries:
        line = {"k": entry.kind, "t": entry.at, "parent_generation": entry.parent, "ids": list(entry.ids)}
        for name in ("step", "generation", "rank", "world", "pid", "data_epoch", "loss", "source"):
            line[name] = getattr(entry, name)
        (folder / entry.member).mkdir(parents=True, exist_ok=True)
        with (folder / entry.member / "ledger.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def test_a_jobs_folder_is_read_also_where_lines_are_torn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(resized(), tmp_path)
    with (tmp_path / "m13" / "ledger.jsonl").open("a") as file:
        file.write('{"k":"begun","step":6,"genera')
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == ("8 steps in 3 generations, 32 samples in 4 data epochs, 0 steps done again\n")
    path = tmp_path / "m12" / "ledger.jsonl"
    path.write_text(path.read_text().replace('"begun"', '"begun', 1))
    assert main([str(tmp_path)]) == 1
    assert "FAULT: step 0 was begun by ranks 0 of a world of 2\n" in capsys.readouterr().out


def test_no_ledger_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main([str(tmp_path)]) == 2
    assert "no member's ledger is in" in capsys.readouterr().err


FULL_DISK = """
import resource, sys
from tidewright.elastic.ledger import Ledger
ledger = Ledger(sys.argv[1])
ledger.write("begun", step=0)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
for step in (1, 2, 3):
    ledger.write("begun", step=step)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
for step in (4, 5):
    ledger.write("begun", step=step)
"""


def test_a_line_that_a_full_disk_took_half_of_costs_no_later_one(tmp_path: Path) -> None:
    (tmp_path / "m1").mkdir()
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path / "m1")]
    told = subprocess.run(command, capture_output=True, check=True, text=True)
    assert told.stderr.count("the ledger cannot be written") == 1
    assert [entry.step for entry in read_ledgers(tmp_path)] == [0, 4, 5]
