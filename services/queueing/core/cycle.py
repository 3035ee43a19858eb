"""One turn of queueing's loop, without its waiting and saving: apply words to the book, then plan and carry out."""

from collections.abc import Iterable, Sequence
from typing import assert_never

from schemas.envelope import Draft
from schemas.events.capacity import CapacityObserved
from schemas.events.job import JobChanged, JobSubmitted
from schemas.events.scaling import ScalingProposed
from schemas.events.worker import Checkpointed, GroupEnded, GroupStarted, RoomFreed, RoomOverdue, StartFailed
from schemas.registry import EventData
from schemas.resources import Resources
from schemas.vocabulary import FlavorName, JobId, NodeName, TenantName, WaitCode
from services.queueing.core import ledger, words
from services.queueing.core.book import Book
from services.queueing.core.ledger import Step
from services.queueing.core.plan import plan
from services.queueing.core.values import (
    Capacity,
    Decision,
    Evict,
    Grant,
    Parked,
    Plan,
    Resize,
    Rules,
    View,
    WaitReason,
    Workload,
)

_PARKED_ORDINAL = 0


def apply_word(
    book: Book, job_id: JobId, tenant: TenantName, data: EventData, *, now: float, rules: Rules
) -> list[Draft[EventData]]:
    """Apply one event to the book. A word about a job that is not open changes nothing."""
    match data:
        case CapacityObserved():
            return _on_capacity(book, data, now=now, rules=rules)
        case JobSubmitted():
            return _submit(book, job_id, tenant, data)
        case RoomFreed() | GroupEnded() if is_ahead_of_capacity(book, data.capacity_revision):
            if job_id in book.workloads:
                book.park(job_id, Parked(ordinal=_PARKED_ORDINAL, job_id=job_id, word=data))
            return []
        case _:
            return _on_word(book, job_id, data, now=now, rules=rules)


def is_ahead_of_capacity(book: Book, revision: int) -> bool:
    """True if a word speaks of a capacity that has not been reported yet: what it frees may be gone already."""
    return book.capacity is None or book.capacity.revision < revision


def end_pauses(book: Book, *, now: float) -> bool:
    """Let go of those whose back-off is over; True if there were any."""
    over = [j for j in sorted(book.paused) if (book.workloads[j].back_off_until or now) <= now]
    for job_id in over:
        book.put(words.on_pause_over(book.workloads[job_id]).workload)
    return bool(over)


def settle(book: Book, *, now: float, rules: Rules) -> tuple[list[Draft[EventData]], float | None]:
    """Plan and carry out until nothing is left to decide.

    Returns the events, and in how many seconds time alone may change something (None: never). More than one plan
    is needed only where somebody whose room was promised away waits for that claimant to start.
    """
    drafts: list[Draft[EventData]] = []
    due: float | None = None
    goes_on = True
    while goes_on:
        view = book.view(rules)
        decided = plan(view, now)
        for decision in decided.decisions:
            drafts += _put(book, carry_out(book, decision, now=now))
        book.set_promises(decided.promises)
        goes_on = _is_free_again(view, decided)
        due = decided.due_seconds
    waits, later = _explain(book, decided, now=now, rules=rules)
    return drafts + waits, min((d for d in (due, later) if d is not None), default=None)


def next_pause_seconds(book: Book, *, now: float) -> float | None:
    """Seconds until the first back-off is over."""
    return min((max(0.0, (book.workloads[j].back_off_until or now) - now) for j in book.paused), default=None)


def carry_out(book: Book, decision: Decision, *, now: float) -> Step:
    """The ledger's step for a decision of the plan."""
    workload = book.workloads[decision.job_id]
    match decision:
        case Grant():
            book.orders += 1
            book.note_start(workload, now)
            return ledger.grant(
                workload,
                workers=decision.workers,
                flavor=decision.flavor,
                order=book.orders,
                revision=_revision(book),
                reason=decision.reason,
            )
        case Resize():
            return ledger.resize(
                workload, workers=decision.workers, reason=decision.reason, size_before=decision.size_before
            )
        case Evict():
            return ledger.evict(workload, reason=decision.reason, requeue=True)
    assert_never(decision)


def _submit(book: Book, job_id: JobId, tenant: TenantName, data: JobSubmitted) -> list[Draft[EventData]]:
    if book.knows(job_id):
        return []
    return _put(book, words.on_submitted(job_id, tenant, data))


def _on_word(book: Book, job_id: JobId, data: EventData, *, now: float, rules: Rules) -> list[Draft[EventData]]:
    workload = book.workloads.get(job_id)
    if workload is None:
        return []
    step = _step(workload, data, revision=_revision(book), now=now, rules=rules)
    return _put(book, step) if step is not None else []


def _revision(book: Book) -> int:
    return book.capacity.revision if book.capacity is not None else 0


def _step(workload: Workload, data: EventData, *, revision: int, now: float, rules: Rules) -> Step | None:
    match data:
        case JobChanged():
            return words.on_changed(workload, data.request)
        case ScalingProposed():
            return words.on_proposed(workload, data)
        case GroupStarted():
            return words.on_group_started(workload, data.attempt, now=now)
        case Checkpointed():
            return words.on_checkpointed(workload, now=now)
        case RoomFreed():
            return words.on_room_freed(workload, data)
        case RoomOverdue():
            return words.on_room_overdue(workload, data)
        case StartFailed():
            return words.on_start_failed(workload, data, now=now, rules=rules)
        case GroupEnded():
            return words.on_group_ended(workload, data, revision=revision, now=now, rules=rules)
        case _:
            return None


def _on_capacity(book: Book, data: CapacityObserved, *, now: float, rules: Rules) -> list[Draft[EventData]]:
    """Replace the snapshot, end all pauses if it holds something else, then hear the words that waited for it."""
    before = book.capacity
    after = Capacity(revision=data.revision, nodes=data.nodes, lost_nodes=data.lost_nodes)
    if before is not None and (after.revision < before.revision or after == before):
        return []
    book.set_capacity(after)
    if before is None or _holdings(before) != _holdings(after):
        for job_id in sorted(book.paused):
            book.put(words.on_pause_over(book.workloads[job_id]).workload)
    drafts: list[Draft[EventData]] = []
    for parked in book.take_parked():
        workload = book.workloads.get(parked.job_id)
        if workload is not None:
            drafts += apply_word(book, parked.job_id, workload.tenant, parked.word, now=now, rules=rules)
    return drafts


def _holdings(capacity: Capacity) -> Sequence[tuple[NodeName, FlavorName, Resources, Resources]]:
    return sorted(
        ((n.name, n.flavor, n.allocatable, n.used_by_others) for n in capacity.nodes), key=lambda row: row[0]
    )


def _is_free_again(view: View, decided: Plan) -> bool:
    """Whether a claimant started for which somebody that now waits had made room."""
    granted = {decision.job_id for decision in decided.decisions if isinstance(decision, Grant)}
    return any(
        promise.job_id in granted and any(origin in decided.waits for origin in promise.origins)
        for promise in view.promises
    )


def _explain(book: Book, decided: Plan, *, now: float, rules: Rules) -> tuple[list[Draft[EventData]], float | None]:
    """Tell the reasons that changed; those who had one and are no longer looked at wait behind others."""
    drafts: list[Draft[EventData]] = []
    later: float | None = None
    behind = {job_id: _behind(book.workloads[job_id]) for job_id in book.explained if job_id not in decided.waits}
    for job_id, reason in (*decided.waits.items(), *behind.items()):
        workload = book.workloads[job_id]
        if workload.waiting == reason:
            book.explained.setdefault(job_id, now)
            continue
        wait_seconds = book.explained.get(job_id, now - rules.explain_seconds) + rules.explain_seconds - now
        if workload.waiting is not None and workload.waiting.code is reason.code and wait_seconds > 0:
            later = wait_seconds if later is None else min(later, wait_seconds)
            continue
        drafts += _put(book, ledger.wait(workload, reason))
        book.explained[job_id] = now
    for job_id in behind:
        book.explained.pop(job_id, None)
    return drafts, later


def _behind(workload: Workload) -> WaitReason:
    return WaitReason(
        code=WaitCode.BEHIND_IN_QUEUE,
        detail=f"jobs of the same shape are ahead of it in queue {workload.queue}",
        unblocked_by="the ones ahead of it starting",
    )


def _put(book: Book, step: Step) -> list[Draft[EventData]]:
    book.put(step.workload)
    return drafts_of(step.workload, step.events)


def drafts_of(workload: Workload, events: Iterable[EventData]) -> list[Draft[EventData]]:
    return [Draft(key=workload.job_id, tenant=workload.tenant, data=event) for event in events]
