"""Decides when an attempt is over, how it ended, and when a resize is answered."""

from dataclasses import replace

from schemas.events.worker import GroupEnded, RoomFreed
from schemas.vocabulary import AttemptOutcome, Attribution, EndCause
from services.execution.core.attribution import shell_code
from services.execution.core.live import stop_member, withdraw_offers
from services.execution.core.members import fail_platform, kill, mark_ending, role_counts
from services.execution.core.state import Desired, Ending, Job, MemberState, Verdict
from services.execution.core.turn import Turn


def wind_down(turn: Turn) -> None:
    """End every member with the grace that the eviction, or the job, allows."""
    job = turn.job
    reason = job.verdict.reason if job.verdict is not None else job.desired_reason or "the allocation was taken back"
    withdraw_offers(turn)
    for member in job.held():
        turn.job = mark_ending(turn.job, member, Ending.ATTEMPT_OVER, reason)
        current = turn.job.member(member.name) or member
        if current.ending is Ending.ABNORMAL:
            kill(turn, current)
        else:
            stop_member(turn, current, grace_seconds=job.grace_seconds, reason=reason)


def watch_run_time(turn: Turn) -> None:
    """A job that has run longer than it may has failed for good. Waiting and starting do not count."""
    limit = turn.job.spec.run_time_limit_seconds if turn.job.spec is not None else None
    if limit is not None and run_seconds(turn) > limit:
        turn.decide(
            Verdict(
                outcome=AttemptOutcome.FAILED,
                exit_code=None,
                attributed_to=Attribution.JOB,
                reason=f"ran longer than its limit of {limit:g} s",
                cause=EndCause.RUN_TIME_LIMIT,
                final=True,
            )
        )


def run_seconds(turn: Turn) -> float:
    """Seconds for which groups of the job have run, of all attempts, by this machine's wall clock."""
    started = turn.job.started_at
    present = (turn.instant.wall - started).total_seconds() if started is not None else 0.0
    return turn.job.run_seconds + max(0.0, present)


def answer_epochs(turn: Turn) -> None:
    """``room_freed`` for each resize epoch once: no leaver is left, and each role holds at most what is granted."""
    job = turn.job
    if not job.unanswered or not turn.instant.capacity_tells_all:
        return
    over = any(len(job.held(grant.role)) > grant.members for grant in job.roles)
    if over or any(member.ending is Ending.LEAVER for member in job.held()):
        return
    for epoch in job.unanswered:
        turn.say(RoomFreed(epoch=epoch, held=role_counts(job), capacity_revision=turn.instant.capacity_revision))
    turn.job = replace(job, unanswered=())


def end_attempt(turn: Turn) -> None:
    """``group_ended``, once, when its outcome is decided and no member is left that is not written off."""
    job = turn.job
    if job.is_over or job.held() or not turn.instant.capacity_tells_all:
        return
    verdict = job.verdict or _finished(job)
    if verdict is None and job.desired is Desired.GRANTED:
        return
    if verdict is None:
        verdict = Verdict(
            outcome=AttemptOutcome.EVICTED,
            exit_code=None,
            attributed_to=None,
            reason=job.desired_reason,
            cause=EndCause.STOPPED,
        )
    if job.desired is not Desired.CLOSED:
        turn.say(
            GroupEnded(
                attempt=job.attempt,
                outcome=verdict.outcome,
                exit_code=verdict.exit_code,
                attributed_to=verdict.attributed_to,
                reason=verdict.reason,
                step=job.step or None,
                capacity_revision=turn.instant.capacity_revision,
                cause=verdict.cause,
                final=verdict.final,
            )
        )
    turn.job = replace(
        job,
        verdict=verdict,
        attempt_ended=job.attempt,
        unanswered=(),
        run_seconds=run_seconds(turn),
        started_at=None,
        desired=job.desired if job.desired is Desired.CLOSED else Desired.NOTHING,
    )


def judge_finish(turn: Turn) -> None:
    """Training was complete, and nobody of the elastic role is left: the group's word stands if all exited with 0."""
    job = turn.job
    if job.finished_step is None or job.verdict is not None or job.held(job.workers.role):
        return
    verdict = _finished(job)
    if verdict is not None:
        turn.decide(verdict)
    elif job.desired is Desired.GRANTED:
        told = "the training was complete, but a worker did not exit with 0"
        fail_platform(turn, told, cause=EndCause.STUCK)


def _finished(job: Job) -> Verdict | None:
    running = job.running
    if job.finished_step is None or running is None:
        return None
    members = [job.member(name) for name in running.members]
    codes = [m.exit_code for m in members if m is not None and m.state is MemberState.GONE]
    if len(codes) < len(members) or any(shell_code(code) != 0 for code in codes):
        return None
    return Verdict(
        outcome=AttemptOutcome.SUCCEEDED,
        exit_code=0,
        attributed_to=None,
        reason=f"training was complete after {job.finished_step} steps",
        cause=EndCause.COMPLETED,
    )
