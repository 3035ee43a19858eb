"""Jobs, members and looks for the tests of execution's core."""

from datetime import UTC, datetime
from typing import Any

from schemas.events.allocation import RoleGrant
from schemas.events.job import JobSpec
from schemas.resources import SLOT, Resources
from schemas.vocabulary import (
    DEFAULT_TENANT,
    WORKER_ROLE,
    JobId,
    MemberName,
    MemberPhase,
    Mode,
    NodeName,
    member_name,
)
from services.execution.core.reconcile import decide
from services.execution.core.seen import Limits, Process, Report, Seen
from services.execution.core.state import Desired, Generation, GenerationState, Job, Member, MemberState
from services.execution.core.turn import Decision, Now, Supply

JOB = JobId("j1")
NODE = NodeName("here")
NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
LIMITS = Limits()
RUNS = Process(recorded=True, pid=100)


def name(index: int = 0, incarnation: int = 1, role: str = WORKER_ROLE) -> MemberName:
    return member_name(JOB, role, index, incarnation)


def make_grant(members: int = 2, minimum: int = 1, **changes: Any) -> RoleGrant:
    return RoleGrant(
        **{
            "role": WORKER_ROLE,
            "elastic": True,
            "members": members,
            "minimum": minimum,
            "resources": Resources({SLOT: 1000}),
            **changes,
        }
    )


def make_member(index: int = 0, **changes: Any) -> Member:
    return Member(
        **{
            "job_id": JOB,
            "role": WORKER_ROLE,
            "index": index,
            "incarnation": 1,
            "ordinal": index + 1,
            "attempt": 1,
            "nonce": f"nonce{index}",
            "node": NODE,
            "devices": (index,),
            "state": MemberState.ADMITTED,
            **changes,
        }
    )


def make_spec(**changes: Any) -> JobSpec:
    return JobSpec(**{"name": "job", "mode": Mode.LIVE, "script": "train.py", **changes})


def make_generation(number: int = 1, members: tuple[MemberName, ...] = (), **changes: Any) -> Generation:
    return Generation(
        **{
            "number": number,
            "attempt": 1,
            "epoch": 1,
            "members": members,
            "state": GenerationState.STARTED,
            **changes,
        }
    )


def make_job(workers: int = 2, **changes: Any) -> Job:
    """A granted live job whose group of all members has started."""
    members = tuple(make_member(index) for index in range(workers))
    return Job(
        **{
            "job_id": JOB,
            "tenant": DEFAULT_TENANT,
            "spec": make_spec(),
            "desired": Desired.GRANTED,
            "epoch": 1,
            "attempt": 1,
            "roles": (make_grant(workers),),
            "generation": 1,
            "generations": (make_generation(1, tuple(m.name for m in members)),),
            "members": members,
            "incarnations": tuple((WORKER_ROLE, m.index, 1) for m in members),
            "ordinal": workers,
            "group_started": True,
            "started_at": NOON,
            **changes,
        }
    )


def make_report(**changes: Any) -> Report:
    return Report(
        **{
            "connected": True,
            "heard_at": 1000.0,
            "progressed_at": 1000.0,
            "generation": 1,
            "step": 10,
            "phase": MemberPhase.STEPPING,
            "phase_seconds": 500.0,
            **changes,
        }
    )


def make_seen(workers: int = 2, **changes: Any) -> Seen:
    """All members connected and stepping, all processes running."""
    return Seen(
        **{
            "reports": {name(index): make_report() for index in range(workers)},
            "processes": {name(index): RUNS for index in range(workers)},
            **changes,
        }
    )


def look(
    job: Job,
    seen: Seen,
    *,
    now: float = 1000.0,
    since: dict[str, float] | None = None,
    limits: Limits = LIMITS,
    **instant: Any,
) -> Decision:
    return decide(
        job,
        seen,
        limits=limits,
        since=since or {},
        now=Now(**{"monotonic": now, "wall": NOON, **instant}),
        supply=Supply(nonces=tuple(f"n{i}" for i in range(16)), devices=tuple(range(8, 16)), node=NODE),
    )
