"""Decides that a member is stuck: peers wait for it, its phase is over its limit, or it is silent and still."""

from collections.abc import Mapping, Sequence
from typing import Final

from schemas.vocabulary import MemberName, MemberPhase
from services.execution.core.seen import Limits, Process, Report, Seen
from services.execution.core.state import Generation, Job, Member

_PATIENT: Final = frozenset(MemberPhase) - {MemberPhase.STEPPING}
"""Phases that allow peers to wait longer than ``sync_wait_seconds``."""


def abnormal_members(
    job: Job, seen: Seen, *, limits: Limits, blocked_seconds: float, now: float
) -> tuple[tuple[Member, str], ...]:
    """Those to be killed and replaced, with the reason. Empty while execution is not settled after a restart.

    ``blocked_seconds``: for how long members of the running group have waited for others (``awaited``).
    """
    if not seen.settled:
        return ()
    waited_for = awaited(job.running, seen.reports)
    found: list[tuple[Member, str]] = []
    for member in job.members:
        report = seen.reports.get(member.name)
        if not member.may_work or report is None or seen.process(member.name).ended:
            continue
        reason = _silent(report, seen.process(member.name), limits=limits, now=now) or _over_limit(
            report, in_group=_in_group(member, job.running, report), limits=limits, now=now
        )
        if reason is None and member.name in waited_for:
            reason = _keeps_waiting(report, limits=limits, blocked_seconds=blocked_seconds, now=now)
        if reason is not None:
            found.append((member, reason))
    return tuple(found)


def awaited(running: Generation | None, reports: Mapping[MemberName, Report]) -> Sequence[MemberName]:
    """Members of the running group that others wait for, in a collective or with a cut group."""
    if running is None:
        return ()
    known = [(name, reports[name]) for name in running.members if name in reports]
    blocked = [name for name, report in known if report.waiting or report.sync_seconds > 0]
    if not blocked or len(blocked) == len(known):
        return ()
    return [name for name, _ in known if name not in blocked]


def blocked_for(running: Generation | None, reports: Mapping[MemberName, Report]) -> float:
    """Seconds that the longest waiting member of the group has been in its present collective."""
    names = running.members if running is not None else ()
    return max((reports[name].sync_seconds for name in names if name in reports), default=0.0)


def _silent(report: Report, process: Process, *, limits: Limits, now: float) -> str | None:
    silent = now - report.heard_at
    if silent < limits.silent_seconds or not process.recorded:
        return None
    if process.stopped:
        return f"silent for {silent:.0f} s, its process is stopped"
    if process.still_seconds >= limits.silent_seconds:
        return f"silent for {silent:.0f} s, its CPU time stands still"
    if silent > limits.of_phase(report.phase):
        return f"silent for {silent:.0f} s while {report.phase.value}"
    return None


def _over_limit(report: Report, *, in_group: bool, limits: Limits, now: float) -> str | None:
    """Over its phase's own limit. Who waits for a peer, or for an offer of ours, is not judged by its phase."""
    if (
        report.waiting
        or report.sync_seconds > 0
        or not (in_group or report.phase in _PATIENT - {MemberPhase.STARTING})
    ):
        return None
    limit = limits.of_phase(report.phase)
    still = now - report.progressed_at
    if still <= limit:
        return None
    return f"{report.phase.value} without progress for {still:.0f} s (limit {limit:.0f} s)"


def _keeps_waiting(report: Report, *, limits: Limits, blocked_seconds: float, now: float) -> str | None:
    """Only what peers have waited since its phase allows no wait counts: a long evaluation before does not.

    Nor does a peer's mark that is a moment older than its own: who was held up until now has not been waited for.
    """
    waited = min(blocked_seconds, report.phase_seconds, now - report.progressed_at)
    if report.phase in _PATIENT or waited < limits.sync_wait_seconds:
        return None
    return f"its peers have waited {waited:.0f} s for it while {report.phase.value}"


def _in_group(member: Member, running: Generation | None, report: Report) -> bool:
    return report.holds_state or (running is not None and member.name in running.members)
