"""Where things lie in the state folder."""

from dataclasses import dataclass
from pathlib import Path

from schemas.vocabulary import JobId, MemberName, Mode
from services.execution.core.state import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Folders:
    """Paths below the state folder. Making a folder is the caller's part."""

    state: Path

    @property
    def zygote_socket(self) -> Path:
        return self.state / "zygote.sock"

    @property
    def membership_port(self) -> Path:
        return self.state / "membership.port"

    def of_member(self, name: MemberName) -> Path:
        job_id, role, index, incarnation = name.split("/")
        return self.runs_of(JobId(job_id)) / f"{role}-{index}-{incarnation}"

    def runs_of(self, job_id: JobId) -> Path:
        return self.state / "run" / job_id

    def own_checkpoints_of(self, job_id: JobId) -> Path:
        return self.state / "jobs" / job_id / "checkpoints"

    def checkpoints_of(self, job: Job) -> Path:
        """Where the job's checkpoints lie: where it says, else in the state folder.

        A live job has a folder of its own there: of two jobs that name the same place, one would go on from what the
        other has trained, and each would keep the other from writing.
        """
        if job.spec is None or not job.spec.checkpoint_path:
            return self.own_checkpoints_of(job.job_id)
        place = self._place(job, job.spec.checkpoint_path)
        return place / job.job_id if job.spec.mode is Mode.LIVE else place

    def outputs_of(self, job: Job) -> Path:
        wanted = job.spec.outputs if job.spec is not None else None
        return self._place(job, wanted) if wanted else self.state / "jobs" / job.job_id / "outputs"

    def _place(self, job: Job, wanted: str) -> Path:
        """A relative path counts from the job's working folder."""
        base = job.spec.working_directory if job.spec is not None else None
        return (Path(base) if base else self.state / "jobs" / job.job_id) / wanted
