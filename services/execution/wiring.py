"""Puts execution together for this machine."""

from collections.abc import Mapping

from sqlalchemy import column, select, table

from schemas.vocabulary import JobId, Topic
from services.execution.handlers import ExecutionHandler
from services.execution.http.routes import InternalRoutes
from services.execution.local.checkpoints import ShelfReader, look_at_shelf
from services.execution.local.executor import LocalExecutor
from services.execution.local.folders import Folders
from services.execution.local.machine import look_at_machine
from services.execution.membership.endpoint import MembershipEndpoint
from services.execution.memory import Memory
from services.execution.ports import Executor
from services.execution.reconciler import Reconciler
from services.execution.retention import Retention
from services.execution.settings import ExecutionSettings
from services.execution.simulated import SimulatedExecutor
from services.execution.store import token_hash
from shared.http import make_app
from shared.runtime.service import ServiceContext, ServiceParts
from shared.telemetry.logs import get_logger

_ENVIRONMENTS = table("environments", column("job_id"), column("variables"), schema="intake")
"""Values of environment variables: the one table of another service that execution may read."""


def build(context: ServiceContext) -> ServiceParts:
    """Raises SettingsError."""
    settings = ExecutionSettings.load()
    folders = Folders(state=context.state_directory)
    memory = Memory()
    handler = ExecutionHandler(memory, token_hash=lambda job_id: token_hash(context.signing_key, job_id))
    endpoint = MembershipEndpoint(
        settings,
        memory,
        clock=context.clock,
        directory=context.directory,
        signing_key=context.signing_key,
        port_file=folders.membership_port,
        checkpoint_directory_of=folders.checkpoints_of,
    )
    executor = _executor(context, settings, memory, folders=folders, endpoint=endpoint)
    reconciler = Reconciler(
        settings,
        memory,
        executor,
        endpoint,
        lease=context.lease,
        clock=context.clock,
        instruments=context.instruments,
        has_uncommitted=handler.has_uncommitted,
        shelves=ShelfReader(lambda job: look_at_shelf(folders.checkpoints_of(job))),
    )
    retention = Retention(settings, folders, lease=context.lease, clock=context.clock)
    app = make_app(
        "Tidewright execution",
        ready=lambda: None,
        instruments=context.instruments,
        body_bytes_max=settings.body_bytes_max,
    )
    InternalRoutes(context, settings, memory, folders).add_to(app)
    return ServiceParts(
        handler=handler,
        consumes=frozenset({Topic.JOB, Topic.ALLOCATION}),
        app=app,
        loops=(endpoint.run, executor.run_starts, reconciler.run, retention.run),
    )


def _executor(
    context: ServiceContext,
    settings: ExecutionSettings,
    memory: Memory,
    *,
    folders: Folders,
    endpoint: MembershipEndpoint,
) -> Executor:
    if settings.adapter == "simulated":
        get_logger().warning("simulated", detail="members are timers: no job of this installation trains anything")
        return SimulatedExecutor(settings, memory, state=context.state_directory)
    return LocalExecutor(
        settings,
        memory,
        look_at_machine(slots=settings.slots, node=settings.node),
        clock=context.clock,
        folders=folders,
        signing_key=context.signing_key,
        address=lambda: endpoint.address,
        variables_of=lambda job_id: read_variables(context, job_id),
    )


async def read_variables(context: ServiceContext, job_id: JobId) -> Mapping[str, str]:
    """A job's environment values, read when a member is started and kept nowhere."""
    statement = select(_ENVIRONMENTS.c.variables).where(_ENVIRONMENTS.c.job_id == job_id)
    async with context.read() as connection:
        row = (await connection.execute(statement)).one_or_none()
    return {str(name): str(value) for name, value in (row.variables if row is not None else {}).items()}
