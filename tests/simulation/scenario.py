"""Random stories from a seed: what there is, and what happens, fault by fault."""

import random
from collections.abc import Callable

from schemas.events.job import JobSubmitted, RestartPolicy
from schemas.vocabulary import AttemptOutcome, Attribution, JobId, PriorityClass, StartFailure, Topic
from services.queueing.core.values import Standing
from tests.simulation.builders import job_id, make_submitted
from tests.simulation.execution import Member
from tests.simulation.world import World

Action = tuple[float, str, Callable[[], None]]
"""Weight, what it is called in the trace, what it does."""
_INBOX = (Topic.JOB, Topic.WORKER, Topic.CAPACITY, Topic.SCALING)


class Story:
    """One world and the budget of faults that it will see."""

    def __init__(self, rng: random.Random, *, mixed: bool | None = None) -> None:
        self.rng = rng
        self.mixed = rng.random() < 0.25 if mixed is None else mixed
        largest = 4 if self.mixed else 3
        counts = [rng.randint(1, largest) for _ in range(rng.choice((1, 2, 2, 3)))]
        self.nodes = {f"n{i}": count for i, count in enumerate(counts)}
        classes = rng.sample(tuple(PriorityClass), k=rng.choice((1, 2, 2, 3)))
        jobs = {job_id(n): self._job(classes) for n in range(rng.choice((1, 2, 3, 3, 4, 5)))}
        self.classes = classes
        self.world = World(self.nodes, jobs, rng)
        self.budget = {
            "request": rng.choice((0, 1, 3, 6)),
            "fault": rng.choice((0, 1, 3)),
            "node": rng.choice((0, 0, 1, 2)),
            "crash": rng.choice((0, 1, 3)),
            "proposal": rng.choice((0, 2, 4)),
            "ending": rng.choice((0, 1, 3)),
            "repeat": rng.choice((0, 0, 3)),
        }
        self.steps = rng.choice((20, 40, 80, 120))

    def run(self) -> None:
        """Safety under faults, then liveness without any."""
        self._act()
        self._heal()
        self.world.finish_all()

    def _act(self) -> None:
        for _ in range(self.steps):
            actions = self.actions()
            if not actions:
                break
            _, name, act = self.rng.choices(actions, [weight for weight, _, _ in actions])[0]
            self.world.trace.append(name)
            act()
            self.world.check()

    def go(self, steps: int) -> None:
        """So many actions, each checked; for tests that look at the state in between."""
        self.steps = steps
        self._act()

    def actions(self) -> list[Action]:
        world, execution = self.world, self.world.execution
        found: list[Action] = [
            (4.0, f"submit {j}", lambda j=j: world.submit(j)) for j in sorted(world.jobs) if j not in world.submitted
        ]
        unread = {topic: world.unread(topic) for topic in _INBOX}
        for topic in (t for t in _INBOX if unread[t]):
            found.append((1.5, f"queueing takes 1 of {topic.name}", lambda t=topic: world.turn({t: 1})))
        if any(unread.values()):
            found.append((3.0, "queueing takes all", lambda: world.turn(unread)))
            if self.budget["crash"] > 0:
                found.append((0.5, "queueing crashes in its turn", lambda: self._crash(unread)))
        if self.budget["crash"] > 0:
            found.append((0.3, "queueing is killed", lambda: self._crash({})))
        if world.has_allocations():
            found.append((4.0, "execution reads", world.execution_reads))
        found.append((0.4, "capacity report", world.report))
        if self.budget["repeat"] > 0:
            for topic in (t for t in _INBOX if world.log[t]):
                found.append((0.2, f"a word on {topic.name} is repeated", lambda t=topic: self._repeat(t)))
        if world.book.paused:
            found.append((0.5, "time passes", self._pass_time))
        for member in execution.members:
            found += self._member_actions(member)
        for j in sorted(execution.targets):
            if execution.is_active(j):
                found += self._group_actions(j)
        return found + self._request_actions() + self._node_actions()

    def _member_actions(self, m: Member) -> list[Action]:
        world, found = self.world, []
        answers = world.execution.answers[m.node]
        name = f"{m.job_id}/{m.role}/{m.index}"
        if answers and m.leaving and not m.stuck:
            found.append((4.0, f"{name} goes", lambda: world.member_gone(m)))
        if answers and not m.leaving and not m.is_up and not m.stuck:
            found.append((5.0, f"{name} is up", lambda: world.member_up(m)))
        if self.budget["fault"] > 0:
            if not m.stuck:
                found.append((0.3, f"{name} is stuck", lambda: self._stick(m)))
            if answers:
                found.append((0.3, f"{name} dies", lambda: self._die(m)))
        hopeless = (m.stuck and m.leaving) or not answers
        if hopeless and m.written_off_at is None:
            found.append((0.8, f"{name} is written off", lambda: world.write_off(m)))
        if m.stuck and m.written_off_at is not None and answers:
            found.append((0.3, f"{name} goes after all", lambda: world.member_gone(m)))
        return found

    def _group_actions(self, j: JobId) -> list[Action]:
        world, found = self.world, []
        if world.execution.missing(j):
            failure = StartFailure.IMAGE if self.rng.random() < 0.2 else StartFailure.UNSCHEDULABLE
            found.append((0.2, f"{j} start fails", lambda: world.fail_start(j, failure)))
        if self.budget["ending"] > 0 and world.execution.started.get(j):
            for outcome, blame in (
                (AttemptOutcome.SUCCEEDED, None),
                (AttemptOutcome.FAILED, Attribution.JOB),
                (AttemptOutcome.FAILED, Attribution.PLATFORM),
            ):
                found.append((0.3, f"{j} {outcome.value} {blame}", lambda o=outcome, b=blame: self._end(j, o, b)))
        return found

    def _request_actions(self) -> list[Action]:
        world, found = self.world, []
        open_jobs = [
            j for j in sorted(world.submitted) if j not in world.outcomes and not world.requests[j].cancelled
        ]
        for j in open_jobs if self.budget["request"] > 0 else ():
            held = world.requests[j].held
            found.append((0.2, f"cancel {j}", lambda j=j: self._change(j, cancelled=True)))
            found.append((0.3, f"hold {j} {not held}", lambda j=j, h=held: self._change(j, held=not h)))
            low, high = self.rng.choice(((1, 1), (1, 2), (2, 2), (1, 3), (2, 4)))
            limits = {"workers_min": low, "workers_max": high, "workers": self.rng.randint(low, high)}
            found.append((0.4, f"limits {j} {limits}", lambda j=j, limits=limits: self._change(j, **limits)))
            priority = self.rng.choice(self.classes)
            found.append((0.3, f"priority {j} {priority}", lambda j=j, p=priority: self._change(j, priority=p)))
        for w in world.book.workloads.values() if self.budget["proposal"] > 0 else ():
            if w.standing is Standing.RUNNING and w.request.workers_max > w.request.workers_min:
                n = self.rng.randint(w.request.workers_min, w.request.workers_max)
                ago = self.rng.choice((0, 0, 1))
                found.append(
                    (0.3, f"propose {w.job_id} {n} -{ago}", lambda j=w.job_id, n=n, a=ago: self._propose(j, n, a))
                )
        return found

    def _node_actions(self) -> list[Action]:
        world, found = self.world, []
        for node, answers in sorted(world.execution.answers.items()):
            if answers and self.budget["node"] > 0:
                found.append((0.4, f"{node} is lost", lambda n=node: self._lose(n)))
            elif not answers:
                found.append((0.4, f"{node} is back", lambda n=node: world.set_answers(n, True)))
        return found

    def _job(self, classes: list[PriorityClass]) -> JobSubmitted:
        rng = self.rng
        low = rng.randint(1, 3)
        high = low + rng.choice((0, 0, 1, 2))
        return make_submitted(
            priority=rng.choice(classes),
            workers_min=low,
            workers_max=high,
            workers=rng.choice((low, high)),
            slots_each=rng.choice((1, 2)) if self.mixed else 1,
            servers=rng.choice((0, 0, 0, 1)),
            server_slots=rng.choice((1, 2)) if self.mixed else 1,
            policy=RestartPolicy(limit=rng.choice((0, 1, 2))),
            held=rng.random() < 0.05,
        )

    def _crash(self, counts: dict[Topic, int]) -> None:
        self.budget["crash"] -= 1
        if counts:
            self.world.turn(counts, crash=True)
        else:
            self.world.reload()

    def _repeat(self, topic: Topic) -> None:
        self.budget["repeat"] -= 1
        self.world.repeat(topic)

    def _pass_time(self) -> None:
        self.world.now += self.rng.choice((1.0, 5.0, 20.0))
        self.world.turn({})

    def _stick(self, m: Member) -> None:
        self.budget["fault"] -= 1
        m.stuck = True

    def _die(self, m: Member) -> None:
        self.budget["fault"] -= 1
        self.world.member_gone(m)

    def _end(self, j: JobId, outcome: AttemptOutcome, blame: Attribution | None) -> None:
        self.budget["ending"] -= 1
        self.world.end_group(j, outcome, blame)

    def _change(self, j: JobId, **changes: object) -> None:
        self.budget["request"] -= 1
        self.world.change(j, **changes)

    def _propose(self, j: JobId, workers: int, ago: int) -> None:
        self.budget["proposal"] -= 1
        self.world.propose(j, workers, epochs_ago=ago)

    def _lose(self, node: str) -> None:
        self.budget["node"] -= 1
        self.world.set_answers(node, False)

    def _heal(self) -> None:
        """In six stories of ten the lost nodes come back; those that are stuck stay so until they are written off."""
        if self.rng.random() < 0.6:
            for node, answers in sorted(self.world.execution.answers.items()):
                if not answers:
                    self.world.set_answers(node, True)
