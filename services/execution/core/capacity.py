"""Decides what the cluster can hold: what stands on each node, without members that were written off."""

from collections.abc import Iterable

from schemas.events.capacity import Node, NodeMembers
from schemas.resources import Resources, total
from schemas.vocabulary import FlavorName, NodeName
from services.execution.core.state import Job, Member, MemberState


def observe_node(jobs: Iterable[Job], *, name: NodeName, flavor: FlavorName, size: Resources) -> Node:
    """The node as queueing shall see it. Held members stand on it, written-off ones make it smaller."""
    ordered = sorted(jobs, key=lambda job: job.job_id)
    counts: dict[tuple[str, str], int] = {}
    missing: list[Resources] = []
    members: list[NodeMembers] = []
    for job in ordered:
        for member in job.members:
            if member.node != name:
                continue
            if member.is_held:
                counts[job.job_id, member.role] = counts.get((job.job_id, member.role), 0) + 1
            elif member.state is MemberState.WRITTEN_OFF:
                missing.append(_size(job, member))
        for role in sorted({m.role for m in job.members}):
            if counts.get((job.job_id, role)):
                members.append(NodeMembers(job_id=job.job_id, role=role, members=counts[job.job_id, role]))
    return Node(
        name=name,
        flavor=flavor,
        allocatable=(size - total(missing)).clipped(),
        used_by_others=Resources(),
        members=tuple(members),
    )


def _size(job: Job, member: Member) -> Resources:
    grant = job.role(member.role)
    return grant.resources if grant is not None else Resources()
