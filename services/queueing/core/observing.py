"""What is published about each queue: how many wait by class, its head and what the head waits for."""

from schemas.events.allocation import PendingCount, QueueObserved
from schemas.vocabulary import PriorityClass
from services.queueing.core.book import Book, QueueKey
from services.queueing.core.ordering import urgency_order
from services.queueing.core.values import Workload


def observe_queues(book: Book, *, now: float) -> dict[QueueKey, QueueObserved]:
    """A snapshot of every queue that has had a job since the start. Cost: O(lines + starts of a minute)."""
    heads = _heads(book)
    starts = book.starts_in_last_minute(now)
    return {
        queue: _observed(counts, heads.get(queue), starts.get(queue, 0))
        for queue, counts in sorted(book.pending.items())
    }


def _heads(book: Book) -> dict[QueueKey, Workload]:
    """The most urgent waiting workload of each queue that claims room."""
    heads: dict[QueueKey, Workload] = {}
    for _, job_ids in book.lines():
        first = book.workloads[job_ids[0]]
        queue = (first.tenant, first.queue)
        if queue not in heads or urgency_order(first) < urgency_order(heads[queue]):
            heads[queue] = first
    return heads


def _observed(counts: dict[PriorityClass, int], head: Workload | None, starts: int) -> QueueObserved:
    reason = head.waiting if head else None
    return QueueObserved(
        pending=tuple(
            PendingCount(priority=priority, jobs=counts[priority])
            for priority in PriorityClass
            if counts.get(priority, 0) > 0
        ),
        head=head.job_id if head else None,
        head_code=reason.code if reason else None,
        head_detail=reason.detail if reason else "",
        starts_per_minute=float(starts),
    )
