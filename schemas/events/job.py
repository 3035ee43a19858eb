"""Events of ``tide.job.v1``: what users asked for. Published by intake; key = job id."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from schemas.resources import Resources
from schemas.vocabulary import (
    Attribution,
    EndCause,
    Mode,
    Outcome,
    PriorityClass,
    QueueName,
    RestartPolicyKind,
    TenantName,
    Topic,
    UserName,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRegister:
    """What the user wants now. The register with the higher version replaces the lower, whatever arrives first.

    ``workers`` is the size to start at, and, when it changes later, the size wished for from then on.
    """

    version: int
    priority: PriorityClass
    workers_min: int
    workers_max: int
    workers: int
    held: bool = False
    cancelled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRequest:
    """One role of the gang. The elastic role's count is the register's; a fixed role has its own."""

    name: str
    elastic: bool
    count: int
    resources: Resources


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """When a failure of the job is retried: at most ``limit`` times; for ``exit_codes`` only those codes."""

    kind: RestartPolicyKind = RestartPolicyKind.ON_FAILURE
    limit: int = 3
    exit_codes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """How to run it. Names of environment variables only: values never travel in events (ADR 0003)."""

    name: str
    mode: Mode
    script: str | None = None
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    environment_names: tuple[str, ...] = ()
    working_directory: str | None = None
    interpreter: str | None = None
    image: str | None = None
    checkpoint_path: str | None = None
    checkpoint_every_steps: int = 200
    outputs: str | None = None
    grace_seconds: float = 30.0
    run_time_limit_seconds: float | None = None
    finish_by: str | None = None
    restart_policy: RestartPolicy = RestartPolicy()
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSubmitted:
    """A job was accepted.

    By: intake, in the transaction that accepts the submission. For: queueing, execution, scaling.
    """

    TYPE: ClassVar[Literal["tide.job.submitted.v1"]] = "tide.job.submitted.v1"
    TOPIC: ClassVar[Topic] = Topic.JOB
    tenant: TenantName
    user: UserName
    queue: QueueName
    request: RequestRegister
    roles: tuple[RoleRequest, ...]
    spec: JobSpec
    allow_unsatisfiable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobChanged:
    """Priority, limits, size, hold, release or cancel: the whole request register.

    By: intake, at each accepted PATCH or cancel. For: queueing (higher version wins), scaling.
    """

    TYPE: ClassVar[Literal["tide.job.changed.v1"]] = "tide.job.changed.v1"
    TOPIC: ClassVar[Topic] = Topic.JOB
    request: RequestRegister
    by: UserName
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnded:
    """The job is over, for good.

    By: intake, when the allocation closed. For: other systems, and retention in execution and metrics.
    ``accelerator_seconds`` is whole accelerators times seconds held.
    """

    TYPE: ClassVar[Literal["tide.job.ended.v1"]] = "tide.job.ended.v1"
    TOPIC: ClassVar[Topic] = Topic.JOB
    outcome: Outcome
    exit_code: int | None
    attributed_to: Attribution | None
    reason: str
    image_digest: str | None
    accelerator_seconds: float
    cause: EndCause | None = None
