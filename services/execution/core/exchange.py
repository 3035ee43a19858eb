"""Decides which members have been in so many training groups that newcomers should take their places.

Each group that a member forms costs its process a little for good, and nothing but its end gives that back.

1. A member is worn once it has been in more groups than the limit. It goes on; nobody is exchanged for that alone.
2. When a job shrinks, worn members of the group leave before others of the group.
3. When a job grows, ready newcomers take the places of worn members in the very group that they come to; the size
   asked for is reached with the next newcomers, who may only be started when the worn ones are gone.
4. One who holds the state always stays, and no group becomes smaller by an exchange.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from schemas.vocabulary import MemberName
from services.execution.core.seen import Limits, Seen
from services.execution.core.state import Ending, Generation, Job, Member

_REASON: Final = "exchanged for a newcomer"


def worn_members(job: Job, seen: Seen, limits: Limits) -> tuple[MemberName, ...]:
    """Elastic members that are past the limit, those with the most groups first."""
    counted = [
        (-seen.reports[member.name].generations, member.index, member.name)
        for member in job.held(job.workers.role)
        if member.name in seen.reports and seen.reports[member.name].generations > limits.member_generations_max
    ]
    return tuple(name for _, _, name in sorted(counted))


def plan_exchange(
    *, staying: Sequence[MemberName], newcomers: int, worn: Sequence[MemberName]
) -> tuple[MemberName, ...]:
    """Of those that would stay in the next group, the ones whose places newcomers take."""
    return tuple(name for name in worn if name in staying)[: max(0, min(newcomers, len(staying) - 1))]


def mark_exchanged(job: Job, generation: Generation, limits: Limits) -> tuple[Job, tuple[MemberName, ...]]:
    """Once ``generation`` has started, those that it left out in exchange: they go now, or have gone already."""
    exchanged: list[MemberName] = []
    for name in generation.leavers:
        member = job.member(name)
        if member is not None and member.ending is None:
            member = as_exchanged(member, limits)
            job = job.with_member(member)
        if member is not None and member.ending_reason.startswith(_REASON):
            exchanged.append(name)
    return job, tuple(exchanged)


def as_exchanged(member: Member, limits: Limits) -> Member:
    reason = f"{_REASON}: it has been in more than {limits.member_generations_max} generations"
    return replace(member, ending=Ending.LEAVER, ending_reason=reason)


def was_left_out(job: Job, member: Member) -> bool:
    """It may have left with a group whose start is not known yet: an exit with 0 is then what was asked of it."""
    return any(member.name in generation.leavers for generation in job.line)
