"""The edges of decisions: endpoints for groups that talk through Paddle, and one log line per change."""

import socket
from collections.abc import Sequence
from dataclasses import replace

from structlog.typing import FilteringBoundLogger

from schemas.registry import WorkerData
from schemas.vocabulary import Mode
from services.execution.core.state import GenerationState, Job, MemberState


def plan_endpoints(job: Job, host: str) -> Job:
    """Give every member of a group of restart or fixed mode a port, once: they are part of what is committed."""
    if job.spec is None or job.spec.mode is Mode.LIVE:
        return job
    for generation in job.generations:
        if generation.state is GenerationState.OFFERED and not generation.ports:
            ports = free_ports(host, len(generation.members))
            job = job.with_generation(replace(generation, ports=ports))
    return job


def free_ports(host: str, count: int) -> tuple[int, ...]:
    """Ports that are free now, all different. Somebody else may take one before it is used."""
    sockets = [socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) for _ in range(count)]
    try:
        for each in sockets:
            each.bind((host, 0))
        return tuple(each.getsockname()[1] for each in sockets)
    finally:
        for each in sockets:
            each.close()


def log_changes(log: FilteringBoundLogger, before: Job, after: Job, events: Sequence[WorkerData]) -> None:
    """One line per decision: members committed and gone, generations, verdicts, and what was told."""
    facts = {"job_id": after.job_id, "attempt": after.attempt, "epoch": after.epoch}
    known = {member.name: member for member in before.members}
    for member in after.members:
        former = known.get(member.name)
        if former is None:
            log.info("member_committed", member=member.name, devices=list(member.devices), **facts)
        elif former.state is not member.state and member.state is MemberState.GONE:
            log.info(
                "member_gone", member=member.name, exit_code=member.exit_code, reason=member.exit_reason, **facts
            )
        elif former.state is not member.state:
            log.info(f"member_{member.state.value}", member=member.name, **facts)
        elif former.ending is None and member.ending is not None:
            log.info(
                "member_ending", member=member.name, ending=member.ending.value, reason=member.ending_reason, **facts
            )
    states = {generation.number: generation.state for generation in before.generations}
    for generation in after.generations:
        if states.get(generation.number) is not generation.state:
            log.info(
                f"generation_{generation.state.value}",
                generation=generation.number,
                workers=len(generation.members),
                leavers=len(generation.leavers),
                source=generation.source,
                **facts,
            )
    if after.verdict is not None and before.verdict is None:
        log.info("attempt_decided", outcome=after.verdict.outcome.value, reason=after.verdict.reason, **facts)
    for event in events:
        log.info("said", type=event.TYPE, **facts)
