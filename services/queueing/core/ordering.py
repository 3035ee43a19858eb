"""Who comes first: claimants, victims, and who grows next. Every key ends in the job id, so nobody ties."""

from schemas.vocabulary import JobId
from services.queueing.core.values import Workload


def urgency_order(workload: Workload) -> tuple[int, JobId]:
    """Most urgent first: class, then time of submission (a job id sorts by it). Fair share goes in between."""
    return (-workload.urgency, workload.job_id)


def work_at_risk_seconds(workload: Workload, *, now: float) -> int:
    """What an eviction would lose: whole member-seconds since the newest checkpoint or the start of the group.

    0 before the group has started. After a restart of queueing it counts from there.
    """
    if workload.started_attempt != workload.attempt or workload.started_at is None:
        return 0
    since = max(workload.started_at, workload.checkpointed_at or workload.started_at)
    return max(0, int(now - since)) * sum(workload.granted)


def eviction_order(workload: Workload, *, now: float) -> tuple[int, int, int, JobId]:
    """Cheapest to lose first: least urgent, then least work since a checkpoint, then admitted last."""
    return (
        workload.urgency,
        work_at_risk_seconds(workload, now=now),
        -workload.order,
        workload.job_id,
    )


def shrinking_order(workload: Workload, *, now: float) -> tuple[int, int, int, JobId]:
    """As for evictions; a live job loses no work by shrinking, a restarting one what came after its checkpoint."""
    risk = work_at_risk_seconds(workload, now=now) if workload.loses_work_when_resized else 0
    return (workload.urgency, risk, -workload.order, workload.job_id)


def growing_order(workload: Workload, *, workers: int) -> tuple[int, JobId]:
    """Within one class, whoever has the fewest workers gets the next one."""
    return (workers, workload.job_id)
