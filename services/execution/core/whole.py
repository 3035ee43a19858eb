"""Decides for jobs that are started as a whole (restart and fixed mode): a resize ends all and begins anew."""

from dataclasses import replace

from schemas.events.worker import GroupChanged, GroupStarted
from schemas.vocabulary import AttemptOutcome, EndCause, GroupChangeCause
from services.execution.core.attribution import ExitKind
from services.execution.core.live import stop_member
from services.execution.core.members import (
    fail_job,
    fail_platform,
    judge_follower,
    kill,
    mark_ending,
    note_ends,
    own_code,
    start_missing,
    watch_starts,
)
from services.execution.core.placement import devices_needed
from services.execution.core.state import Ending, Generation, GenerationState, Job, Member, MemberState, Verdict
from services.execution.core.turn import Turn


def note_whole_ends(turn: Turn) -> None:
    """One failure is the attempt's; success is every member's exit with 0."""
    for member, first_look in note_ends(turn):
        if member.attempt != turn.job.attempt or turn.job.is_over:
            continue
        judged = judge_follower(turn, member, first_look)
        match judged.kind:
            case ExitKind.ASKED | ExitKind.DONE:
                pass
            case ExitKind.FAILED | ExitKind.CRASHED:
                fail_job(turn, member, judged)
            case ExitKind.LOST if member.ending is None and member.exit_code is None and not _was_admitted(member):
                pass  # its start failed: the whole is begun again, and the start limit goes on
            case ExitKind.LOST if judged.cause is EndCause.PEER_LOST:
                pass  # the end of the one that was lost decides
            case ExitKind.LOST:
                told = f"{member.role} {member.index} {judged.reason}"
                fail_platform(turn, told, cause=judged.cause, exit_code=own_code(member, judged))
    current = _current(turn.job)
    if current is not None and all(_succeeded(turn.job.member(name)) for name in current.members):
        turn.decide(
            Verdict(
                outcome=AttemptOutcome.SUCCEEDED,
                exit_code=0,
                attributed_to=None,
                reason="every member exited with 0",
                cause=EndCause.COMPLETED,
            )
        )


def run_whole(turn: Turn) -> None:
    """One turn of a granted attempt without a verdict."""
    _supersede(turn)
    watch_starts(turn)
    for member in turn.job.held():
        if member.ending is Ending.LEAVER:
            stop_member(turn, member, grace_seconds=turn.job.grace_seconds, reason=member.ending_reason)
        elif member.ending is Ending.ABNORMAL:
            kill(turn, member)
        elif turn.seen.settled and turn.seen.process(member.name).quiet_seconds > turn.limits.quiet_seconds:
            reason = f"no output and no CPU time for {turn.limits.quiet_seconds:.0f} s"
            turn.job = mark_ending(turn.job, member, Ending.ABNORMAL, reason)
    if not turn.job.held() and turn.job.verdict is None:
        _begin_whole(turn)
    _note_running(turn)


def _supersede(turn: Turn) -> None:
    """End what runs at another size than granted, and a start of which a part failed."""
    current = _current(turn.job)
    if current is None:
        return
    members = [turn.job.member(name) for name in current.members]
    sizes = {grant.role: grant.members for grant in turn.job.roles if grant.members}
    have: dict[str, int] = {}
    for name in current.members:
        role = name.split("/")[1]
        have[role] = have.get(role, 0) + 1
    incomplete = current.state is GenerationState.OFFERED and any(
        m is None or (m.state is MemberState.GONE and not _succeeded(m)) for m in members
    )
    if sizes == have and not incomplete:
        return
    reason = "started anew: a member could not be started" if sizes == have else "started anew at another size"
    for member in turn.job.held():
        turn.job = mark_ending(turn.job, member, Ending.LEAVER, reason)
    if current.state is GenerationState.OFFERED:
        turn.job = turn.job.with_generation(replace(current, state=GenerationState.FAILED))


def _begin_whole(turn: Turn) -> None:
    """Commit the intent of every member at once, or of none."""
    job = turn.job
    wanted = sum(devices_needed(grant) * grant.members for grant in job.roles)
    count = sum(grant.members for grant in job.roles)
    if wanted > len(turn.supply.devices) or count > len(turn.supply.nonces) or count == 0:
        return
    start_missing(turn)
    order = {grant.role: (not grant.elastic, number) for number, grant in enumerate(turn.job.roles)}
    ranked = sorted(turn.job.held(), key=lambda m: (order[m.role], m.index))
    number = turn.job.generation + 1
    generation = Generation(
        number=number,
        attempt=job.attempt,
        epoch=job.epoch,
        members=tuple(m.name for m in ranked),
        source=-1,
        checkpoint=job.spec.checkpoint_path or "" if job.spec is not None else "",
    )
    kept = tuple(g for g in turn.job.generations if g.state is GenerationState.STARTED)
    turn.job = replace(turn.job, generation=number, generations=(*kept, generation))


def _note_running(turn: Turn) -> None:
    """Started: every member is admitted, so its script runs."""
    job, current = turn.job, _current(turn.job)
    if current is None or current.state is not GenerationState.OFFERED:
        return
    members = [job.member(name) for name in current.members]
    if not all(m is not None and (m.state is MemberState.ADMITTED or _succeeded(m)) for m in members):
        return
    workers = sum(1 for m in members if m is not None and m.role == job.workers.role)
    job = job.with_generation(replace(current, state=GenerationState.STARTED))
    if job.group_started:
        turn.say(
            GroupChanged(
                epoch=job.epoch,
                attempt=job.attempt,
                generation=current.number,
                workers=workers,
                step=0,
                pause_seconds=0.0,
                cause=GroupChangeCause.RESIZED,
                lost=job.losses,
            )
        )
        turn.job = replace(job, losses=())
        return
    turn.say(
        GroupStarted(
            epoch=job.epoch,
            attempt=job.attempt,
            generation=current.number,
            workers=workers,
            resumed_from=None,
            steps_dropped=0,
        )
    )
    turn.job = replace(job, group_started=True, started_at=turn.instant.wall)


def _current(job: Job) -> Generation | None:
    own = [g for g in job.generations if g.attempt == job.attempt]
    return own[-1] if own and own[-1].state is not GenerationState.FAILED else None


def _succeeded(member: Member | None) -> bool:
    return member is not None and member.state is MemberState.GONE and member.exit_code == 0 and member.ending is None


def _was_admitted(member: Member) -> bool:
    return member.exit_reason != "ended before it was admitted"
