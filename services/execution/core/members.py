"""Decides about single processes, whatever the mode: admission, starts and their limit, ends, kills, write-off."""

from collections.abc import Mapping
from dataclasses import replace

from schemas.events.worker import LostMember, RoleCount, RoomOverdue, StartFailed
from schemas.vocabulary import AttemptOutcome, Attribution, MemberName, StartFailure
from services.execution.core.attribution import Exit, ExitKind, attribute_exit, shell_code
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
            turn.decide(_failed(127, Attribution.JOB, f"{member.role} {member.index}: {error.detail}"))
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
    """Members seen gone, oldest first, with the judgement of their exit. Their rows are gone from here on."""
    ended: list[tuple[Member, Exit]] = []
    for member in turn.job.members:
        process = turn.seen.process(member.name)
        if member.state is MemberState.GONE or not process.recorded:
            continue
        if not process.gone:
            if process.ended and turn.lasted(f"linger:{member.name}") > _LINGER_SECONDS:
                turn.do(Kill(member=member.name))
            continue
        judged = attribute_exit(member, process.exit_code)
        if member.state is MemberState.COMMITTED and member.ending is None:
            judged = Exit(
                kind=ExitKind.LOST, attributed_to=Attribution.PLATFORM, reason="ended before it was admitted"
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
    return tuple(ended)


def count_loss(turn: Turn, member: Member, judged: Exit, *, step: int) -> None:
    """A member was taken away or crashed: it is replaced, unless that happens again and again without a step."""
    job = turn.job
    lost = LostMember(
        member=member.name,
        exit_code=member.exit_code,
        attributed_to=judged.attributed_to,
        reason=judged.reason,
    )
    fruitless = 1 if step > job.fruitless_step else job.fruitless + 1
    crashes = job.crashes + (judged.kind is ExitKind.CRASHED)
    turn.job = replace(
        job,
        losses=(*job.losses, lost)[-64:],
        fruitless=fruitless,
        fruitless_step=max(step, job.fruitless_step),
        crashes=crashes,
    )
    what = f"{member.role} {member.index} {judged.reason}"
    if crashes >= turn.limits.crashes_max and judged.kind is ExitKind.CRASHED:
        turn.decide(
            _failed(shell_code(member.exit_code), Attribution.JOB, f"{what}, {crashes} times in this attempt")
        )
    elif fruitless > turn.limits.fruitless_losses_max:
        turn.decide(
            _failed(None, Attribution.PLATFORM, f"{fruitless} workers were lost without a step between them: {what}")
        )


def fail_job(turn: Turn, member: Member, judged: Exit) -> None:
    turn.decide(
        _failed(shell_code(member.exit_code), Attribution.JOB, f"{member.role} {member.index} {judged.reason}")
    )


def fail_platform(turn: Turn, reason: str) -> None:
    turn.decide(_failed(None, Attribution.PLATFORM, reason))


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


def _failed(exit_code: int | None, attributed_to: Attribution, reason: str) -> Verdict:
    return Verdict(outcome=AttemptOutcome.FAILED, exit_code=exit_code, attributed_to=attributed_to, reason=reason)
