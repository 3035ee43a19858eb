"""The API of a training script: ``join``, ``track``, ``steps``, ``apply``, ``phase``."""

import atexit
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from tidewright import protocol
from tidewright.elastic.admission import address_of
from tidewright.elastic.backend import prepare_backend, to_tensors
from tidewright.elastic.child import NOT_ADMITTED_EXIT
from tidewright.elastic.control import Control, Speaker
from tidewright.elastic.data import Batch, Plan, Prefetcher, make_plan, to_source
from tidewright.elastic.errors import ElasticError, GroupBroken
from tidewright.elastic.gradients import check_loss, reduce_gradients
from tidewright.elastic.keeper import Keeper
from tidewright.elastic.ledger import Ledger
from tidewright.elastic.offers import Offers, alone
from tidewright.elastic.parts import Parts, Wishes
from tidewright.elastic.samples import Sampler, Section, Stopwatch, Where
from tidewright.elastic.standing import PHASES, Identity, Standing
from tidewright.elastic.step import Step
from tidewright.elastic.tracked import Tracked, clear_gradients
from tidewright.elastic.trainer import Trainer

FLUSH_SECONDS: Final = 1.0
COMPILING_STEPS: Final = 2
"""The first steps of a process take longer; they have a phase with a limit of their own."""
CHECKPOINT_EVERY_STEPS: Final = 200


class Job:
    """One training job, as this worker sees it. ``rank``, ``world`` and ``generation`` may change between steps."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._identity = Identity(
            token=environment.get(protocol.TOKEN_VARIABLE, ""),
            member=environment.get(protocol.MEMBER_VARIABLE, ""),
            nonce=environment.get(protocol.NONCE_VARIABLE, ""),
            attempt=int(environment.get(protocol.ATTEMPT_VARIABLE) or 0),
            pid=os.getpid(),
        )
        self._standing = Standing(self._identity)
        self._ledger = Ledger(environment.get(protocol.MEMBER_DIRECTORY_VARIABLE))
        self._tracked = Tracked()
        self._wishes = Wishes()
        self._changed = threading.Condition()
        self._welcomed = threading.Event()
        self._welcome: protocol.Welcome | None = None
        self._stopwatch = Stopwatch()
        self._control: Control | None = None
        self._offers: Offers | None = None
        self._trainer: Trainer | None = None
        self._keeper: Keeper | None = None
        self._sampler: Sampler | None = None
        self._batch: Batch | None = None
        self._parameters: list[Any] = []
        self._steps_here = 0
        self._entered = False
        self._stepping = False
        self._backend = prepare_backend()

    @classmethod
    def from_environment(cls) -> "Job":
        """Raises ElasticError where the environment is incomplete."""
        environment = dict(os.environ)
        address = environment.get(protocol.ADDRESS_VARIABLE)
        if address:
            try:
                address_of(address)
            except ValueError as error:
                raise ElasticError(str(error)) from error
            for name in (protocol.TOKEN_VARIABLE, protocol.MEMBER_VARIABLE, protocol.NONCE_VARIABLE):
                if not environment.get(name):
                    raise ElasticError(f"{name} is not set, though {protocol.ADDRESS_VARIABLE} is")
        return cls(environment)

    # -- what a script reads ---------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """0 to ``world`` - 1. Use it to let one worker print or save; not to choose samples."""
        return self._standing.view.rank

    @property
    def world(self) -> int:
        """How many workers share each step."""
        return self._standing.view.world

    @property
    def generation(self) -> int:
        """Number of the training group; 0 before the first."""
        return self._standing.view.generation

    @property
    def loss(self) -> float:
        """The last step's loss over all workers; NaN before the first, and where it was no finite number."""
        loss = self._standing.view.loss
        return math.nan if loss is None else loss

    @property
    def step(self) -> int:
        """Steps applied so far, by all workers together."""
        return self._standing.view.step

    @property
    def output_directory(self) -> Path | None:
        """Where results belong; None where the job names no place."""
        path = self._environment.get(protocol.OUTPUT_DIRECTORY_VARIABLE)
        return Path(path) if path else None

    # -- what a script does ----------------------------------------------------------------------------------

    def __enter__(self) -> "Job":
        self._entered = True
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        ):
            signal.signal(signal.SIGTERM, self._on_terminate)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered = False
        if kind is None and self._trainer is not None and self._trainer.group is not None:
            self._trainer.finish()  # also of a loop that the script broke out of: that is its end too
        if self._keeper is not None:
            self._keeper.wait()
        if self._sampler is not None:
            self._sampler.stop()
        if self._control is not None:
            self._control.flush(
                FLUSH_SECONDS
            )  # the connection stays: the last word is repeated until the process ends

    def track(self, *things: Any) -> None:
        """Name what makes up the state of training: layers, optimizers, schedulers, scalers, and whatever else has
        ``state_dict`` with ``set_state_dict`` or ``load_state_dict``.

        A worker that joins later receives all of it, matched by the order of tracking, and Paddle's random numbers go
        on there alike; those of numpy and Python are the script's to track. Checkpoints hold it all. Call it before
        ``steps``. The result does not depend on the number of workers, but for what a layer makes of its own part of
        the batch: dropout draws its masks, BatchNorm takes its statistics. Raises ElasticError for what cannot be
        sent.
        """
        if self._stepping:
            raise ElasticError("job.track: everything must be tracked before job.steps")
        for thing in things:
            self._tracked.add(thing)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Say what takes long, so that nobody takes this worker for stuck: ``with job.phase("evaluating"):``."""
        if name not in PHASES:
            raise ElasticError(f"job.phase: {name!r} is none of {', '.join(PHASES)}")
        before = self._standing.view.phase
        self._standing.enter_phase(name)
        self._rouse()
        try:
            yield
        finally:
            self._standing.enter_phase(before)
            self._rouse()

    def steps(
        self, dataset: Any, *, global_batch: int, epochs: int, seed: int = 0, shuffle: bool = True
    ) -> Iterator[Step]:
        """This worker's part of each step still to be done, in a ``for`` loop that calls ``apply`` once.

        ``dataset``: arrays such as ``(inputs, labels)``, or a map-style ``paddle.io.Dataset``. Each sample is used
        once per epoch, at any number of workers. Where the job was stopped or resized, the loop goes on where it is.
        Raises ElasticError for arguments that cannot work.
        """
        if not self._entered:
            raise ElasticError("job.steps: write `with elastic.join() as job:` around the loop")
        if self._stepping:
            raise ElasticError("job.steps can be used once: put all epochs into one loop")
        if not self._tracked.optimizers:
            raise ElasticError("job.steps: call job.track(model, optimizer) first, so that others can receive them")
        count, fetch = to_source(dataset)
        plan = make_plan(count, global_batch=global_batch, epochs=epochs, seed=seed, shuffle=bool(shuffle))
        self._stepping = True
        return self._loop(plan, Prefetcher(plan, fetch))

    def apply(self, loss: Any) -> bool:
        """Backward, all-reduce, optimizer step. True if the step was applied.

        False if a worker was lost in it: the loop then yields the same step again. What the round did to schedulers,
        random generators and whatever else is tracked is undone (to things above 1 MiB: what it does from here on).
        ``loss``: this worker's losses, summed and divided by ``step.global_batch``.
        """
        batch, trainer = self._batch, self._trainer
        if batch is None or trainer is None or trainer.group is None:
            raise ElasticError("job.apply: call it once in each round of `for step in job.steps(...)`")
        check_loss(loss)
        self._batch = None
        scaler = self._tracked.scaler
        if not batch.borrowed:
            (scaler.scale(loss) if scaler is not None else loss).backward()
        trainer.begun(data_epoch=batch.epoch, ids=batch.ids.tolist())
        try:
            with self._stopwatch.within(Section.SYNC), self._standing.waiting_for_others():
                agreement = reduce_gradients(
                    self._parameters,
                    loss,
                    trainer.group,
                    trainer.flags(samples=len(batch.ids)),
                    counts=not batch.borrowed,
                    read_flags=batch.step % self._backend.flags_every_steps == 0,
                )
        except GroupBroken as error:
            clear_gradients(self._tracked.optimizers)
            trainer.on_broken(error)
            return False
        for optimizer in self._tracked.optimizers:
            if scaler is not None:
                scaler.step(optimizer)
            else:
                optimizer.step()
        if scaler is not None:
            scaler.update()
        clear_gradients(self._tracked.optimizers)
        self._tracked.end_round()
        trainer.on_applied(agreement)
        self._standing.count(samples=len(batch.ids))
        self._steps_here += 1
        return True

    # -- the loop --------------------------------------------------------------------------------------------

    def _loop(self, plan: Plan, prefetcher: Prefetcher) -> Iterator[Step]:
        trainer = self._start(plan)
        self._trainer = trainer
        try:
            while True:
                self._stopwatch.enter(Section.IDLE)
                trainer.settle()
                if trainer.step >= plan.total_steps:
                    if trainer.part():
                        break
                    continue
                self._standing.enter_phase("compiling" if self._steps_here < COMPILING_STEPS else "stepping")
                yield self._next(plan, prefetcher, trainer)
                if self._batch is not None:
                    raise ElasticError("the body of the loop must call job.apply(loss) once for every step")
        finally:
            self._stopwatch.enter(Section.IDLE)
            prefetcher.close()
        trainer.finish()

    def _next(self, plan: Plan, prefetcher: Prefetcher, trainer: Trainer) -> Step:
        assert trainer.group is not None
        self._stopwatch.enter(Section.INPUT)
        batch = prefetcher.get(step=trainer.step, rank=trainer.group.rank, world=trainer.group.world)
        data = to_tensors(batch.fields)
        self._stopwatch.enter(Section.STEP)
        self._tracked.begin_round()
        self._batch = batch
        return Step(
            index=batch.step,
            epoch=batch.epoch,
            is_epoch_end=(batch.step + 1) % plan.steps_per_epoch == 0,
            ids=batch.ids,
            global_batch=batch.global_batch,
            data=data,
        )

    def _start(self, plan: Plan) -> Trainer:
        """Connect only now that everything is loaded: whoever is connected may be asked into a group at once."""
        self._parameters = self._tracked.parameters()
        self._tracked.tensors()
        self._standing.set(total_steps=plan.total_steps)
        offers = Offers(
            backend=self._backend,
            say=self._say,
            changed=self._changed,
        )
        self._offers = offers
        self._sampler = Sampler(self._stopwatch, self._standing.sample, on_gpu=self._backend.device != "cpu")
        directory = self._environment.get(protocol.CHECKPOINT_DIRECTORY_VARIABLE, "")
        every_steps = CHECKPOINT_EVERY_STEPS
        address = self._environment.get(protocol.ADDRESS_VARIABLE)
        if address:
            welcome = self._connect(address_of(address), offers)
            directory = welcome.checkpoint_directory or directory
            every_steps = welcome.checkpoint_every_steps
            self._sampler.start()
        else:
            offers.put(alone(directory, self._backend))
        self._keeper = Keeper(
            directory=directory,
            every_steps=every_steps,
            standing=self._standing,
            tracked=self._tracked,
            ledger=self._ledger,
            plan=asdict(plan),
            say=self._say,
        )
        return Trainer(
            Parts(
                standing=self._standing,
                offers=offers,
                tracked=self._tracked,
                ledger=self._ledger,
                wishes=self._wishes,
                changed=self._changed,
                say=self._say,
                flush=self._flush,
                keeper=self._keeper,
                plan=asdict(plan),
            )
        )

    # -- the connection --------------------------------------------------------------------------------------

    def _connect(self, address: tuple[str, int], offers: Offers) -> protocol.Welcome:
        """Blocks until execution has answered once; without its settings there is nothing to be done."""
        speaker = Speaker(
            hello=lambda: self._standing.hello(formed=offers.formed_generation),
            standing=self._standing.kept,
            mark=self._mark,
            on_message=self._on_message,
        )
        self._control = Control(address, speaker)
        self._control.start()
        atexit.register(self._flush)
        while not self._welcomed.wait(0.5):
            if self._wishes.stop:
                raise SystemExit(0)
        assert self._welcome is not None
        return self._welcome

    def _on_message(self, message: protocol.Message) -> None:
        """In the connection's thread."""
        match message:
            case protocol.Welcome():
                self._welcome = message
                if self._sampler is not None:
                    self._sampler.send_to(Where(url=message.metrics_url, token=message.sample_token))
                self._welcomed.set()
            case protocol.Form() if self._offers is not None:
                self._offers.on_form(message)
            case protocol.Abort() if self._offers is not None:
                self._offers.on_abort(message.generation)
            case protocol.Stop():
                self._wishes.stop_reason = message.reason or "stopped"
                with self._changed:
                    self._changed.notify_all()
            case protocol.Refused():
                os.write(2, f"tidewright: refused: {message.reason}\n".encode())
                os._exit(NOT_ADMITTED_EXIT)
            case _:
                pass

    def _on_terminate(self, *_: object) -> None:
        """SIGTERM means the same as a Stop: at the next boundary, with a checkpoint."""
        self._wishes.stop_reason = "SIGTERM"
        if not self._stepping or self._standing.view.phase == "finishing":
            sys.exit(128 + signal.SIGTERM)

    def _say(self, message: protocol.Message) -> None:
        if self._control is not None:
            self._control.send(message)

    def _mark(self) -> protocol.Mark:
        return self._standing.mark(generations=self._offers.begun if self._offers is not None else 0)

    def _rouse(self) -> None:
        if self._control is not None and self._welcomed.is_set():
            self._control.send(self._mark())

    def _flush(self) -> None:
        if self._control is not None:
            self._control.flush(FLUSH_SECONDS)


__all__ = ["Job", "Step"]
