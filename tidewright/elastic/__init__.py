"""What a training script imports: ``with elastic.join() as job`` makes its loop elastic."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidewright.elastic.job import Job, Step

__all__ = ["Job", "Step", "join"]


def join() -> "Job":
    """The job that this process is a worker of, to be used in a ``with`` statement.

    Without ``TIDE_ADDRESS`` in the environment the script runs alone, as a job of one worker. Paddle is imported
    here, not with this package. Raises ElasticError where the environment is incomplete.
    """
    from tidewright.elastic.job import Job

    return Job.from_environment()


def __getattr__(name: str) -> object:
    if name in ("Job", "Step"):
        from tidewright.elastic import job

        return getattr(job, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
