"""What a turn of queueing costs, by jobs pending and nodes: ``python -m loadtests.queueing_turn``.

Everything in memory, no Postgres. CPU time of this process, so that a busy machine does not matter.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from schemas.events.capacity import CapacityObserved, NodeMembers
from schemas.events.worker import GroupEnded
from schemas.vocabulary import (
    CLUSTER_KEY,
    DEFAULT_TENANT,
    AttemptOutcome,
    JobId,
    PriorityClass,
    UserName,
)
from services.queueing.core.book import Book
from services.queueing.core.cycle import apply_word, settle
from services.queueing.core.values import Rules, Standing, Workload
from tests.simulation.builders import make_node, make_submitted

RULES = Rules()
SLOTS = 8
TURNS = 100
T = TypeVar("T")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pending", type=int, nargs="+", default=[1_000, 100_000])
    parser.add_argument("--nodes", type=int, nargs="+", default=[10, 100, 1_000])
    arguments = parser.parse_args()
    print("pending  nodes  lines  running  submit us/job  first plan ms  turn ms p50   p95")
    for nodes in arguments.nodes:
        for pending in arguments.pending:
            print(measure(pending, nodes))


def measure(pending: int, nodes: int) -> str:
    """Submit all, plan once, then let one running job after the other end, a turn for each."""
    rng = random.Random(1)
    book = Book()
    report(book, nodes, 1)
    shapes = [
        make_submitted(
            priority=rng.choice(tuple(PriorityClass)),
            workers_min=low,
            workers_max=low + rng.choice((0, 4)),
            servers=rng.choice((0, 1)),
            user=UserName(f"u{rng.randrange(5)}"),
        )
        for low in (1, 2, 4, 8, 16)
        for _ in range(20)
    ]

    def submit_all() -> None:
        for number in range(pending):
            hear(book, JobId(f"j{number:07d}"), rng.choice(shapes))

    submits, _ = timed(submit_all)
    first, _ = timed(lambda: settle(book, now=0.0, rules=RULES))
    book.take_changes()
    turns = []
    for number in range(TURNS):
        report(book, nodes, number + 2)
        ended = rng.choice(running(book))
        seconds, _ = timed(partial(end, book, ended, 0.05 * number))
        book.take_changes()
        turns.append(seconds)
    cuts = statistics.quantiles(turns, n=20)
    return (
        f"{pending:7d} {nodes:6d} {len(list(book.lines())):6d} {len(running(book)):8d} "
        f"{submits / pending * 1e6:14.0f} {first * 1e3:14.1f} {statistics.median(turns) * 1e3:12.1f} "
        f"{cuts[-1] * 1e3:5.1f}"
    )


def report(book: Book, nodes: int, revision: int) -> None:
    """A capacity report that shows the members of all running jobs, spread over the nodes in order."""
    left = [SLOTS] * nodes
    members: list[list[NodeMembers]] = [[] for _ in range(nodes)]
    at = 0
    for w in running(book):
        for role, count in zip(w.roles, w.granted, strict=True):
            remaining = count
            while remaining and at < nodes:
                taken = min(remaining, left[at])
                members[at].append(NodeMembers(job_id=w.job_id, role=role.name, members=taken))
                left[at] -= taken
                remaining -= taken
                at += 0 if left[at] else 1
    empty = (make_node(f"n{index:05d}", SLOTS) for index in range(nodes))
    standing = tuple(replace(node, members=tuple(there)) for node, there in zip(empty, members, strict=True))
    hear(book, JobId(CLUSTER_KEY), CapacityObserved(revision=revision, nodes=standing))


def running(book: Book) -> list[Workload]:
    return [w for w in book.view(RULES).active if w.standing is Standing.RUNNING]


def end(book: Book, workload: Workload, now: float) -> None:
    word = GroupEnded(
        attempt=workload.attempt,
        outcome=AttemptOutcome.SUCCEEDED,
        exit_code=0,
        attributed_to=None,
        reason="done",
        step=1,
        capacity_revision=1,
    )
    hear(book, workload.job_id, word, now)
    settle(book, now=now, rules=RULES)


def hear(book: Book, job_id: JobId, data: object, now: float = 0.0) -> None:
    apply_word(book, job_id, DEFAULT_TENANT, data, now=now, rules=RULES)  # type: ignore[arg-type]


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """Seconds of CPU, and the answer."""
    start = time.process_time()
    answer = call()
    return time.process_time() - start, answer


if __name__ == "__main__":
    main()
