"""One turn of the reconciler over one job: what changes for good, what is said, what is done afterwards."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TypeAlias

from schemas.registry import WorkerData
from schemas.vocabulary import MemberName, NodeName
from services.execution.core.seen import Limits, Seen
from services.execution.core.state import Generation, Job, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class StartMember:
    """Have the process of a committed member started. Repeating is harmless: its folder's lock decides."""

    member: MemberName


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerAdmission:
    """Tell a process that asked whether it may run. ``refusal`` is empty if it may."""

    member: MemberName
    nonce: str
    refusal: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferGeneration:
    """Open a rendezvous store and send the offer to its members and leavers.

    ``older`` are folders beside the generation's checkpoint, to be tried in this order if that one is not whole;
    ``may_begin_anew`` at step 0 if all of them are damaged.
    """

    generation: Generation
    older: tuple[str, ...] = ()
    may_begin_anew: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WithdrawGeneration:
    """Tell everyone that the offer is off, and close its store."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AskToStop:
    """Ask a member, over its connection, to write a checkpoint at the next boundary and to exit."""

    member: MemberName
    grace_seconds: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminate:
    """SIGTERM, once."""

    member: MemberName


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """SIGKILL of the whole tree, until it is seen gone."""

    member: MemberName


Effect: TypeAlias = (
    StartMember | AnswerAdmission | OfferGeneration | WithdrawGeneration | AskToStop | Terminate | Kill
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The result of a turn: commit ``job`` and ``events`` first, then do ``effects``.

    ``since`` are the clocks that run: condition -> when it began to hold. A condition that no longer holds has none,
    so a clock starts anew when its condition comes back, and when execution restarts.
    """

    job: Job
    events: tuple[WorkerData, ...]
    effects: tuple[Effect, ...]
    since: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """What new processes are made of: fresh nonces, accelerators that nobody holds, and the node they stand on."""

    nonces: tuple[str, ...]
    devices: tuple[int, ...]
    node: NodeName


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """``monotonic`` in seconds for durations, ``wall`` for records. ``capacity_revision`` is the last one published,
    ``capacity_tells_all`` whether it already lacks every member written off."""

    monotonic: float
    wall: datetime
    capacity_revision: int = 0
    capacity_tells_all: bool = True


class Turn:
    """Collects a decision. Cores pass it along; its job is replaced, never edited."""

    __slots__ = ("_running", "_since", "effects", "events", "instant", "job", "limits", "now", "seen", "supply")

    def __init__(
        self, job: Job, seen: Seen, *, limits: Limits, since: Mapping[str, float], now: Now, supply: Supply
    ) -> None:
        self.job = job
        self.seen = seen
        self.limits = limits
        self.instant = now
        self.now = now.monotonic
        self.supply = supply
        self.events: list[WorkerData] = []
        self.effects: list[Effect] = []
        self._since = since
        self._running: dict[str, float] = {}

    def lasted(self, condition: str, *, already: float = 0.0) -> float:
        """Seconds for which ``condition`` has held, this turn included. ``already``: held so long when first seen."""
        start = self._since.get(condition, self.now - already)
        self._running[condition] = start
        return self.now - start

    def say(self, event: WorkerData) -> None:
        self.events.append(event)

    def do(self, effect: Effect) -> None:
        if effect not in self.effects:
            self.effects.append(effect)

    def decide(self, verdict: Verdict) -> None:
        """The attempt's outcome. The first one stands."""
        if self.job.verdict is None:
            self.job = replace(self.job, verdict=verdict)

    def decision(self) -> Decision:
        return Decision(
            job=self.job,
            events=tuple(self.events),
            effects=tuple(self.effects),
            since=dict(sorted(self._running.items())),
        )
