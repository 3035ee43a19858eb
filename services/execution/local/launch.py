"""Makes the request that starts a member: what is run, where, in which environment."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from schemas.events.job import JobSpec
from schemas.resources import MEMORY
from schemas.vocabulary import Attribution
from services.execution.core.environment import Places, member_environment
from services.execution.core.seen import StartError
from services.execution.core.state import Job, Member
from services.execution.local.folders import Folders


def start_request(
    job: Job,
    member: Member,
    *,
    folders: Folders,
    address: str,
    token: str,
    has_gpus: bool,
    variables: Mapping[str, str],
) -> dict[str, Any]:
    """The zygote's ``start`` request. Makes the job's folders for checkpoints and outputs.

    Raises OSError if they cannot be made.
    """
    spec = job.spec
    assert spec is not None, "nothing is started before its spec is known"
    grant = job.role(member.role)
    checkpoints, outputs = folders.checkpoints_of(job), folders.outputs_of(job)
    for folder in (checkpoints, outputs):
        make_folder(folder, folders)
    places = Places(
        address=address,
        token=token,
        member_directory=str(folders.of_member(member.name)),
        checkpoint_directory=str(checkpoints),
        output_directory=str(outputs),
        host=address.rpartition(":")[0],
        has_gpus=has_gpus,
    )
    environment = member_environment(job, member, places=places, variables=variables)
    if spec.command and spec.interpreter:
        # The job's own Python comes first for whatever the command calls.
        path = environment.get("PATH", os.environ.get("PATH", os.defpath))
        environment["PATH"] = f"{Path(spec.interpreter).parent}{os.pathsep}{path}"
    return {
        "directory": places.member_directory,
        "member": member.name,
        "nonce": member.nonce,
        "environment": environment,
        "working_directory": spec.working_directory,
        "script": str(script_path(spec)) if spec.script else None,
        "args": list(spec.args),
        "command": None if spec.script else list(spec.command),
        "interpreter": spec.interpreter if spec.script else None,
        "memory_bytes": grant.resources[MEMORY] if grant is not None else 0,
    }


def make_folder(path: Path, folders: Folders) -> None:
    """Ours are for this account alone; one that the job names is made as its user would. Raises OSError."""
    path.mkdir(mode=0o700 if path.is_relative_to(folders.state) else 0o777, parents=True, exist_ok=True)


def script_path(spec: JobSpec) -> Path:
    """A relative script counts from the working folder."""
    return Path(spec.working_directory or "/") / (spec.script or "")


def what_is_missing(spec: JobSpec) -> StartError | None:
    """What the job names and this machine does not have: a failure of the job, told before anything is started."""
    if spec.working_directory and not Path(spec.working_directory).is_dir():
        return StartError(
            detail=f"there is no working folder {spec.working_directory}", attributed_to=Attribution.JOB
        )
    if spec.script and not script_path(spec).is_file():
        return StartError(detail=f"there is no script {script_path(spec)}", attributed_to=Attribution.JOB)
    if spec.interpreter and not os.access(spec.interpreter, os.X_OK):
        return StartError(detail=f"the interpreter {spec.interpreter} cannot be run", attributed_to=Attribution.JOB)
    return None
