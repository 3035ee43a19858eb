"""From a submission to the facts of ``job.submitted``, or to all that is wrong with it at once."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import Final, TypeAlias

from schemas.api.jobs import Invalid, SubmitJob, WorkerResources
from schemas.events.job import JobSpec, JobSubmitted, RequestRegister, RestartPolicy, RoleRequest
from schemas.resources import CPU, MEMORY, MILLI, SHM, Resources
from schemas.vocabulary import (
    WORKER_ROLE,
    Mode,
    QueueName,
    RestartPolicyKind,
    TenantName,
    UserName,
)
from services.intake.core.quantities import BadQuantity, Unit, parse_quantity

RESERVED_VARIABLES: Final = ("TIDE_ADDRESS", "TIDE_MEMBER", "TIDE_TOKEN")
ENVIRONMENT_BYTES_MAX: Final = 131_072
LABELS_MAX: Final = 64
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LABEL_KEY: Final = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9._/]{0,251}[A-Za-z0-9])?")
_NAME_MAX: Final = 63
UNIT_OF: Final = {CPU: Unit.MILLI_UNITS, MEMORY: Unit.BYTES, SHM: Unit.BYTES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A submission that is sound. Environment values stand apart: they never travel in events."""

    submitted: JobSubmitted
    environment: dict[str, str]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Everything that is wrong, in the order of the fields."""

    errors: tuple[Invalid, ...]


Judgement: TypeAlias = Accepted | Refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks. Until access control is built: the defaults."""

    tenant: TenantName
    user: UserName


def judge(
    body: SubmitJob,
    *,
    caller: Caller,
    accelerator: str,
    now: datetime,
    allow_unsatisfiable: bool = False,
    is_local: bool = True,
) -> Judgement:
    """Decide about one submission. ``accelerator`` is the resource that one accelerator counts in here."""
    errors: list[Invalid] = []
    errors += _program_errors(body)
    errors += _environment_errors(body.environment)
    mode = body.mode or _default_mode(body)
    size = _size_of(body, mode)
    resources = _resources_of(body.resources, accelerator=accelerator, is_local=is_local)
    errors += [*size] if isinstance(size, list) else []
    errors += [*resources] if isinstance(resources, list) else []
    errors += _restart_errors(body)
    errors += _finish_errors(body)
    errors += _label_errors(body.labels)
    if errors or isinstance(size, list) or isinstance(resources, list):
        return Refused(errors=tuple(errors))
    submitted = JobSubmitted(
        tenant=caller.tenant,
        user=caller.user,
        queue=QueueName(body.queue),
        request=RequestRegister(
            version=1,
            priority=body.priority,
            workers_min=size.low,
            workers_max=size.high,
            workers=size.wished,
            held=body.held,
        ),
        roles=(RoleRequest(name=WORKER_ROLE, elastic=True, count=size.low, resources=resources),),
        spec=_spec_of(body, mode),
        allow_unsatisfiable=allow_unsatisfiable,
    )
    return Accepted(
        submitted=submitted,
        environment=dict(body.environment),
        warnings=_warnings(body, mode=mode, size=size, now=now, is_local=is_local),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    low: int
    high: int
    wished: int


def _default_mode(body: SubmitJob) -> Mode:
    if body.command is None:
        return Mode.LIVE
    return Mode.RESTART if body.checkpoint_path else Mode.FIXED


def _program_errors(body: SubmitJob) -> list[Invalid]:
    errors: list[Invalid] = []
    one_of = "give `script` (a Python file) or `command` (a list of words), not both"
    if body.script is None and body.command is None:
        errors.append(Invalid(field="/script", detail="nothing to run", way_out=one_of))
    if body.script is not None and body.command is not None:
        errors.append(Invalid(field="/command", detail="there is a script already", way_out=one_of))
    if body.script is not None and not body.script.strip():
        errors.append(Invalid(field="/script", detail="is empty", way_out="name a Python file"))
    if body.command is not None and not (body.command and body.command[0].strip()):
        errors.append(
            Invalid(field="/command", detail="has no program", way_out='write a list: ["python", "train.py"]')
        )
    for field, value in _paths(body):
        if value is not None and not value.strip():
            errors.append(
                Invalid(field=f"/{field}", detail="is empty", way_out="leave the field out, or name a path")
            )
    if body.working_directory and not body.working_directory.startswith("/"):
        errors.append(
            Invalid(field="/working_directory", detail="is a relative path", way_out="write it from the root: /…")
        )
    return errors


def _paths(body: SubmitJob) -> tuple[tuple[str, str | None], ...]:
    return (
        ("working_directory", body.working_directory),
        ("interpreter", body.interpreter),
        ("checkpoint_path", body.checkpoint_path),
        ("outputs", body.outputs),
    )


def _environment_errors(environment: dict[str, str]) -> list[Invalid]:
    errors: list[Invalid] = []
    for name in sorted(environment):
        if not _VARIABLE.fullmatch(name):
            errors.append(
                Invalid(
                    field=f"/environment/{pointer_part(name)}",
                    detail="is not a name of a variable",
                    way_out="letters, digits and _, not starting with a digit",
                )
            )
        elif name in RESERVED_VARIABLES:
            errors.append(
                Invalid(
                    field=f"/environment/{name}",
                    detail="is set by the system for every worker",
                    way_out="choose any other name",
                )
            )
    size = sum(len(name.encode()) + len(value.encode()) for name, value in environment.items())
    if size > ENVIRONMENT_BYTES_MAX:
        errors.append(
            Invalid(
                field="/environment",
                detail=f"has {size} bytes, the limit is {ENVIRONMENT_BYTES_MAX}",
                way_out="put large values into a file and name the file",
            )
        )
    return errors


def _size_of(body: SubmitJob, mode: Mode) -> Size | list[Invalid]:
    if mode is Mode.FIXED:
        return _fixed_size_of(body)
    low = body.workers_min
    wished = body.workers if body.workers is not None else low
    high = body.workers_max if body.workers_max is not None else max(low, wished)
    errors = size_errors(Size(low=low, high=high, wished=wished))
    return errors or Size(low=low, high=high, wished=wished)


def _fixed_size_of(body: SubmitJob) -> Size | list[Invalid]:
    """One number; whichever fields name it must agree."""
    named = [
        (name, count)
        for name, count in (
            ("workers", body.workers),
            ("workers_max", body.workers_max),
            ("workers_min", body.workers_min if "workers_min" in body.model_fields_set else None),
        )
        if count is not None
    ]
    count = named[0][1] if named else 1
    errors = [
        Invalid(
            field=f"/{name}",
            detail=f"is {other}, but `{named[0][0]}` is {count}, and a job in fixed mode has one size",
            way_out="give `workers` alone, or mode live or restart for a range",
        )
        for name, other in named[1:]
        if other != count
    ]
    return errors or Size(low=count, high=count, wished=count)


def size_errors(size: Size) -> list[Invalid]:
    """What is wrong with a range and the size wished for inside it."""
    if size.low > size.high:
        return [
            Invalid(
                field="/workers_min",
                detail=f"is {size.low}, above workers_max ({size.high})",
                way_out=f"at most {size.high}, or raise workers_max",
            )
        ]
    if not size.low <= size.wished <= size.high:
        return [
            Invalid(
                field="/workers",
                detail=f"is {size.wished}, outside workers_min..workers_max ({size.low}..{size.high})",
                way_out=f"from {size.low} to {size.high}",
            )
        ]
    return []


def _resources_of(wanted: WorkerResources, *, accelerator: str, is_local: bool) -> Resources | list[Invalid]:
    """Shared memory counts only where a worker has its own: processes of one machine all see the machine's."""
    amounts = {accelerator: wanted.accelerators * MILLI}
    errors: list[Invalid] = []
    for name, value in ((CPU, wanted.cpu), (MEMORY, wanted.memory), (SHM, wanted.shm)):
        if value is None:
            continue
        amount = parse_quantity(value, unit=UNIT_OF[name])
        if isinstance(amount, BadQuantity):
            errors.append(Invalid(field=f"/resources/{name}", detail=amount.detail, way_out=amount.way_out))
        elif name != SHM or not is_local:
            amounts[name] = amount
    return errors or Resources(amounts)


def _restart_errors(body: SubmitJob) -> list[Invalid]:
    policy = body.restart_policy
    if policy.kind is RestartPolicyKind.EXIT_CODES and not policy.exit_codes:
        return [
            Invalid(
                field="/restart_policy/exit_codes",
                detail="is empty, so nothing would ever be retried",
                way_out="name the codes, or choose kind never or on_failure",
            )
        ]
    if policy.exit_codes and policy.kind is not RestartPolicyKind.EXIT_CODES:
        return [
            Invalid(
                field="/restart_policy/exit_codes",
                detail=f"has no meaning with kind {policy.kind.value}",
                way_out="choose kind exit_codes, or leave the codes out",
            )
        ]
    return []


def _finish_errors(body: SubmitJob) -> list[Invalid]:
    if body.finish_by is not None and body.finish_by.utcoffset() is None:
        return [
            Invalid(field="/finish_by", detail="has no time zone", way_out="add Z or an offset: 2031-05-01T18:00:00Z")
        ]
    return []


def _label_errors(labels: dict[str, str]) -> list[Invalid]:
    errors = [
        Invalid(
            field=f"/labels/{pointer_part(key)}",
            detail="is not a label",
            way_out="keys: letters, digits, - . _ /, at most 253; values: at most 253 characters",
        )
        for key, value in sorted(labels.items())
        if not _LABEL_KEY.fullmatch(key) or len(value) > 253
    ]
    if len(labels) > LABELS_MAX:
        errors.append(Invalid(field="/labels", detail=f"has {len(labels)} labels", way_out=f"at most {LABELS_MAX}"))
    return errors


def _spec_of(body: SubmitJob, mode: Mode) -> JobSpec:
    policy = body.restart_policy
    return JobSpec(
        name=body.name or _name_of(body),
        mode=mode,
        script=body.script,
        command=body.command or (),
        args=body.args,
        environment_names=tuple(sorted(body.environment)),
        working_directory=body.working_directory,
        interpreter=body.interpreter,
        image=body.image,
        checkpoint_path=body.checkpoint_path,
        checkpoint_every_steps=body.checkpoint_every_steps,
        outputs=body.outputs,
        grace_seconds=body.grace_seconds,
        run_time_limit_seconds=body.run_time_limit_seconds,
        finish_by=None if body.finish_by is None else body.finish_by.astimezone(UTC).isoformat(),
        restart_policy=RestartPolicy(kind=policy.kind, limit=policy.limit, exit_codes=policy.exit_codes),
        labels=tuple(sorted(body.labels.items())),
    )


def _name_of(body: SubmitJob) -> str:
    """A name for a job that has none: that of its program, in the characters that a name may have."""
    program = body.script or (body.command[0] if body.command else "")
    stem = re.sub(r"[^a-z0-9._-]+", "-", PurePosixPath(program).stem.lower())[:_NAME_MAX].strip("-._")
    return stem or "job"


def _warnings(body: SubmitJob, *, mode: Mode, size: Size, now: datetime, is_local: bool) -> tuple[str, ...]:
    warnings = _local_warnings(body) if is_local else []
    if mode is Mode.RESTART and not body.checkpoint_path and size.low < size.high:
        warnings.append(
            "workers: without checkpoint_path a job in restart mode keeps the size it started with; "
            "name the folder of the script's own checkpoints to let it be resized"
        )
    if body.finish_by is not None and body.finish_by.utcoffset() is not None and body.finish_by <= now:
        warnings.append("finish_by: this moment has passed already, so the job counts as late")
    if body.script and not body.working_directory and not body.script.startswith("/"):
        warnings.append(
            "script: a relative path without working_directory depends on where the services run; "
            "give an absolute path or a working_directory"
        )
    return tuple(warnings)


def _local_warnings(body: SubmitJob) -> list[str]:
    here = "has no meaning where workers are processes of this machine, and is ignored"
    warnings = []
    if body.image is not None:
        warnings.append(f"image: {here}; the job runs in the environment that the services run in")
    if body.volumes:
        warnings.append(f"volumes: {here}; the job sees the files of this machine")
    if body.secrets:
        warnings.append(f"secrets: {here}; pass values through environment")
    if body.resources.shm is not None:
        warnings.append(f"resources.shm: {here}; workers share the machine's shared memory")
    return warnings


def pointer_part(key: str) -> str:
    """One step of a JSON pointer (RFC 6901)."""
    return key.replace("~", "~0").replace("/", "~1")
