"""Who may hold a group's state, and so is waited for after a restart: nobody else holds anybody up."""

from dataclasses import replace

from unit.execution_builders import make_generation, make_job, make_member, name

from services.execution.core.generations import members_of_line
from services.execution.core.state import GenerationState, MemberState


def test_members_of_the_running_group_and_of_offers_since() -> None:
    job = make_job(2)
    newcomer = make_member(2)
    job = replace(job, members=(*job.members, newcomer))
    assert members_of_line(job) == (name(0), name(1)), "who has not been offered a group holds nothing"
    offered = make_generation(2, (name(0), name(1), name(2)), state=GenerationState.OFFERED)
    assert members_of_line(replace(job, generations=(*job.generations, offered))) == (name(0), name(1), name(2))


def test_not_who_is_gone_nor_who_was_only_in_a_group_before() -> None:
    job = make_job(3)
    shrunk = make_generation(2, (name(0), name(1)))
    gone = replace(job.members[1], state=MemberState.GONE)
    job = replace(job, members=(job.members[0], gone, job.members[2]), generations=(*job.generations, shrunk))
    assert members_of_line(job) == (name(0),)
