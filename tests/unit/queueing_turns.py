"""A book of queueing that hears one word after the other, for tests of single decisions."""

from typing import Any

from schemas.events.allocation import (
    AllocationWaiting,
)
from schemas.events.capacity import CapacityObserved, Node
from schemas.events.job import JobSubmitted
from schemas.events.worker import GroupEnded, GroupStarted, RoleCount, RoomFreed
from schemas.registry import EventData
from schemas.vocabulary import (
    CLUSTER_KEY,
    WORKER_ROLE,
    AttemptOutcome,
    Attribution,
    JobId,
    TenantName,
)
from services.queueing.core.book import Book
from services.queueing.core.cycle import apply_word, end_pauses, settle
from services.queueing.core.values import Rules, Workload
from tests.simulation.builders import job_id, make_submitted


class Turns:
    """A book that hears one word after the other; ``told`` is everything that was published, by job."""

    def __init__(self, *nodes: Node, rules: Rules = Rules(explain_seconds=0.0)) -> None:  # noqa: B008
        self.book = Book()
        self.rules = rules
        self.now = 0.0
        self.told: list[tuple[JobId, EventData]] = []
        self.due: float | None = None
        if nodes:
            self.hear(0, CapacityObserved(revision=1, nodes=nodes), key=JobId(CLUSTER_KEY))

    def hear(self, number: int, data: EventData | None = None, *, key: JobId | None = None) -> None:
        job = key or job_id(number)
        tenant = data.tenant if isinstance(data, JobSubmitted) else TenantName("default")
        drafts = []
        if data is not None:
            drafts = apply_word(self.book, job, tenant, data, now=self.now, rules=self.rules)
        end_pauses(self.book, now=self.now)
        planned, self.due = settle(self.book, now=self.now, rules=self.rules)
        self.told += [(JobId(d.key), d.data) for d in (*drafts, *planned)]

    def submit(self, number: int, **job: Any) -> None:
        self.hear(number, make_submitted(**job))

    def started(self, number: int) -> None:
        w = self.job(number)
        word = GroupStarted(
            epoch=w.epoch, attempt=w.attempt, generation=1, workers=1, resumed_from=None, steps_dropped=0
        )
        self.hear(number, word)

    def freed(self, number: int) -> None:
        """Execution's answer to the present resize."""
        w = self.job(number)
        held = (RoleCount(role=WORKER_ROLE, members=w.workers),)
        self.hear(number, RoomFreed(epoch=w.epoch, held=held, capacity_revision=1))

    def job(self, number: int) -> Workload:
        return self.book.workloads[job_id(number)]

    def last(self, number: int) -> Any:
        return [data for key, data in self.told if key == job_id(number)][-1]

    def waiting(self, number: int) -> AllocationWaiting:
        return [d for k, d in self.told if k == job_id(number) and isinstance(d, AllocationWaiting)][-1]


def failed_by_itself(*, attempt: int) -> GroupEnded:
    return GroupEnded(
        attempt=attempt,
        outcome=AttemptOutcome.FAILED,
        exit_code=1,
        attributed_to=Attribution.JOB,
        reason="an exception",
        step=None,
        capacity_revision=1,
    )
