"""Builders for intake's tests: records, events, envelopes."""

import itertools
import json
from datetime import UTC, datetime

from schemas.api.jobs import SubmitJob
from schemas.envelope import Event, Sequence
from schemas.events.allocation import (
    AllocationClosed,
    AllocationEvicted,
    AllocationGranted,
    AllocationResized,
    AllocationWaiting,
    QueueObserved,
    Reason,
    RoleGrant,
)
from schemas.events.capacity import CapacityObserved, Node
from schemas.events.job import RequestRegister
from schemas.events.worker import GroupChanged, GroupEnded, GroupStarted
from schemas.resources import Resources
from schemas.vocabulary import (
    DEFAULT_FLAVOR,
    DEFAULT_TENANT,
    DEFAULT_USER,
    AttemptOutcome,
    DecisionCode,
    GroupChangeCause,
    JobId,
    NodeName,
    Outcome,
    PriorityClass,
    QueueName,
    WaitCode,
)
from services.intake.core.readmodel import JobRecord
from services.intake.core.validation import Accepted, Caller, Judgement, judge

NOW = datetime(2030, 1, 1, 12, 0, tzinfo=UTC)
CALLER = Caller(tenant=DEFAULT_TENANT, user=DEFAULT_USER)
_numbers = itertools.count(1)


def make_judgement(*, is_local=True, **fields) -> Judgement:
    body = SubmitJob.model_validate_json(json.dumps(fields))
    return judge(body, caller=CALLER, accelerator="tidewright.io/slot", now=NOW, is_local=is_local)


def make_record(*, job_id: str | None = None, **fields) -> JobRecord:
    judgement = make_judgement(**{"script": "/jobs/train.py", **fields})
    assert isinstance(judgement, Accepted), judgement
    submitted = judgement.submitted
    return JobRecord(
        job_id=JobId(job_id or f"j{next(_numbers):026d}"),
        tenant=submitted.tenant,
        user=submitted.user,
        queue=QueueName(submitted.queue),
        spec=submitted.spec,
        roles=submitted.roles,
        request=submitted.request,
        warnings=judgement.warnings,
        allow_unsatisfiable=False,
        submitted_at=NOW,
    )


def make_request(**fields) -> RequestRegister:
    values = {"version": 1, "priority": PriorityClass.MEDIUM, "workers_min": 1, "workers_max": 4, "workers": 1}
    return RequestRegister(**{**values, **fields})


def make_roles(workers=1, *, minimum=1, slots=1) -> tuple[RoleGrant, ...]:
    resources = Resources({"tidewright.io/slot": 1000 * slots, "cpu": 500})
    return (RoleGrant(role="worker", elastic=True, members=workers, minimum=minimum, resources=resources),)


def make_reason(code=DecisionCode.ADMITTED_IDLE, detail="room is free") -> Reason:
    return Reason(code=code, detail=detail)


def granted(*, epoch=1, attempt=1, workers=1, slots=1, code=DecisionCode.ADMITTED_IDLE) -> AllocationGranted:
    return AllocationGranted(
        epoch=epoch,
        attempt=attempt,
        roles=make_roles(workers, slots=slots),
        flavor=DEFAULT_FLAVOR,
        reason=make_reason(code),
    )


def resized(*, epoch=2, attempt=1, before=1, after=2) -> AllocationResized:
    return AllocationResized(
        epoch=epoch,
        attempt=attempt,
        workers_from=before,
        workers_to=after,
        roles=make_roles(after),
        grace_seconds=30,
        reason=make_reason(DecisionCode.GREW_PROPOSED, "busy"),
    )


def evicted(*, epoch=2, attempt=1, requeue=True, code=DecisionCode.PREEMPTED_FOR_CLAIMANT) -> AllocationEvicted:
    return AllocationEvicted(
        epoch=epoch, attempt=attempt, grace_seconds=30, reason=make_reason(code, "another job"), requeue=requeue
    )


def closed(*, epoch=3, attempt=1, outcome=Outcome.SUCCEEDED, exit_code=0) -> AllocationClosed:
    return AllocationClosed(
        epoch=epoch,
        attempt=attempt,
        outcome=outcome,
        exit_code=exit_code,
        attributed_to=None,
        reason=make_reason(DecisionCode.COMPLETED, "the group says so"),
    )


def waiting(code=WaitCode.NO_ROOM, detail="no room") -> AllocationWaiting:
    return AllocationWaiting(code=code, detail=detail, unblocked_by="the end of another job")


def queue_observed(*, head=None, per_minute=0.0, detail="no room") -> QueueObserved:
    code = None if head is None else WaitCode.NO_ROOM
    return QueueObserved(pending=(), head=head, head_code=code, head_detail=detail, starts_per_minute=per_minute)


def group_started(*, epoch=1, attempt=1, generation=1, workers=1) -> GroupStarted:
    return GroupStarted(
        epoch=epoch, attempt=attempt, generation=generation, workers=workers, resumed_from=None, steps_dropped=0
    )


def group_changed(
    *, epoch=2, attempt=1, generation=2, workers=2, cause=GroupChangeCause.RESIZED, lost=()
) -> GroupChanged:
    return GroupChanged(
        epoch=epoch,
        attempt=attempt,
        generation=generation,
        workers=workers,
        step=10,
        pause_seconds=0.05,
        cause=cause,
        lost=lost,
    )


def group_ended(*, attempt=1, outcome=AttemptOutcome.SUCCEEDED) -> GroupEnded:
    return GroupEnded(
        attempt=attempt,
        outcome=outcome,
        exit_code=0,
        attributed_to=None,
        reason="all members are gone",
        step=10,
        capacity_revision=1,
    )


def make_capacity(*slots: int, revision=1, lost=(), resource="tidewright.io/slot", extra=None) -> CapacityObserved:
    nodes = tuple(
        Node(
            name=NodeName(f"node-{index}"),
            flavor=DEFAULT_FLAVOR,
            allocatable=Resources({resource: 1000 * count, "cpu": 4000, "memory": 2**30, **(extra or {})}),
            used_by_others=Resources(),
        )
        for index, count in enumerate(slots)
    )
    return CapacityObserved(revision=revision, nodes=nodes, lost_nodes=tuple(lost))


def event(data, *, xid=1, row=1, key="j1", at=NOW) -> Event:
    return Event(
        type=data.TYPE,
        topic=data.TOPIC,
        key=key,
        tenant=DEFAULT_TENANT,
        source="test",
        sequence=Sequence(xid, row),
        time=at,
        data=data,
    )
