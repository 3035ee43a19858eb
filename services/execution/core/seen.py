"""What execution sees at the moment: reports, processes, the disk. Rebuilt by looking after a restart."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from schemas.events.worker import SkippedCheckpoint
from schemas.vocabulary import Attribution, MemberName, MemberPhase
from services.execution.core.checkpoints import EMPTY_SHELF, Shelf
from services.execution.core.state import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedWord:
    """A member's word that the second all-reduce of a generation has passed."""

    generation: int
    step: int
    pause_seconds: float
    resumed_generation: int = 0
    resumed_step: int = 0
    skipped: tuple[SkippedCheckpoint, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The last that a member said. Instants are monotonic seconds of this process.

    ``generation`` is the one it steps in (0: none), ``formed`` one that is connected and not yet used, ``step`` the
    number of steps applied. ``generation_step`` is the step at its first report in this generation.
    ``progressed_at``: when generation, step or phase last changed; ``failed`` the highest generation that it could
    not form or fell back from, ``state_lost`` the last for which it found no whole checkpoint. ``generations``:
    groups that it has begun to form so far.
    """

    connected: bool
    heard_at: float
    progressed_at: float
    generation: int = 0
    formed: int = 0
    step: int = 0
    rank: int = -1
    world: int = 0
    phase: MemberPhase = MemberPhase.STARTING
    phase_seconds: float = 0.0
    sync_seconds: float = 0.0
    waiting: bool = False
    generation_step: int = 0
    failed: int = 0
    failure: str = ""
    state_lost: int = 0
    left: bool = False
    finished_step: int | None = None
    started: StartedWord | None = None
    generations: int = 0

    @property
    def holds_state(self) -> bool:
        return self.generation > 0

    @property
    def is_stepping(self) -> bool:
        return self.generation > 0 and not self.waiting


class MemoryWitness(StrEnum):
    """Who says that a process ran out of memory."""

    LIMIT = "limit"
    """Its shim, which ended it: it used more than the job asked for."""
    KERNEL = "kernel"
    """The kernel's count of processes that it killed for memory."""
    ALLOCATION = "allocation"
    """The process itself: an allocation was refused (MemoryError, ResourceExhausted, bad_alloc)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEnd:
    """``used_bytes``: the most that was seen, ``limit_bytes``: what it ran into; 0 where that is not known."""

    witness: MemoryWitness
    used_bytes: int = 0
    limit_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """What the machine shows of a member's process.

    ``recorded``: it exists or existed. ``ended``: the worker is over (``exit_code`` None: nobody saw it).
    ``gone``: nothing of its tree is left. ``stopped``: state T. ``still_seconds``: its CPU time has not moved for so
    long; ``quiet_seconds``: neither has its log, nor the CPU time of its whole tree. ``ledger_step``,
    ``ledger_finished`` and ``ledger_stopped`` (it stopped in order, before the end) are read once it has ended.
    ``memory``: it ran out of it. ``rebooted``: its machine was started anew since then.
    """

    recorded: bool = False
    pid: int | None = None
    ended: bool = False
    gone: bool = False
    exit_code: int | None = None
    stopped: bool = False
    still_seconds: float = 0.0
    quiet_seconds: float = 0.0
    ledger_step: int = 0
    ledger_finished: bool = False
    ledger_stopped: bool = False
    memory: MemoryEnd | None = None
    rebooted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StartError:
    """Why a member could not be started, and whose fault that is."""

    detail: str
    attributed_to: Attribution = Attribution.PLATFORM


NO_PROCESS: Final = Process()


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One look at a job. ``settled``: the time to rejoin after a restart is over, or everyone is back.

    ``asking`` are processes that ask for admission, with their nonce. ``stores`` are generations whose rendezvous
    store lives in this process. ``shelf`` is the folder of checkpoints; None: not looked at, nothing asks for it.
    ``checkpoint_word`` is the last that a member announced, ``checkpoint_failure`` the last that failed, and why.
    """

    reports: Mapping[MemberName, Report] = field(default_factory=lambda: MappingProxyType({}))
    processes: Mapping[MemberName, Process] = field(default_factory=lambda: MappingProxyType({}))
    asking: Mapping[MemberName, str] = field(default_factory=lambda: MappingProxyType({}))
    start_errors: Mapping[MemberName, StartError] = field(default_factory=lambda: MappingProxyType({}))
    stores: frozenset[int] = frozenset()
    settled: bool = True
    shelf: Shelf | None = EMPTY_SHELF
    checkpoint_word: Checkpoint | None = None
    checkpoint_failure: tuple[int, int, str] | None = None

    def process(self, name: MemberName) -> Process:
        return self.processes.get(name, NO_PROCESS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Every clock on workers, in seconds, and the bounds on repetition."""

    start_seconds: float = 60.0
    gather_seconds: float = 5.0
    form_seconds: float = 30.0
    offer_retry_seconds: float = 0.1
    offer_retry_seconds_max: float = 5.0
    settle_seconds: float = 0.3
    sync_wait_seconds: float = 60.0
    silent_seconds: float = 15.0
    recover_seconds: float = 120.0
    write_off_seconds: float = 300.0
    overdue_seconds: float = 10.0
    idle_stop_seconds: float = 3.0
    quiet_seconds: float = 1800.0
    checkpoint_event_seconds: float = 30.0
    starting_seconds: float = 600.0
    loading_seconds: float = 600.0
    compiling_seconds: float = 900.0
    stepping_seconds: float = 60.0
    evaluating_seconds: float = 1800.0
    checkpointing_seconds: float = 900.0
    finishing_seconds: float = 900.0
    crashes_max: int = 3
    fruitless_losses_max: int = 8
    member_generations_max: int = 500

    def of_phase(self, phase: MemberPhase) -> float:
        """How long a member may be in ``phase`` before that counts as abnormal."""
        limits = {
            MemberPhase.STARTING: self.starting_seconds,
            MemberPhase.LOADING: self.loading_seconds,
            MemberPhase.COMPILING: self.compiling_seconds,
            MemberPhase.STEPPING: self.stepping_seconds,
            MemberPhase.EVALUATING: self.evaluating_seconds,
            MemberPhase.CHECKPOINTING: self.checkpointing_seconds,
            MemberPhase.FINISHING: self.finishing_seconds,
        }
        return limits[phase]
