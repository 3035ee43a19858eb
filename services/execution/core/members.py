"""Decides about single processes, whatever the mode: admission, starts and their limit, ends, kills, write-off."""

from collections.abc import Mapping
from dataclasses import replace

from schemas.events.worker import LostMember, RoleCount, RoomOverdue, StartFailed
from schemas.resources import MEMORY
from schemas.vocabulary import AttemptOutcome, Attribution, EndCause, MemberName, Mode, StartFailure
from services.execution.core.attribution import (
    Exit,
    ExitKind,
    as_follower,
    attribute_exit,
    may_follow,
    root_cause_order,
    shell_code,
    took_its_peers_along,
)
from services.execution.core.exchange import as_exchanged, was_left_out
from services.execution.core.placement import add_member, devices_needed, free_indices, missing_members
from services.execution.core.state import Desired, Ending, Job, Member, MemberState, Verdict
from services.execution.core.turn import AnswerAdmission, Kill, StartMember, Terminate, Turn

_LINGER_SECONDS = 2.0
"""A worker has ended, and its shim has not finished the tree below: from then on it is helped."""


def admit(turn: Turn) -> None:
    """Answer every process that asks. An answer takes effect after the commit that holds it."""
    for name, nonce in sorted(turn.seen.asking.items()):
        member = turn.job.member(name)
        refusal = admission_refusal(turn.job, member, nonce)
        if member is not None and not refusal and member.state is MemberState.COMMITTED:
            turn.job = turn.job.with_member(replace(member, state=MemberState.ADMITTED))
        turn.do(AnswerAdmission(member=name, nonce=nonce, refusal=refusal))


def admission_refusal(job: Job, member: Member | None, nonce: str) -> str:
    """Why a process may not run; empty if it may. One that was admitted before is admitted again."""
    if member is None or member.state in (MemberState.GONE, MemberState.WRITTEN_OFF):
        return "this member is gone"
    if member.nonce != nonce:
        return "another process has this name"
    if member.ending is not None:
        return "this member is leaving"
    if job.desired is not Desired.GRANTED or job.verdict is not None or job.is_over:
        return "the attempt is over"
    return ""


def start_missing(turn: Turn) -> None:
    """Commit the intent of every member that is missing and for which accelerators are free."""
    nonces, devices = list(turn.supply.nonces), list(turn.supply.devices)
    for grant in turn.job.roles:
        count = missing_members(turn.job, grant)
        wanted = devices_needed(grant)
        for index in free_indices(turn.job, grant.role, count):
            if not nonces or len(devices) < wanted:
                break
            mine, devices = tuple(devices[:wanted]), devices[wanted:]
            turn.job = add_member(
                turn.job, role=grant.role, index=index, nonce=nonces.pop(0), node=turn.supply.node, devices=mine
            )
    turn.supply = replace(turn.supply, nonces=tuple(nonces), devices=tuple(devices))


def request_starts(turn: Turn) -> None:
    for member in turn.job.members:
        is_wanted = member.state is MemberState.COMMITTED and member.ending is None
        if is_wanted and not turn.seen.process(member.name).recorded:
            turn.do(StartMember(member=member.name))


def watch_starts(turn: Turn) -> None:
    """Give up on members that are not admitted within the start limit; the first one of an epoch is told."""
    late: dict[str, int] = {}
    detail = ""
    for member in turn.job.members:
        if member.state is not MemberState.COMMITTED or member.ending is not None:
            continue
        error = turn.seen.start_errors.get(member.name)
        if error is not None and error.attributed_to is Attribution.JOB:
            what = f"{member.role} {member.index}: {error.detail}"
            turn.decide(_failed(127, Attribution.JOB, EndCause.NOT_STARTABLE, what))
        if turn.lasted(f"start:{member.name}") <= turn.limits.start_seconds:
            continue
        detail = error.detail if error is not None else "the process did not ask for admission in time"
        late[member.role] = late.get(member.role, 0) + 1
        drop_unadmitted(turn, member, reason=detail)
    if late and turn.job.start_failed_epoch != turn.job.epoch:
        turn.job = replace(turn.job, start_failed_epoch=turn.job.epoch)
        missing = tuple(RoleCount(role=role, members=count) for role, count in sorted(late.items()))
        turn.say(
            StartFailed(epoch=turn.job.epoch, missing=missing, failure=StartFailure.UNSCHEDULABLE, detail=detail)
        )


def drop_unadmitted(turn: Turn, member: Member, *, reason: str) -> None:
    """A member that was never admitted runs nothing: it is called gone at once, and refused when it asks."""
    gone = replace(
        member,
        state=MemberState.GONE,
        ending=Ending.NOT_STARTED,
        attributed_to=Attribution.PLATFORM,
        exit_reason=reason,
    )
    turn.job = turn.job.with_member(gone)
    turn.do(Kill(member=member.name))


def note_ends(turn: Turn) -> tuple[tuple[Member, Exit], ...]:
    """Members seen gone, with the judgement of their exit, what explains the others first. Their rows are gone."""
    ended: list[tuple[Member, Exit]] = []
    for member in turn.job.members:
        process = turn.seen.process(member.name)
        if member.state is MemberState.GONE or not process.recorded:
            continue
        if not process.gone:
            if process.ended and turn.lasted(f"linger:{member.name}") > _LINGER_SECONDS:
                turn.do(Kill(member=member.name))
            continue
        if member.ending is None and process.exit_code == 0 and was_left_out(turn.job, member):
            member = as_exchanged(member, turn.limits)  # noqa: PLW2901 - what is known of it only now
        judged = _judge(turn, member)
        if _hangs_on_a_peer(turn, member, judged):
            continue
        if member.state is MemberState.COMMITTED and member.ending is None:
            judged = Exit(
                kind=ExitKind.LOST,
                cause=EndCause.UNSEEN,
                attributed_to=Attribution.PLATFORM,
                reason="ended before it was admitted",
            )
        gone = replace(
            member,
            state=MemberState.GONE,
            exit_code=process.exit_code,
            attributed_to=judged.attributed_to,
            exit_reason=judged.reason,
            finished=member.finished or process.ledger_finished,
        )
        turn.job = turn.job.with_member(gone)
        if member.state is not MemberState.WRITTEN_OFF:
            ended.append((gone, judged))
    return tuple(sorted(ended, key=lambda end: (root_cause_order(end[1]), end[0].ordinal)))


def judge_follower(turn: Turn, member: Member, judged: Exit) -> Exit:
    """The judgement once more, by what happened to the peers: who trips over a lost one is part of that burst.

    A peer counts from its end on, also while what it left behind is still being ended.
    """
    if not _may_be_a_follower(turn, judged, member.exit_code):
        return judged
    peers = _peers_of(turn.job, member)
    is_told = any(lost.member in peers and lost.cause is not EndCause.PEER_LOST for lost in turn.job.losses)
    is_seen = any(_was_taken(turn, other) for other in turn.job.held() if other.name in peers)
    return as_follower(judged) if is_told or is_seen else judged


def count_loss(turn: Turn, member: Member, judged: Exit, *, step: int) -> None:
    """A member was taken away or crashed: it is replaced, unless that happens again and again without a step.

    What a group loses at once (its machine restarts, all crash in the same step) is one loss.
    """
    job = turn.job
    lost = LostMember(
        member=member.name,
        exit_code=member.exit_code,
        attributed_to=judged.attributed_to or Attribution.PLATFORM,
        reason=judged.reason,
        cause=judged.cause,
    )
    group = job.running.members if job.running is not None else ()
    is_new = member.name not in group or not any(each.member in group for each in job.losses)
    fruitless = 1 if step > job.fruitless_step else job.fruitless + is_new
    crashes = job.crashes + (is_new and judged.kind is ExitKind.CRASHED)
    turn.job = replace(
        job,
        losses=(*job.losses, lost)[-64:],
        fruitless=fruitless,
        fruitless_step=max(step, job.fruitless_step),
        crashes=crashes,
    )
    what = f"{member.role} {member.index} {judged.reason}"
    if crashes >= turn.limits.crashes_max and judged.kind is ExitKind.CRASHED:
        code = shell_code(member.exit_code)
        turn.decide(_failed(code, Attribution.JOB, judged.cause, f"{what}, {crashes} times in this attempt"))
    elif fruitless > turn.limits.fruitless_losses_max:
        told = f"{fruitless} workers were lost without a step between them, the last one: {what}"
        turn.decide(_failed(own_code(member, judged), Attribution.PLATFORM, judged.cause, told))


def fail_job(turn: Turn, member: Member, judged: Exit) -> None:
    what = f"{member.role} {member.index} {judged.reason}"
    turn.decide(_failed(shell_code(member.exit_code), Attribution.JOB, judged.cause, what))


def fail_platform(turn: Turn, reason: str, *, cause: EndCause, exit_code: int | None = None) -> None:
    turn.decide(_failed(exit_code, Attribution.PLATFORM, cause, reason))


def own_code(member: Member, judged: Exit) -> int | None:
    """Its exit code as a shell shows it; None where that only tells of our own kill."""
    return None if judged.cause is EndCause.STUCK else shell_code(member.exit_code)


def fail_after_losses(turn: Turn, reason: str, *, cause: EndCause) -> None:
    """The group cannot go on. If it has broken by crashes of its own alone, that is a failure of the job."""
    losses = turn.job.losses
    last = losses[-1] if losses else None
    told = f"{reason}; before that, {last.member.partition('/')[2]} {last.reason}" if last is not None else reason
    if last is not None and all(lost.attributed_to is Attribution.JOB for lost in losses):
        turn.decide(_failed(shell_code(last.exit_code), Attribution.JOB, last.cause or cause, told))
    else:
        fail_platform(turn, told, cause=cause)


def kill(turn: Turn, member: Member) -> None:
    """SIGKILL, each turn until it is seen gone. Then: told as overdue, and in the end written off."""
    turn.do(Kill(member=member.name))
    lasted = turn.lasted(f"kill:{member.name}")
    job = turn.job
    if lasted > turn.limits.overdue_seconds and job.overdue_epoch != job.epoch:
        turn.job = replace(job, overdue_epoch=job.epoch)
        turn.say(
            RoomOverdue(
                epoch=job.epoch,
                members=(member.name,),
                node=member.node,
                overdue_seconds=round(lasted, 3),
                capacity_revision=turn.instant.capacity_revision,
            )
        )
    if lasted > turn.limits.write_off_seconds:
        turn.job = turn.job.with_member(
            replace(member, state=MemberState.WRITTEN_OFF, exit_reason="written off: its end was never seen")
        )


def end_with_grace(turn: Turn, member: Member, *, grace_seconds: float) -> None:
    """SIGTERM, then SIGKILL when the grace is over."""
    if turn.seen.process(member.name).ended:
        return
    if turn.lasted(f"end:{member.name}") > grace_seconds:
        kill(turn, member)
    else:
        turn.do(Terminate(member=member.name))


def mark_ending(job: Job, member: Member, ending: Ending, reason: str) -> Job:
    """Note why we end it, so that its exit is attributed to that. The first reason stands."""
    if member.ending is None:
        return job.with_member(replace(member, ending=ending, ending_reason=reason))
    return job


def role_counts(job: Job) -> tuple[RoleCount, ...]:
    """Members held per granted role."""
    return tuple(RoleCount(role=grant.role, members=len(job.held(grant.role))) for grant in job.roles)


def exit_codes(job: Job) -> Mapping[MemberName, int | None]:
    return {m.name: m.exit_code for m in job.members if m.state is MemberState.GONE and m.attempt == job.attempt}


def _judge(turn: Turn, member: Member) -> Exit:
    grant, spec = turn.job.role(member.role), turn.job.spec
    return attribute_exit(
        member,
        turn.seen.process(member.name),
        mode=spec.mode if spec is not None else Mode.LIVE,
        memory_bytes=grant.resources[MEMORY] if grant is not None else 0,
    )


def _hangs_on_a_peer(turn: Turn, member: Member, judged: Exit) -> bool:
    """A peer has ended as well, and how is not known yet: a matter of milliseconds, and of whose fault this was."""
    if not _may_be_a_follower(turn, judged, turn.seen.process(member.name).exit_code):
        return False
    peers = _peers_of(turn.job, member)
    seen = [turn.seen.process(other.name) for other in turn.job.held() if other.name in peers - {member.name}]
    return any(process.ended and not process.gone and process.exit_code is None for process in seen)


def _may_be_a_follower(turn: Turn, judged: Exit, exit_code: int | None) -> bool:
    failed = judged.kind in (ExitKind.FAILED, ExitKind.CRASHED) and judged.cause is not EndCause.OUT_OF_MEMORY
    return failed and may_follow(exit_code) and turn.job.finished_step is None


def _peers_of(job: Job, member: Member) -> frozenset[MemberName]:
    """Members of the groups that it is in, itself included."""
    groups = [generation.members for generation in job.line if member.name in generation.members]
    return frozenset(name for group in groups for name in group)


def _was_taken(turn: Turn, member: Member) -> bool:
    process = turn.seen.process(member.name)
    is_known = process.ended and process.exit_code is not None
    return is_known and took_its_peers_along(_judge(turn, member))


def _failed(exit_code: int | None, attributed_to: Attribution, cause: EndCause, reason: str) -> Verdict:
    return Verdict(
        outcome=AttemptOutcome.FAILED, exit_code=exit_code, attributed_to=attributed_to, reason=reason, cause=cause
    )
