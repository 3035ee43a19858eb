"""Offers of execution: forms the group of each in the background, while the old one goes on stepping."""

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tidewright import protocol
from tidewright.elastic.devices import Backend
from tidewright.elastic.errors import GroupBroken
from tidewright.elastic.group import Group, form_group
from tidewright.elastic.shelf import found_in, youngest_in


@dataclass(eq=False, slots=True)
class Formation:
    """An offer that is ready to be used; ``group`` None: this member leaves."""

    form: protocol.Form
    group: Group | None
    seconds: float = 0.0
    source_is_there: bool = False
    asked: bool = False

    @property
    def is_source(self) -> bool:
        """The one whose state others receive brings it; with nobody's state, rank 0 loads it."""
        return self.form.rank == max(self.form.source, 0)

    @property
    def is_usable(self) -> bool:
        """Without a group of its own a member waits for the source outside any collective."""
        return self.group is None or self.group.is_solo or self.is_source or self.source_is_there


@dataclass(eq=False, slots=True)
class _Forming:
    form: protocol.Form
    cancelled: bool = False
    store_descriptors: list[int] = field(default_factory=list)

    def cancel(self) -> None:
        """Shut the connection to the store, so that the thread which forms gives up."""
        self.cancelled = True
        for descriptor in self.store_descriptors:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for descriptor in self.store_descriptors:
            with suppress(OSError):
                os.close(descriptor)
        self.store_descriptors.clear()


class Offers:
    """At most one offer is forming or ready; a later one takes its place. ``changed`` guards all, and is notified."""

    def __init__(
        self,
        *,
        backend: Backend,
        say: Callable[[protocol.Message], None],
        changed: threading.Condition,
    ) -> None:
        self._backend = backend
        self._say = say
        self._changed = changed
        self._forming: _Forming | None = None
        self._ready: Formation | None = None
        self._highest = 0
        self._closed = ""
        self.begun = 0
        """groups of which this member has formed, or begun to form, its part"""

    @property
    def formed_generation(self) -> int:
        """0: none."""
        ready = self._ready
        return ready.form.generation if ready is not None else 0

    def ready(self) -> Formation | None:
        return self._ready

    def take(self, generation: int) -> Formation | None:
        """The ready offer if it is this one; it is the caller's then."""
        with self._changed:
            ready = self._ready
            if ready is None or ready.form.generation != generation:
                return None
            self._ready = None
            return ready

    def put(self, formation: Formation) -> None:
        """An offer that needs no forming: of a worker that runs alone."""
        with self._changed:
            self._ready = formation
            self._changed.notify_all()

    def abandon(self, reason: str) -> None:
        """Give up what is forming or ready. Later offers are welcome."""
        self._drop(self._highest, reason)

    def close(self, reason: str) -> None:
        """Refuse everything from now on."""
        with self._changed:
            self._closed = reason
        self._drop(self._highest, reason)

    # -- called by the connection --------------------------------------------------------------------------------

    def on_form(self, form: protocol.Form) -> None:
        with self._changed:
            if self._closed:
                self._say(protocol.FormFailed(generation=form.generation, reason=self._closed))
                return
            if form.generation <= self._highest:
                self._repeat(form.generation)
                return
        self._drop(self._highest, "")
        forming = _Forming(form)
        with self._changed:
            self._highest = form.generation
            self._forming = forming
            self.begun += form.rank >= 0
        threading.Thread(target=self._form, args=(forming,), name="tide-forming", daemon=True).start()

    def on_abort(self, generation: int) -> None:
        self._drop(generation, "called off")

    def _repeat(self, generation: int) -> None:
        """The same offer again, after a lost connection: say again what has become of it."""
        if self._ready is not None and self._ready.form.generation == generation:
            self._say(protocol.Formed(generation=generation, seconds=self._ready.seconds))

    def _drop(self, up_to: int, reason: str) -> None:
        with self._changed:
            forming, ready = self._forming, self._ready
            if forming is not None and forming.form.generation <= up_to:
                self._forming = None
                forming.cancel()
            if ready is None or ready.form.generation > up_to:
                return
            self._ready = None
            self._changed.notify_all()
        if ready.group is not None:
            ready.group.let_go()
        if reason:
            self._say(protocol.FormFailed(generation=ready.form.generation, reason=reason))

    # -- in threads of their own ---------------------------------------------------------------------------------

    def _form(self, forming: _Forming) -> None:
        began = time.monotonic()
        group: Group | None = None
        try:
            if forming.form.rank >= 0:
                group = form_group(forming.form, self._backend, on_store=lambda one: self._on_store(forming, one))
                group.watch(self._on_lost)
        except GroupBroken as error:
            self._forming_failed(forming, str(error))
            return
        finally:
            with self._changed:
                forming.close()
        formation = Formation(form=forming.form, group=group, seconds=time.monotonic() - began)
        with self._changed:
            wanted = self._forming is forming
            if wanted:
                self._forming = None
                self._ready = formation
                self._changed.notify_all()
        if not wanted:
            if group is not None:
                group.let_go()
        elif group is not None and group.is_broken:
            self._on_lost(group)
        else:
            self._say(protocol.Formed(generation=forming.form.generation, seconds=formation.seconds))

    def _on_store(self, forming: _Forming, descriptor: int) -> None:
        with self._changed:
            forming.store_descriptors.append(descriptor)
            if forming.cancelled:
                forming.cancel()

    def _forming_failed(self, forming: _Forming, reason: str) -> None:
        with self._changed:
            if self._forming is forming:
                self._forming = None
        self._say(protocol.FormFailed(generation=forming.form.generation, reason=reason))

    def _on_lost(self, group: Group) -> None:
        """A peer of a formed group that is not used yet is gone."""
        with self._changed:
            ready = self._ready
            if ready is None or ready.group is not group:
                return
            self._ready = None
            self._changed.notify_all()
        group.drop_broken()
        self._say(
            protocol.FormFailed(generation=group.generation, reason="a member was lost before the group was used")
        )

    def ask_for_source(self, formation: Formation) -> None:
        """Wait for the source in a thread, so that the main one can be called away. Holds ``changed``."""
        group = formation.group
        assert group is not None
        formation.asked = True

        def wait() -> None:
            group.wait_for_source()
            with self._changed:
                formation.source_is_there = True
                self._changed.notify_all()

        threading.Thread(target=wait, name="tide-source", daemon=True).start()


def alone(directory: str, backend: Backend) -> Formation:
    """The group of a worker without a control plane: itself, going on from its own newest checkpoint."""
    found = found_in(Path(directory)) if directory else []
    form = protocol.Form(
        generation=youngest_in(Path(directory)) + 1 if directory else 1,
        rank=0,
        world=1,
        store_host="",
        store_port=0,
        source=-1,
        checkpoint=str(found[0]) if found else "",
        older=tuple(folder.name for folder in found[1:]),
    )
    solo = Group(form, backend=backend, store=None, process_group=None, side_group=None)
    return Formation(form=form, group=solo)
