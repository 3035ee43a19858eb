"""What this member holds and does, as others are told; written by the main thread, read by all."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from tidewright import protocol

PHASES: Final = ("starting", "loading", "compiling", "stepping", "evaluating", "checkpointing", "finishing")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who this process is, from its environment."""

    token: str = ""
    member: str = ""
    nonce: str = ""
    attempt: int = 0
    pid: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One consistent look. ``generation`` is the one whose state is held; ``waiting``: its group is cut."""

    generation: int = 0
    rank: int = 0
    world: int = 1
    step: int = 0
    phase: str = "starting"
    phase_since: float = 0.0
    waiting: bool = False
    loss: float | None = None
    total_steps: int | None = None


class Standing:
    """The view is replaced as a whole, so readers need no lock."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.view = View(phase_since=time.monotonic())
        self.sync_since: float | None = None
        """monotonic; since when the main thread has waited for other members"""
        self._lock = threading.Lock()
        self._words: dict[str, protocol.Message] = {}
        self._steps = 0
        self._samples = 0

    def set(self, **changes: Any) -> None:
        self.view = replace(self.view, **changes)

    def enter_phase(self, phase: str) -> None:
        if phase != self.view.phase:
            self.set(phase=phase, phase_since=time.monotonic())

    @contextmanager
    def waiting_for_others(self) -> Iterator[None]:
        self.sync_since = time.monotonic()
        try:
            yield
        finally:
            self.sync_since = None

    # -- words that follow every hello ---------------------------------------------------------------------------

    def keep(self, word: protocol.Message) -> protocol.Message:
        """Say it again after every hello, until a later word of its kind or ``forget``."""
        with self._lock:
            self._words[word.KIND] = word
        return word

    def forget(self, kind: type[protocol.Message]) -> None:
        with self._lock:
            self._words.pop(kind.KIND, None)

    def kept(self) -> Sequence[protocol.Message]:
        with self._lock:
            return list(self._words.values())

    # -- what is sent --------------------------------------------------------------------------------------------

    def hello(self, *, formed: int) -> protocol.Hello:
        view, who = self.view, self.identity
        return protocol.Hello(
            version=protocol.PROTOCOL_VERSION,
            token=who.token,
            member=who.member,
            nonce=who.nonce,
            pid=who.pid,
            attempt=who.attempt,
            generation=view.generation,
            formed=formed,
            step=view.step,
            rank=view.rank,
            world=view.world,
            phase=view.phase,
            waiting=view.waiting,
        )

    def mark(self, *, generations: int) -> protocol.Mark:
        view, now, since = self.view, time.monotonic(), self.sync_since
        return protocol.Mark(
            generation=view.generation,
            step=view.step,
            phase=view.phase,
            phase_seconds=round(now - view.phase_since, 3),
            sync_seconds=round(now - since, 3) if since is not None else 0.0,
            waiting=view.waiting,
            generations=generations,
        )

    def count(self, *, samples: int) -> None:
        """One step was applied, with so many samples of this member's own."""
        with self._lock:
            self._steps += 1
            self._samples += samples

    def sample(self) -> dict[str, Any]:
        """The part of a report that is not time; steps and samples since the last one."""
        view, who = self.view, self.identity
        with self._lock:
            steps, samples, self._steps, self._samples = self._steps, self._samples, 0, 0
        return {
            "job_id": who.member.partition("/")[0],
            "attempt": who.attempt,
            "member": who.member,
            "generation": view.generation,
            "rank": view.rank,
            "world": view.world,
            "steps": steps,
            "samples": samples,
            "loss": view.loss,
            "step": view.step,
            "total_steps": view.total_steps,
        }
