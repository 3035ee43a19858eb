"""What a trainer's message changes in the report of its member."""

import re
from dataclasses import replace
from typing import Final

from schemas.events.worker import SkippedCheckpoint
from schemas.vocabulary import MemberPhase
from services.execution.core.checkpoints import CANDIDATES_MAX
from services.execution.core.seen import Report, StartedWord
from tidewright import protocol

_CHECKPOINT: Final = re.compile(r"g(\d{1,9})-s(\d{1,15})")
_PHASES = {phase.value: phase for phase in MemberPhase}


def to_report(hello: protocol.Hello, before: Report | None, *, now: float) -> Report:
    """The report after a (re)connection. What only earlier messages told is kept."""
    known = before if before is not None else Report(connected=True, heard_at=now, progressed_at=now)
    return _moved(
        replace(known, connected=True),
        now=now,
        generation=hello.generation,
        step=hello.step,
        phase=hello.phase,
        waiting=hello.waiting,
        formed=hello.formed,
        rank=hello.rank,
        world=hello.world,
    )


def apply_message(report: Report, message: protocol.Message, *, now: float) -> Report:
    """The report after one message. Messages that say nothing about the member leave it as it is."""
    report = replace(report, heard_at=now)
    match message:
        case protocol.Mark():
            return _marked(report, message, now=now)
        case protocol.Formed():
            return replace(report, formed=message.generation)
        case protocol.FormFailed():
            return replace(
                report,
                failed=max(report.failed, message.generation),
                failure=message.reason,
                state_lost=message.generation if message.state_lost else report.state_lost,
            )
        case protocol.FellBack():
            return replace(
                _moved(report, now=now, generation=message.generation, waiting=False),
                failed=max(report.failed, message.failed),
                failure="fell back",
            )
        case protocol.Started():
            word = StartedWord(
                generation=message.generation,
                step=message.step,
                pause_seconds=message.pause_seconds,
                resumed_generation=message.resumed_generation,
                resumed_step=message.resumed_step,
                skipped=tuple(_skipped(text) for text in message.skipped[:CANDIDATES_MAX]),
            )
            moved = _moved(report, now=now, generation=message.generation, step=message.step, waiting=False)
            return replace(moved, started=word, rank=message.rank, world=message.world)
        case protocol.Waiting():
            return _moved(report, now=now, generation=message.generation, step=message.step, waiting=True)
        case protocol.Left():
            return replace(report, left=True)
        case protocol.Finished():
            # It may be the first that is heard of this group: of one that began at the end, nothing was left to do.
            moved = _moved(report, now=now, generation=message.generation, step=message.step, waiting=False)
            return replace(moved, finished_step=message.step)
        case _:
            return report


def _skipped(text: str) -> SkippedCheckpoint:
    """``g<generation>-s<step>: why``; numbers that cannot be read are 0."""
    name, _, reason = text.partition(": ")
    match = _CHECKPOINT.fullmatch(name)
    generation, step = (int(match[1]), int(match[2])) if match is not None else (0, 0)
    return SkippedCheckpoint(generation=generation, step=step, reason=reason if match is not None else text)


def is_news(message: protocol.Message, before: Report, after: Report) -> bool:
    """Whether a decision may depend on it at once; ordinary marks wait for the next look."""
    if not isinstance(message, protocol.Mark):
        return True
    return (before.generation, before.waiting, before.phase) != (after.generation, after.waiting, after.phase)


def _marked(report: Report, mark: protocol.Mark, *, now: float) -> Report:
    """A member that waits, or did until now, was held up by others: its own time to get ahead begins after that."""
    after = _moved(
        replace(
            report,
            phase_seconds=mark.phase_seconds,
            sync_seconds=mark.sync_seconds,
            generations=max(report.generations, mark.generations),
        ),
        now=now,
        generation=mark.generation,
        step=mark.step,
        phase=mark.phase,
        waiting=mark.waiting,
    )
    held_up = any(each.waiting or each.sync_seconds > 0 for each in (report, after))
    return replace(after, progressed_at=now) if held_up else after


def _moved(
    report: Report,
    *,
    now: float,
    generation: int | None = None,
    step: int | None = None,
    phase: str | None = None,
    waiting: bool | None = None,
    formed: int | None = None,
    rank: int | None = None,
    world: int | None = None,
) -> Report:
    """With what was said; notes when it last got ahead, and the step at which it was first seen in a generation."""
    after = replace(
        report,
        heard_at=now,
        generation=report.generation if generation is None else generation,
        step=report.step if step is None else step,
        phase=report.phase if phase is None else _PHASES.get(phase, report.phase),
        waiting=report.waiting if waiting is None else waiting,
        formed=report.formed if formed is None else formed,
        rank=report.rank if rank is None else rank,
        world=report.world if world is None else world,
    )
    if after.generation != report.generation:
        after = replace(after, generation_step=after.step)
    if (after.generation, after.step, after.phase) != (report.generation, report.step, report.phase):
        after = replace(after, progressed_at=now)
    return after
