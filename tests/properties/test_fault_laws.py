"""Laws of fault: every end is judged, the order of looking does not matter, nothing is tried again for ever."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from unit.execution_builders import look, make_generation, make_job, make_member, make_seen, name

from schemas.events.allocation import AllocationClosed
from schemas.events.job import RestartPolicy
from schemas.events.worker import GroupEnded
from schemas.vocabulary import DEFAULT_FLAVOR, AttemptOutcome, Attribution, DecisionCode, EndCause, Mode, Outcome
from services.execution.core.attribution import ExitKind, attribute_exit
from services.execution.core.seen import MemoryEnd, MemoryWitness, Process
from services.execution.core.state import Ending
from services.queueing.core import ledger, words
from services.queueing.core.values import Rules, Standing, Workload
from tests.unit.fault_table import workload

CODES = st.one_of(st.none(), st.integers(-64, 255))
MEMORY = st.one_of(
    st.none(), st.builds(MemoryEnd, witness=st.sampled_from(MemoryWitness), used_bytes=st.integers(0, 4))
)
PROCESSES = st.builds(
    Process,
    recorded=st.just(True),
    ended=st.just(True),
    gone=st.just(True),
    exit_code=CODES,
    memory=MEMORY,
    rebooted=st.booleans(),
    ledger_stopped=st.booleans(),
)
ENDINGS = st.one_of(st.none(), st.sampled_from(Ending))
FOLLOWS = st.sampled_from([1, 3, -6])
"""How a peer may end that trips over a lost one."""
_CODE = DecisionCode.ADMITTED_IDLE
RULES = Rules(platform_retries_without_progress_max=3, steady_seconds=100.0)


@given(process=PROCESSES, ending=ENDINGS, mode=st.sampled_from(Mode), asked=st.integers(0, 4))
def test_every_end_is_somebodys_or_was_asked_for(
    process: Process, ending: Ending | None, mode: Mode, asked: int
) -> None:
    judged = attribute_exit(make_member(ending=ending), process, mode=mode, memory_bytes=asked)
    assert judged.reason or ending is not None
    is_ours = ending is not None and ending is not Ending.ABNORMAL
    assert (judged.kind is ExitKind.ASKED) == (judged.attributed_to is None) == is_ours
    if judged.kind is ExitKind.LOST:
        assert judged.attributed_to is Attribution.PLATFORM
    if judged.kind in (ExitKind.FAILED, ExitKind.CRASHED):
        assert judged.attributed_to is Attribution.JOB
    if judged.cause is EndCause.OUT_OF_MEMORY:
        assert judged.attributed_to is Attribution.JOB
        assert process.exit_code != 0


@given(follows=st.lists(FOLLOWS, min_size=1, max_size=3), place=st.integers(0, 3), mode=st.sampled_from(Mode))
def test_a_burst_is_the_platforms_in_whatever_order_it_is_seen(follows: list[int], place: int, mode: Mode) -> None:
    """One member is killed from outside and the others trip over it, all seen in one look."""
    codes = list(follows)
    codes.insert(min(place, len(codes)), -9)
    job = ended_together(codes, mode)
    if mode is Mode.LIVE:
        # All who held the state are gone, and there is no checkpoint: another attempt, and not the job's failure.
        assert job.verdict is not None
        assert (job.verdict.attributed_to, job.verdict.cause) == (Attribution.PLATFORM, EndCause.STATE_LOST)
        assert {lost.attributed_to for lost in job.losses} == {Attribution.PLATFORM}
        assert [lost.cause for lost in job.losses].count(EndCause.KILLED) == 1
        assert job.fruitless == 1  # one loss, however many it took along
    else:
        assert job.verdict is not None
        assert (job.verdict.attributed_to, job.verdict.cause) == (Attribution.PLATFORM, EndCause.KILLED)


@given(follows=st.lists(FOLLOWS, max_size=3), place=st.integers(0, 3), mode=st.sampled_from(Mode))
def test_want_of_memory_explains_what_it_took_along(follows: list[int], place: int, mode: Mode) -> None:
    codes = list(follows)
    place = min(place, len(codes))
    codes.insert(place, -9)
    memory = MemoryEnd(witness=MemoryWitness.KERNEL, used_bytes=1)
    verdict = ended_together(codes, mode, memory={place: memory}).verdict
    assert verdict is not None
    assert (verdict.attributed_to, verdict.cause, verdict.exit_code) == (Attribution.JOB, EndCause.OUT_OF_MEMORY, 137)


@given(code=st.integers(1, 125), others=st.integers(0, 3), mode=st.sampled_from(Mode))
def test_an_exception_without_a_lost_peer_is_the_jobs(code: int, others: int, mode: Mode) -> None:
    verdict = ended_together([code, *[-6] * others], mode).verdict
    assert verdict is not None
    assert (verdict.attributed_to, verdict.exit_code) == (Attribution.JOB, code)


def ended_together(codes: list[int], mode: Mode, *, memory: dict[int, MemoryEnd] | None = None):
    job = make_job(len(codes))
    members = tuple(make_member(index) for index in range(len(codes)))
    generation = make_generation(1, tuple(m.name for m in members))
    job = replace(job, spec=replace(job.spec, mode=mode), generations=(generation,), step=0)
    processes = {
        name(index): Process(
            recorded=True, pid=1, ended=True, gone=True, exit_code=code, memory=(memory or {}).get(index)
        )
        for index, code in enumerate(codes)
    }
    return look(job, replace(make_seen(len(codes)), processes=processes)).job


# -- retries -------------------------------------------------------------------------------------------------------

ENDS = st.tuples(st.sampled_from([Attribution.JOB, Attribution.PLATFORM, None]), st.integers(0, 3), st.booleans())
"""Whose, the step that was reached, whether the job was preempted meanwhile."""


@given(limit=st.integers(0, 4), ends=st.lists(ENDS, min_size=60, max_size=60))
def test_nothing_is_tried_again_for_ever(limit: int, ends: list[tuple[Attribution | None, int, bool]]) -> None:
    """Each failure of the job uses up a retry, and each step is gained once: whatever happens, it comes to an end."""
    job, attempts, best = fresh(limit), 0, 0
    fruitless_allowed = RULES.platform_retries_without_progress_max + 1
    for whose, step, preempted in ends:
        if whose is None:
            continue
        before = job
        job, closed = attempt(job, whose, step, preempted=preempted)
        attempts += 1
        assert job.job_failures == before.job_failures + (whose is Attribution.JOB)
        best = max(best, step)
        assert job.best_step == best
        if closed is not None:
            assert closed.outcome is Outcome.FAILED
            assert closed.attributed_to is whose
            gave_up = closed.cause is EndCause.NO_PROGRESS
            assert gave_up == (whose is Attribution.PLATFORM)
            assert not gave_up or job.fruitless == fruitless_allowed
            assert gave_up or job.job_failures == limit + 1
            return
        assert job.fruitless < fruitless_allowed
        assert job.job_failures <= limit
    # Each of at most 3 steps gained, and each of at most ``limit`` failures, begins a row of fruitless attempts anew.
    assert attempts <= (limit + 3 + 1) * fruitless_allowed


@given(counts=st.tuples(st.integers(0, 3), st.integers(0, 3)), step=st.integers(0, 5))
def test_what_we_asked_for_counts_nowhere(counts: tuple[int, int], step: int) -> None:
    job = replace(fresh(3), job_failures=counts[0], fruitless=counts[1], best_step=5)
    after, closed = attempt(job, None, step, preempted=True)
    assert closed is None
    assert (after.job_failures, after.fruitless, after.best_step) == (*counts, 5)


@given(whose=st.sampled_from(Attribution), preempted=st.booleans(), cancelled=st.booleans())
def test_a_final_failure_of_the_job_is_the_end(whose: Attribution, preempted: bool, cancelled: bool) -> None:
    job = fresh(1000)
    if cancelled:
        job = words.on_changed(job, replace(job.request, version=2, cancelled=True)).workload
    _, closed = attempt(job, whose, 1, preempted=preempted and not cancelled, final=True)
    if cancelled:
        assert closed is not None
        assert closed.outcome is Outcome.CANCELLED
    elif whose is Attribution.JOB:
        assert closed is not None
        assert closed.outcome is Outcome.FAILED
    else:
        assert closed is None


def fresh(limit: int) -> Workload:
    return replace(workload(), restart_policy=RestartPolicy(limit=limit))


def attempt(
    job: Workload, whose: Attribution | None, step: int, *, preempted: bool, final: bool = False
) -> tuple[Workload, AllocationClosed | None]:
    """The job after one more attempt has ended, granted again where it had to wait."""
    said = GroupEnded(
        attempt=job.attempt,
        outcome=AttemptOutcome.EVICTED if whose is None else AttemptOutcome.FAILED,
        exit_code=None if whose is None else 1,
        attributed_to=whose,
        reason="it said so",
        step=step,
        capacity_revision=1,
        cause=EndCause.STOPPED if whose is None else EndCause.EXIT_CODE,
        final=final,
    )
    if preempted and job.standing is Standing.RUNNING:
        job = ledger.evict(job, reason=ledger.to_reason(_CODE, "for a test"), requeue=True).workload
    step_after = words.on_group_ended(job, said, revision=1, now=0.0, rules=RULES)
    after = step_after.workload
    closed = next((e for e in step_after.events if isinstance(e, AllocationClosed)), None)
    if closed is None and after.standing is Standing.WAITING:
        after = _grant(words.on_pause_over(after).workload)
    return after, closed


def _grant(job: Workload) -> Workload:
    reason = ledger.to_reason(_CODE, "for a test")
    return ledger.grant(job, workers=1, flavor=DEFAULT_FLAVOR, order=1, revision=1, reason=reason).workload
