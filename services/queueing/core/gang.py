"""Gangs: how many members of each role a size means, and what they add up to."""

from schemas.events.allocation import RoleGrant
from schemas.resources import Resources, total
from services.queueing.core.values import Workload


def members_at(workload: Workload, workers: int) -> tuple[int, ...]:
    """Members per role when the elastic role has ``workers``; fixed roles are whole at any size."""
    return tuple(workers if role.elastic else role.count for role in workload.roles)


def minimum_of(workload: Workload) -> tuple[int, ...]:
    """The whole present minimum: all of the fixed roles, and the elastic one's lower limit."""
    return members_at(workload, workload.request.workers_min)


def nobody(workload: Workload) -> tuple[int, ...]:
    """No member of any role."""
    return (0,) * len(workload.roles)


def size_of(workload: Workload, members: tuple[int, ...]) -> Resources:
    """What so many members of each role need together."""
    return total(role.resources * count for role, count in zip(workload.roles, members, strict=True))


def wanted_workers(workload: Workload) -> int:
    """The size to grow to: what is wished for, within the limits."""
    request = workload.request
    return min(max(workload.wanted, request.workers_min), request.workers_max)


def to_role_grants(workload: Workload, *, members: tuple[int, ...], floor: int) -> tuple[RoleGrant, ...]:
    """The roles of a grant as events have them; a fixed role's minimum is all of it."""
    return tuple(
        RoleGrant(
            role=role.name,
            elastic=role.elastic,
            members=count,
            minimum=floor if role.elastic else role.count,
            resources=role.resources,
        )
        for role, count in zip(workload.roles, members, strict=True)
    )
