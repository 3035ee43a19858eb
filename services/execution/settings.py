"""Settings of execution: section ``[execution]``, environment ``TIDE_EXECUTION_*``. Durations in seconds."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from services.execution.core.seen import Limits
from shared.settings import NotNegative, Positive, ServiceSettings


class ExecutionSettings(ServiceSettings):
    """Limits of workers, of the machine, and of what is kept."""

    SECTION: ClassVar[str] = "execution"

    adapter: Literal["local", "simulated"] = "local"
    """Where members run: processes of this machine, or timers that stand for them (load tests, trying things out)."""
    simulated_run_seconds: NotNegative = 1.0
    """How long a simulated member runs whose command does not say so."""
    slots: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Accelerators to offer; None: the machine's GPUs, else max(4, cores)."""
    node: str | None = None
    """Name of this machine in the capacity report; None: its host name."""
    membership_host: str = "127.0.0.1"
    """Address on which trainers report and find their group's store."""
    membership_port: Annotated[int, Field(ge=0, le=65_535)] = 0
    """0: any free port, kept in the state folder and taken again after a restart."""
    membership_advertise_host: str | None = None
    """Host under which trainers reach it; None: ``membership_host``."""
    membership_bind_seconds_max: Positive = 15.0
    """How long the kept port is tried again before another one is taken."""
    connections_max: Annotated[int, Field(ge=1)] = 4096
    mark_seconds: Positive = 0.5
    """How often a trainer reports."""
    reconnect_seconds_max: Positive = 0.25
    """Longest back-off of a trainer that lost its connection."""
    rejoin_seconds: NotNegative = 5.0
    """After a restart nobody is called lost for so long."""
    observe_seconds: Positive = 0.25
    """How often processes are looked at when nothing wakes us."""
    start_retry_seconds: Positive = 2.0
    """How often a start is asked for again while its process does not show."""
    starts_at_once_max: Annotated[int, Field(ge=1)] = 16
    zygote_answer_seconds: Positive = 15.0
    folders_answer_seconds: Positive = 5.0
    """A job whose folders hang for so long is not started now; it holds up no other."""
    unseen_end_seconds: Positive = 2.0
    """Worker and shim are over and no exit status was written: after so long it is unknown for good."""
    capacity_seconds: Positive = 30.0
    """A capacity report is published at least so often."""
    retention_seconds: NotNegative = 604_800.0
    """Logs and ledgers of a job are kept for so long after its end; its outputs are never deleted."""
    checkpoint_retention_seconds: NotNegative = 2_592_000.0
    """Checkpoints in the state folder are kept for so long after the job's end."""
    retention_interval_seconds: Positive = 60.0
    log_chunk_bytes: Annotated[int, Field(ge=4096)] = 65_536
    log_line_bytes_max: Annotated[int, Field(ge=1024)] = 1_048_576
    """A longer line is cut into pieces of this size."""
    log_poll_seconds: Positive = 0.25
    log_streams_max: Annotated[int, Field(ge=1)] = 200

    start_seconds: Positive = 60.0
    gather_seconds: Positive = 5.0
    """How long a group waits for newcomers that are on their way before it changes without them."""
    form_seconds: Positive = 30.0
    offer_retry_seconds: Positive = 0.1
    offer_retry_seconds_max: Positive = 5.0
    settle_seconds: Positive = 0.3
    sync_wait_seconds: Positive = 60.0
    """A member for which its peers wait longer is replaced, unless its phase allows more."""
    silent_seconds: Positive = 15.0
    """A member that is silent for so long and whose process is stopped or uses no CPU is replaced."""
    recover_seconds: Positive = 120.0
    """A group below its minimum for so long ends as a failure of the platform."""
    write_off_seconds: Positive = 300.0
    overdue_seconds: Positive = 10.0
    """A killed member that is not gone after so long is reported."""
    idle_stop_seconds: Positive = 3.0
    """A member that holds no state and was asked to stop gets SIGTERM after so long."""
    quiet_seconds: Positive = 1800.0
    """Restart and fixed mode: no output and no CPU time for so long is abnormal."""
    checkpoint_event_seconds: Positive = 30.0
    starting_seconds: Positive = 600.0
    loading_seconds: Positive = 600.0
    compiling_seconds: Positive = 900.0
    stepping_seconds: Positive = 60.0
    evaluating_seconds: Positive = 1800.0
    checkpointing_seconds: Positive = 900.0
    finishing_seconds: Positive = 900.0
    crashes_max: Annotated[int, Field(ge=1)] = 3
    """Crashes (SIGSEGV and the like) in one attempt that make it a failure of the job."""
    fruitless_losses_max: Annotated[int, Field(ge=1)] = 8
    """Members lost without one step between them before the attempt ends as a failure of the platform."""
    member_generations_max: Annotated[int, Field(ge=1)] = 500
    """A member that has been in more training groups is exchanged for a newcomer at the next planned resize, since
    Paddle loses about 30 KB, a descriptor and a thread with each."""

    def limits(self) -> Limits:
        """What the core needs of these."""
        names = [name for name in Limits.__dataclass_fields__ if name in type(self).model_fields]
        return Limits(**{name: getattr(self, name) for name in names})
