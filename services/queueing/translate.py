"""Between what the core thinks in and rows: one workload is a row, its charges, and its reason for waiting."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, TypeAlias

from pydantic import TypeAdapter

from schemas.events.allocation import StartEstimate
from schemas.events.capacity import CapacityObserved
from schemas.events.job import RequestRegister, RestartPolicy, RoleRequest
from schemas.events.worker import GroupEnded, RoomFreed
from schemas.registry import decode, encode
from schemas.vocabulary import FlavorName, JobId, QueueName, TenantName, UserName, WaitCode
from services.queueing.core.values import Capacity, Parked, Promise, Standing, WaitReason, Workload

Row: TypeAlias = Mapping[str, Any]
"""Column name -> value; JSON columns are text on the way in and out."""

_ROLES: Final = TypeAdapter(tuple[RoleRequest, ...])
_POLICY: Final = TypeAdapter(RestartPolicy)
_REQUEST: Final = TypeAdapter(RequestRegister)
_CAPACITY: Final = TypeAdapter(CapacityObserved)
_SHAPES_KEPT: Final = 4_096


def workload_row(workload: Workload) -> Row:
    return {
        "job_id": workload.job_id,
        "name": workload.name,
        "tenant": workload.tenant,
        "user_name": workload.user,
        "queue": workload.queue,
        "roles": _roles_json(workload.roles),
        "is_resizable": workload.is_resizable,
        "loses_work_when_resized": workload.loses_work_when_resized,
        "grace_seconds": workload.grace_seconds,
        "restart_policy": _policy_json(workload.restart_policy),
        "request": _REQUEST.dump_json(workload.request).decode(),
        "wanted": workload.wanted,
        "wanted_because": storable(workload.wanted_because),
        "standing": workload.standing.value,
        "epoch": workload.epoch,
        "attempt": workload.attempt,
        "started_attempt": workload.started_attempt,
        "flavor": workload.flavor,
        "floor": workload.floor,
        "size_before": workload.size_before,
        "admission_order": workload.order,
        "granted_at_revision": workload.granted_at_revision,
        "job_failures": workload.job_failures,
        "platform_failures": workload.platform_failures,
        "best_step": workload.best_step,
        "fruitless": workload.fruitless,
        "back_off_seconds": workload.back_off_seconds,
        "overdue": storable(workload.overdue),
    }


def charge_rows(workload: Workload) -> list[Row]:
    """One per role; none where nothing is charged."""
    if not any((*workload.granted, *workload.held)):
        return []
    return [
        {"job_id": workload.job_id, "role": role.name, "granted": granted, "held": held}
        for role, granted, held in zip(workload.roles, workload.granted, workload.held, strict=True)
    ]


def waiting_row(workload: Workload) -> Row | None:
    reason = workload.waiting
    if reason is None:
        return None
    return {
        "job_id": workload.job_id,
        "code": reason.code.value,
        "detail": storable(reason.detail),
        "unblocked_by": storable(reason.unblocked_by),
        "estimate_seconds": reason.estimate.seconds if reason.estimate else None,
        "estimate_basis": storable(reason.estimate.basis) if reason.estimate else None,
    }


def promise_row(promise: Promise) -> Row:
    return {
        "job_id": promise.job_id,
        "flavor": promise.flavor,
        "members": list(promise.members),
        "origins": list(promise.origins),
    }


def parked_row(parked: Parked) -> Row:
    return {
        "ordinal": parked.ordinal,
        "job_id": parked.job_id,
        "type": parked.word.TYPE,
        "payload": encode(parked.word),
    }


def capacity_row(capacity: Capacity) -> Row:
    report = CapacityObserved(revision=capacity.revision, nodes=capacity.nodes, lost_nodes=capacity.lost_nodes)
    return {"revision": capacity.revision, "report": _CAPACITY.dump_json(report).decode()}


def to_workload(row: Row, charges: Sequence[Row], waiting: Row | None) -> Workload:
    """Inverse of the three above; what is not saved (clocks) is empty."""
    roles = _roles(row["roles"])
    charged = {charge["role"]: charge for charge in charges}
    return Workload(
        job_id=JobId(row["job_id"]),
        name=row["name"],
        tenant=TenantName(row["tenant"]),
        user=UserName(row["user_name"]),
        queue=QueueName(row["queue"]),
        roles=roles,
        is_resizable=row["is_resizable"],
        loses_work_when_resized=row["loses_work_when_resized"],
        grace_seconds=row["grace_seconds"],
        restart_policy=_policy(row["restart_policy"]),
        request=_REQUEST.validate_json(row["request"]),
        granted=tuple(charged[r.name]["granted"] if r.name in charged else 0 for r in roles),
        held=tuple(charged[r.name]["held"] if r.name in charged else 0 for r in roles),
        wanted=row["wanted"],
        wanted_because=row["wanted_because"],
        standing=Standing(row["standing"]),
        epoch=row["epoch"],
        attempt=row["attempt"],
        started_attempt=row["started_attempt"],
        flavor=FlavorName(row["flavor"]) if row["flavor"] is not None else None,
        floor=row["floor"],
        size_before=row["size_before"],
        order=row["admission_order"],
        granted_at_revision=row["granted_at_revision"],
        job_failures=row["job_failures"],
        platform_failures=row["platform_failures"],
        best_step=row["best_step"],
        fruitless=row["fruitless"],
        back_off_seconds=row["back_off_seconds"],
        overdue=row["overdue"],
        waiting=_to_wait_reason(waiting) if waiting is not None else None,
    )


def to_promise(row: Row) -> Promise:
    return Promise(
        job_id=JobId(row["job_id"]),
        flavor=FlavorName(row["flavor"]),
        members=tuple(row["members"]),
        origins=tuple(JobId(origin) for origin in row["origins"]),
    )


def to_parked(row: Row) -> Parked:
    word = decode(row["type"], row["payload"])
    assert isinstance(word, RoomFreed | GroupEnded)
    return Parked(ordinal=row["ordinal"], job_id=JobId(row["job_id"]), word=word)


def to_capacity(row: Row) -> Capacity:
    report = _CAPACITY.validate_json(row["report"])
    return Capacity(revision=report.revision, nodes=report.nodes, lost_nodes=report.lost_nodes)


def storable(text: str) -> str:
    """Postgres holds no NUL in text; others' words may carry one."""
    return text.replace("\x00", "\ufffd")


def _to_wait_reason(row: Row) -> WaitReason:
    seconds = row["estimate_seconds"]
    return WaitReason(
        code=WaitCode(row["code"]),
        detail=row["detail"],
        unblocked_by=row["unblocked_by"],
        estimate=StartEstimate(seconds=seconds, basis=row["estimate_basis"]) if seconds is not None else None,
    )


@lru_cache(maxsize=_SHAPES_KEPT)
def _roles_json(roles: tuple[RoleRequest, ...]) -> str:
    return _ROLES.dump_json(roles).decode()


@lru_cache(maxsize=_SHAPES_KEPT)
def _policy_json(policy: RestartPolicy) -> str:
    return _POLICY.dump_json(policy).decode()


@lru_cache(maxsize=_SHAPES_KEPT)
def _roles(text: str) -> tuple[RoleRequest, ...]:
    return _ROLES.validate_json(text)


@lru_cache(maxsize=_SHAPES_KEPT)
def _policy(text: str) -> RestartPolicy:
    return _POLICY.validate_json(text)
