"""Decides what to do about one job: desired against observed, every time anew."""

from collections.abc import Mapping
from dataclasses import replace

from schemas.events.worker import Checkpointed, CheckpointFailed
from schemas.vocabulary import Mode
from services.execution.core.ending import answer_epochs, end_attempt, judge_finish, watch_run_time, wind_down
from services.execution.core.live import finish_live, note_live_ends, note_live_words, run_live
from services.execution.core.members import admit, request_starts
from services.execution.core.recent import forget_old
from services.execution.core.seen import Limits, Seen
from services.execution.core.state import Desired, Job, MemberState
from services.execution.core.turn import Decision, Kill, Now, Supply, Turn
from services.execution.core.whole import note_whole_ends, run_whole


def decide(job: Job, seen: Seen, *, limits: Limits, since: Mapping[str, float], now: Now, supply: Supply) -> Decision:
    """One turn. Level-triggered: called again with the same input, it decides the same.

    1. Answer who asks for admission; note words, then exits (so that a member's last word is known when it goes).
    2. While the attempt is granted and undecided: run it. Otherwise: end its members, with grace.
    3. Answer resizes; end the attempt when nobody is left.
    """
    turn = Turn(job, seen, limits=limits, since=since, now=now, supply=supply)
    admit(turn)
    _note(turn)
    for member in turn.job.members:
        if member.state is MemberState.WRITTEN_OFF:
            turn.do(Kill(member=member.name))
    if not turn.job.is_over:
        _run(turn)
        answer_epochs(turn)
        end_attempt(turn)
    request_starts(turn)
    return turn.decision()


def _note(turn: Turn) -> None:
    if _is_live(turn.job):
        note_live_words(turn)
        note_live_ends(turn)
        judge_finish(turn)
    else:
        note_whole_ends(turn)
    turn.job = forget_old(turn.job)
    _note_checkpoints(turn)


def _run(turn: Turn) -> None:
    job = turn.job
    if job.spec is not None and job.desired is Desired.GRANTED and job.verdict is None:
        watch_run_time(turn)
        if job.finished_step is not None:
            finish_live(turn)
        elif job.spec.mode is Mode.LIVE:
            run_live(turn)
        else:
            run_whole(turn)
    if turn.job.verdict is not None or turn.job.desired in (Desired.EVICTED, Desired.CLOSED):
        wind_down(turn)


def _note_checkpoints(turn: Turn) -> None:
    """Announce what the shell lets through: it keeps the interval between two announcements."""
    word, failure = turn.seen.checkpoint_word, turn.seen.checkpoint_failure
    if word is not None and word != turn.job.checkpoint:
        turn.job = replace(turn.job, checkpoint=word)
        turn.say(Checkpointed(generation=word.generation, step=word.step, location=word.location))
    if failure is not None:
        generation, step, reason = failure
        turn.say(CheckpointFailed(generation=generation, step=step, reason=reason))


def _is_live(job: Job) -> bool:
    return job.spec is None or job.spec.mode is Mode.LIVE
