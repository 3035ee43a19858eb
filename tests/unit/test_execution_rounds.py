"""What is worth a commit of its own: a step that moved on is not, or every job would cost several a second."""

from dataclasses import replace

from unit.execution_builders import JOB, NOON, look, make_generation, make_job, make_report, make_seen, name

from services.execution.core.state import Job
from services.execution.core.turn import Decision
from services.execution.memory import JobView, Memory
from services.execution.reconciler import Round
from services.execution.store import StoredJob


def make_view(job: Job) -> JobView:
    return JobView(stored=StoredJob(job=job, token_hash=b""))


def make_round(view: JobView, decision: Decision, *, routine_is_due: bool = False) -> Round:
    return Round(
        decisions={JOB: decision},
        before={JOB: view.saved},
        capacity=None,
        checkpoints=(),
        write_offs=frozenset(),
        routine_is_due=routine_is_due,
    )


def decided(job: Job, *, step: int) -> Decision:
    return look(job, make_seen(reports={name(index): make_report(step=step) for index in (0, 1)}))


def test_a_step_alone_waits_until_a_commit_is_due() -> None:
    view = make_view(make_job(step=10))
    decision = decided(view.job, step=11)
    assert decision.job.step == 11
    assert not make_round(view, decision).needs_commit
    assert make_round(view, decision, routine_is_due=True).needs_commit
    other = replace(decision, job=replace(decision.job, generations=(*decision.job.generations, make_generation(2))))
    assert make_round(view, other).needs_commit


def test_a_step_that_was_not_saved_is_saved_with_the_next_commit() -> None:
    memory = Memory()
    view = memory.jobs[JOB] = make_view(make_job(step=10))
    for step in (11, 12):
        assert not make_round(view, decided(view.job, step=step)).needs_commit
        memory.commit(replace(view.saved, job=decided(view.job, step=step).job))
        assert (view.job.step, view.saved.job.step) == (step, 10)
    assert make_round(view, decided(view.job, step=12), routine_is_due=True).needs_commit
    memory.commit(view.stored, with_step=True)
    assert view.saved == view.stored
    assert not make_round(view, decided(view.job, step=12), routine_is_due=True).needs_commit


def test_what_was_read_again_is_what_is_saved() -> None:
    memory = Memory()
    view = memory.jobs[JOB] = make_view(make_job(step=10))
    memory.commit(replace(view.stored, job=replace(view.job, step=15)))
    memory.reload([StoredJob(job=make_job(step=13, started_at=NOON), token_hash=b"")])
    assert (view.job.step, view.saved.job.step) == (13, 13)
