"""What the screen shows, folded from events; and how it is shown, on a terminal and elsewhere."""

import io
from pathlib import Path

import pytest
from demo_recordings import FIRST, URGENT, good_run
from rich.console import Console

from demo.journal import Journal
from demo.picture import JobPicture, Picture, tell
from demo.record import read_record, to_event
from demo.screen import LiveScreen, PlainScreen, make_screen, paint

ROOT = Path(__file__).parents[2]


def picture_of_good_run(*, until: str = "") -> Picture:
    """Folded up to the first event of that type, or to the end."""
    picture = Picture(slots=4)
    picture.jobs = {
        FIRST: JobPicture(name="nightly", priority="low"),
        URGENT: JobPicture(name="checkout", priority="critical"),
    }
    for line in good_run().events:
        picture.fold(to_event(line))
        if line["type"] == until:
            break
    return picture


def test_sizes_and_states_follow_the_events():
    at_the_shrink = picture_of_good_run(until="tide.worker.room_freed.v1").jobs[FIRST]
    assert (at_the_shrink.granted, at_the_shrink.running, at_the_shrink.state) == (2, 2, "running")
    ended = picture_of_good_run().jobs[FIRST]
    assert (ended.granted, ended.running, ended.state) == (0, 0, "succeeded")


def test_windows_change_numbers_and_tell_nothing():
    data = good_run().events[3]["data"] | {"progress": {"step": 12, "total_steps": 180, "remaining_seconds": 9.0}}
    picture = Picture(slots=4, jobs={FIRST: JobPicture(name="nightly", priority="low")})
    event = to_event(good_run().events[3] | {"type": "tide.metric.window.v1", "data": _window(data)})
    picture.fold(event)
    job = picture.jobs[FIRST]
    assert (job.step, job.loss, job.utilisation) == (12, 0.5, 0.95)
    assert picture.lines == []


def _window(data: dict) -> dict:
    return {"utilisation": 0.95, "loss": 0.5, "progress": data["progress"]}


def test_jobs_of_others_are_not_shown():
    picture = Picture(slots=4)
    for line in good_run().events:
        picture.fold(to_event(line))
    assert picture.lines == []


def test_every_change_is_told_with_its_reason():
    job = JobPicture(name="nightly", priority="low")
    lost = {"member": f"{FIRST}/worker/1/1", "exit_code": -9, "attributed_to": "platform", "reason": "killed"}
    data = {"workers": 3, "step": 41, "cause": "member_lost", "pause_seconds": 0.0612, "lost": [lost]}
    assert tell(job, "tide.worker.group_changed.v1", data) == (
        "nightly trains with 3 workers from step 41 (member lost, pause 0.06 s); lost worker/1/1: killed"
    )
    waiting = {"code": "NO_ROOM", "detail": "2 slots are missing"}
    assert tell(job, "tide.allocation.waiting.v1", waiting) == "nightly waits: 2 slots are missing"


def test_plain_screen_prints_each_thing_once():
    console = Console(file=io.StringIO(), width=100)
    picture = picture_of_good_run(until="tide.worker.group_started.v1")
    picture.say(1_002.0, "== the second scene")
    with PlainScreen(console, began=1_000.0) as screen:
        screen.show(picture)
        screen.show(picture)
    lines = console.file.getvalue().splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines] == [
        "nightly is granted 1 worker: room was free",
        "nightly trains with 1 worker",
        "== the second scene",
    ]


def test_square_brackets_in_a_reason_are_no_markup():
    console = Console(file=io.StringIO(), width=100)
    picture = Picture(slots=4, lines=[(1_001.0, "nightly waits: [bold]2[/bold] slots")])
    with PlainScreen(console, began=1_000.0) as screen:
        screen.show(picture)
    assert "[bold]2[/bold]" in console.file.getvalue()


def test_live_picture_shows_slots_jobs_and_events():
    console = Console(file=io.StringIO(), width=110, color_system=None)
    picture = picture_of_good_run(until="tide.worker.room_freed.v1")
    console.print(paint(picture, began=1_000.0, now=1_020.0))
    shown = console.file.getvalue()
    assert "slots ■ ■ □ □" in shown
    assert "nightly 4 → 2: 4 to 2" in shown
    assert "95%" in shown


@pytest.mark.parametrize(("terminal", "kind"), [(True, LiveScreen), (False, PlainScreen)])
def test_screen_suits_the_console(terminal, kind):
    console = Console(file=io.StringIO(), force_terminal=terminal)
    assert type(make_screen(console, began=0.0)) is kind


def test_journal_gives_each_whole_event_once(tmp_path):
    run = good_run()
    run.write(tmp_path)
    whole = (tmp_path / "events.jsonl").read_bytes()
    (tmp_path / "events.jsonl").write_bytes(whole[:-20])
    journal = Journal(tmp_path)
    seen = journal.new_events()
    assert len(seen) == len(run.events) - 1
    (tmp_path / "events.jsonl").write_bytes(whole)
    assert [str(e.sequence[1]) for e in journal.new_events()] == [str(len(run.events))]
    assert journal.new_events() == []


def test_journal_marks_are_what_the_checker_reads(tmp_path):
    good_run().write(tmp_path)
    (tmp_path / "marks.jsonl").unlink()
    Journal(tmp_path).mark("submitted", at=1_000.5, part="first", job=FIRST)
    record = read_record(tmp_path)
    assert record.job("first") == FIRST
    assert record.job("urgent") is None
