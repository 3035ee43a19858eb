"""The table of ``docs/failures.md``, made by the code that decides: exits, retries, the command line's status.

``python -m tests.unit.fault_table`` prints it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final

from schemas.events.allocation import AllocationClosed, AllocationGranted, Reason
from schemas.events.job import JobSubmitted, RequestRegister, RestartPolicy, RoleRequest
from schemas.events.worker import GroupEnded
from schemas.resources import MEMORY, SLOT, Resources
from schemas.vocabulary import (
    DEFAULT_FLAVOR,
    DEFAULT_QUEUE,
    DEFAULT_TENANT,
    DEFAULT_USER,
    WORKER_ROLE,
    AttemptOutcome,
    Attribution,
    DecisionCode,
    EndCause,
    JobPhase,
    Mode,
    PriorityClass,
)
from services.execution.core.seen import MemoryEnd, MemoryWitness, Process, Seen, StartError
from services.execution.core.state import Desired, Ending, Job, MemberState
from services.queueing.core import ledger, words
from services.queueing.core.ledger import Step
from services.queueing.core.values import Rules, Workload
from tests.unit.execution_builders import (
    JOB,
    NOON,
    look,
    make_grant,
    make_job,
    make_member,
    make_report,
    make_seen,
    make_spec,
    name,
)
from tidewright.cli import exits

RULES: Final = Rules()
RETRIES: Final = 3
GIB: Final = 2**30
ASKED: Final = Resources({SLOT: 1000, MEMORY: GIB})
GONE: Final = Process(recorded=True, pid=100, ended=True, gone=True)
KERNEL: Final = MemoryEnd(witness=MemoryWitness.KERNEL, used_bytes=2 * GIB, limit_bytes=4 * GIB)
WITHIN: Final = replace(KERNEL, used_bytes=GIB // 2)
OVER: Final = MemoryEnd(witness=MemoryWitness.LIMIT, used_bytes=2 * GIB, limit_bytes=GIB)
REFUSED: Final = MemoryEnd(witness=MemoryWitness.ALLOCATION, used_bytes=GIB // 2)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Worker 0 is gone as ``process`` shows. ``peer``: what is seen of the other one (live jobs have two)."""

    what: str
    process: Process
    mode: Mode = Mode.FIXED
    ending: Ending | None = None
    peer: Process | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    what: str
    cause: EndCause
    whose: str
    follows: str
    counts: str
    status: int | None


def gone(code: int | None, **more: object) -> Process:
    return replace(GONE, exit_code=code, **more)


CASES: Final = (
    Case(what="exits with a code of its own, 1 to 255", process=gone(3)),
    Case(what="the command is not found (127)", process=gone(127)),
    Case(what="the command cannot be executed (126)", process=gone(126)),
    Case(what="exits with 0 before the training is complete (live)", process=gone(0), mode=Mode.LIVE),
    Case(what="uses more memory than it asked for", process=gone(-9, memory=OVER)),
    Case(what="is killed by the kernel, out of memory", process=gone(-9, memory=KERNEL)),
    Case(what="so is a program below it (137)", process=gone(137, memory=KERNEL)),
    Case(what="an allocation is refused (MemoryError, ResourceExhausted)", process=gone(1, memory=REFUSED)),
    Case(what="is killed by the kernel although it kept to its memory", process=gone(-9, memory=WITHIN)),
    Case(what="SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT of its own", process=gone(-11)),
    Case(what="the same, in a live job", process=gone(-11), mode=Mode.LIVE),
    Case(
        what="SIGABRT or an exception after a peer was lost (live)",
        process=gone(-6),
        mode=Mode.LIVE,
        peer=Process(recorded=True, pid=101, ended=True, exit_code=-9),
    ),
    Case(what="SIGKILL, SIGTERM, SIGINT, SIGHUP from outside", process=gone(-9)),
    Case(what="the same, in a live job", process=gone(-9), mode=Mode.LIVE),
    Case(what="so is a program below it (137, 143, 130, 129)", process=gone(143)),
    Case(what="its end was not seen by anybody", process=gone(None)),
    Case(what="its machine was restarted", process=gone(None, rebooted=True)),
    Case(what="the same, in a live job", process=gone(None, rebooted=True), mode=Mode.LIVE),
    Case(what="is stuck, and we kill it", process=gone(-9), ending=Ending.ABNORMAL),
    Case(what="the same, in a live job", process=gone(-9), ending=Ending.ABNORMAL, mode=Mode.LIVE),
)


def table() -> str:
    lines = [
        "| What happens to a worker or its job | Cause | Whose fault | What follows | Counts | Status at the end |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows():
        status = "" if row.status is None else str(row.status)
        cells = (row.what, f"`{row.cause}`", row.whose, row.follows, row.counts, status)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def rows() -> Iterator[Row]:
    for case in CASES:
        yield row_of(case)
    yield _judged("runs longer than its limit", after_run_time())
    yield _judged("what it names is not there: script, folder, interpreter", not_startable())
    yield _judged("every worker with the state is gone, and there is no checkpoint (live)", state_lost())
    evicted = GroupEnded(
        attempt=1,
        outcome=AttemptOutcome.EVICTED,
        exit_code=None,
        attributed_to=None,
        reason="preempted",
        step=None,
        capacity_revision=1,
        cause=EndCause.STOPPED,
    )
    yield _evicted("preempted, held, idle; also where the grace was not enough and we kill", evicted)
    yield _cancelled("cancelled; also where the grace was not enough and we kill", evicted)


# -- execution's part ----------------------------------------------------------------------------------------------


def job_of(case: Case) -> Job:
    workers = 2 if case.mode is Mode.LIVE else 1
    job = make_job(workers, roles=(make_grant(workers, resources=ASKED),))
    first = make_member(0, ending=case.ending, ending_reason="silent for 20 s" if case.ending else "")
    return replace(job, spec=make_spec(mode=case.mode), members=(first, *job.members[1:]))


def seen_of(case: Case) -> Seen:
    workers = 2 if case.mode is Mode.LIVE else 1
    seen = make_seen(workers)
    processes = dict(seen.processes) | {name(0): case.process}
    if case.peer is not None:
        processes[name(1)] = case.peer
    return replace(seen, processes=processes)


def after(case: Case) -> Job:
    """The job once execution has seen it."""
    return look(job_of(case), seen_of(case)).job


def row_of(case: Case) -> Row:
    job = after(case)
    if job.verdict is not None:
        return _judged(case.what, job)
    (lost,) = job.losses
    assert lost.cause is not None
    over_again = repeated(case)
    final = _judged(case.what, over_again)
    counts = (
        "the 3rd in an attempt is a failure of the job"
        if lost.attributed_to is Attribution.JOB
        else "the 9th without a step between them ends the attempt"
    )
    return replace(final, cause=lost.cause, whose=f"{lost.attributed_to}", follows="it is replaced", counts=counts)


def repeated(case: Case) -> Job:
    """The same misfortune to each replacement, without a step, until the attempt has a verdict."""
    job = after(case)
    for _ in range(20):
        if job.verdict is not None:
            return job
        fresh = next(m for m in job.held() if m.index == 0)
        fresh = replace(fresh, state=MemberState.ADMITTED, ending=case.ending, ending_reason="silent for 20 s")
        job = job.with_member(fresh)
        seen = make_seen(2, processes={m.name: Process(recorded=True, pid=1) for m in job.members})
        seen = replace(seen, processes=dict(seen.processes) | {fresh.name: case.process})
        job = look(job, seen).job
    raise AssertionError("it goes on for ever")


def after_run_time() -> Job:
    job = make_job(1, spec=make_spec(run_time_limit_seconds=60.0), started_at=NOON - timedelta(seconds=61))
    return look(job, make_seen(1)).job


def not_startable() -> Job:
    job = make_job(1, group_started=False, members=(make_member(0, state=MemberState.COMMITTED),), generations=())
    error = StartError(detail="there is no script train.py", attributed_to=Attribution.JOB)
    return look(job, Seen(start_errors={name(0): error})).job


def state_lost() -> Job:
    job = look(make_job(1), make_seen(1, processes={name(0): gone(-9)})).job
    return look(job, Seen(reports={name(0, 2): make_report(generation=0)}, processes={})).job


def group_ended(job: Job) -> GroupEnded:
    """As ``end_attempt`` says it, of a job with a verdict, once its members are gone."""
    members = tuple(replace(m, state=MemberState.GONE) for m in job.members)
    decision = look(replace(job, members=members, desired=Desired.GRANTED, attempt_ended=0), Seen())
    (said,) = (event for event in decision.events if isinstance(event, GroupEnded))
    return said


# -- queueing's part -----------------------------------------------------------------------------------------------


def workload(*, limit: int = RETRIES) -> Workload:
    """Granted one worker, and it runs."""
    submitted = JobSubmitted(
        tenant=DEFAULT_TENANT,
        user=DEFAULT_USER,
        queue=DEFAULT_QUEUE,
        request=RequestRegister(version=1, priority=PriorityClass.MEDIUM, workers_min=1, workers_max=1, workers=1),
        roles=(RoleRequest(name=WORKER_ROLE, elastic=True, count=1, resources=ASKED),),
        spec=replace(make_spec(), restart_policy=RestartPolicy(limit=limit)),
    )
    waiting = words.on_submitted(JOB, DEFAULT_TENANT, submitted).workload
    why = Reason(code=DecisionCode.ADMITTED_IDLE, detail="for a test")
    return ledger.grant(waiting, workers=1, flavor=DEFAULT_FLAVOR, order=1, revision=1, reason=why).workload


def end(job: Workload, said: GroupEnded) -> Step:
    return words.on_group_ended(job, replace(said, attempt=job.attempt), revision=1, now=0.0, rules=RULES)


def _judged(what: str, job: Job) -> Row:
    said = group_ended(job)
    assert said.cause is not None
    step = end(workload(), said)
    whose = said.attributed_to.value if said.attributed_to is not None else "nobody"
    if step.workload.job_failures:
        counts = "one of its retries" if not said.final else "nothing: it is final"
    else:
        counts = "only without a step further"
    return Row(
        what=what,
        cause=said.cause,
        whose=whose,
        follows=_follows(step),
        counts=counts,
        status=_status(said),
    )


def _follows(step: Step) -> str:
    (event,) = step.events
    if isinstance(event, AllocationClosed):
        return "the job has failed"
    assert isinstance(event, AllocationGranted)
    return "another attempt" if step.workload.job_failures else "another attempt, after a pause from the 2nd on"


def _status(said: GroupEnded) -> int:
    """Where the retries are used up."""
    last = replace(workload(limit=0), fruitless=RULES.platform_retries_without_progress_max, best_step=10**9)
    (closed,) = end(last, said).events
    assert isinstance(closed, AllocationClosed)
    return status_of(closed)


def status_of(closed: AllocationClosed) -> int:
    phase = {"succeeded": JobPhase.SUCCEEDED, "failed": JobPhase.FAILED, "cancelled": JobPhase.CANCELLED}
    view = {
        "phase": phase[closed.outcome.value].value,
        "exit_code": closed.exit_code,
        "attributed_to": closed.attributed_to.value if closed.attributed_to is not None else None,
    }
    return exits.of_job(view)


def _evicted(what: str, said: GroupEnded) -> Row:
    why = Reason(code=DecisionCode.PREEMPTED_FOR_CLAIMANT, detail="for a test")
    draining = ledger.evict(replace(workload(), fruitless=2), reason=why, requeue=True).workload
    step = end(draining, said)
    assert (step.workload.job_failures, step.workload.fruitless, step.events) == (0, 2, ())
    assert said.cause is not None
    return Row(
        what=what, cause=said.cause, whose="nobody", follows="back to its queue", counts="nothing", status=None
    )


def _cancelled(what: str, said: GroupEnded) -> Row:
    job = workload()
    request = replace(job.request, version=2, cancelled=True)
    (closed,) = end(words.on_changed(job, request).workload, said).events
    assert isinstance(closed, AllocationClosed)
    assert said.cause is not None
    assert closed.attributed_to is None
    status = status_of(closed)
    return Row(
        what=what, cause=said.cause, whose="nobody", follows="the job is cancelled", counts="nothing", status=status
    )


if __name__ == "__main__":
    print(table(), end="")
