"""Shows the members of a job: as they are committed, with what is heard and seen of them."""

from collections.abc import Mapping, Sequence

from schemas.api.jobs import MemberView
from schemas.vocabulary import MemberName
from services.execution.core.seen import Process, Report
from services.execution.core.state import Member, MemberState


def to_member_views(
    members: Sequence[Member],
    *,
    reports: Mapping[MemberName, Report],
    processes: Mapping[MemberName, Process],
) -> list[MemberView]:
    """Latest first."""
    newest = sorted(members, key=lambda member: -member.ordinal)
    return [_to_view(m, reports.get(m.name), processes.get(m.name)) for m in newest]


def _to_view(member: Member, report: Report | None, process: Process | None) -> MemberView:
    return MemberView(
        member=member.name,
        state=_state_of(member, report),
        pid=process.pid if process is not None else None,
        node=member.node,
        phase=report.phase.value if report is not None and member.is_held else None,
        generation=report.generation if report is not None else 0,
        step=report.step if report is not None else 0,
        exit_code=member.exit_code,
        attributed_to=member.attributed_to,
        reason=member.exit_reason,
    )


def _state_of(member: Member, report: Report | None) -> str:
    """committed, admitted, waiting, leaving, ending, gone, written_off."""
    if member.is_held and member.ending is not None:
        return "leaving" if member.ending.value == "leaver" else "ending"
    if member.state is MemberState.ADMITTED and report is not None and report.waiting:
        return "waiting"
    return member.state.value
