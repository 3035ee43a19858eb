"""What execution holds in memory: jobs as they are committed, and what was heard and seen of their members."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from schemas.vocabulary import JobId, MemberName
from services.execution.core.checkpoints import Shelf
from services.execution.core.seen import Process, Report, Seen, StartError
from services.execution.core.state import Checkpoint, Desired, Job, Member
from services.execution.store import StoredJob, is_active

WORDS_MAX: Final = 64


@dataclass(slots=True)
class JobView:
    """One active job. ``stored`` changes only after a commit, but for its step; the rest is volatile."""

    stored: StoredJob
    saved_step: int = field(init=False)
    """the step that Postgres has: a lower one, made good by reports and ledgers, since it is no reason to commit"""
    reports: dict[MemberName, Report] = field(default_factory=dict)
    processes: dict[MemberName, Process] = field(default_factory=dict)
    asking: dict[MemberName, str] = field(default_factory=dict)
    start_errors: dict[MemberName, StartError] = field(default_factory=dict)
    since: dict[str, float] = field(default_factory=dict)
    shelf: Shelf | None = None
    """the folder of checkpoints, looked at when a group must begin without anyone's state"""
    words: list[Checkpoint] = field(default_factory=list)
    """announced by members and not yet in the catalogue"""
    announced_at: float = float("-inf")
    failure: tuple[int, int, str] | None = None
    failure_at: float = float("-inf")

    def __post_init__(self) -> None:
        self.saved_step = self.stored.job.step

    @property
    def job(self) -> Job:
        return self.stored.job

    @property
    def saved(self) -> StoredJob:
        """What is in Postgres, as far as this process knows."""
        if self.saved_step == self.job.step:
            return self.stored
        return replace(self.stored, job=replace(self.job, step=self.saved_step))

    def note_checkpoint(self, word: Checkpoint) -> None:
        """Keep it for the catalogue. While nothing can be committed only so many wait: the newest ones."""
        self.words.append(word)
        if len(self.words) > WORDS_MAX:
            self.words.remove(min(self.words, key=lambda each: (each.step, each.generation)))

    def seen(self, *, stores: frozenset[int], settled: bool, now: float, interval: float) -> Seen:
        """One look. ``interval``: seconds between two announcements of checkpoints."""
        newest = max(self.words, key=lambda c: (c.step, c.generation), default=None)
        if self.job.desired is not Desired.GRANTED or self.job.verdict is not None:
            interval = 0.0  # the last one before the end is told at once
        recovered = self.failure_at > self.announced_at  # so is the first one after a failure
        return Seen(
            reports=self.reports,
            processes=self.processes,
            asking=self.asking,
            start_errors=self.start_errors,
            stores=stores,
            settled=settled,
            shelf=self.shelf,
            checkpoint_word=newest if recovered or now - self.announced_at >= interval else None,
            checkpoint_failure=self.failure if now - self.failure_at >= interval else None,
        )

    def skip(self, seconds: float, now: float) -> None:
        """Count the last ``seconds`` on no clock: neither on those that run, nor as silence of a member."""
        self.since = {condition: began + seconds for condition, began in self.since.items()}
        self.reports = {
            name: replace(
                report,
                heard_at=min(now, report.heard_at + seconds),
                progressed_at=min(now, report.progressed_at + seconds),
            )
            for name, report in self.reports.items()
        }


class Memory:
    """All active jobs. ``wake`` is set whenever something happened that a decision may depend on."""

    def __init__(self) -> None:
        self.jobs: dict[JobId, JobView] = {}
        self.wake = asyncio.Event()
        self.settled = False

    def reload(self, stored: Iterable[StoredJob]) -> None:
        """Replace what is committed; what was heard and seen of jobs that are still there is kept."""
        before = self.jobs
        self.jobs = {}
        for item in stored:
            view = before.get(item.job.job_id)
            if view is None:
                view = JobView(stored=item)
            view.stored, view.saved_step = item, item.job.step
            self.jobs[item.job.job_id] = view
        self.wake.set()

    def commit(self, stored: StoredJob, *, with_step: bool = False) -> None:
        """Make a committed job visible, or forget it when there is nothing left to look after.

        ``with_step``: its step was committed, too.
        """
        job_id = stored.job.job_id
        view = self.jobs.get(job_id)
        if not is_active(stored.job):
            self.jobs.pop(job_id, None)
            return
        if view is None:
            self.jobs[job_id] = JobView(stored=stored)
            return
        view.stored = stored
        if with_step:
            view.saved_step = stored.job.step
        names = {member.name for member in stored.job.members}
        for mapping in (view.reports, view.processes, view.asking, view.start_errors):
            for name in [n for n in mapping if n not in names]:
                mapping.pop(name)

    def view_of(self, name: MemberName) -> JobView | None:
        return self.jobs.get(JobId(name.partition("/")[0]))

    def member(self, name: MemberName) -> Member | None:
        view = self.view_of(name)
        return view.job.member(name) if view is not None else None

    def report(self, name: MemberName, **changes: object) -> Report | None:
        """Change a member's report; None if it has none."""
        view = self.view_of(name)
        if view is None or name not in view.reports:
            return None
        view.reports[name] = replace(view.reports[name], **changes)  # type: ignore[arg-type]  # checked by the fields
        return view.reports[name]
