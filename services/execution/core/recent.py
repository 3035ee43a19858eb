"""Decides what of a long attempt is kept at hand: an attempt may go through thousands of resizes."""

from dataclasses import replace
from typing import Final

from services.execution.core.state import GenerationState, Job, MemberState

RECENT: Final = 256
"""Started generations, and members that are gone, that are kept of an attempt. Their rows stay in Postgres."""


def forget_old(job: Job) -> Job:
    """The job without what is older than that and belongs to no generation of the present line. Cheap when short."""
    if len(job.generations) <= RECENT and len(job.members) <= RECENT:
        return job
    started = [g.number for g in job.generations if g.state is GenerationState.STARTED]
    old = frozenset(started[:-RECENT])
    job = replace(job, generations=tuple(g for g in job.generations if g.number not in old))
    named = frozenset(name for g in job.line for name in (*g.members, *g.leavers))
    gone = [m.name for m in job.members if m.state is MemberState.GONE and m.name not in named]
    forgotten = frozenset(gone[:-RECENT])
    return replace(job, members=tuple(m for m in job.members if m.name not in forgotten))
