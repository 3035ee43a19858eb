"""Bodies of ``/v1/jobs``: what users send and what they get back."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from schemas.vocabulary import EndCause, JobFlag, JobPhase, Mode, Outcome, PriorityClass, RestartPolicyKind, WaitCode

Count = Annotated[int, Field(ge=1, le=10_000)]
Seconds = Annotated[float, Field(gt=0, le=31_536_000, allow_inf_nan=False)]
Quantity = Annotated[str | int | float, Field(description="As in Kubernetes: 500m, 2, 1.5, 512Mi, 2Gi.")]


class RequestModel(BaseModel):
    """Base of request bodies: unknown fields and wrong types are errors that name the field."""

    model_config = ConfigDict(extra="forbid", strict=True, str_max_length=65_536)


class WorkerResources(RequestModel):
    """What one worker needs. ``accelerators`` are whole GPUs, or slots on a machine without any.

    A worker that uses more than ``memory``, with all that it starts, is ended as ``OutOfMemory``.
    """

    accelerators: Annotated[int, Field(ge=0, le=1024)] = 1
    cpu: Quantity | None = None
    memory: Quantity | None = None
    shm: Quantity | None = None


class RestartPolicyRequest(RequestModel):
    kind: RestartPolicyKind = RestartPolicyKind.ON_FAILURE
    limit: Annotated[int, Field(ge=0, le=1000)] = 3
    exit_codes: tuple[Annotated[int, Field(ge=1, le=255)], ...] = ()


class SubmitJob(RequestModel):
    """A job to run. Exactly one of ``script`` (Python, forked from a warm process) and ``command`` is given.

    ``workers`` is the size to start at (default ``workers_min``). ``mode`` defaults to ``live`` for a script, and
    for a command to ``restart`` if there is a ``checkpoint_path``, else ``fixed``. ``checkpoint_path`` is where a
    script keeps its own checkpoints; a live job has a folder of its own there, named by its id.
    """

    name: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9._]*[a-z0-9])?$")] | None = (
        None
    )
    script: str | None = None
    command: tuple[str, ...] | None = None
    args: tuple[str, ...] = ()
    environment: dict[str, str] = Field(default_factory=dict)
    working_directory: str | None = None
    interpreter: str | None = None
    mode: Mode | None = None
    priority: PriorityClass = PriorityClass.MEDIUM
    queue: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")] = "default"
    workers_min: Count = 1
    workers_max: Count | None = None
    workers: Count | None = None
    resources: WorkerResources = Field(default_factory=WorkerResources)
    checkpoint_path: str | None = None
    checkpoint_every_steps: Count = 200
    outputs: str | None = None
    grace_seconds: Seconds = 30.0
    restart_policy: RestartPolicyRequest = Field(default_factory=RestartPolicyRequest)
    run_time_limit_seconds: Seconds | None = None
    finish_by: datetime | None = None
    held: bool = False
    labels: dict[str, str] = Field(default_factory=dict)
    image: str | None = None
    volumes: list[Any] | None = None
    secrets: list[Any] | None = None


class BulkJob(SubmitJob):
    """One job of a list, with the Idempotency-Key that stands for it alone."""

    idempotency_key: Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,255}$")] | None = None


class BulkAnswer(BaseModel):
    """What became of one job of a list. ``status``: as if it had been sent alone; 201 and 200 have an ``id``."""

    status: int
    id: str | None = None
    name: str | None = None
    warnings: list[str] = Field(default_factory=list)
    problem: "Problem | None" = None


class BulkAnswers(BaseModel):
    """One answer for each job, in the order of the list."""

    answers: list[BulkAnswer]


class PatchJob(RequestModel):
    """A change of what is wanted. Absent fields stay as they are."""

    priority: PriorityClass | None = None
    workers_min: Count | None = None
    workers_max: Count | None = None
    workers: Count | None = None
    held: bool | None = None
    reason: Annotated[str, Field(max_length=1000)] = ""


class WorkersView(BaseModel):
    """``wished``: the size the user asked for; ``granted``: by queueing; ``running``: in the started group."""

    min: int
    max: int
    wished: int
    granted: int
    running: int


class WaitingView(BaseModel):
    """Why a job waits, what would unblock it, and a guess of when it starts (``start_estimate_seconds``)."""

    code: WaitCode
    detail: str
    unblocked_by: str
    start_estimate_seconds: float | None = None
    estimate_basis: str | None = None


class ProgressView(BaseModel):
    """``percent`` and ``remaining_seconds`` are null where the script does not say how long it is."""

    step: int
    total_steps: int | None = None
    percent: float | None = None
    remaining_seconds: float | None = None
    loss: float | None = None
    samples_per_second: float | None = None
    utilisation: float | None = None
    measure: str | None = None


class FailuresView(BaseModel):
    """``of_job`` count against ``retries``, those that are tried again; the platform's never do.

    ``without_progress``: attempts in a row that the platform ended without one step further; too many end the job.
    """

    of_job: int
    retries: int
    without_progress: int


class AttemptFailureView(BaseModel):
    """How the last attempt that failed has ended. ``attributed_to``: ``job`` or ``platform``."""

    attempt: int
    exit_code: int | None = None
    attributed_to: str | None = None
    cause: EndCause | None = None
    reason: str


class JobView(BaseModel):
    """One job as it stands. ``version`` is that of the request register.

    ``exit_code``: 128 + N where signal N ended it. ``attributed_to`` says whose fault a failure was, ``cause`` names
    it for programs and ``reason`` for people.
    """

    id: str
    name: str
    tenant: str
    user: str
    queue: str
    priority: PriorityClass
    mode: Mode
    phase: JobPhase
    flags: list[JobFlag]
    workers: WorkersView
    version: int
    epoch: int
    attempt: int
    generation: int
    submitted_at: datetime
    started_at: datetime | None = None
    ended_at: datetime | None = None
    outcome: Outcome | None = None
    exit_code: int | None = None
    attributed_to: str | None = None
    cause: EndCause | None = None
    reason: str | None = None
    failures: FailuresView
    last_failure: AttemptFailureView | None = None
    waiting: WaitingView | None = None
    progress: ProgressView | None = None
    finish_by: datetime | None = None
    late: bool = False
    accelerator_seconds: float = 0.0
    labels: dict[str, str] = Field(default_factory=dict)
    warnings: list[str] = Field(default_factory=list)


class JobList(BaseModel):
    """A page, newest first. ``next_cursor`` is null on the last one."""

    items: list[JobView]
    next_cursor: str | None = None


class HistoryEntry(BaseModel):
    """One thing that happened to a job: an event of the log, told in one sentence."""

    sequence: str
    time: datetime
    type: str
    summary: str
    epoch: int | None = None
    attempt: int | None = None
    generation: int | None = None
    workers: int | None = None
    data: dict[str, Any]


class History(BaseModel):
    """Oldest first. ``next_cursor`` is null on the last page."""

    items: list[HistoryEntry]
    next_cursor: str | None = None


class WhyView(BaseModel):
    """The answer to "why is it as it is?": the last decision and what may change it."""

    id: str
    phase: JobPhase
    summary: str
    waiting: WaitingView | None = None
    decision: HistoryEntry | None = None
    scaling: HistoryEntry | None = None
    utilisation: float | None = None
    measure: str | None = None
    queue_ahead: int | None = None


class NodeHolder(BaseModel):
    job_id: str
    name: str
    role: str
    members: int


class NodeView(BaseModel):
    name: str
    flavor: str
    allocatable: dict[str, int]
    used_by_others: dict[str, int]
    holders: list[NodeHolder]


class CapacityView(BaseModel):
    """What the cluster can hold and who holds it. ``revision`` 0: nothing was reported yet."""

    revision: int
    nodes: list[NodeView]
    lost_nodes: list[str]


class MemberView(BaseModel):
    """One process of a job, answered by execution. ``reason``: why it ended, ``attributed_to`` by whose doing (null:
    nobody's, it was asked to go); ``exit_code`` is negative for a signal."""

    member: str
    state: str
    pid: int | None
    node: str
    phase: str | None
    generation: int
    step: int
    exit_code: int | None = None
    attributed_to: str | None = None
    reason: str = ""


class MemberList(BaseModel):
    items: list[MemberView]


class Invalid(BaseModel):
    """One thing that is wrong with a request: a JSON pointer, what is wrong, and what is allowed."""

    field: str
    detail: str
    way_out: str = ""


class Problem(BaseModel):
    """RFC 9457 ``application/problem+json``. ``type`` is ``urn:tidewright:problem:<code>``."""

    type: str
    title: str
    status: int
    detail: str
    instance: str | None = None
    errors: list[Invalid] = Field(default_factory=list)


class ServerEvent(BaseModel):
    """The data of one server-sent event: a CloudEvent in structured form. Its SSE id is ``sequence``."""

    specversion: Literal["1.0"]
    id: str
    source: str
    type: str
    subject: str
    time: datetime
    sequence: str
    tenant: str
    dataschema: str
    traceparent: str | None = None
    data: dict[str, Any]


class CancelJob(RequestModel):
    """The body of a cancel may be left out."""

    reason: Annotated[str, Field(max_length=1000)] = ""


class LogLineView(BaseModel):
    """One line of ``application/x-ndjson`` logs, answered by execution. ``cursor`` resumes behind it."""

    member: str
    cursor: str
    line: str


class GapView(BaseModel):
    """The data of the server-sent event ``gap``: events after ``asked`` may be missing, up to ``resumed_after``."""

    asked: str
    resumed_after: str
    detail: str
