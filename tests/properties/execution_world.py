"""A model of a live job: trainers, their groups, processes and the disk, driven by execution's core."""

import random
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from schemas.events.allocation import AllocationEvicted, AllocationGranted, AllocationResized, Reason, RoleGrant
from schemas.events.job import JobSpec, JobSubmitted, RequestRegister, RoleRequest
from schemas.events.worker import GroupChanged, GroupEnded, GroupStarted, RoomFreed
from schemas.resources import SLOT, Resources
from schemas.vocabulary import (
    DEFAULT_FLAVOR,
    DEFAULT_QUEUE,
    DEFAULT_TENANT,
    DEFAULT_USER,
    WORKER_ROLE,
    Attribution,
    DecisionCode,
    JobId,
    MemberName,
    MemberPhase,
    Mode,
    NodeName,
    PriorityClass,
)
from services.execution.core import reconcile
from services.execution.core.checkpoints import Shelf
from services.execution.core.desired import apply_event
from services.execution.core.placement import free_devices
from services.execution.core.seen import Limits, Process, Report, Seen, StartedWord
from services.execution.core.state import Checkpoint, Ending, Generation, GenerationState, Job, Member, MemberState
from services.execution.core.turn import (
    AnswerAdmission,
    AskToStop,
    Decision,
    Effect,
    Kill,
    Now,
    OfferGeneration,
    StartMember,
    Supply,
    Terminate,
    WithdrawGeneration,
)

JOB = JobId("j1")
SIZE = Resources({SLOT: 1000})
EPOCH = datetime(2030, 1, 1, tzinfo=UTC)
WHY = Reason(code=DecisionCode.ADMITTED_IDLE, detail="for a test")
TICK_SECONDS = 0.5
GLOO_SECONDS = 30.0
LIMITS = Limits(gather_seconds=3.0, fruitless_losses_max=1000, crashes_max=1000, write_off_seconds=100.0)


class LawBroken(AssertionError):
    """One of the laws below does not hold; the text begins with its name."""


def require(law: str, holds: bool, detail: object = "") -> None:
    if not holds:
        raise LawBroken(f"{law}: {detail}")


@dataclass
class Trainer:
    """One worker process and the trainer in it."""

    member: Member
    alive: bool = True
    stopped_at: float | None = None
    unkillable: bool = False
    exit_code: int | None = None
    admitted: bool = False
    connected: bool = False
    generation: int = 0
    steps_in: int = 0
    previous: int = 0
    limbo: int = 0
    """the generation whose start it awaits, as a leaver"""
    step: int = 0
    waiting: bool = False
    failed: int = 0
    formed: set[int] = field(default_factory=set)
    begun: int = 0
    offers: dict[int, Generation] = field(default_factory=dict)
    asked_to_stop: bool = False
    finished: bool = False
    word: StartedWord | None = None
    blocked_since: float | None = None

    @property
    def name(self) -> MemberName:
        return self.member.name

    @property
    def moves(self) -> bool:
        return self.alive and self.stopped_at is None


class World:
    """Time, trainers, disk. ``turn`` lets execution look and act, ``tick`` lets trainers do something."""

    def __init__(self, seed: int, *, total_steps: int = 10_000, faults: bool = True, limits: Limits = LIMITS) -> None:
        self.rng = random.Random(seed)
        self.limits = limits
        self.faults = faults
        self.total_steps = total_steps
        self.now = 100.0
        self.is_up = True
        self.settled_at = 0.0
        self.job = Job(job_id=JOB, tenant=DEFAULT_TENANT)
        self.since: dict[str, float] = {}
        self.reports: dict[MemberName, Report] = {}
        self.asking: dict[MemberName, str] = {}
        self.stores: set[int] = set()
        self.trainers: dict[MemberName, Trainer] = {}
        self.groups: dict[int, Generation] = {}
        self.checkpoint: Checkpoint | None = None
        self.events: list[Any] = []
        self.epoch = self.attempt = 0
        self.granted = 0
        self.killed_by_us: set[MemberName] = set()
        self.stepped: set[int] = set()
        self.nonces = 0
        self.apply(submitted())

    # -- what queueing says -----------------------------------------------------------------------------------

    def apply(self, data: Any) -> None:
        self.job = apply_event(self.job, data, now=EPOCH)

    def grant(self, workers: int, minimum: int = 1) -> None:
        self.epoch += 1
        self.attempt += 1
        self.granted = workers
        self.apply(
            AllocationGranted(
                epoch=self.epoch,
                attempt=self.attempt,
                roles=roles(workers, minimum),
                flavor=DEFAULT_FLAVOR,
                reason=WHY,
            )
        )

    def resize(self, workers: int, minimum: int = 1) -> None:
        self.epoch += 1
        before, self.granted = self.granted, workers
        self.apply(
            AllocationResized(
                epoch=self.epoch,
                attempt=self.attempt,
                workers_from=before,
                workers_to=workers,
                roles=roles(workers, minimum),
                grace_seconds=30.0,
                reason=WHY,
            )
        )

    def evict(self) -> None:
        self.epoch += 1
        self.granted = 0
        self.apply(
            AllocationEvicted(epoch=self.epoch, attempt=self.attempt, grace_seconds=30.0, reason=WHY, requeue=True)
        )

    # -- execution --------------------------------------------------------------------------------------------

    def crash(self) -> None:
        """Execution is gone with all that it remembered; stores close, connections break, processes stay."""
        self.is_up = False
        self.since, self.reports, self.asking = {}, {}, {}
        self.stores = set()
        for trainer in self.trainers.values():
            trainer.connected = False

    def restart(self) -> None:
        self.is_up = True
        self.settled_at = self.now + 5.0

    def turn(self) -> None:
        if not self.is_up:
            return
        decision = self.decide()
        if self.faults and self.rng.random() < 0.03:
            self.crash()  # before the commit
            return
        self.check(decision)
        self.job, self.since = decision.job, dict(decision.since)
        self.events += decision.events
        if self.faults and self.rng.random() < 0.03:
            self.crash()  # committed, and nothing done
            return
        for effect in decision.effects:
            self.act(effect)

    def decide(self) -> Decision:
        self.nonces += 1
        taken = [n for m in self.job.members if m.state is not MemberState.GONE for n in m.devices]
        everyone_back = all(t.connected for t in self.trainers.values() if t.moves and t.admitted)
        seen = Seen(
            reports=dict(self.reports),
            processes={m.name: self.process(m) for m in self.job.members},
            asking=dict(self.asking),
            stores=frozenset(self.stores),
            settled=self.now >= self.settled_at or everyone_back,
            shelf=self.shelf(),
        )
        return reconcile.decide(
            self.job,
            seen,
            limits=self.limits,
            since=self.since,
            now=Now(monotonic=self.now, wall=EPOCH + timedelta(seconds=self.now)),
            supply=Supply(
                nonces=tuple(f"n{self.nonces}-{i}" for i in range(16)),
                devices=free_devices(taken, 64, 64),
                node=NodeName("here"),
            ),
        )

    def shelf(self) -> Shelf:
        return Shelf(found=() if self.checkpoint is None else (self.checkpoint,))

    def process(self, member: Member) -> Process:
        trainer = self.trainers.get(member.name)
        if trainer is None:
            return Process()
        still = self.now - trainer.stopped_at if trainer.stopped_at is not None else 0.0
        return Process(
            recorded=True,
            ended=not trainer.alive,
            gone=not trainer.alive,
            exit_code=trainer.exit_code,
            stopped=trainer.stopped_at is not None,
            still_seconds=still,
            ledger_step=trainer.step if not trainer.alive else 0,
            ledger_finished=trainer.finished and not trainer.alive,
        )

    def act(self, effect: Effect) -> None:
        match effect:
            case StartMember():
                member = self.job.member(effect.member)
                if effect.member not in self.trainers and member is not None and self.rng.random() < 0.9:
                    self.trainers[effect.member] = Trainer(member)
            case AnswerAdmission():
                self.asking.pop(effect.member, None)
                trainer = self.trainers[effect.member]
                if effect.refusal:
                    self.die(trainer, 97)
                else:
                    trainer.admitted = True
            case OfferGeneration():
                self.groups[effect.generation.number] = effect.generation
                self.stores.add(effect.generation.number)
                for name in (*effect.generation.members, *effect.generation.leavers):
                    if name in self.trainers and self.trainers[name].connected:
                        self.trainers[name].offers[effect.generation.number] = effect.generation
            case WithdrawGeneration():
                self.stores.discard(effect.generation)
                for trainer in self.trainers.values():
                    if trainer.connected and trainer.generation != effect.generation:
                        trainer.offers.pop(effect.generation, None)
                        trainer.formed.discard(effect.generation)
            case AskToStop():
                trainer = self.trainers.get(effect.member)
                if trainer is not None and trainer.connected:
                    trainer.asked_to_stop = True
            case Terminate():
                if effect.member in self.trainers and self.trainers[effect.member].moves:
                    self.killed_by_us.add(effect.member)
                    self.die(self.trainers[effect.member], -15)
            case Kill():
                trainer = self.trainers.get(effect.member)
                if trainer is not None and trainer.alive and not trainer.unkillable:
                    self.killed_by_us.add(effect.member)
                    self.die(trainer, -9)

    # -- trainers ---------------------------------------------------------------------------------------------

    def die(self, trainer: Trainer, code: int | None) -> None:
        trainer.alive, trainer.connected, trainer.exit_code = False, False, code
        if trainer.name in self.reports:
            self.reports[trainer.name] = replace(self.reports[trainer.name], connected=False)
        self.asking.pop(trainer.name, None)

    def tick(self) -> None:
        self.now += TICK_SECONDS
        self.stepped = set()
        order = sorted(self.trainers)
        self.rng.shuffle(order)
        for name in order:
            if self.trainers[name].moves and self.rng.random() < 0.8:
                self._talk(self.trainers[name])
        for number in sorted({t.generation for t in self.trainers.values() if t.moves and t.generation}):
            self._run_group(number)
        self._adopt_idle()
        self._stop_and_finish()
        for trainer in self.trainers.values():
            self._report(trainer)
        require("one group steps at a time", len(self.stepped) <= 1, self.stepped)

    def _talk(self, trainer: Trainer) -> None:
        if not self.is_up:
            return
        if not trainer.admitted:
            self.asking[trainer.name] = trainer.member.nonce
            return
        if not trainer.connected:
            member = self.job.member(trainer.name)
            if member is None or member.state is not MemberState.ADMITTED:
                self.die(trainer, 97)
                return
            trainer.connected = True
            offered = self.job.offered
            is_meant = offered is not None and trainer.name in (*offered.members, *offered.leavers)
            if is_meant and offered.number in self.stores and offered.number not in trainer.formed:
                trainer.offers[offered.number] = offered
        for number, generation in sorted(trainer.offers.items()):
            if number not in self.stores and number not in trainer.formed:
                trainer.offers.pop(number)
                trainer.failed = max(trainer.failed, number)
            elif trainer.name in generation.members and number > trainer.generation and self._all_have(generation):
                trainer.begun += number not in trainer.formed
                trainer.formed.add(number)

    def _all_have(self, generation: Generation) -> bool:
        return all(
            (t := self.trainers.get(name)) is not None and t.moves and generation.number in t.offers
            for name in generation.members
        )

    def _run_group(self, number: int) -> None:
        group = self.groups[number]
        members = [self.trainers[name] for name in group.members]
        here = [t for t in members if t.generation == number and t.moves and not t.waiting and not t.limbo]
        if not here or any(t.finished for t in here):
            return
        whole = all(t.moves and t.generation == number and not t.waiting for t in members)
        if not whole:
            self._cut(number, here, members)
            return
        for t in here:
            t.blocked_since = None
        following = self._formed_by(here)
        if following is not None:
            self._swap(following, here)
            return
        self._step(number, here)

    def _formed_by(self, here: list[Trainer]) -> Generation | None:
        """The newest offer that all its members have formed, made to this very group."""
        for number in sorted({n for t in here for n in t.formed if n > t.generation}, reverse=True):
            generation = self.groups[number]
            ready = all(
                self.trainers[name].moves and number in self.trainers[name].formed for name in generation.members
            )
            covered = {t.name for t in here} <= {*generation.members, *generation.leavers}
            if ready and covered and all(t.steps_in >= 2 or not t.previous for t in here):
                return generation
        return None

    def _swap(self, generation: Generation, old: list[Trainer]) -> None:
        source = self.trainers[generation.members[generation.source]]
        self._check_source(generation, source)
        for name in generation.members:
            trainer = self.trainers[name]
            trainer.previous = trainer.generation if trainer in old else 0
            trainer.generation, trainer.steps_in, trainer.waiting = generation.number, 0, False
            trainer.step = source.step
            trainer.limbo = 0
        for trainer in old:
            if trainer.name in generation.leavers:
                trainer.limbo = generation.number
        self._step(generation.number, [self.trainers[name] for name in generation.members])

    def _step(self, number: int, members: list[Trainer]) -> None:
        self.stepped.add(number)
        for trainer in members:
            trainer.step += 1
            trainer.steps_in += 1
        if members[0].steps_in == 2:
            for trainer in members:
                trainer.previous = 0
                trainer.word = StartedWord(generation=number, step=trainer.step, pause_seconds=0.1)
            for trainer in self.trainers.values():
                if trainer.limbo == number and trainer.moves:
                    self.die(trainer, 0)

    def _cut(self, number: int, here: list[Trainer], members: list[Trainer]) -> None:
        """The group has lost somebody: fall back if the one before is whole, else hold the state and wait."""
        if any(t.stopped_at is not None and t.alive for t in members):
            for t in here:
                t.blocked_since = t.blocked_since or self.now
            if self.now - here[0].blocked_since < GLOO_SECONDS and all(t.alive for t in members):
                return
        before = self.groups.get(here[0].previous) if here[0].steps_in < 2 else None
        fellows = [self.trainers[name] for name in before.members] if before is not None else []
        if before is not None and all(t.moves and (t.generation == number or t.limbo == number) for t in fellows):
            step = max(t.step for t in fellows)
            for t in fellows:
                t.generation, t.steps_in, t.limbo, t.step = before.number, 2, 0, step
                t.previous, t.failed = 0, max(t.failed, number)
            for t in here:
                if t not in fellows:
                    t.waiting, t.failed = True, max(t.failed, number)
                    self._abandon(t)
            return
        if here[0].steps_in >= 2 and self.rng.random() < 0.5:
            # The last all-reduce has passed for some, and not for the others.
            for t in self.rng.sample(here, self.rng.randint(1, len(here))):
                t.step += 1
        for t in [*here, *(x for x in self.trainers.values() if x.limbo == number and x.moves)]:
            t.waiting, t.limbo = True, 0
            t.failed = max(t.failed, number) if t.steps_in < 2 else t.failed
            self._abandon(t)

    def _abandon(self, trainer: Trainer) -> None:
        """An offer of before the cut may lack the member that is one step ahead: it is not used any more."""
        for number in [n for n in trainer.formed | set(trainer.offers) if n > trainer.generation]:
            trainer.formed.discard(number)
            trainer.offers.pop(number, None)
            trainer.failed = max(trainer.failed, number)

    def _adopt_idle(self) -> None:
        """A group all of whose members have formed it and step in none: from nobody's state, or from a holder's."""
        for number, generation in sorted(self.groups.items(), reverse=True):
            members = [self.trainers[name] for name in generation.members if name in self.trainers]
            if len(members) < len(generation.members) or not all(t.moves and number in t.formed for t in members):
                continue
            if any(t.generation >= number or (t.generation and not t.waiting) for t in members):
                continue
            if generation.source >= 0:
                source = members[generation.source]
                self._check_source(generation, source)
                step = source.step
            else:
                self._check_begin(generation)
                step = self.checkpoint.step if generation.checkpoint and self.checkpoint else 0
            for t in members:
                t.generation, t.steps_in, t.waiting, t.previous, t.step = number, 0, False, 0, step
            self._step(number, members)

    def _stop_and_finish(self) -> None:
        for trainer in self.trainers.values():
            if not trainer.moves:
                continue
            if trainer.asked_to_stop and not trainer.finished:
                if trainer.generation:
                    self.write_checkpoint(trainer)
                self.die(trainer, 0)
            elif trainer.finished and self.rng.random() < 0.5:
                self.die(trainer, 0)
            elif self._is_done(trainer):
                trainer.finished = True

    def _is_done(self, trainer: Trainer) -> bool:
        steps = bool(trainer.generation) and not trainer.waiting and not trainer.limbo
        return steps and trainer.step >= self.total_steps and (trainer.steps_in >= 2 or not trainer.previous)

    def write_checkpoint(self, trainer: Trainer) -> None:
        if self.checkpoint is None or trainer.step >= self.checkpoint.step:
            self.checkpoint = Checkpoint(
                generation=trainer.generation, step=trainer.step, location=f"g{trainer.generation}-s{trainer.step}"
            )

    def _report(self, trainer: Trainer) -> None:
        if not (trainer.connected and trainer.moves and self.is_up):
            return
        before = self.reports.get(trainer.name)
        moved = before is None or (before.generation, before.step) != (trainer.generation, trainer.step)
        fresh = before is None or before.generation != trainer.generation
        self.reports[trainer.name] = Report(
            connected=True,
            heard_at=self.now,
            progressed_at=self.now if moved else before.progressed_at,
            generation=trainer.generation,
            formed=max(trainer.formed, default=0),
            step=trainer.step,
            phase=MemberPhase.FINISHING if trainer.finished else MemberPhase.STEPPING,
            sync_seconds=self.now - trainer.blocked_since if trainer.blocked_since is not None else 0.0,
            waiting=trainer.waiting,
            generation_step=trainer.step if fresh else before.generation_step,
            failed=trainer.failed,
            finished_step=trainer.step if trainer.finished else None,
            started=trainer.word,
            generations=trainer.begun,
        )

    # -- laws ---------------------------------------------------------------------------------------------------

    def _check_source(self, generation: Generation, source: Trainer) -> None:
        """The most advanced state goes on: nobody alive holds a later step."""
        ahead = [t for t in self.trainers.values() if t.moves and t.generation and t.step > source.step]
        require("the most advanced state goes on", not ahead, (generation.number, [t.name for t in ahead]))

    def _check_begin(self, generation: Generation) -> None:
        last = max((g.number for g in self.job.line if g.state is GenerationState.STARTED), default=1)
        own = [t for t in self.trainers.values() if t.moves and t.member.attempt == self.attempt]
        counted = [t for t in own if t.generation >= last and (t.steps_in >= 2 or self._has_started(t.generation))]
        require(
            "no state is dropped that somebody holds", not counted, (generation.number, [t.name for t in counted])
        )
        stepped = [t for t in self.trainers.values() if t.member.attempt == self.attempt and t.step > 0]
        require("never step 0 again in an attempt", bool(generation.checkpoint) or not stepped, generation.number)
        if self.checkpoint is not None:
            require("from the newest checkpoint", generation.checkpoint == self.checkpoint.location, generation)

    def _has_started(self, number: int) -> bool:
        return any(g.number == number and g.state is GenerationState.STARTED for g in self.job.generations)

    def check(self, decision: Decision) -> None:
        """What a commit may say."""
        before, after = self.job, decision.job
        for grant in after.roles:
            known = {m.name for m in before.members}
            fresh = [m for m in after.held(grant.role) if m.name not in known]
            held = len(after.held(grant.role))
            require("no start above what is granted", not fresh or held <= grant.members, held)
        require("nothing is started after the end", not (after.is_over and _fresh(before, after)))
        numbers = [g.number for g in after.generations]
        require("a generation's number is used once", len(numbers) == len(set(numbers)), numbers)
        require("a generation's number only rises", after.generation >= before.generation)
        for member in after.members:
            former = before.member(member.name)
            if former is not None and former.state is MemberState.GONE:
                require("gone is for good", member.state is MemberState.GONE, member.name)
        for effect in decision.effects:
            if isinstance(effect, OfferGeneration):
                self.check_exchange(effect.generation, decision.job)
        self.check_leavers(decision)
        told = [e for e in self.events if isinstance(e, RoomFreed)]
        for event in decision.events:
            if isinstance(event, RoomFreed):
                require("one answer an epoch", event.epoch not in [e.epoch for e in told], event.epoch)
                require("no answer with a leaver left", not _leavers(after), _leavers(after))
                told.append(event)
            if isinstance(event, GroupEnded):
                ended = [e.attempt for e in self.events if isinstance(e, GroupEnded)]
                require("one end an attempt", event.attempt not in ended, event.attempt)
                blamed = event.attributed_to is Attribution.JOB and event.exit_code == 0
                require("who left when asked is no failure", not blamed, event)
                living = [t.name for t in self.trainers.values() if t.alive and t.admitted and not t.unkillable]
                require("an end only when nobody is left", not living and not after.held(), living)
            if isinstance(event, GroupStarted):
                started = [e.attempt for e in self.events if isinstance(e, GroupStarted)]
                require("one start an attempt", event.attempt not in started, event.attempt)
        if decision.events:
            self._check_again(decision)

    def is_worn(self, name: MemberName) -> bool:
        report = self.reports.get(name)
        return report is not None and report.generations > self.limits.member_generations_max

    def check_exchange(self, offer: Generation, job: Job) -> None:
        """Who is left out of an offer without being asked to go before, and who is not although he might be."""
        stepping = {r.generation for r in self.reports.values() if r.connected and r.is_stepping}
        inside = next((g for g in job.generations if {g.number} == stepping), None)
        endings = {m.name: m.ending for m in job.members}
        exchanged = [n for n in offer.leavers if endings[n] is None and inside is not None]
        if inside is None:
            return
        is_resize = offer.epoch > inside.epoch
        require("only worn members are exchanged", all(self.is_worn(n) for n in exchanged), exchanged)
        require("exchanged at planned resizes only", is_resize or not exchanged, exchanged)
        stayed = [n for n in inside.members if n in offer.members]
        require("one who holds the state stays", bool(stayed), offer.members)
        asked = [n for n in inside.members if endings[n] is Ending.LEAVER]
        require("no exchange makes a group smaller", len(offer.members) >= len(inside.members) - len(asked), offer)
        newcomers = len(offer.members) - len(stayed)
        left = [n for n in stayed if self.is_worn(n)]
        able = min(newcomers, len(stayed) + len(exchanged) - 1)
        require(
            "a worn member is exchanged at the next planned resize",
            not is_resize or not left or len(exchanged) >= able,
            (offer, left),
        )

    def check_leavers(self, decision: Decision) -> None:
        """Worn members of the group leave before others of the group."""
        running = decision.job.running
        before = self.job.running
        if running is None or before is None or before.number != running.number or len(self.job.roles) != 1:
            return
        endings = {m.name: m.ending for m in self.job.members}
        after = {m.name: m.ending for m in decision.job.held()}
        fresh = [
            n
            for n in running.members
            if endings.get(n) is None and after.get(n) is Ending.LEAVER and n in self.reports
        ]
        going = decision.job.offered.leavers if decision.job.offered is not None else ()
        stay = [n for n in running.members if after.get(n, Ending.ABNORMAL) is None and n not in going]
        wrong = [n for n in fresh if not self.is_worn(n)] if any(self.is_worn(n) for n in stay) else []
        require("worn members leave first", not wrong, (wrong, stay))

    def _check_again(self, decision: Decision) -> None:
        """Having said something, it does not say it again."""
        again = reconcile.decide(
            decision.job,
            self._unchanged(decision),
            limits=self.limits,
            since=decision.since,
            now=Now(monotonic=self.now, wall=EPOCH + timedelta(seconds=self.now)),
            supply=Supply(nonces=(), devices=(), node=NodeName("here")),
        )
        # A newcomer's word may count only now that the last veteran is known to be gone: that is news.
        repeated = [e for e in again.events if not isinstance(e, GroupChanged | GroupStarted)]
        require("deciding again says nothing new", not repeated, repeated)

    def _unchanged(self, decision: Decision) -> Seen:
        offered = {e.generation.number for e in decision.effects if isinstance(e, OfferGeneration)}
        return Seen(
            reports=dict(self.reports),
            processes={m.name: self.process(m) for m in decision.job.members},
            stores=frozenset(self.stores | offered),
            settled=self.now >= self.settled_at,
            shelf=self.shelf(),
        )

    def check_killed(self) -> None:
        """Nobody is ended by us without a reason that stands in its row."""
        for name in self.killed_by_us:
            member = self.job.member(name)
            if member is not None and member.attempt == self.job.attempt:
                require("survivors keep their process", member.ending is not None, name)


def _fresh(before: Job, after: Job) -> list[MemberName]:
    known = {m.name for m in before.members}
    return [m.name for m in after.held() if m.name not in known]


def _leavers(job: Job) -> list[MemberName]:
    return [m.name for m in job.held() if m.ending is Ending.LEAVER]


def roles(workers: int, minimum: int) -> tuple[RoleGrant, ...]:
    return (RoleGrant(role=WORKER_ROLE, elastic=True, members=workers, minimum=minimum, resources=SIZE),)


def submitted(**spec: Any) -> JobSubmitted:
    return JobSubmitted(
        tenant=DEFAULT_TENANT,
        user=DEFAULT_USER,
        queue=DEFAULT_QUEUE,
        request=RequestRegister(version=1, priority=PriorityClass.MEDIUM, workers_min=1, workers_max=8, workers=1),
        roles=(RoleRequest(name=WORKER_ROLE, elastic=True, count=1, resources=SIZE),),
        spec=JobSpec(name="job", **{"mode": Mode.LIVE, "script": "train.py", **spec}),
    )
