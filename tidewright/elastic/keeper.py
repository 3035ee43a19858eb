"""When a checkpoint is due, what is in it, and going on from one."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tidewright import protocol
from tidewright.elastic.checkpoint import BackgroundWriter, Snapshot, load_first
from tidewright.elastic.errors import CheckpointBroken, ElasticError, StateLost
from tidewright.elastic.ledger import Ledger
from tidewright.elastic.standing import Standing
from tidewright.elastic.tracked import Tracked, copies, set_from
from tidewright.elastic.transfer import Position

_COURSE = ("samples", "global_batch", "seed", "shuffle")
"""What decides which samples a step uses; the number of epochs may change between two runs."""
_REASON_CHARACTERS_MAX = 500


class Keeper:
    """Without a directory nothing is written. Only one member at a time writes: the lowest rank."""

    def __init__(
        self,
        *,
        directory: str,
        every_steps: int,
        standing: Standing,
        tracked: Tracked,
        ledger: Ledger,
        plan: Mapping[str, Any],
        say: Callable[[protocol.Message], None],
    ) -> None:
        self._every_steps = every_steps
        self._standing = standing
        self._tracked = tracked
        self._ledger = ledger
        self._plan = plan
        self._say = say
        self._due_since = 0
        """the last step whose checkpoint was due, whoever wrote it and whatever became of it"""
        self._kept_step = 0
        """the highest step that this process knows to be on the disk"""
        self.skipped: tuple[str, ...] = ()
        """what ``load`` passed over, and why"""
        self._writer = BackgroundWriter(Path(directory), self._on_written) if directory else None

    def note_due(self, step: int) -> None:
        """Another member writes the state of ``step``, or it has just come from one."""
        self._due_since = step

    def note_loaded(self, step: int) -> None:
        """The group goes on from the checkpoint of ``step``, or begins at step 0."""
        self._due_since = self._kept_step = step

    def started(self, generation: int) -> None:
        """No older generation may add a checkpoint from now on."""
        if self._writer is not None:
            self._writer.fence(generation, on_failed=lambda error: self._on_unfenced(generation, error))

    def is_due(self, step: int) -> bool:
        return self._every_steps > 0 and step // self._every_steps > self._due_since // self._every_steps

    def begin(self, step: int) -> None:
        """Copy the state (a moment) and write it in the background; not at all while an earlier one is written."""
        if self._writer is not None and not self._writer.is_busy and step > self._kept_step:
            before = self._standing.view.phase
            self._standing.enter_phase("checkpointing")
            self._writer.begin(self._snapshot(step))
            self._due_since = step
            self._standing.enter_phase(before)

    def write(self, step: int) -> None:
        """Write the state here and now, unless it is kept already."""
        if self._writer is None:
            return
        before = self._standing.view.phase
        self._standing.enter_phase("checkpointing")
        self._writer.wait()
        if step > self._kept_step:
            self._writer.write(self._snapshot(step))
            self._due_since = step
        self._standing.enter_phase(before)

    def wait(self) -> None:
        """Until what is being written is written."""
        if self._writer is not None:
            self._writer.wait()

    def load(self, form: protocol.Form) -> Position:
        """Take over the state of the first whole checkpoint of an offer; of a fresh job if it names none.

        Raises StateLost if none is whole (unless the job may begin anew), ElasticError if it does not fit the script.
        """
        self.skipped = ()
        if not form.checkpoint:
            return Position()
        first = Path(form.checkpoint)
        try:
            snapshot = load_first([first, *(first.parent / name for name in form.older)], skipped=self._on_skipped)
        except CheckpointBroken as error:
            if form.may_begin_anew and error.is_damaged:
                return Position()
            raise StateLost(f"{error} in {first.parent} ({'; '.join(self.skipped)})") from error
        name = f"checkpoint g{snapshot.generation}-s{snapshot.step}"
        if snapshot.layout != self._tracked.layout():
            raise ElasticError(f"{name} holds other tensors than the script tracks: was the model changed?")
        for what in _COURSE:
            if snapshot.plan.get(what) != self._plan.get(what):
                raise ElasticError(
                    f"{name} was made with {what} = {snapshot.plan.get(what)!r}, now it is {self._plan.get(what)!r}: "
                    "its steps would mean other samples"
                )
        set_from(self._tracked.tensors(), snapshot.tensors)
        self._tracked.load_values(snapshot.values)
        position = Position(step=snapshot.step, generation=snapshot.generation)
        return replace(position, resumed_generation=snapshot.generation, resumed_step=snapshot.step)

    def _snapshot(self, step: int) -> Snapshot:
        self._ledger.sync()
        return Snapshot(
            generation=self._standing.view.generation,
            step=step,
            world=self._standing.view.world,
            layout=self._tracked.layout(),
            tensors=copies(self._tracked.tensors()),
            values=self._tracked.save_values(),
            plan=dict(self._plan),
        )

    def _on_skipped(self, why: str) -> None:
        self.skipped = (*self.skipped, why[:_REASON_CHARACTERS_MAX])
        self._ledger.write("checkpoint_skipped", reason=why)

    def _on_unfenced(self, generation: int, error: OSError) -> None:
        self._ledger.write("fence_failed", generation=generation, reason=str(error))

    def _on_written(self, snapshot: Snapshot, outcome: Path | Exception) -> None:
        if isinstance(outcome, Exception):
            self._ledger.write(
                "checkpoint_failed", step=snapshot.step, generation=snapshot.generation, reason=str(outcome)
            )
            self._say(
                protocol.CheckpointFailed(
                    generation=snapshot.generation, step=snapshot.step, reason=str(outcome)[:_REASON_CHARACTERS_MAX]
                )
            )
            return
        self._kept_step = max(self._kept_step, snapshot.step)
        self._ledger.write("checkpoint", step=snapshot.step, generation=snapshot.generation, location=str(outcome))
        word = protocol.CheckpointWritten(generation=snapshot.generation, step=snapshot.step, location=str(outcome))
        self._say(self._standing.keep(word))
