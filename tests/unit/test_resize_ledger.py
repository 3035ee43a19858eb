"""What counts as a step of a group, and as its first one, when ledgers are read for the benchmark of resizes."""

import json
from pathlib import Path

from loadtests.resize_ledger import Entry, Ledgers, first_step, last_applied, parse_ledger, whole_steps


def line(kind: str, step: int, *, generation: int, rank: int, world: int, at: float) -> str:
    fields = {"k": kind, "step": step, "generation": generation, "rank": rank, "world": world, "pid": 100 + rank}
    return json.dumps({**fields, "t": at}) + "\n"


def applied(step: int, *, generation: int, world: int, at: float, ranks: int | None = None) -> list[Entry]:
    """By all ranks, or by the first few; each one a second after the one before."""
    text = "".join(
        line("applied", step, generation=generation, rank=rank, world=world, at=at + rank)
        for rank in range(world if ranks is None else ranks)
    )
    return parse_ledger(text.encode())


def test_a_step_counts_once_its_last_rank_has_applied_it():
    entries = [*applied(7, generation=1, world=2, at=10.0), *applied(8, generation=2, world=4, at=20.0, ranks=3)]
    steps = whole_steps(entries)
    assert [(s.step, s.generation, s.world, s.at, s.pids) for s in steps] == [(7, 1, 2, 11.0, (100, 101))]


def test_the_first_step_is_of_a_later_generation_and_of_the_size_that_was_asked_for():
    entries = [
        *applied(7, generation=1, world=2, at=10.0),
        *applied(8, generation=2, world=3, at=20.0),
        *applied(9, generation=3, world=4, at=30.0),
    ]
    steps = whole_steps(entries)
    by_size = first_step(steps, above=1, world=4)
    of_any = first_step(steps, above=1)
    assert by_size is not None
    assert (by_size.step, by_size.at) == (9, 33.0)
    assert of_any is not None
    assert of_any.world == 3
    assert first_step(steps, above=3) is None


def test_the_gap_begins_with_whoever_applied_the_last_old_step_last():
    entries = [*applied(7, generation=1, world=2, at=10.0), *applied(8, generation=2, world=4, at=20.0)]
    assert last_applied(entries, up_to=1, before=23.0) == 11.0


def test_what_was_begun_or_said_without_a_size_is_left_out():
    text = line("begun", 1, generation=1, rank=0, world=2, at=1.0) + '{"k": "checkpoint", "step": 1, "t": 2.0}\n'
    assert parse_ledger(text.encode()) == []


def test_a_ledger_is_followed_by_whole_lines(tmp_path: Path):
    folder = tmp_path / "worker-0-1"
    folder.mkdir()
    first, second = (line("applied", step, generation=1, rank=0, world=1, at=float(step)) for step in (1, 2))
    (folder / "ledger.jsonl").write_text(first + second[:20])
    ledgers = Ledgers(folder=tmp_path)
    assert [e.step for e in ledgers.follow().entries] == [1]
    (folder / "ledger.jsonl").write_text(first + second)
    assert [e.step for e in ledgers.follow().entries] == [1, 2]
    assert [s.step for s in ledgers.steps(since=1.5)] == [2]
