"""The loop: step; then log, evaluate, save when due; stop cleanly.

Owns: the life of a run, from the launch to the exit code. Does not own: any
arithmetic; it calls the parts in order. Whatever must be alike on all ranks is
decided from reduced values or by `World.all_max`, never by one rank.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import torch

from lockstep.agreement import raise_together, together
from lockstep.checkpoint import BackgroundWriter, snapshot
from lockstep.config import Cadence, RunConfig
from lockstep.data.loader import StepBatch
from lockstep.errors import CheckpointError, ConfigError, LockstepError, NonFiniteError
from lockstep.evaluation import evaluate
from lockstep.parallel import bare, follow_first
from lockstep.record import Record
from lockstep.runtime import World
from lockstep.schedule import build_schedule
from lockstep.setup import Run, check_alike, prepare, versions
from lockstep.signals import EXIT_CODES, StopSignals
from lockstep.step import StepReport, train_step
from lockstep.task import Context, Task


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended: where it stands, what it measured, and the exit code it deserves."""

    step: int
    metrics: dict[str, float]
    folder: Path
    exit_code: int = 0


def fit(task: Task, config: RunConfig) -> RunResult:
    """Train `task` as `config` says, on as many ranks as were launched.

    Goes on from the newest good checkpoint in `config.output_dir` if there is
    one. SIGTERM and Ctrl-C save at the next step, on all ranks alike; a second
    signal leaves at once.

    Raises:
        LockstepError: the same on every rank, with what is wrong and what to try.
    """
    with ExitStack() as stack:
        world = stack.enter_context(World.enter(config.device, config.timeout_s))
        signals = stack.enter_context(StopSignals())
        run = prepare(task, config, world, stack)
        trainer = Trainer(run, signals, stack)
        loader = run.loader
        schedule = build_schedule(config.schedule, loader.plan.steps_per_epoch, loader.total_steps)
        for batch in trainer.steps():
            run.set_rate(schedule(batch.step))
            report = train_step(
                task.loss,
                run.model,
                run.optimizer,
                batch,
                world,
                weights=task.weights,
                seed=config.seed,
                max_grad_norm=config.max_grad_norm,
                autocast=run.autocast,
                scaler=run.scaler,
            )
            trainer.took(report, batch)
        return trainer.finish()


class Trainer:
    """Takes a prepared run through its steps. The steps themselves are the caller's.

    A loop is `for batch in trainer.steps()`, a step and `trainer.took(report, batch)` in
    it, and `trainer.finish()` after it. `fit` is such a loop; docs/own_loop.md shows another.

    Args:
        run: From `prepare`.
        signals: Already entered.
        stack: Closes what the trainer opens.
        also_say: Lines for the first rank to print with its own before the first step.
    """

    def __init__(
        self, run: Run, signals: StopSignals, stack: ExitStack, also_say: Sequence[str] = ()
    ) -> None:
        self.run = run
        self.signals = signals
        self.writer: BackgroundWriter = BackgroundWriter()
        stack.callback(self.writer.close)
        self.record = Record(run, stack, also_say)
        self.events = self.record.events
        self.metrics: dict[str, float] = {}
        self.report: StepReport | None = None
        self.stopped_by = 0
        """The exit code of the signal that ended the steps early."""
        self.evaluated_step: int | None = None
        self.saved_step = run.progress.step if run.resumed_from else None
        self._num_new = 0
        self._began = time.monotonic()
        stack.push(self._say_where)

    def steps(self) -> Iterator[StepBatch]:
        """Yield the batches of the steps that are left; log, evaluate and save between them.

        Ends early, on all ranks alike, when one of them was asked to stop. Collective.

        Raises:
            LockstepError: on all ranks, what one of them met; the good steps are saved first.
        """
        run, progress, plan = self.run, self.run.progress, self.run.contract.plan
        total_steps, throughput = run.loader.total_steps, self.record.throughput
        batches = iter(run.loader)
        upcoming = self._fetch(batches)
        while progress.step < total_steps:
            self.stopped_by = self._agree(upcoming)
            if self.stopped_by:
                return
            assert isinstance(upcoming, StepBatch)
            yield upcoming
            if progress.step != upcoming.step + 1:
                raise RuntimeError("a loop over steps() calls took(report, batch) for each")
            upcoming = self._fetch(batches)  # while the device is still busy
            throughput.step_done(plan.global_batch)
            if run.world.device.type == "cpu":  # on a GPU, asking would mean waiting
                self._check_finite()
            self._once_in_a_while()

    def took(self, report: StepReport, batch: StepBatch) -> None:
        """Count a finished step; nothing here waits for the device. Collective."""
        run, before = self.run, self.run.progress.consumed
        if self.report is None:
            check_alike("parts of the loss", " ".join(sorted(report.parts)), run.world)
        self.report = report
        run.progress.take(report, batch)
        self._num_new = run.progress.consumed - before
        run.averages.update(run.progress.step)
        self.record.enter(batch)

    def finish(self) -> RunResult:
        """Save what is not saved yet, and say how the run ended. Collective."""
        step = self.run.progress.step
        if self.saved_step != step:
            self._save()
        together(self.run.world, self.writer.wait)
        if self.stopped_by:
            name = {code: number.name for number, code in EXIT_CODES.items()}[self.stopped_by]
            self.events.write("stop", step, reason=name, exit_code=self.stopped_by)
        self.events.write("run_end", step, seconds=time.monotonic() - self._began)
        return RunResult(step, self.metrics, Path(self.run.config.output_dir), self.stopped_by)

    def _once_in_a_while(self) -> None:
        """Log, close the epoch, evaluate, save: each when it is due. Collective."""
        run, config, progress = self.run, self.run.config, self.run.progress
        at_end = progress.step == run.loader.total_steps
        if at_end or progress.step % config.log_every == 0:
            self._check_finite()
            assert self.report is not None
            self.record.log(self.report)
        with self.record.throughput.pausing():
            if progress.consumed % run.contract.plan.samples_per_epoch == 0:
                self.record.close_epoch()
            is_best = False
            if run.held_out is not None and (at_end or self._is_due(config.evaluation)):
                is_best = self._evaluate()
            if at_end or is_best or self._is_due(config.checkpoint):
                self._save(is_best)

    def _fetch(self, batches: Iterator[StepBatch]) -> StepBatch | LockstepError | None:
        with self.record.throughput.waiting():
            try:
                return next(batches, None)
            except LockstepError as error:
                return error

    def _agree(self, upcoming: object) -> int:
        """Return the exit code to stop with, or 0; raise on all ranks what one of them met."""
        problem = upcoming if isinstance(upcoming, LockstepError) else None
        try:
            self.writer.poll()
        except LockstepError as error:
            problem = error
        world = self.run.world
        votes = (problem is not None, isinstance(problem, CheckpointError))
        stop, failed, cannot_save = world.all_max(self.signals.exit_code, *map(int, votes))
        if failed:
            if not cannot_save and self.saved_step != self.run.progress.step:
                self._save()  # the steps that were good are not lost
                together(world, self.writer.wait)
            raise_together(world, problem)
        return stop

    def _is_due(self, when: Cadence) -> bool:
        progress, per_epoch = self.run.progress, self.run.contract.plan.samples_per_epoch
        epochs = Fraction(progress.consumed, per_epoch)
        return when.is_due(progress.step, epochs, Fraction(self._num_new, per_epoch))

    def _check_finite(self) -> None:
        """Raise, on all ranks alike, when the last step was no longer arithmetic."""
        report = self.report
        if report is None:
            return
        # With a scaler an overflowing gradient is routine: it skips the step and scales down.
        finite = torch.isfinite(report.loss_sum) if self.run.scaler else report.finite
        if not bool(finite):
            raise NonFiniteError(
                f"step {self.run.progress.step}: loss {float(report.loss):g}, gradient norm "
                f"{float(report.grad_norm):g}; nothing of it was saved",
                "a lower learning rate, a longer warm-up, or precision=fp32; "
                "the newest checkpoint is from before",
            )

    def _evaluate(self) -> bool:
        """Evaluate the weights and their first average; say if they are the best. Collective."""
        run, config, model = self.run, self.run.config, bare(self.run.model)
        began, step = time.monotonic(), run.progress.step
        self.evaluated_step = step
        follow_first(model, run.world)

        def measure() -> dict[str, float]:
            return evaluate(
                run.task,
                model,
                run.held_out,
                run.world,
                batch_size=config.evaluation.batch_size or run.contract.plan.batch_size,
                seed=config.seed,
                step=step,
                loader=config.loader,
                autocast=run.autocast,
            )

        def finish() -> None:
            context = Context(run.world, config.seed, step, 0, training=False)
            with run.autocast or nullcontext():
                made = together(
                    run.world,
                    lambda: run.task.finish_evaluation(model, context, config.output_dir),
                )
            for name, value in made.items():
                if isinstance(value, Path):
                    self.events.write("picture", step, name=name, path=str(value))
                else:
                    self.metrics[name] = value

        self.metrics = measure()
        if config.averages:
            with run.averages.applied(config.averages[0]):
                self.metrics |= {f"ema_{name}": value for name, value in measure().items()}
                finish()
        else:
            finish()
        stall_s = time.monotonic() - began
        self.events.write("evaluation", step, metrics=self.metrics, local_stall_s=stall_s)
        return config.evaluation.save_best and self._is_best()

    def _save(self, is_best: bool = False) -> None:
        """Copy the state of the run to host memory and let the writer store it. Collective."""
        self._check_finite()
        began = time.monotonic()
        run, plan = self.run, self.run.contract.plan
        step = self.saved_step = run.progress.step
        self.record.sum_ledger()
        names = ["best_model.pt"] if is_best else []
        epochs, into_epoch = divmod(run.progress.consumed, plan.samples_per_epoch)
        saving = run.config.checkpoint
        if not into_epoch and saving.name_epochs:
            names.append(f"checkpoint_epoch_{epochs}.pt")
        if saving.name_steps and saving.every_steps and step % saving.every_steps == 0:
            names.append(f"checkpoint_step_{step}.pt")
        meta = {
            "world_size": run.world.size,
            "contract": run.contract.to_json(),
            "consumed": run.progress.consumed,
            "ledger": str(run.progress.ledger),
            "epochs_completed": epochs,
            "names": names,
            "metrics": self.metrics if self.evaluated_step == step else {},
            "config": run.config.model_dump(mode="json"),
            "versions": versions(),
        }
        parts = together(run.world, lambda: snapshot(run.parts()) if run.world.is_first else {})
        # Written before the checkpoint can exist: a resume from it must find this in the record.
        path = str(run.store.path(step))
        self.events.write("checkpoint", step, path=path, stall_s=time.monotonic() - began)

        def write() -> None:
            run.store.save(step, parts, meta)
            for name in names:
                run.store.name(step, name)

        def hand_over() -> None:
            if run.world.is_first:
                self.writer.submit(write)  # raises what the save before it met
                if not run.config.checkpoint.background:
                    self.writer.wait()

        together(run.world, hand_over)

    def _is_best(self) -> bool:
        """Say whether the present metrics are the best so far, and remember it."""
        progress, evaluation = self.run.progress, self.run.config.evaluation
        value = self.metrics.get(evaluation.best_metric)
        if value is None:
            raise ConfigError(
                f"evaluation.best_metric={evaluation.best_metric!r} is not measured",
                f"one of {', '.join(self.metrics) or 'none'}",
            )
        if not math.isfinite(value):
            return False
        sign = 1 if evaluation.best_is == "lowest" else -1
        if progress.best is not None and sign * value >= sign * progress.best:
            return False
        progress.best = value
        return True

    def _say_where(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Note on whatever ends the run which rank met it, and when."""
        if error is not None:
            error.add_note(f"on rank {self.run.world.rank}, after step {self.run.progress.step}")
