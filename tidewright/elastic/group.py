"""A training group of one generation: forming it, its collectives, and noticing at once that it is broken."""

import json
import os
import select
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NoReturn

import numpy as np

from tidewright import protocol
from tidewright.elastic import sockets
from tidewright.elastic.backend import core, make_gloo_group, make_nccl_group, on_cpu
from tidewright.elastic.calls import Calls
from tidewright.elastic.devices import NCCL, Backend
from tidewright.elastic.errors import GroupBroken

STORE_SECONDS: Final = 60
_GO: Final = "tide/go"
_PADDLE_ERRORS: Final = (RuntimeError, ValueError, OSError)


class Group:
    """A connected group; with one member there is nothing to connect and collectives do nothing.

    Gradients and state go through ``process_group``; what members only agree on goes through ``side_group``, which is
    gloo's on any device: its sockets show that a peer is gone, and its collectives can be made to raise.
    """

    def __init__(
        self, form: protocol.Form, *, backend: Backend, store: Any, process_group: Any, side_group: Any
    ) -> None:
        self.generation = form.generation
        self.rank = form.rank
        self.world = form.world
        self.backend = backend
        self._store = store
        self._process_group = process_group
        self._side_group = side_group
        self._descriptors: list[int] = []
        self._store_descriptors: list[int] = []
        self._watchdog: _Watchdog | None = None
        self._broken = False
        self._calls = Calls() if backend.survives_a_lost_peer else None

    @property
    def is_solo(self) -> bool:
        return self.world == 1

    @property
    def is_broken(self) -> bool:
        return self._broken

    # -- collectives --------------------------------------------------------------------------------------------

    def sum(self, tensor: Any) -> None:
        """All-reduce in place. Raises GroupBroken."""
        self._run(lambda: self._process_group.all_reduce(tensor, core.ReduceOp.SUM, True))

    def max(self, value: int) -> int:
        """The greatest of what the members say. Raises GroupBroken."""
        if self.is_solo:
            return value
        tensor = on_cpu(np.array([value], np.int64))
        self._run(lambda: self._side_group.all_reduce(tensor, core.ReduceOp.MAX, True))
        return int(tensor.numpy()[0])

    def broadcast(self, tensor: Any, source: int) -> None:
        self._run(lambda: self._process_group.broadcast(tensor, source, True))

    def meet(self) -> None:
        """Return when all members are here, which proves that each has passed every earlier collective."""
        self.max(0)

    def _run(self, begin: Callable[[], Any]) -> None:
        if self.is_solo:
            return
        try:
            if self._calls is not None:
                self._calls.run(begin, check=self.check)
            else:
                self.check()
                begin().wait()
        except _PADDLE_ERRORS as error:
            lines = str(error).strip().splitlines()
            raise GroupBroken(lines[-1][:200] if lines else "raised") from error

    def check(self) -> None:
        """A collective that is begun on a cut group may hang for ever, so this stands before every one."""
        if self._broken or (self._descriptors and sockets.is_cut(self._descriptors)):
            self._broken = True
            raise GroupBroken("a peer is gone")

    # -- from formed to used ------------------------------------------------------------------------------------

    def announce_source(self) -> None:
        """Let those come to the transfer who wait outside any collective, since gloo itself gives up after 30 s."""
        if not self.is_solo:
            with suppress(*_PADDLE_ERRORS):  # the store is gone: they come when they notice that
                self._store.set(_GO, b"1")

    def wait_for_source(self) -> None:
        """Return once the source is there, or the store is gone; blocks, so in a thread of its own."""
        store = self._store
        if store is not None:
            with suppress(*_PADDLE_ERRORS):
                store.wait(_GO)

    # -- watching and leaving ------------------------------------------------------------------------------------

    def adopt_sockets(self, descriptors: list[int], *, to_store: list[int]) -> None:
        self._descriptors = descriptors
        self._store_descriptors = to_store
        sockets.notice_lost_hosts(descriptors)

    def watch(self, on_broken: Callable[["Group"], None]) -> None:
        """Have a thread cut this group as soon as a peer is gone. Replaces a watch that is there."""
        self.unwatch()
        if self._descriptors:
            self._watchdog = _Watchdog(self, self._descriptors, on_broken)
            self._watchdog.start()

    def unwatch(self) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None

    def mark_broken(self) -> None:
        self._broken = True
        sockets.cut(self._descriptors)

    def see_calls_through(self, stop: int) -> None:
        """After the cut: wait until no collective is under way, and give up one that stays away.

        Comes back as soon as the descriptor ``stop`` can be read.
        """
        if self._calls is not None:
            self._calls.see_through(stop)

    def drop_broken(self) -> None:
        """Give up a group whose collective has raised."""
        self.unwatch()
        self.mark_broken()
        self._forget()

    def let_go(self) -> None:
        """Leave a group in which no collective of ours is under way; the peers notice at once."""
        self.unwatch()
        self._broken = True
        sockets.let_go(self._descriptors)
        self._forget()

    def _forget(self) -> None:
        sockets.let_go(self._store_descriptors)  # who waits in it for the source must come back
        sockets.cut(self._store_descriptors)
        sockets.close_all([*self._descriptors, *self._store_descriptors])
        if self._calls is not None:
            self._calls.close()
        self._descriptors, self._store_descriptors = [], []
        held = [self._process_group, self._side_group, self._store]
        self._process_group, self._side_group, self._store = None, None, None
        # The end of a pair waits for a look of gloo's loop, 10 ms each: no step and no recovery waits for that.
        threading.Thread(target=held.clear, name="tide-forgetting", daemon=True).start()


class _Watchdog:
    """Polls a group's sockets; in a full mesh each member sees each death by itself."""

    def __init__(self, group: Group, descriptors: list[int], on_broken: Callable[[Group], None]) -> None:
        self._group = group
        self._own = [os.dup(descriptor) for descriptor in descriptors]
        self._on_broken = on_broken
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="tide-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        os.eventfd_write(self._stop, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        os.close(self._stop)

    def _run(self) -> None:
        poll = select.poll()
        for descriptor in self._own:
            poll.register(descriptor, sockets.CUT_EVENTS)
        poll.register(self._stop, select.POLLIN)
        poll.poll()
        if not self._stopped:
            self._group.mark_broken()
            self._on_broken(self._group)
            self._group.see_calls_through(self._stop)
        sockets.close_all(self._own)


def form_group(form: protocol.Form, backend: Backend, *, on_store: Callable[[int], None]) -> Group:
    """Connect the group of an offer; blocks until all members have come.

    ``on_store`` gets a duplicate of the store's socket: shutting it down cancels the forming. Raises GroupBroken.
    """
    if form.world == 1:
        return Group(form, backend=backend, store=None, process_group=None, side_group=None)
    if form.store_host.startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    before = sockets.socket_inodes()
    to_store: list[int] = []
    try:
        store = core.TCPStore(form.store_host, form.store_port, False, 0, STORE_SECONDS)
        connections = sockets.connected_since(before)
        to_store = [one.descriptor for one in connections if one.ends[3] == form.store_port]
        sockets.set_no_delay(to_store)  # Paddle's client does not, and each word would take 40 ms
        for descriptor in to_store:
            on_store(os.dup(descriptor))
        sockets.close_all(one.descriptor for one in connections if one.descriptor not in to_store)
        before = sockets.socket_inodes()
        place = {"rank": form.rank, "world": form.world, "generation": form.generation}
        side_group = make_gloo_group(store, **place)
        descriptors = _own_sockets(store, form, before)
        process_group = make_nccl_group(store, **place) if backend.name == NCCL else side_group
        group = Group(form, backend=backend, store=store, process_group=process_group, side_group=side_group)
        group.adopt_sockets(descriptors, to_store=to_store)
    except (*_PADDLE_ERRORS, GroupBroken) as error:
        sockets.close_all(to_store)
        lines = str(error).strip().splitlines()
        raise GroupBroken(lines[-1][:200] if lines else type(error).__name__) from error
    return group


def _own_sockets(store: Any, form: protocol.Form, before: dict[int, int]) -> list[int]:
    """Publish what this member has, read what the others have: also the proof that everyone is connected."""
    candidates = sockets.connected_since(before)
    store.set(f"tide/sockets/{form.rank}", json.dumps([one.ends for one in candidates]).encode())
    theirs: list[sockets.Ends] = []
    for rank in range(form.world):
        if rank != form.rank:
            theirs += [tuple(ends) for ends in json.loads(bytes(store.get(f"tide/sockets/{rank}")))]
    group, others = sockets.agreed(candidates, theirs)
    sockets.close_all(others)
    if len(group) < form.world - 1:
        sockets.close_all(group)
        raise GroupBroken(f"{len(group)} sockets of a group of {form.world} were found")
    return group


def die_as_lost(text: str) -> NoReturn:
    """End this process in a way that counts as the platform's doing, so that it is replaced."""
    with suppress(OSError):
        os.write(2, f"tidewright: {text}\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)
    os._exit(1)
