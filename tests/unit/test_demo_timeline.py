"""The picture of a run and the summary: bars, levels, pauses."""

from itertools import pairwise

from demo_recordings import FIRST, URGENT, good_run, member

from demo.record import read_record
from demo.summary import plan_pauses, usual_step
from demo.timeline import draw, plan_bars, plan_levels
from tidewright.elastic.proof import read_training


def test_every_worker_is_one_bar_and_none_overlap(tmp_path):
    bars = plan_bars(read_record(good_run().write(tmp_path)))
    assert sorted(b.pid for b in bars) == [101, 102, 103, 104, 105, 106, 107, 201, 202]
    assert {b.lane for b in bars} == {0, 1, 2, 3}
    for lane in range(4):
        own = sorted((b.since, b.until) for b in bars if b.lane == lane)
        assert all(a[1] <= b[0] for a, b in pairwise(own))


def test_survivor_keeps_one_bar_over_all_resizes(tmp_path):
    record = read_record(good_run().write(tmp_path))
    first = next(b for b in plan_bars(record) if b.pid == 101)
    assert (first.lane, first.member) == (0, member(0))
    assert first.until - first.since > 16


def test_more_workers_than_slots_are_shown_beside_them(tmp_path):
    run = good_run()
    alive = [[pid, pid * 10, "S"] for pid in (101, 102, 103, 104, 105)]
    for sample in run.samples[2:]:
        sample["alive"] = alive
    assert max(b.lane for b in plan_bars(read_record(run.write(tmp_path)))) >= 4


def test_levels_are_the_grants(tmp_path):
    record = read_record(good_run().write(tmp_path))
    assert [count for _, count in plan_levels(record, FIRST)] == [1, 2, 4, 2, 4, 0]
    assert [count for _, count in plan_levels(record, URGENT)] == [2, 0]


def test_pauses_are_measured_in_the_ledgers(tmp_path):
    run = good_run()
    for lines in run.ledgers[FIRST].values():
        for line in lines:
            if line["step"] >= 10:
                line["t"] += 0.5
    pauses = plan_pauses(read_record(run.write(tmp_path)), FIRST)
    assert [(p.workers_before, p.workers) for p in pauses] == [(1, 2), (2, 4), (4, 2), (2, 4), (4, 3), (3, 4)]
    assert [round(p.gap, 3) for p in pauses[:2]] == [0.7, 0.2]
    assert {p.told for p in pauses} == {0.1}


def test_usual_step_is_that_of_its_own_generation(tmp_path):
    run = good_run()
    for lines in run.ledgers[FIRST].values():
        for line in lines:
            if line["generation"] == 2:
                line["t"] += 0.3 * (line["step"] - 10)
    training = read_training(read_record(run.write(tmp_path)).ledgers[FIRST], finished=True)
    assert round(usual_step(training, 5), 3) == 0.2
    assert round(usual_step(training, 15), 3) == 0.5


def test_picture_is_a_png(tmp_path):
    draw(read_record(good_run().write(tmp_path / "record")), tmp_path / "out" / "timeline.png")
    assert (tmp_path / "out" / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_picture_of_a_run_in_which_nothing_happened(tmp_path):
    run = good_run()
    run.marks, run.events, run.samples, run.ledgers = run.marks[:1], [], [], {}
    draw(read_record(run.write(tmp_path / "record")), tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").exists()
