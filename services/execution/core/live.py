"""Decides for jobs of living processes: what members' words and exits mean, which group is next, who is stuck."""

from dataclasses import replace

from schemas.events.worker import GroupChanged, GroupStarted, ResumePoint
from schemas.vocabulary import Attribution, EndCause, GroupChangeCause, MemberName, Mode
from services.execution.core.abnormal import abnormal_members, awaited, blocked_for
from services.execution.core.attribution import Exit, ExitKind
from services.execution.core.exchange import mark_exchanged, worn_members
from services.execution.core.generations import (
    Hold,
    Offer,
    StateLost,
    Unreadable,
    applied_on_line,
    is_newer,
    plan_offer,
    started_by,
)
from services.execution.core.members import (
    count_loss,
    drop_unadmitted,
    end_with_grace,
    fail_after_losses,
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
from services.execution.core.placement import choose_leavers, mark_leaving
from services.execution.core.seen import Report
from services.execution.core.state import Ending, Generation, GenerationState, Job, Member, MemberState
from services.execution.core.turn import AskToStop, OfferGeneration, Turn, WithdrawGeneration

_FIRST_FORMATIONS_MAX = 20
"""A first group that cannot be formed so often ends the attempt."""


def run_live(turn: Turn) -> None:
    """One turn of a granted attempt without a verdict."""
    _watch_offer(turn)
    _choose_leavers(turn)
    start_missing(turn)
    watch_starts(turn)
    _watch_joining(turn)
    _end_stuck(turn)
    _end_leavers(turn)
    if turn.seen.settled:
        _offer_next(turn)
        _watch_minimum(turn)


def note_live_words(turn: Turn) -> None:
    """Which generations have started, how far they are, and whether training is complete."""
    job = turn.job
    step = max(job.step, applied_on_line(job, turn.seen))
    turn.job = replace(job, step=step)
    for generation in turn.job.line:
        if not is_newer(generation, turn.job):
            continue
        report = started_by(generation, turn.seen, turn.job, settled=False)
        if report is None:
            of_newcomer = started_by(generation, turn.seen, turn.job, settled=True)
            if of_newcomer is not None and turn.lasted(f"word:{generation.number}") > turn.limits.settle_seconds:
                report = of_newcomer
        if report is not None:
            _note_started(turn, generation, report)
    _note_finished(turn)


def note_live_ends(turn: Turn) -> None:
    """Judge exits. After the group has finished, exits decide about success; before, they end or mend the attempt."""
    for member, first_look in note_ends(turn):
        elastic = member.role == turn.job.workers.role
        if member.attempt != turn.job.attempt or turn.job.is_over:
            continue
        judged = judge_follower(turn, member, first_look)
        match judged.kind:
            case ExitKind.ASKED:
                pass
            case ExitKind.DONE if turn.job.finished_step is None or not elastic:
                _ended_early(turn, member, judged)
            case ExitKind.DONE:
                pass
            case ExitKind.FAILED:
                fail_job(turn, member, judged)
            case ExitKind.CRASHED if turn.job.finished_step is not None and elastic:
                fail_job(turn, member, replace(judged, reason=f"{judged.reason} after the training was complete"))
            case ExitKind.LOST if turn.job.finished_step is not None and elastic:
                told = f"worker {member.index} {judged.reason} after the training was complete"
                fail_platform(turn, told, cause=judged.cause, exit_code=own_code(member, judged))
            case ExitKind.CRASHED | ExitKind.LOST:
                count_loss(turn, member, judged, step=turn.job.step)


def finish_live(turn: Turn) -> None:
    """Training is complete: the group's members end by themselves, within their limits; others are stopped.

    So is a member whose group was cut while the others said their last word: nobody is left to go on with.
    """
    running = turn.job.running
    withdraw_offers(turn)
    _end_stuck(turn)
    for member in turn.job.held():
        report = turn.seen.reports.get(member.name)
        cut_off = report is not None and report.waiting
        in_group = running is not None and member.name in running.members and not cut_off
        elastic = turn.job.workers.role
        if not in_group and (member.role == elastic or not turn.job.held(elastic)):
            turn.job = mark_ending(turn.job, member, Ending.ATTEMPT_OVER, "the training is complete")
            stop_member(turn, member, grace_seconds=turn.job.grace_seconds, reason="the training is complete")


def stop_member(turn: Turn, member: Member, *, grace_seconds: float, reason: str) -> None:
    """End one member, whatever it has come to."""
    if member.state is MemberState.COMMITTED:
        drop_unadmitted(turn, member, reason=reason)
    elif turn.job.spec is not None and turn.job.spec.mode is Mode.LIVE and member.role == turn.job.workers.role:
        stop_live(turn, member, grace_seconds=grace_seconds, reason=reason)
    else:
        end_with_grace(turn, member, grace_seconds=grace_seconds)


def stop_live(turn: Turn, member: Member, *, grace_seconds: float, reason: str) -> None:
    """End one member with a checkpoint: by its connection if it has joined, else by SIGTERM; at last by SIGKILL."""
    report = turn.seen.reports.get(member.name)
    if turn.seen.process(member.name).ended:
        return
    if report is None:
        # It never joined, or has not come back since a restart. The first kind holds nothing that could be saved.
        in_group = any(member.name in generation.members for generation in turn.job.line)
        if not in_group or turn.lasted(f"end:{member.name}") > grace_seconds:
            end_with_grace(turn, member, grace_seconds=grace_seconds)
        return
    if turn.lasted(f"end:{member.name}") > grace_seconds:
        kill(turn, member)
        return
    turn.do(AskToStop(member=member.name, grace_seconds=grace_seconds, reason=reason))
    if not report.holds_state and turn.lasted(f"end:{member.name}") > turn.limits.idle_stop_seconds:
        end_with_grace(turn, member, grace_seconds=grace_seconds)


def withdraw_offers(turn: Turn) -> None:
    offered = turn.job.offered
    if offered is not None:
        _fail_offer(turn, offered)


def _ended_early(turn: Turn, member: Member, judged: Exit) -> None:
    reason = (
        f"{judged.reason} before the group had finished: does the script train with tidewright.elastic?"
        if member.role == turn.job.workers.role
        else judged.reason
    )
    fail_job(turn, replace(member, exit_code=0), replace(judged, cause=EndCause.ENDED_EARLY, reason=reason))


def _note_started(turn: Turn, generation: Generation, report: Report) -> None:
    """The generation is the line from here on; whatever was offered before it has failed."""
    job, word = turn.job, report.started
    told = word if word is not None and word.generation == generation.number else None
    resumed = told.resumed_generation if told is not None else 0
    step = told.step if told is not None else report.step
    from_step = told.resumed_step if told is not None and resumed else max(0, step - 2)
    for other in job.line:
        if other.number < generation.number and other.state is GenerationState.OFFERED:
            job = job.with_generation(replace(other, state=GenerationState.FAILED))
    before = job.running
    started = replace(generation, state=GenerationState.STARTED, from_step=from_step)
    job, exchanged = mark_exchanged(job.with_generation(started), started, turn.limits)
    resume_point = ResumePoint(generation=resumed, step=from_step) if resumed else None
    skipped = told.skipped if told is not None else ()
    if not job.group_started:
        turn.say(
            GroupStarted(
                epoch=job.epoch,
                attempt=job.attempt,
                generation=generation.number,
                workers=len(generation.members),
                resumed_from=resume_point,
                steps_dropped=max(0, job.attempt_step - from_step),
                skipped=skipped,
            )
        )
        job = replace(job, group_started=True, started_at=turn.instant.wall)
    else:
        turn.say(
            GroupChanged(
                epoch=job.epoch,
                attempt=job.attempt,
                generation=generation.number,
                workers=len(generation.members),
                step=step,
                pause_seconds=round(told.pause_seconds, 6) if told is not None else 0.0,
                cause=change_cause(before, started, lost=bool(job.losses)),
                lost=job.losses,
                resumed_from=resume_point,
                steps_dropped=max(0, job.step - from_step) if resumed else 0,
                skipped=skipped,
                exchanged=exchanged,
            )
        )
    kept = tuple(g for g in job.generations if g.state is GenerationState.STARTED or g.number > generation.number)
    # What was resumed from a checkpoint may stand further back than what was lost.
    turn.job = replace(job, losses=(), step=step if resumed else max(job.step, step), generations=kept)


def change_cause(before: Generation | None, after: Generation, *, lost: bool) -> GroupChangeCause:
    """Why the group changed. A newcomer in an epoch that asked for no other size stands in for a lost one."""
    came = before is None or any(name not in before.members for name in after.members)
    if lost:
        return GroupChangeCause.MEMBER_REPLACED if came else GroupChangeCause.MEMBER_LOST
    if before is not None and after.epoch != before.epoch:
        return GroupChangeCause.RESIZED
    return GroupChangeCause.MEMBER_REPLACED if came else GroupChangeCause.RESYNCED


def _note_finished(turn: Turn) -> None:
    """The group's word: a member of the newest generation in use says that training is complete, or its ledger."""
    if turn.job.finished_step is not None or turn.job.verdict is not None:
        return
    for generation in reversed(turn.job.line):
        for name in generation.members:
            report, process = turn.seen.reports.get(name), turn.seen.process(name)
            said = report.finished_step if report is not None else None
            if said is None and process.ledger_finished:
                said = process.ledger_step
            if said is None:
                continue
            if is_newer(generation, turn.job) and _is_in(generation, report):
                _note_started(turn, generation, report or _silent_report(generation, said, turn.now))
            if turn.job.running is not None and name in turn.job.running.members:
                turn.job = replace(turn.job, finished_step=said, step=max(said, turn.job.step))
                return


def _is_in(generation: Generation, report: Report | None) -> bool:
    return report is None or report.generation == generation.number


def _silent_report(generation: Generation, step: int, now: float) -> Report:
    return Report(connected=False, heard_at=now, progressed_at=now, generation=generation.number, step=step)


def _watch_offer(turn: Turn) -> None:
    """Call an offer off when it cannot come true: a member of it is gone, failed to form, or the time is over."""
    offered = turn.job.offered
    if offered is None:
        return
    reports = {n: turn.seen.reports[n] for n in offered.members if n in turn.seen.reports}
    held = {m.name for m in turn.job.held() if m.ending is not Ending.ABNORMAL}
    lost = any(name not in held for name in (*offered.members, *offered.leavers))
    for report in reports.values():
        if report.state_lost == offered.number:
            fail_after_losses(turn, f"the state of training is lost: {report.failure}", cause=EndCause.STATE_LOST)
    failed = any(report.failed >= offered.number for report in reports.values())
    taken = [n for n, r in reports.items() if offered.number in (r.generation, r.formed)]
    orphaned = turn.seen.settled and offered.number not in turn.seen.stores and not taken
    late = len(taken) < len(offered.members) and turn.lasted(f"form:{offered.number}") > turn.limits.form_seconds
    if lost or failed or orphaned or late:
        _fail_offer(turn, offered)


def _fail_offer(turn: Turn, offered: Generation) -> None:
    turn.job = turn.job.with_generation(replace(offered, state=GenerationState.FAILED))
    turn.do(WithdrawGeneration(generation=offered.number))


def _choose_leavers(turn: Turn) -> None:
    worn = worn_members(turn.job, turn.seen, turn.limits)
    for grant in turn.job.roles:
        turn.job = mark_leaving(turn.job, choose_leavers(turn.job, grant, worn=worn), worn=worn)


def _watch_joining(turn: Turn) -> None:
    """Members that run and have not reported: new ones have a limit to join, former ones to come back."""
    touched = frozenset(name for generation in turn.job.line for name in generation.members)
    for member in turn.job.members:
        process = turn.seen.process(member.name)
        known = member.name in turn.seen.reports or member.role != turn.job.workers.role
        if not member.may_work or known or process.ended:
            continue
        silent = turn.lasted(f"join:{member.name}")
        # A script may sleep before it joins; one that was in a group, or is stopped, does not come by itself.
        still = member.name in touched and process.still_seconds >= turn.limits.silent_seconds
        if silent > turn.limits.silent_seconds and (still or process.stopped) and process.recorded:
            reason = f"silent for {silent:.0f} s, its process does not move"
            turn.job = mark_ending(turn.job, member, Ending.ABNORMAL, reason)
        elif silent > turn.limits.starting_seconds and member.name in touched:
            turn.job = mark_ending(turn.job, member, Ending.ABNORMAL, f"silent for {silent:.0f} s")
        elif silent > turn.limits.starting_seconds:
            reason = f"did not call tidewright.elastic.join() within {turn.limits.starting_seconds:.0f} s"
            judged = Exit(
                kind=ExitKind.FAILED, cause=EndCause.NEVER_JOINED, attributed_to=Attribution.JOB, reason=reason
            )
            fail_job(turn, member, judged)


def _end_stuck(turn: Turn) -> None:
    running, reports = turn.job.running, turn.seen.reports
    blocked = 0.0
    if turn.seen.settled and awaited(running, reports) and running is not None:
        already = blocked_for(running, reports)
        blocked = turn.lasted(f"blocked:{running.number}", already=already)
    stuck = abnormal_members(turn.job, turn.seen, limits=turn.limits, blocked_seconds=blocked, now=turn.now)
    for member, reason in stuck:
        turn.job = mark_ending(turn.job, member, Ending.ABNORMAL, reason)
    for member in turn.job.held():
        if member.ending is Ending.ABNORMAL:
            kill(turn, member)


def _end_leavers(turn: Turn) -> None:
    """A leaver in the group exits by itself once the next one has started; one outside is stopped at once.

    So is one whose group was cut before it was told of the start: the state that it holds for others is old now.
    """
    grace = turn.job.grace_seconds
    for member in turn.job.held():
        if member.ending is not Ending.LEAVER:
            continue
        report = turn.seen.reports.get(member.name)
        in_group = any(member.name in generation.members for generation in turn.job.line)
        if member.state is MemberState.COMMITTED:
            drop_unadmitted(turn, member, reason=member.ending_reason)
        elif in_group or (report is not None and report.is_stepping):
            if turn.lasted(f"end:{member.name}") > grace:
                kill(turn, member)
        else:
            stop_live(turn, member, grace_seconds=grace, reason=member.ending_reason)


def _offer_next(turn: Turn) -> None:
    if turn.job.offered is not None or turn.job.finished_step is not None or turn.job.verdict is not None:
        return
    failed = [g for g in turn.job.line if g.state is GenerationState.FAILED]
    if failed and turn.job.running is None and len(failed) >= _FIRST_FORMATIONS_MAX:
        fail_after_losses(turn, f"no group could be formed in {len(failed)} attempts", cause=EndCause.NOT_FORMED)
        return
    if failed and turn.lasted(f"retry:{failed[-1].number}") < retry_seconds(turn, len(failed)):
        return
    worn = worn_members(turn.job, turn.seen, turn.limits)
    plan = plan_offer(turn.job, turn.seen, gathered=False, worn=worn)
    if isinstance(plan, Hold) and plan.gathering and turn.lasted("gather") > turn.limits.gather_seconds:
        plan = plan_offer(turn.job, turn.seen, gathered=True, worn=worn)
    if isinstance(plan, StateLost) or (
        isinstance(plan, Unreadable) and turn.lasted("unreadable") > turn.limits.recover_seconds
    ):
        fail_after_losses(turn, plan.reason, cause=EndCause.STATE_LOST)
    elif isinstance(plan, Offer):
        _offer(turn, plan)


def retry_seconds(turn: Turn, failures: int) -> float:
    """How long to wait after the last failed offer: doubling, with a bound."""
    base = turn.limits.offer_retry_seconds * 2.0 ** min(failures - 1, 30)
    return min(turn.limits.offer_retry_seconds_max, base)


def _offer(turn: Turn, plan: Offer) -> None:
    job = turn.job
    generation = Generation(
        number=max(next_generation(job, turn), plan.above + 1),
        attempt=job.attempt,
        epoch=job.epoch,
        members=plan.members,
        leavers=plan.leavers,
        source=plan.source,
        checkpoint=plan.checkpoint,
    )
    turn.job = replace(job, generation=generation.number, generations=(*job.generations, generation))
    turn.do(OfferGeneration(generation=generation, older=plan.older, may_begin_anew=plan.may_begin_anew))


def next_generation(job: Job, turn: Turn) -> int:
    """A number that was never used, also not by a group that a member knows and we do not."""
    known: list[int] = [max(r.generation, r.formed) for r in turn.seen.reports.values()]
    return max((job.generation, *known)) + 1


def _watch_minimum(turn: Turn) -> None:
    """Below its minimum a group waits for its replacements, for a while."""
    job = turn.job
    if job.running is None or job.finished_step is not None:
        return
    able = [name for name in _able(job) if name in turn.seen.reports]
    if len(able) < job.workers.minimum and turn.lasted("below_minimum") > turn.limits.recover_seconds:
        reason = f"below the minimum of {job.workers.minimum} for {turn.limits.recover_seconds:.0f} s"
        fail_after_losses(turn, reason, cause=EndCause.BELOW_MINIMUM)


def _able(job: Job) -> tuple[MemberName, ...]:
    return tuple(m.name for m in job.members if m.may_work and m.role == job.workers.role)
