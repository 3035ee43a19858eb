"""Decides which checkpoints a group may go on from: those of the applied line, the highest step first."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from services.execution.core.state import Checkpoint, Generation, GenerationState, Job

CANDIDATES_MAX: Final = 16
"""Trainers keep three; more are there only where something else put them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelf:
    """What lies in a job's folder of checkpoints, by name alone: whether it is whole, who loads it will see.

    ``directory`` is that folder. ``youngest``: the highest generation that has started or written there, 0 if none.
    ``trouble``: why the folder could not be looked at; empty if it was, or does not exist.
    """

    directory: str = ""
    found: tuple[Checkpoint, ...] = ()
    youngest: int = 0
    trouble: str = ""


EMPTY_SHELF: Final = Shelf()


def on_applied_line(checkpoint: Checkpoint, generations: Iterable[Generation]) -> bool:
    """False for one that a later started generation has passed by: it took over at an earlier step.

    A group that was cut off as a whole may go on stepping, and writing, after another has gone on without it.
    """
    return all(
        checkpoint.step <= generation.from_step
        for generation in generations
        if generation.state is GenerationState.STARTED and generation.number > checkpoint.generation
    )


def plan_candidates(job: Job, shelf: Shelf) -> tuple[Checkpoint, ...]:
    """Those of the applied line, the highest step first. The last one announced is among them though it be missing:
    who looks for it in vain says so.
    """
    known = {(each.generation, each.step): each for each in shelf.found}
    if job.checkpoint is not None:
        number = job.checkpoint.generation, job.checkpoint.step
        place = f"{shelf.directory}/g{number[0]}-s{number[1]}"  # where it lies now, should the folder have moved
        known.setdefault(number, replace(job.checkpoint, location=place))
    line = [each for each in known.values() if on_applied_line(each, job.generations)]
    return tuple(sorted(line, key=lambda each: (-each.step, -each.generation)))[:CANDIDATES_MAX]


def trouble_of(job: Job, shelf: Shelf) -> str:
    """Why nothing may be decided by this look at the folder; empty if it may.

    A folder that a job has written to, and that now shows no trace of it, is not the one it wrote to: a disk that is
    not mounted must not make a job begin anew.
    """
    if shelf.trouble and has_steps(job):
        return f"the folder of checkpoints cannot be read: {shelf.trouble}"
    if job.checkpoint is not None and not shelf.found and not shelf.youngest:
        return (
            f"the checkpoint of step {job.checkpoint.step} is gone, and so is every trace of it: is a disk missing?"
        )
    return ""


def has_steps(job: Job) -> bool:
    return job.checkpoint is not None or max(job.step, job.attempt_step) > 0
