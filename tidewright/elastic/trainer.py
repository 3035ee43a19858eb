"""How one member goes from group to group: join, swap, fall back, hold, leave, stop. Runs in the main thread.

Everything here happens at a step boundary, when the body of the script's loop has ended, so that what the script does
after ``job.apply`` (a scheduler's step) is part of the state that others receive.

1. A new group is swapped to when the flags of one all-reduce say that everyone has formed it.
2. The old group is kept until the second all-reduce of the new one, which proves that everyone passed the first.
3. A collective that breaks before that leads back to the old group; after it, the state is held until the next offer.
4. Leavers wait in a collective of the old group, which completes when the others come back, or when they say that the
   new group has started. If it breaks, the others may be dead: then a leaver holds its state like everyone else.
"""

import time
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, NoReturn

from tidewright import protocol
from tidewright.elastic.agreement import Agreement, Flags
from tidewright.elastic.dismissal import Dismissal
from tidewright.elastic.errors import Dismissed, GroupBroken, StateLost
from tidewright.elastic.group import Group, die_as_lost
from tidewright.elastic.ledger import finite
from tidewright.elastic.offers import Formation
from tidewright.elastic.parts import Parts
from tidewright.elastic.reception import catch_up, receive, see_all_there
from tidewright.elastic.transfer import Position

STARTED_AFTER_STEPS: Final = 2
_SETTLED: Final = 1 << 30
_REASON_CHARACTERS_MAX: Final = 2000


class Trainer:
    """``group`` None: no group yet, or it is cut and the state is held."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.group: Group | None = None
        self._old: Group | None = None
        self._dismissal = Dismissal()
        self._steps_in_group = 0
        self._position = Position()
        self._skipped: tuple[str, ...] = ()
        """checkpoints that were passed over when this group's state was loaded here"""
        self._confirmed = False
        """The state is of a group that has started: nobody can have gone on without it."""
        self._agreement: Agreement | None = None
        self._failure = ""
        self._last_step_ended: float | None = None
        self._pause_seconds = 0.0
        self._ready_generation = 0
        self._finished = False
        self._is_leaving_or_done = False
        """That a peer goes away means nothing then."""

    @property
    def step(self) -> int:
        return self._position.step

    # -- within a step --------------------------------------------------------------------------------------------

    def flags(self, *, samples: int) -> Flags:
        has_started = self._steps_in_group >= STARTED_AFTER_STEPS  # else there would be two older groups to return to
        self._ready_generation = self._parts.offers.formed_generation if has_started else 0
        return Flags(samples=samples, ready_generation=self._ready_generation, stop=self._parts.wishes.stop)

    def on_applied(self, agreement: Agreement | None) -> None:
        """The optimizers have stepped."""
        assert self.group is not None
        now = time.monotonic()
        self._agreement = agreement
        self._steps_in_group += 1
        ended_step = self.step
        self._position = replace(self._position, step=ended_step + 1, generation=self.group.generation)
        loss = finite(agreement.loss) if agreement is not None else self._parts.standing.view.loss
        self._parts.standing.set(step=self.step, loss=loss)
        self._parts.ledger.write("applied", **self._place(ended_step), loss=loss)
        if self._steps_in_group == 1 and self._last_step_ended is not None:
            self._pause_seconds = now - self._last_step_ended
        if self._steps_in_group == STARTED_AFTER_STEPS:
            self._started()
        self._last_step_ended = now

    def on_broken(self, error: GroupBroken) -> None:
        """The all-reduce of a step has raised: the step will be done again."""
        assert self.group is not None
        self._failure = str(error) or "broken"
        self._parts.tracked.keep_round()
        if not self.group.backend.survives_a_lost_peer:
            die_as_lost("a collective on GPUs has failed; this process is to be replaced")

    def _place(self, step: int) -> dict[str, Any]:
        assert self.group is not None
        group = self.group
        return {"step": step, "generation": group.generation, "rank": group.rank, "world": group.world}

    def begun(self, *, data_epoch: int, ids: list[int]) -> None:
        self._parts.ledger.write("begun", **self._place(self.step), data_epoch=data_epoch, ids=ids)

    def _started(self) -> None:
        assert self.group is not None
        self._confirmed = True
        resumed = self._position
        word = protocol.Started(
            generation=self.group.generation,
            step=self.step,
            rank=self.group.rank,
            world=self.group.world,
            pause_seconds=round(self._pause_seconds, 6),
            resumed_generation=resumed.resumed_generation,
            resumed_step=resumed.resumed_step,
            skipped=self._skipped,
        )
        if self.group.rank == 0:
            self._parts.keeper.started(self.group.generation)
        self._parts.say(self._parts.standing.keep(word))
        self._dismiss_leavers()

    def _dismiss_leavers(self) -> None:
        """Rule 4: this group has started, or ends as a whole."""
        if self._old is not None:
            self._dismissal.begin(self._old)
            self._old = None

    # -- between steps ----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Be in a working group when this returns. May take as long as it takes; may end the process (SystemExit)."""
        while True:
            agreement, self._agreement = self._agreement, None
            if self._failure:
                self._recover()
            elif self.group is None:
                self._join()
            elif agreement is not None and agreement.stop:
                self._stop(as_writer=self.group.rank == 0)
            elif agreement is not None and agreement.swap:
                self._swap()
            else:
                self._keep_if_due()
                return

    def _recover(self) -> None:
        """Rule 3. What the script changed in the round of the failed step is taken back: it comes again."""
        assert self.group is not None
        reason, self._failure = self._failure, ""
        self._parts.tracked.take_back_round()
        broken, old = self.group, self._old
        self.group, self._old = None, None
        broken.drop_broken()
        if old is not None:
            self._return_to(old, failed=broken.generation)
        else:
            self._hold(reason)

    def _return_to(self, old: Group, *, failed: int) -> None:
        """The older generation goes on, from its most advanced member."""
        self.group = None
        old.watch(self._on_group_broken)
        try:
            self._position = catch_up(self._parts, old, self._position)
        except GroupBroken as error:
            old.drop_broken()
            self._hold(str(error))
            return
        self.group = old
        self._steps_in_group = _SETTLED
        self._came_back(old, failed=failed)

    def _came_back(self, old: Group, *, failed: int) -> None:
        self._use(old)
        parent = self._position.generation
        self._parts.ledger.write("fell_back", **self._place(self.step), failed=failed, parent_generation=parent)
        self._parts.say(protocol.FellBack(generation=old.generation, failed=failed))

    def _hold(self, reason: str) -> None:
        """Keep the state for an offer that is made in the knowledge of where everybody stands.

        One of before the cut may leave out the very member that is a step ahead: it is not used any more.
        """
        parts = self._parts
        view = parts.standing.view
        if not view.waiting:
            parts.ledger.write(
                "waiting", step=self.step, generation=view.generation, rank=view.rank, world=view.world
            )
        parts.standing.set(waiting=True)
        parts.standing.forget(protocol.Started)
        word = protocol.Waiting(generation=view.generation, step=self.step, reason=reason)
        parts.say(parts.standing.keep(word))
        parts.offers.abandon("the group before it was cut")

    def _swap(self) -> None:
        """Rule 1. If the new group is lost meanwhile, the others find out in the transfer, and come back too."""
        assert self.group is not None
        parts, old, generation = self._parts, self.group, self._ready_generation
        formation = parts.offers.take(generation)
        if formation is None:
            self._return_to(old, failed=generation)
        elif formation.group is None:
            self._leave(generation)
        else:
            try:
                position = self._receive(formation)
            except GroupBroken as error:
                formation.group.drop_broken()
                parts.say(protocol.FormFailed(generation=generation, reason=str(error)))
                self._return_to(old, failed=generation)
                return
            old.unwatch()
            self._old = old
            self._adopt(formation, position)

    def _leave(self, generation: int) -> None:
        """Rule 4."""
        assert self.group is not None
        parts, old = self._parts, self.group
        parts.standing.enter_phase("finishing")
        self._is_leaving_or_done = True
        if not old.is_solo:
            try:
                self._position = catch_up(parts, old, self._position)
            except Dismissed:
                with suppress(GroupBroken):
                    old.meet()
            except GroupBroken as error:
                self._is_leaving_or_done = False
                old.drop_broken()
                self.group = None
                self._hold(str(error))
                return
            else:
                self._is_leaving_or_done = False
                self._came_back(old, failed=generation)
                return
        self._end_as_leaver()

    def _end_as_leaver(self) -> NoReturn:
        view = self._parts.standing.view
        self._parts.ledger.write("left", step=self.step, generation=view.generation, rank=view.rank, world=view.world)
        self._parts.say(self._parts.standing.keep(protocol.Left(generation=view.generation, step=self.step)))
        self._parts.flush()
        raise SystemExit(0)

    def _join(self) -> None:
        """Wait for an offer, without a group."""
        formation = self._wait_for_offer()
        if formation.group is None:
            self._end_as_leaver()
        try:
            position = self._receive(formation)
        except GroupBroken as error:
            formation.group.drop_broken()
            self._parts.say(protocol.FormFailed(generation=formation.form.generation, reason=str(error)))
            return
        except StateLost as error:
            formation.group.drop_broken()
            self._refuse(formation.form, error)
            return
        self._adopt(formation, position)

    def _refuse(self, form: protocol.Form, error: StateLost) -> None:
        """None of the checkpoints is whole: what follows is execution's to decide; alone, this is the end."""
        if not form.store_port:
            raise error
        reason = str(error)[:_REASON_CHARACTERS_MAX]
        self._parts.standing.enter_phase("starting")
        self._parts.ledger.write("state_lost", generation=form.generation, reason=reason)
        self._parts.say(protocol.FormFailed(generation=form.generation, reason=reason, state_lost=True))

    def _wait_for_offer(self) -> Formation:
        """An offer that can be used at once: it needs no transfer, or its source is there."""
        parts = self._parts
        while True:
            if parts.wishes.stop:
                self._stop(as_writer=self._confirmed)
            with parts.changed:
                formation = parts.offers.ready()
                if formation is None:
                    parts.standing.sync_since = None
                elif formation.is_usable:
                    return self._take(formation)
                elif not formation.asked:
                    parts.standing.sync_since = time.monotonic()
                    parts.offers.ask_for_source(formation)
                if not parts.wishes.stop:
                    parts.changed.wait(1.0)  # a signal's handler does not notify

    def _take(self, formation: Formation) -> Formation:
        taken = self._parts.offers.take(formation.form.generation)
        assert taken is formation
        self._parts.standing.sync_since = None
        return taken

    def _receive(self, formation: Formation) -> Position:
        """Raises GroupBroken, and then nothing has changed."""
        assert formation.group is not None
        received = receive(self._parts, formation, formation.group, self._position, is_confirmed=self._confirmed)
        self._skipped = received.skipped
        return received.position

    def _adopt(self, formation: Formation, position: Position) -> None:
        group, form = formation.group, formation.form
        assert group is not None
        parent = position.generation
        source = "member" if form.source >= 0 else "checkpoint" if position.resumed_generation else "fresh"
        shrunk_to_one = group.is_solo and self._old is not None and not self._old.is_solo
        self.group = group
        self._position = position
        self._steps_in_group = 0
        self._pause_seconds = 0.0
        if form.source < 0:
            self._confirmed = False
            self._last_step_ended = None
            self._parts.keeper.note_loaded(self.step)
        else:
            self._parts.keeper.note_due(self.step)
        group.watch(self._on_group_broken)
        self._use(group)
        self._parts.ledger.write("adopted", **self._place(self.step), parent_generation=parent, source=source)
        if shrunk_to_one:
            self._parts.keeper.write(self.step)  # the only copy of the state: leavers wait until it is on the disk

    def _use(self, group: Group) -> None:
        standing = self._parts.standing
        standing.forget(protocol.Waiting)
        standing.forget(protocol.Started)
        standing.set(generation=group.generation, rank=group.rank, world=group.world, step=self.step, waiting=False)

    def _on_group_broken(self, group: Group) -> None:
        """From the watchdog's thread. What is under way comes back on gloo, and hangs on NCCL."""
        if not group.backend.survives_a_lost_peer and group is self.group and not self._is_leaving_or_done:
            die_as_lost(f"a peer in generation {group.generation} is gone; this process is to be replaced")

    # -- the end ----------------------------------------------------------------------------------------------------

    def _stop(self, *, as_writer: bool) -> NoReturn:
        parts = self._parts
        if self.group is not None:
            self._see_all_through(self.group)
        if as_writer:
            parts.keeper.write(self.step)
        parts.keeper.wait()
        view = parts.standing.view
        parts.ledger.write("stopped", step=self.step, generation=view.generation, rank=view.rank, world=view.world)
        self._dismissal.see_off()
        parts.flush()
        raise SystemExit(0)

    def part(self) -> bool:
        """After the last step: True once it is known that everyone has applied it; else settle, and ask again.

        Whoever left at once would cut off a peer that has not yet received the sum of the last step. A member that
        this collective breaks for holds its state like after any other: the one behind gets it in the next group.
        """
        group = self.group
        assert group is not None
        if group.is_solo:
            return True
        try:
            see_all_there(self._parts, group, self._position)
        except GroupBroken as error:
            self.on_broken(error)
            return False
        return True

    def _see_all_through(self, group: Group) -> None:
        """Do not leave while a slower peer is still in the last all-reduce: it would lose it, and wait for ever."""
        self._is_leaving_or_done = True
        with suppress(GroupBroken), self._parts.standing.waiting_for_others():
            group.meet()
            self._dismiss_leavers()

    def finish(self) -> None:
        """Training is complete: say so while this process lives, and keep the end for a restart. Once."""
        assert self.group is not None
        if self._finished:
            return
        self._finished = True
        parts = self._parts
        self._see_all_through(self.group)
        parts.standing.enter_phase("finishing")
        if self._steps_in_group < STARTED_AFTER_STEPS:
            self._started()  # it began so near the end that there were no two steps: everyone has met all the same
        parts.ledger.write("finished", **self._place(self.step))
        word = protocol.Finished(generation=self.group.generation, step=self.step)
        parts.say(parts.standing.keep(word))
        parts.offers.close("the training is complete")
        if self.group.rank == 0:
            parts.keeper.wait()  # an earlier one may still be under way, and this one must not be left out
            parts.keeper.begin(self.step)
        self._dismissal.see_off()

    def _keep_if_due(self) -> None:
        """Only in a group that has started: others may fall back from one that has not, and apply its steps anew."""
        keeper = self._parts.keeper
        if self._steps_in_group >= STARTED_AFTER_STEPS and keeper.is_due(self.step):
            assert self.group is not None
            if self.group.rank == 0:
                keeper.begin(self.step)
            else:
                keeper.note_due(self.step)
