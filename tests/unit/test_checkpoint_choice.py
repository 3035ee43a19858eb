"""Which checkpoints a group may go on from, what execution makes of what the trainers find, and how that is told."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from execution_builders import (
    LIMITS,
    RUNS,
    look,
    make_generation,
    make_job,
    make_member,
    make_report,
    make_seen,
    make_spec,
    name,
)
from intake_builders import event, granted, make_record

from schemas.events.worker import (
    Checkpointed,
    CheckpointFailed,
    GroupChanged,
    GroupStarted,
    ResumePoint,
    SkippedCheckpoint,
)
from schemas.vocabulary import Attribution, GroupChangeCause, JobId, Mode
from services.execution.core.checkpoints import Shelf, plan_candidates, trouble_of
from services.execution.core.seen import Process, StartedWord
from services.execution.core.state import Checkpoint, GenerationState, Job
from services.execution.core.turn import OfferGeneration
from services.execution.local.checkpoints import ShelfReader, look_at_shelf
from services.execution.local.folders import Folders
from services.execution.membership.words import apply_message
from services.execution.memory import JobView
from services.execution.store import StoredJob
from services.intake.core.readmodel import Registers, fold_event
from services.intake.core.summaries import tell
from services.intake.core.view import say_why
from tidewright import protocol

GONE = Process(recorded=True, ended=True, gone=True, exit_code=None)
BAD = SkippedCheckpoint(generation=1, step=60, reason="tensors.npz is not what was written")


def lying(*numbers: tuple[int, int], youngest: int = 0) -> Shelf:
    found = tuple(Checkpoint(generation=g, step=s, location=f"/c/g{g}-s{s}") for g, s in numbers)
    return Shelf(directory="/c", found=found, youngest=max((youngest, *(g for g, _ in numbers))))


def offers(decision) -> list[OfferGeneration]:
    return [effect for effect in decision.effects if isinstance(effect, OfferGeneration)]


def lost_group(*, step: int = 57, **changes) -> Job:
    """Both members of the started generation 1 are gone, and two others stand ready."""
    return make_job(
        2,
        members=(
            *(make_member(i) for i in range(2)),
            *(make_member(i, incarnation=2, ordinal=3 + i) for i in range(2)),
        ),
        incarnations=(("worker", 0, 2), ("worker", 1, 2)),
        step=step,
        **changes,
    )


def lost_seen(**changes):
    processes = {name(i): replace(GONE, ledger_step=57 - i) for i in range(2)} | {name(i, 2): RUNS for i in range(2)}
    reports = {name(i, 2): make_report(generation=0, step=0) for i in range(2)}
    return make_seen(**{"processes": processes, "reports": reports, **changes})


# -- which, and in which order -------------------------------------------------------------------------------


def test_the_highest_step_of_the_applied_line_comes_first() -> None:
    job = make_job(generations=(make_generation(2, from_step=50), make_generation(4, from_step=80)))
    shelf = lying((1, 50), (1, 60), (2, 80), (2, 90), (4, 95))
    assert [(c.generation, c.step) for c in plan_candidates(job, shelf)] == [(4, 95), (2, 80), (1, 50)]


def test_the_last_announced_one_is_looked_for_where_the_folder_is_now() -> None:
    job = make_job(checkpoint=Checkpoint(generation=1, step=40, location="/before/the/move/g1-s40"))
    assert [c.location for c in plan_candidates(job, lying((1, 20)))] == ["/c/g1-s40", "/c/g1-s20"]
    assert [c.location for c in plan_candidates(job, lying((1, 20), (1, 40)))] == ["/c/g1-s40", "/c/g1-s20"]
    assert len(plan_candidates(job, lying(*((1, step) for step in range(99))))) == 16


def test_a_group_without_anyones_state_is_offered_all_of_them_at_once() -> None:
    (offer,) = offers(look(lost_group(), lost_seen(shelf=lying((1, 20), (1, 40), (1, 55), youngest=6))))
    assert (offer.generation.source, offer.generation.checkpoint) == (-1, "/c/g1-s55")
    assert offer.older == ("g1-s40", "g1-s20")
    assert not offer.may_begin_anew
    assert offer.generation.number == 7, "a number that stands in the folder is never used again"


@pytest.mark.parametrize(("shelf", "checkpoint"), [(lying(), ""), (lying((1, 40), (1, 60)), "/c/g1-s60")])
def test_only_a_new_attempt_may_begin_anew(shelf: Shelf, checkpoint: str) -> None:
    earlier = make_generation(1, (name(0), name(1)))
    job = make_job(attempt=2, generations=(earlier,), attempt_step=57, group_started=False, step=0)
    job = replace(job, members=tuple(replace(m, attempt=2) for m in job.members))
    reports = {name(i): make_report(generation=0, step=0) for i in range(2)}
    (offer,) = offers(look(job, make_seen(reports=reports, shelf=shelf)))
    assert (offer.generation.checkpoint, offer.may_begin_anew) == (checkpoint, True)


def test_a_folder_that_cannot_be_read_is_waited_for_and_never_taken_for_an_empty_one() -> None:
    job = lost_group()
    seen = lost_seen(shelf=Shelf(directory="/c", trouble="/c: Stale file handle"))
    first = look(job, seen)
    first = look(first.job, seen, since=dict(first.since))
    assert (offers(first), first.job.verdict) == ([], None)
    later = look(first.job, seen, now=1000.0 + LIMITS.recover_seconds + 1, since=dict(first.since))
    assert later.job.verdict is not None
    assert later.job.verdict.attributed_to is Attribution.PLATFORM
    assert later.job.verdict.reason.startswith("the folder of checkpoints cannot be read: /c: Stale file handle")


def test_a_folder_without_a_trace_of_what_was_announced_is_another_folder() -> None:
    job = make_job(checkpoint=Checkpoint(generation=1, step=40, location="/c/g1-s40"))
    assert trouble_of(job, Shelf(directory="/c")).endswith("is a disk missing?")
    assert trouble_of(job, lying(youngest=1)) == ""
    assert trouble_of(job, lying((1, 20))) == ""
    fresh = make_job(generations=(), group_started=False)
    assert trouble_of(fresh, Shelf(trouble="no answer")) == "", "a job that has nothing to lose begins"


# -- what the trainers say ------------------------------------------------------------------------------------


def offered_again(**changes) -> Job:
    job = lost_group(**changes)
    members = tuple(name(i, 2) for i in range(2))
    offer = make_generation(2, members, state=GenerationState.OFFERED, source=-1, checkpoint="/c/g1-s60")
    gone = tuple(replace(m, state="gone") if m.incarnation == 1 else m for m in job.members)
    return replace(job, generations=(*job.generations, offer), generation=2, members=gone)


def test_without_a_whole_checkpoint_the_attempt_ends_and_the_platform_is_to_blame() -> None:
    said = protocol.FormFailed(
        generation=2, reason="no whole checkpoint is left in /c (g1-s60: cut)", state_lost=True
    )
    reports = {name(0, 2): apply_message(make_report(generation=0, step=0), said, now=1000.0)}
    decision = look(offered_again(), lost_seen(reports=reports, stores=frozenset({2})))
    assert decision.job.verdict is not None
    assert decision.job.verdict.attributed_to is Attribution.PLATFORM
    assert "no whole checkpoint is left in /c (g1-s60: cut)" in decision.job.verdict.reason


def test_another_failure_to_form_ends_nothing() -> None:
    said = protocol.FormFailed(generation=2, reason="a peer is gone")
    reports = {name(0, 2): apply_message(make_report(generation=0, step=0), said, now=1000.0)}
    assert look(offered_again(), lost_seen(reports=reports, stores=frozenset({2}))).job.verdict is None


def resumed(step: int, *, to: int) -> dict:
    told = StartedWord(generation=2, step=to + 2, pause_seconds=0.0, resumed_generation=1, resumed_step=to)
    at = make_report(generation=2, step=step, generation_step=to + 2)
    return {name(0, 2): replace(at, started=replace(told, skipped=(BAD,))), name(1, 2): replace(at, started=told)}


@pytest.mark.parametrize("heard_at", [42, 300])
def test_the_event_says_where_it_went_on_and_what_was_dropped(heard_at: int) -> None:
    """Also where execution was away, and the new group is further by now than the lost one ever was."""
    seen = lost_seen(reports=resumed(heard_at, to=40), stores=frozenset({2}))
    decision = look(offered_again(), seen)
    (changed,) = [each for each in decision.events if isinstance(each, GroupChanged)]
    assert changed.resumed_from == ResumePoint(generation=1, step=40)
    assert (changed.steps_dropped, changed.skipped) == (17, (BAD,))
    after = look(decision.job, seen, since=dict(decision.since))
    assert after.job.step == heard_at, "the job stands where it is, and not where it was"


def test_who_loaded_is_asked_first_and_others_after_a_moment() -> None:
    reports = resumed(42, to=40)
    reports[name(0, 2)] = replace(reports[name(0, 2)], started=None, generation_step=42)
    seen = lost_seen(reports=reports, stores=frozenset({2}))
    early = look(offered_again(), seen)
    assert not early.events
    (late,) = look(early.job, seen, now=1001.0, since=dict(early.since)).events
    assert isinstance(late, GroupChanged)
    assert (late.steps_dropped, late.skipped) == (17, ())


def test_a_word_of_the_wire_becomes_checkpoints() -> None:
    word = protocol.Started(
        generation=2,
        step=42,
        rank=0,
        world=2,
        pause_seconds=0.0,
        resumed_generation=1,
        resumed_step=40,
        skipped=("g1-s60: tensors.npz is not what was written", "something else: told"),
    )
    report = apply_message(make_report(generation=0, step=0), word, now=1000.0)
    assert report.started is not None
    assert report.started.skipped == (
        BAD,
        SkippedCheckpoint(generation=0, step=0, reason="something else: told"),
    )


def test_the_first_one_after_a_failure_is_announced_at_once() -> None:
    """Until then ``why`` says that checkpoints fail."""
    view = JobView(stored=StoredJob(job=make_job(), token_hash=b""), announced_at=100.0)
    view.note_checkpoint(Checkpoint(generation=1, step=40, location="/c/g1-s40"))
    look_at = {"stores": frozenset[int](), "settled": True, "now": 110.0, "interval": 30.0}
    assert view.seen(**look_at).checkpoint_word is None
    view.failure_at = 105.0
    word = view.seen(**look_at).checkpoint_word
    assert word is not None
    assert word.step == 40


# -- the folder ---------------------------------------------------------------------------------------------------


def test_a_folder_is_looked_at_by_name(tmp_path: Path) -> None:
    for entry in ("g1-s20", "g2-s40", ".g1-s30.aa", ".old-g1-s10", "notes", "g9999999999-s1"):
        (tmp_path / entry).mkdir()
    (tmp_path / ".g3.started").touch()
    shelf = look_at_shelf(tmp_path)
    assert [(c.generation, c.step, c.location) for c in shelf.found] == [
        (1, 20, str(tmp_path / "g1-s20")),
        (2, 40, str(tmp_path / "g2-s40")),
    ]
    assert (shelf.youngest, shelf.trouble) == (3, "")
    assert look_at_shelf(tmp_path / "none") == Shelf(directory=str(tmp_path / "none"))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "Too many levels" in look_at_shelf(tmp_path / "loop").trouble


def test_live_jobs_that_name_the_same_place_share_no_checkpoints() -> None:
    folders = Folders(state=Path("/state"))
    at = {"checkpoint_path": "kept", "working_directory": "/home/user"}
    live = [replace(make_job(spec=make_spec(**at)), job_id=JobId(each)) for each in ("a", "b")]
    assert [str(folders.checkpoints_of(job)) for job in live] == ["/home/user/kept/a", "/home/user/kept/b"]
    restarted = make_job(spec=make_spec(mode=Mode.RESTART, **at))
    assert folders.checkpoints_of(restarted) == Path("/home/user/kept"), "the script's own: where it says"
    assert folders.checkpoints_of(make_job()) == Path("/state/jobs/j1/checkpoints")


async def test_a_file_system_that_hangs_holds_up_its_own_jobs_only() -> None:
    release = threading.Event()

    def slow(job: Job) -> Shelf:
        if job.job_id == "hangs":
            assert release.wait(20)
        return lying((1, 20))

    reader = ShelfReader(slow, patience_seconds=0.1)
    jobs = [replace(make_job(), job_id=JobId(each)) for each in ("hangs", "well")]
    async with asyncio.timeout(5):
        first = await reader.look(jobs)
        again = await reader.look(jobs)
    for found in (first, again):
        assert found[JobId("hangs")].trouble == "the file system does not answer"
        assert found[JobId("well")] == lying((1, 20))
    release.set()
    await asyncio.sleep(0.05)
    assert (await reader.look(jobs))[JobId("hangs")] == lying((1, 20))


# -- how it is told --------------------------------------------------------------------------------------------------


def changed(**fields) -> GroupChanged:
    return GroupChanged(
        **{
            "epoch": 1,
            "attempt": 1,
            "generation": 2,
            "workers": 2,
            "step": 42,
            "pause_seconds": 0.0,
            "cause": GroupChangeCause.MEMBER_REPLACED,
            **fields,
        }
    )


def started(**fields) -> GroupStarted:
    return GroupStarted(
        **{
            "epoch": 1,
            "attempt": 1,
            "generation": 1,
            "workers": 2,
            "resumed_from": None,
            "steps_dropped": 0,
            **fields,
        }
    )


FROM_40 = {"resumed_from": ResumePoint(generation=1, step=40), "steps_dropped": 17, "skipped": (BAD,)}


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (
            changed(**FROM_40),
            (
                "Goes on with 2 workers (member_replaced), resumed from the checkpoint of step 40; 17 steps to be "
                "done again; skipped as not whole: step 60 (tensors.npz is not what was written)."
            ),
        ),
        (
            started(resumed_from=ResumePoint(generation=1, step=40), steps_dropped=1),
            "Runs with 2 workers, resumed from the checkpoint of step 40; 1 step to be done again.",
        ),
        (
            started(steps_dropped=60, skipped=(BAD,)),
            (
                "Runs with 2 workers, anew from step 0; 60 steps to be done again; skipped as not whole: step 60 "
                "(tensors.npz is not what was written)."
            ),
        ),
    ],
)
def test_history_says_where_it_went_on_and_what_was_dropped(data: GroupStarted | GroupChanged, text: str) -> None:
    assert tell(data).summary == text


def why(*data) -> str:
    registers = Registers()
    for number, item in enumerate(data, start=1):
        registers = fold_event(registers, event(item, xid=number))
    return say_why(make_record(workers_max=4), registers, waiting=None, decision=None)


def test_why_says_what_the_attempt_went_on_from_and_that_checkpoints_fail() -> None:

    told = "It was resumed from the checkpoint of step 40; 17 steps to be done again; skipped as not whole: step 60"
    assert told in why(granted(workers=2), started(), changed(**FROM_40))
    assert told in why(granted(workers=2), started(), changed(**FROM_40), changed(generation=3))
    assert "resumed" not in why(granted(workers=2), started(), changed())
    failed = CheckpointFailed(generation=1, step=60, reason="No space left on device")
    kept = Checkpointed(generation=1, step=40, location="/c")
    text = why(granted(workers=2), started(), kept, failed)
    assert "The checkpoint of step 60 failed (No space left on device); the last whole one is of step 40." in text
    assert "failed" not in why(granted(workers=2), started(), failed, replace(kept, step=80))
