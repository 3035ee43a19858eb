"""Decides which checkpoint a group goes on from: the highest step of the line that was applied."""

from collections.abc import Iterable

from services.execution.core.state import Checkpoint, Generation, GenerationState


def on_applied_line(checkpoint: Checkpoint, generations: Iterable[Generation]) -> bool:
    """False for one that a later started generation has passed by: it took over at an earlier step.

    A group that was cut off as a whole may go on stepping, and writing, after another has gone on without it.
    """
    return all(
        checkpoint.step <= generation.from_step
        for generation in generations
        if generation.state is GenerationState.STARTED and generation.number > checkpoint.generation
    )
