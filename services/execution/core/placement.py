"""Decides which members are started and which leave: indices, devices, and the order of leavers."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from schemas.events.allocation import RoleGrant
from schemas.resources import MILLI, NVIDIA_GPU, SLOT
from schemas.vocabulary import MemberName, NodeName
from services.execution.core.state import Ending, Job, Member

ACCELERATORS = (NVIDIA_GPU, SLOT)


def free_indices(job: Job, role: str, count: int) -> tuple[int, ...]:
    """The lowest ``count`` indices of ``role`` that no held member has."""
    taken = {member.index for member in job.held(role)}
    free: list[int] = []
    candidate = 0
    while len(free) < count:
        if candidate not in taken:
            free.append(candidate)
        candidate += 1
    return tuple(free)


def next_incarnation(job: Job, role: str, index: int) -> int:
    """One above the highest that this index ever had; it begins at 1."""
    return 1 + next((n for r, i, n in job.incarnations if (r, i) == (role, index)), 0)


def devices_needed(grant: RoleGrant) -> int:
    """Whole accelerators that one member of the role holds."""
    return max(grant.resources[name] for name in ACCELERATORS) // MILLI


def add_member(job: Job, *, role: str, index: int, nonce: str, node: NodeName, devices: tuple[int, ...]) -> Job:
    """The job with the intent of one more process."""
    incarnation = next_incarnation(job, role, index)
    member = Member(
        job_id=job.job_id,
        role=role,
        index=index,
        incarnation=incarnation,
        ordinal=job.ordinal + 1,
        attempt=job.attempt,
        nonce=nonce,
        node=node,
        devices=devices,
    )
    others = tuple(entry for entry in job.incarnations if entry[:2] != (role, index))
    return replace(
        job,
        members=(*job.members, member),
        incarnations=tuple(sorted((*others, (role, index, incarnation)))),
        ordinal=job.ordinal + 1,
    )


def choose_leavers(
    job: Job, grant: RoleGrant, *, lost_nodes: Collection[NodeName] = (), worn: Sequence[MemberName] = ()
) -> tuple[Member, ...]:
    """Who leaves so that the role holds what is granted, members that leave already counted.

    In this order: members on lost nodes, those not in the running group, worn ones, the highest index.
    """
    running, offered = job.running, job.offered
    in_group = frozenset(running.members) if running is not None else frozenset()
    going = frozenset(offered.leavers) if offered is not None else frozenset()
    staying = [m for m in job.held(grant.role) if m.ending is None and m.name not in going]
    surplus = max(0, len(staying) - grant.members)
    places = {name: place for place, name in enumerate(worn)}
    staying.sort(
        key=lambda m: (
            m.node not in lost_nodes,
            m.name in in_group,
            places.get(m.name, len(places)),
            -m.index,
            -m.incarnation,
        )
    )
    return tuple(staying[:surplus])


def missing_members(job: Job, grant: RoleGrant) -> int:
    """How many may be started now: only while those neither seen gone nor written off are fewer than granted."""
    return max(0, grant.members - len(job.held(grant.role)))


def mark_leaving(job: Job, leavers: Collection[Member], *, worn: Collection[MemberName] = ()) -> Job:
    for member in leavers:
        reason = "leaves: the job shrinks"
        if member.name in worn:
            reason += ", and it has been in more generations than a member should"
        job = job.with_member(replace(member, ending=Ending.LEAVER, ending_reason=reason))
    return job


def free_devices(taken: Collection[int], count: int, wanted: int) -> tuple[int, ...]:
    """The lowest ``wanted`` numbers below ``count`` that are not taken; fewer where there are not enough."""
    return tuple(number for number in range(count) if number not in taken)[:wanted]
