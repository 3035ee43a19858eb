"""One word, one meaning: the identifiers and closed enumerations that every service shares."""

from enum import StrEnum
from typing import Final, NewType

JobId = NewType("JobId", str)
"""Time-ordered: ``j`` followed by a lower-case ULID. Sorts by time of submission."""
MemberName = NewType("MemberName", str)
"""``<job>/<role>/<index>/<incarnation>``: one process of a job (see ``member_name``)."""
TenantName = NewType("TenantName", str)
UserName = NewType("UserName", str)
QueueName = NewType("QueueName", str)
FlavorName = NewType("FlavorName", str)
NodeName = NewType("NodeName", str)

DEFAULT_TENANT: Final = TenantName("default")
DEFAULT_USER: Final = UserName("default")
DEFAULT_QUEUE: Final = QueueName("default")
DEFAULT_FLAVOR: Final = FlavorName("default")

WORKER_ROLE: Final = "worker"
"""Name of the elastic role."""
CLUSTER_KEY: Final = "cluster"
"""Key of ``tide.capacity`` events: one installation drives one cluster."""


class ServiceName(StrEnum):
    INTAKE = "intake"
    QUEUEING = "queueing"
    METRICS = "metrics"
    SCALING = "scaling"
    EXECUTION = "execution"


class Topic(StrEnum):
    """Topics of the log. The Kafka name is ``tide.<name>.v1``; the key is the job id unless said."""

    JOB = "tide.job.v1"
    ALLOCATION = "tide.allocation.v1"
    WORKER = "tide.worker.v1"
    METRIC = "tide.metric.v1"
    SCALING = "tide.scaling.v1"
    CAPACITY = "tide.capacity.v1"


class PriorityClass(StrEnum):
    """Strict between classes; see ``urgency`` for the order."""

    CRITICAL = "critical"
    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"

    @property
    def urgency(self) -> int:
        """3 for critical down to 0 for low: larger is more urgent."""
        return 3 - tuple(PriorityClass).index(self)


class Mode(StrEnum):
    """How a job can be resized: in living processes, by checkpoint and restart, or not at all."""

    LIVE = "live"
    RESTART = "restart"
    FIXED = "fixed"


class JobPhase(StrEnum):
    """PROTOCOL: a pure function of request, grant and group; made only by intake's ``phase_of``."""

    HELD = "Held"
    QUEUED = "Queued"
    STARTING = "Starting"
    RUNNING = "Running"
    DRAINING = "Draining"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    CANCELLED = "Cancelled"

    @property
    def is_terminal(self) -> bool:
        return self in (JobPhase.SUCCEEDED, JobPhase.FAILED, JobPhase.CANCELLED)


class JobFlag(StrEnum):
    """What goes on beside the phase."""

    CANCELLING = "cancelling"
    RESIZING = "resizing"
    RECOVERING = "recovering"
    ENDING = "ending"
    SHORT_OF_WORKERS = "short_of_workers"


class Outcome(StrEnum):
    """How a job ended (``allocation.closed``, ``job.ended``)."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class AttemptOutcome(StrEnum):
    """How one attempt ended (``worker.group_ended``): the group's word, or evicted if it had none."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    EVICTED = "evicted"


class Attribution(StrEnum):
    """Whose fault an exit was. Failures of the job count against its restart policy."""

    JOB = "job"
    PLATFORM = "platform"


class EndCause(StrEnum):
    """What ended a process, an attempt or a job. For programs; the reason beside it says it to people."""

    COMPLETED = "Completed"
    STOPPED = "Stopped"
    """We asked for it: a resize, a preemption, a hold, a cancel. Nobody's fault."""
    EXIT_CODE = "ExitCode"
    COMMAND_NOT_FOUND = "CommandNotFound"
    COMMAND_NOT_EXECUTABLE = "CommandNotExecutable"
    CRASHED = "Crashed"
    """Ended by a signal that it drew upon itself."""
    OUT_OF_MEMORY = "OutOfMemory"
    ENDED_EARLY = "EndedEarly"
    """Exit 0 before the training was complete."""
    NEVER_JOINED = "NeverJoined"
    NOT_STARTABLE = "NotStartable"
    """What the job names (script, working folder, interpreter) is not there."""
    RUN_TIME_LIMIT = "RunTimeLimit"
    KILLED = "Killed"
    """Ended by a signal from outside that was not ours."""
    PEER_LOST = "PeerLost"
    """It ended because another member of its group was taken away."""
    UNSEEN = "Unseen"
    STUCK = "Stuck"
    NODE_RESTARTED = "NodeRestarted"
    NODE_OUT_OF_MEMORY = "NodeOutOfMemory"
    """The kernel ended it although it used no more than it had asked for."""
    STATE_LOST = "StateLost"
    BELOW_MINIMUM = "BelowMinimum"
    NOT_FORMED = "NotFormed"
    NO_PROGRESS = "NoProgress"
    """The platform ended too many attempts in a row without one step further."""


class MemberPhase(StrEnum):
    """What a member is doing; each phase has its own limit before the member counts as abnormal."""

    STARTING = "starting"
    LOADING = "loading"
    COMPILING = "compiling"
    STEPPING = "stepping"
    EVALUATING = "evaluating"
    CHECKPOINTING = "checkpointing"
    FINISHING = "finishing"


class RestartPolicyKind(StrEnum):
    NEVER = "never"
    ON_FAILURE = "on_failure"
    EXIT_CODES = "exit_codes"


class WaitCode(StrEnum):
    """Why an examined job waits."""

    NOT_YET_CONSIDERED = "NOT_YET_CONSIDERED"
    HELD = "HELD"
    NO_CAPACITY_REPORT = "NO_CAPACITY_REPORT"
    NEVER_FITS = "NEVER_FITS"
    NO_ROOM = "NO_ROOM"
    ROOM_COMING = "ROOM_COMING"
    PLACEMENT = "PLACEMENT"
    BEHIND_IN_QUEUE = "BEHIND_IN_QUEUE"
    BACK_OFF = "BACK_OFF"


class DecisionCode(StrEnum):
    """Why an allocation changed."""

    ADMITTED_IDLE = "ADMITTED_IDLE"
    ADMITTED_PROMISE = "ADMITTED_PROMISE"
    RETRIED = "RETRIED"
    GREW_PROPOSED = "GREW_PROPOSED"
    GREW_REQUESTED = "GREW_REQUESTED"
    GAVE_BACK = "GAVE_BACK"
    SHRANK_PROPOSED = "SHRANK_PROPOSED"
    SHRANK_REQUESTED = "SHRANK_REQUESTED"
    SHRANK_FOR_CLAIMANT = "SHRANK_FOR_CLAIMANT"
    SHRANK_FOR_SHORTAGE = "SHRANK_FOR_SHORTAGE"
    START_FAILED = "START_FAILED"
    LIMITS_CHANGED = "LIMITS_CHANGED"
    PREEMPTED_FOR_CLAIMANT = "PREEMPTED_FOR_CLAIMANT"
    PREEMPTED_FOR_SHORTAGE = "PREEMPTED_FOR_SHORTAGE"
    HELD = "HELD"
    CANCELLED = "CANCELLED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"


class UtilisationMeasure(StrEnum):
    """How a utilisation was measured: by NVML on a GPU, else 1 - (input wait + idle) / wall."""

    NVML = "nvml"
    WALL = "wall"


class GroupChangeCause(StrEnum):
    """Why a later generation was formed."""

    RESIZED = "resized"
    MEMBER_LOST = "member_lost"
    MEMBER_REPLACED = "member_replaced"
    RESYNCED = "resynced"


class StartFailure(StrEnum):
    """Why members could not be started. ``IMAGE`` and ``SECRET`` count as failures of the job."""

    IMAGE = "image"
    SECRET = "secret"
    UNSCHEDULABLE = "unschedulable"


def member_name(job_id: JobId, role: str, index: int, incarnation: int) -> MemberName:
    """The name of one process of a job; ``index`` and ``incarnation`` start at 0 and 1."""
    return MemberName(f"{job_id}/{role}/{index}/{incarnation}")
