"""Builders of scaling's tests."""

from dataclasses import replace
from typing import Any

from schemas.events.allocation import (
    AllocationClosed,
    AllocationEvicted,
    AllocationGranted,
    AllocationResized,
    Reason,
    RoleGrant,
)
from schemas.events.job import JobChanged, JobSpec, JobSubmitted, RequestRegister, RoleRequest
from schemas.events.metric import MetricWindow
from schemas.events.worker import GroupChanged, GroupEnded, GroupStarted, LostMember
from schemas.resources import SLOT, Resources
from schemas.vocabulary import (
    DEFAULT_FLAVOR,
    DEFAULT_QUEUE,
    DEFAULT_TENANT,
    DEFAULT_USER,
    AttemptOutcome,
    Attribution,
    DecisionCode,
    GroupChangeCause,
    JobId,
    Mode,
    Outcome,
    PriorityClass,
    UtilisationMeasure,
    member_name,
)
from services.scaling.core.registers import REGISTER_EVENTS, Job, apply, observe
from services.scaling.core.stability import Band
from services.scaling.core.threshold import Growth, Keep, Policy, Propose, decide

S = 1_000_000
JOB = JobId("j1")
ONE = Resources({SLOT: 1000})
WHY = Reason(code=DecisionCode.ADMITTED_IDLE, detail="there was room")
POLICY = Policy(
    band=Band(low_ppm=750_000, high_ppm=850_000, window_us=300 * S, staleness_us=15 * S, reporting_ppm=1_000_000),
    target_ppm=800_000,
    cooldown_us=300 * S,
    growth=Growth.DOUBLE,
    growth_ppm_max=2_000_000,
)


def request(version=1, **changes: Any) -> RequestRegister:
    values = {"priority": PriorityClass.MEDIUM, "workers_min": 1, "workers_max": 8, "workers": 2}
    return RequestRegister(**{"version": version, **values, **changes})


def submitted(*, mode: Mode = Mode.LIVE, checkpoint_path: str | None = None, **changes: Any) -> JobSubmitted:
    return JobSubmitted(
        tenant=DEFAULT_TENANT,
        user=DEFAULT_USER,
        queue=DEFAULT_QUEUE,
        request=request(**changes),
        roles=(RoleRequest(name="worker", elastic=True, count=2, resources=ONE),),
        spec=JobSpec(name="digits", mode=mode, script="digits.py", checkpoint_path=checkpoint_path),
    )


def changed(version: int, **changes: Any) -> JobChanged:
    return JobChanged(request=request(version, **changes), by=DEFAULT_USER)


def roles(workers: int) -> tuple[RoleGrant, ...]:
    worker = RoleGrant(role="worker", elastic=True, members=workers, minimum=1, resources=ONE)
    return worker, RoleGrant(role="server", elastic=False, members=3, minimum=3, resources=ONE)


def granted(*, epoch: int = 1, attempt: int = 1, workers: int = 2) -> AllocationGranted:
    return AllocationGranted(epoch=epoch, attempt=attempt, roles=roles(workers), flavor=DEFAULT_FLAVOR, reason=WHY)


def resized(*, epoch: int, workers: int, attempt: int = 1) -> AllocationResized:
    return AllocationResized(
        epoch=epoch,
        attempt=attempt,
        workers_from=1,
        workers_to=workers,
        roles=roles(workers),
        grace_seconds=30.0,
        reason=WHY,
    )


def evicted(*, epoch: int, attempt: int = 1) -> AllocationEvicted:
    return AllocationEvicted(epoch=epoch, attempt=attempt, grace_seconds=30.0, reason=WHY, requeue=True)


def allocation_closed(*, epoch: int = 2, attempt: int = 1) -> AllocationClosed:
    return AllocationClosed(
        epoch=epoch, attempt=attempt, outcome=Outcome.SUCCEEDED, exit_code=0, attributed_to=None, reason=WHY
    )


def group_started(*, attempt: int = 1, generation: int = 1, workers: int = 2) -> GroupStarted:
    return GroupStarted(
        epoch=1, attempt=attempt, generation=generation, workers=workers, resumed_from=None, steps_dropped=0
    )


def group_changed(*, generation: int, workers: int, attempt: int = 1, lost: bool = False) -> GroupChanged:
    gone = LostMember(
        member=member_name(JOB, "worker", 0, 1), exit_code=-9, attributed_to=Attribution.PLATFORM, reason="killed"
    )
    return GroupChanged(
        epoch=1,
        attempt=attempt,
        generation=generation,
        workers=workers,
        step=1,
        pause_seconds=0.1,
        cause=GroupChangeCause.MEMBER_REPLACED if lost else GroupChangeCause.RESIZED,
        lost=(gone,) if lost else (),
    )


def group_ended(*, attempt: int = 1) -> GroupEnded:
    return GroupEnded(
        attempt=attempt,
        outcome=AttemptOutcome.FAILED,
        exit_code=1,
        attributed_to=Attribution.JOB,
        reason="exit code 1",
        step=1,
        capacity_revision=1,
    )


def window(utilisation: float | None = 0.93, **changes: Any) -> MetricWindow:
    values: dict[str, Any] = {
        "attempt": 1,
        "generation": 1,
        "window_seconds": 5.0,
        "members_reporting": 2,
        "members_expected": 2,
        "utilisation": utilisation,
        "measure": UtilisationMeasure.WALL,
        "step_seconds": 4.0,
        "sync_seconds": 0.5,
        "input_wait_seconds": 0.2,
        "idle_seconds": 0.3,
        "samples_per_second": 100.0,
        "loss": 0.5,
        "gradient_noise": None,
        "progress": None,
    }
    return MetricWindow(**{**values, **changes})


class Story:
    """One job told event by event, with a decision after each window, as the handler takes it."""

    def __init__(self, *events: Any, policy: Policy = POLICY, job_id: JobId = JOB) -> None:
        self.policy = policy
        self.now_us = 0
        self.job = Job(job_id=job_id, tenant=DEFAULT_TENANT)
        self.proposals: list[tuple[int, Propose]] = []
        self.last: Propose | Keep | None = None
        self.tell(*events)

    def tell(self, *events: Any) -> "Story":
        for event in events:
            assert isinstance(event, REGISTER_EVENTS)
            self.job = apply(self.job, event, now_us=self.now_us)
        return self

    def wait(self, seconds: float) -> "Story":
        self.now_us += round(seconds * S)
        return self

    def windows(self, count: int, utilisation: float | None = 0.93, *, age_us: int = 0, **changes: Any) -> "Story":
        """So many windows, each told when it is over; decided after each."""
        for _ in range(count):
            told = window(utilisation, **changes)
            self.wait(5.0)
            self.job, _ = observe(self.job, told, age_us=age_us, now_us=self.now_us, band=self.policy.band)
            self.decide()
        return self

    def decide(self) -> None:
        self.last = decide(self.job, now_us=self.now_us, policy=self.policy)
        if isinstance(self.last, Propose):
            self.proposals.append((self.now_us, self.last))
            self.job = told_of(self.job, self.last)

    @property
    def sizes(self) -> list[int]:
        return [proposal.workers for _, proposal in self.proposals]


def told_of(job: Job, proposal: Propose) -> Job:
    return replace(job, proposed=(job.grant.epoch, proposal.workers))


def running(workers: int = 2, *, policy: Policy = POLICY, **changes: Any) -> Story:
    """A live job of ``workers`` whose group has started and whose cooldown is over."""
    story = Story(submitted(**changes), granted(workers=workers), policy=policy)
    return story.tell(group_started(workers=workers)).wait(300)
