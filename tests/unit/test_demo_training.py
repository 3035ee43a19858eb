"""What the ledgers of one job prove: falling back, dying at the wrong moment, and gaps."""

from math import inf

from demo.record import Entry
from demo.training import largest_gap, read_training


def entry(kind: str, step: int, generation: int, rank: int, *, world: int = 2, pid: int, **more) -> Entry:
    where = {"step": step, "generation": generation, "rank": rank, "world": world, "pid": pid}
    return Entry(kind=kind, member=f"worker-{rank}-1", at=100.0 + step + generation / 100, **where, **more)


def step_of(step: int, generation: int, pids: tuple[int, ...], *, ids: tuple[int, ...] = ()) -> list[Entry]:
    ids = ids or (2 * step, 2 * step + 1)
    entries = []
    for rank, pid in enumerate(pids):
        where = {"rank": rank, "world": len(pids), "pid": pid}
        entries.append(entry("begun", step, generation, ids=ids[rank :: len(pids)], **where))
        entries.append(entry("applied", step, generation, loss=1.0, **where))
    return entries


def begun_only(step: int, generation: int, pids: tuple[int, ...]) -> list[Entry]:
    return [e for e in step_of(step, generation, pids) if e.kind == "begun"]


def test_step_begun_in_a_failed_generation_counts_where_it_was_applied():
    entries = [
        *step_of(0, 7, (11, 12)),
        *begun_only(1, 8, (11, 12, 13)),
        *step_of(1, 7, (11, 12)),
        *step_of(2, 9, (11, 12, 14)),
    ]
    training = read_training(entries, finished=True)
    assert training.faults == ()
    assert [s.generation for s in training.steps] == [7, 7, 9]


def test_step_applied_by_one_rank_counts_when_all_had_begun_it():
    broken = [e for e in step_of(1, 7, (11, 12)) if (e.kind, e.pid) != ("applied", 12)]
    training = read_training([*step_of(0, 7, (11, 12)), *broken, *step_of(2, 8, (11, 13))], finished=True)
    assert training.faults == ()


def only_the_dead_applied_step_one(*, source: str = "member", adopted_step: int = 1) -> list[Entry]:
    lost = [e for e in step_of(1, 7, (11, 12)) if (e.kind, e.pid) != ("applied", 11)]
    adopted = entry("adopted", adopted_step, 8, 0, world=1, pid=11, parent=7, source=source)
    return [*step_of(0, 7, (11, 12)), *lost, adopted, *step_of(1, 8, (11,))]


def test_step_that_only_the_dead_had_applied_is_done_again():
    training = read_training(only_the_dead_applied_step_one(), finished=True)
    assert training.faults == ()
    assert training.repeated == 1
    assert training.steps[1].generation == 8


def test_step_is_a_fault_when_the_state_came_from_nowhere():
    training = read_training(only_the_dead_applied_step_one(source="fresh"), finished=True)
    assert training.faults == ("step 1 was applied in generations 7, 8",)


def test_step_is_a_fault_when_the_state_already_had_it():
    training = read_training(only_the_dead_applied_step_one(adopted_step=2), finished=True)
    assert training.faults == ("step 1 was applied in generations 7, 8",)


def test_step_is_a_fault_when_whoever_applied_it_lives_on():
    adopted = entry("adopted", 1, 8, 0, pid=11, parent=7, source="member")
    entries = [*step_of(0, 7, (11, 12)), *step_of(1, 7, (11, 12)), adopted, *step_of(1, 8, (11, 12))]
    assert read_training(entries, finished=True).faults == ("step 1 was applied in generations 7, 8",)


def test_two_processes_of_one_rank_are_a_fault_even_if_only_one_applies():
    entries = [*step_of(0, 1, (11, 12)), entry("begun", 0, 1, 0, pid=99, ids=(0,))]
    assert "begun by 3 processes" in read_training(entries, finished=True).faults[0]


def test_left_out_samples_count_only_when_the_job_has_finished():
    entries = [e for s in range(3) for e in step_of(s, 1, (11,))] + step_of(3, 1, (11,), ids=(0, 1))
    entries = [
        Entry(**{f: getattr(e, f) for f in e.__slots__} | {"data_epoch": 1 if e.step == 3 else 0}) for e in entries
    ]
    assert read_training(entries, finished=False).faults == ()
    assert read_training(entries, finished=True).faults == ("data epoch 1 left out 4 of 6 samples",)


def test_gap_reaches_over_both_ends_of_the_interval():
    steps = read_training([e for s in (0, 1, 2, 3) for e in step_of(s, 1, (11,))], finished=False).steps
    gap = largest_gap(steps, since=100.5, until=101.5)
    assert (round(gap.seconds, 6), gap.after_step, gap.steps) == (1.0, 0, 1)


def test_gap_is_endless_when_nothing_follows():
    steps = read_training([e for s in (0, 1) for e in step_of(s, 1, (11,))], finished=False).steps
    gap = largest_gap(steps, since=100.5, until=102.5)
    assert (gap.seconds, gap.after_step, gap.steps) == (inf, 1, 1)
