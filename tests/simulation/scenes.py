"""Short stories told step by step: each leads to the moment that one rule of the ledger is about, and further."""

import random
from typing import Any

from schemas.events.job import JobSubmitted, RestartPolicy
from schemas.events.worker import GroupEnded
from schemas.vocabulary import AttemptOutcome, Attribution, PriorityClass, StartFailure, Topic
from tests.simulation.builders import job_id, make_submitted
from tests.simulation.execution import Member
from tests.simulation.world import World

LOW, MEDIUM, HIGH, CRITICAL = (
    PriorityClass.LOW,
    PriorityClass.MEDIUM,
    PriorityClass.HIGH,
    PriorityClass.CRITICAL,
)
_INBOX = (Topic.JOB, Topic.WORKER, Topic.CAPACITY, Topic.SCALING)


class Scene:
    """A world with nodes of so many slots and jobs 0, 1, 2 ... that are submitted by number."""

    def __init__(self, nodes: tuple[int, ...], *jobs: JobSubmitted) -> None:
        names = {f"n{index}": count for index, count in enumerate(nodes)}
        self.world = World(names, {job_id(n): job for n, job in enumerate(jobs)}, random.Random(0))

    def submit(self, number: int) -> None:
        """Submitted, decided on, and started as far as it was granted."""
        self.world.submit(job_id(number))
        self.decide()
        self.start()

    def decide(self, *topics: Topic) -> None:
        """Queueing takes all that was said on these topics (default: all)."""
        self.world.turn({topic: self.world.unread(topic) for topic in topics or _INBOX})
        self.world.check()

    def obey(self) -> None:
        """Execution reads all that was decided."""
        while self.world.has_allocations():
            self.world.execution_reads()
            self.world.check()

    def start(self) -> None:
        """... and its members are up."""
        self.obey()
        for member in self.world.execution.members:
            if not member.is_up and not member.leaving:
                self.world.member_up(member)
        self.world.report()

    def members(self, number: int) -> list[Member]:
        return self.world.execution.held(job_id(number))

    def leave(self, number: int) -> None:
        """Every member that was told to go is gone."""
        for member in self.members(number):
            if member.leaving:
                self.world.member_gone(member)
        self.world.check()

    def change(self, number: int, **changes: Any) -> None:
        self.world.change(job_id(number), **changes)

    def end(self) -> None:
        self.world.finish_all()


def own_room_is_promised() -> None:
    """A job is preempted, becomes more urgent than its claimant, and must not take its room back."""
    scene = Scene((2,), make_submitted(priority=LOW, workers_min=2), make_submitted(priority=HIGH, workers_min=2))
    scene.submit(0)
    scene.submit(1)
    scene.change(0, priority=CRITICAL)
    scene.decide()
    scene.leave(0)
    scene.decide()
    scene.end()


def claimant_is_overtaken() -> None:
    """Room is made for one, and a more urgent one comes for it: it does not go back to the victim, which is of a
    higher class by now than both.
    """
    scene = Scene(
        (2,),
        make_submitted(priority=HIGH),
        make_submitted(priority=CRITICAL),
        make_submitted(priority=CRITICAL, workers_min=1, workers_max=2, workers=2),
    )
    scene.submit(2)
    scene.submit(1)
    scene.change(1, priority=HIGH)
    scene.decide()
    scene.submit(0)
    scene.leave(2)
    scene.decide()
    scene.end()


def two_of_a_line_lose_their_promise() -> None:
    """Both were promised what is leaving; then a more urgent one takes most of it."""
    scene = Scene(
        (6,),
        make_submitted(priority=LOW, workers_min=2),
        make_submitted(priority=LOW, workers_min=2),
        make_submitted(priority=MEDIUM, workers_min=4),
        make_submitted(priority=MEDIUM, workers_min=2),
        make_submitted(priority=MEDIUM, workers_min=3),
    )
    scene.submit(2)
    scene.submit(3)
    scene.change(2, held=True)
    scene.decide()
    scene.submit(0)
    scene.submit(1)
    scene.submit(4)
    scene.obey()
    scene.leave(2)
    scene.decide()
    scene.end()


def two_claimants_come_at_once() -> None:
    """The victim of the second does for both."""
    scene = Scene(
        (4,),
        make_submitted(workers_min=2, workers_max=3, workers=3),
        make_submitted(),
        make_submitted(priority=HIGH, workers_min=2),
        make_submitted(priority=HIGH),
    )
    scene.submit(0)
    scene.submit(1)
    scene.world.submit(job_id(2))
    scene.submit(3)
    scene.end()


def equal_stands_behind_a_victim() -> None:
    """The first of a line waits for what was taken from itself; an equal behind it need not."""
    scene = Scene(
        (4,),
        make_submitted(priority=LOW, workers_min=2),
        make_submitted(priority=HIGH, workers_min=3),
        make_submitted(priority=CRITICAL, workers_min=2),
        make_submitted(priority=LOW, workers_min=2),
    )
    scene.submit(0)
    scene.submit(3)
    scene.submit(1)
    scene.change(0, priority=CRITICAL)
    scene.world.submit(job_id(2))
    scene.leave(0)
    scene.decide()
    scene.end()


def minimum_is_raised_while_waiting() -> None:
    """The claimant asks for more: its promise follows."""
    scene = Scene(
        (4,),
        make_submitted(priority=LOW, workers_min=1, workers_max=4, workers=4),
        make_submitted(priority=HIGH, workers_min=2, workers_max=3),
    )
    scene.submit(0)
    scene.submit(1)
    scene.change(1, workers_min=3, workers=3)
    scene.decide()
    scene.leave(0)
    scene.decide()
    scene.end()


def _stuck_victim() -> Scene:
    """A victim's member does not answer and is written off; queueing hears of the end before the new capacity."""
    scene = Scene(
        (1, 1), make_submitted(priority=LOW), make_submitted(priority=CRITICAL), make_submitted(priority=HIGH)
    )
    scene.submit(0)
    scene.submit(1)
    scene.submit(2)
    (victim,) = scene.members(0)
    victim.stuck = True
    scene.world.write_off(victim)
    scene.decide(Topic.WORKER)
    return scene


def word_before_its_capacity() -> None:
    _stuck_victim().end()


def restart_while_a_word_waits() -> None:
    scene = _stuck_victim()
    scene.world.reload()
    scene.end()


def running_job_of_a_higher_class_wants_more() -> None:
    """Room is made for a job of a lower class than the one that would like to grow."""
    scene = Scene(
        (2,),
        make_submitted(priority=HIGH, workers_min=1, workers_max=2, workers=2),
        make_submitted(priority=LOW),
        make_submitted(priority=MEDIUM),
    )
    scene.submit(1)
    scene.submit(0)
    scene.submit(2)
    scene.leave(1)
    scene.decide()
    scene.end()


def one_worker_is_needed() -> None:
    """Of two workers that could go, one is enough."""
    scene = Scene(
        (3,), make_submitted(priority=LOW, workers_min=1, workers_max=3, workers=3), make_submitted(priority=HIGH)
    )
    scene.submit(0)
    scene.submit(1)
    scene.leave(0)
    scene.decide()
    scene.end()


def proposal_while_somebody_waits() -> None:
    """A job would grow into idle room that a waiting one of its class needs together with what is leaving."""
    scene = Scene(
        (4,),
        make_submitted(priority=MEDIUM, workers_min=1, workers_max=2),
        make_submitted(priority=LOW, workers_min=2),
        make_submitted(priority=MEDIUM, workers_min=3),
    )
    scene.submit(0)
    scene.submit(1)
    scene.submit(2)
    scene.world.propose(job_id(0), 2)
    scene.decide()
    scene.leave(1)
    scene.decide()
    scene.end()


def start_fails_after_a_resize() -> None:
    """The start limit of one epoch passes when the next one is decided already."""
    scene = Scene((2,), make_submitted(workers_min=1, workers_max=2, workers=2))
    scene.world.submit(job_id(0))
    scene.decide()
    scene.obey()
    scene.world.member_up(scene.members(0)[0])
    scene.world.fail_start(job_id(0), StartFailure.UNSCHEDULABLE)
    scene.change(0, workers_max=1, workers=1)
    scene.decide(Topic.JOB)
    scene.decide()
    scene.end()


def node_is_lost_while_a_job_leaves() -> None:
    """What is left is enough for what is granted, once the leaving have left."""
    scene = Scene((2, 2), make_submitted(workers_min=2), make_submitted(workers_min=2))
    scene.submit(0)
    scene.submit(1)
    scene.change(0, held=True)
    scene.decide()
    scene.obey()
    scene.world.set_answers("n1", False)
    scene.decide()
    scene.end()


def ended_job_is_submitted_once_more() -> None:
    """The first word about a job comes again after its end."""
    scene = Scene((1,), make_submitted())
    scene.submit(0)
    scene.world.end_group(job_id(0), AttemptOutcome.SUCCEEDED, None)
    scene.leave(0)
    scene.decide()
    scene.world.repeat(Topic.JOB)
    scene.decide()
    scene.end()


def end_of_the_first_run_is_told_twice() -> None:
    """The word that ended one attempt comes again in the next."""
    scene = Scene((1,), make_submitted(policy=RestartPolicy(limit=1)))
    scene.submit(0)
    scene.world.end_group(job_id(0), AttemptOutcome.FAILED, Attribution.JOB)
    scene.leave(0)
    scene.decide()
    scene.start()
    log = scene.world.log[Topic.WORKER]
    log.append(next(message for message in log if message[1] == GroupEnded.TYPE))
    scene.decide()
    scene.end()


def shrink_is_answered_after_an_eviction() -> None:
    """room_freed of a resize is heard when the job has been told to go altogether."""
    scene = Scene(
        (3,), make_submitted(priority=LOW, workers_min=1, workers_max=3, workers=3), make_submitted(priority=HIGH)
    )
    scene.submit(0)
    scene.submit(1)
    scene.leave(0)
    scene.change(0, held=True)
    scene.decide(Topic.JOB)
    scene.decide()
    scene.obey()
    scene.leave(0)
    scene.decide()
    scene.end()


def minimum_is_raised_while_running() -> None:
    """There is no room for the new minimum: it has to wait for the next admission."""
    scene = Scene((3,), make_submitted(workers_min=1, workers_max=3), make_submitted(workers_min=2))
    scene.submit(0)
    scene.submit(1)
    scene.change(0, workers_min=2, workers=2)
    scene.decide()
    scene.end()


def start_fails_and_there_is_room() -> None:
    """A job whose start failed waits out its pause although there is room."""
    scene = Scene((1,), make_submitted())
    scene.world.submit(job_id(0))
    scene.decide()
    scene.obey()
    scene.world.fail_start(job_id(0), StartFailure.UNSCHEDULABLE)
    scene.decide()
    scene.obey()
    scene.leave(0)
    scene.decide()
    scene.end()


def old_request_comes_again() -> None:
    """A change of the request is repeated after a newer one."""
    scene = Scene((1,), make_submitted(priority=LOW))
    scene.submit(0)
    scene.change(0, priority=HIGH)
    scene.change(0, priority=MEDIUM)
    scene.decide()
    log = scene.world.log[Topic.JOB]
    log.append(log[1])
    scene.decide()
    scene.end()
