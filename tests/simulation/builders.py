"""Small jobs and clusters for tests of queueing: slots of one whole unit, ids that sort by their number."""

from schemas.events.capacity import CapacityObserved, Node, NodeMembers
from schemas.events.job import JobSpec, JobSubmitted, RequestRegister, RestartPolicy, RoleRequest
from schemas.resources import MILLI, SLOT, Resources
from schemas.vocabulary import (
    DEFAULT_FLAVOR,
    DEFAULT_QUEUE,
    DEFAULT_TENANT,
    DEFAULT_USER,
    WORKER_ROLE,
    FlavorName,
    JobId,
    Mode,
    NodeName,
    PriorityClass,
    QueueName,
    TenantName,
    UserName,
)
from services.queueing.core.values import Workload
from services.queueing.core.words import on_submitted

SERVER_ROLE = "server"


def job_id(number: int) -> JobId:
    return JobId(f"j{number:04d}")


def slots(count: int) -> Resources:
    return Resources({SLOT: count * MILLI})


def make_submitted(
    *,
    priority: PriorityClass = PriorityClass.MEDIUM,
    workers_min: int = 1,
    workers_max: int | None = None,
    workers: int | None = None,
    slots_each: int = 1,
    servers: int = 0,
    server_slots: int = 1,
    mode: Mode = Mode.LIVE,
    checkpoint_path: str | None = None,
    policy: RestartPolicy | None = None,
    held: bool = False,
    name: str = "job",
    grace_seconds: float = 30.0,
    queue: QueueName = DEFAULT_QUEUE,
    tenant: TenantName = DEFAULT_TENANT,
    user: UserName = DEFAULT_USER,
) -> JobSubmitted:
    """A job of ``workers_min..workers_max`` workers, and so many servers as a fixed role."""
    most = workers_max if workers_max is not None else max(workers_min, workers or 1)
    roles = [RoleRequest(name=WORKER_ROLE, elastic=True, count=workers_min, resources=slots(slots_each))]
    if servers:
        roles.append(RoleRequest(name=SERVER_ROLE, elastic=False, count=servers, resources=slots(server_slots)))
    return JobSubmitted(
        tenant=tenant,
        user=user,
        queue=queue,
        request=RequestRegister(
            version=1,
            priority=priority,
            workers_min=workers_min,
            workers_max=most,
            workers=workers if workers is not None else workers_min,
            held=held,
        ),
        roles=tuple(roles),
        spec=JobSpec(
            name=name,
            mode=mode,
            script="train.py",
            checkpoint_path=checkpoint_path,
            grace_seconds=grace_seconds,
            restart_policy=policy or RestartPolicy(),
        ),
    )


def make_workload(number: int, submitted: JobSubmitted | None = None) -> Workload:
    """A workload as it waits right after its submission."""
    data = submitted or make_submitted()
    return on_submitted(job_id(number), data.tenant, data).workload


def make_node(
    name: str,
    count: int,
    *,
    flavor: FlavorName = DEFAULT_FLAVOR,
    others: int = 0,
    members: tuple[tuple[int, str, int], ...] = (),
) -> Node:
    """``members``: (job number, role, how many)."""
    return Node(
        name=NodeName(name),
        flavor=flavor,
        allocatable=slots(count),
        used_by_others=slots(others),
        members=tuple(NodeMembers(job_id=job_id(n), role=role, members=m) for n, role, m in members),
    )


def make_capacity(*counts: int, revision: int = 1) -> CapacityObserved:
    """One node a count."""
    nodes = tuple(make_node(f"n{index}", count) for index, count in enumerate(counts))
    return CapacityObserved(revision=revision, nodes=nodes)
