"""The loop: step; then log, evaluate, save when due; stop cleanly.

Owns: the life of a run, from the launch to the exit code. Does not own: any
arithmetic; it calls the parts in order. Whatever must be alike on all ranks is
decided from reduced values or by `World.all_max`, never by one rank.
"""

import json
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from lockstep.agreement import raise_together, together
from lockstep.checkpoint import BackgroundWriter, snapshot
from lockstep.config import Cadence, RunConfig
from lockstep.data.ledger import Ledger
from lockstep.data.loader import StepBatch
from lockstep.data.reader import is_stream
from lockstep.errors import CheckpointError, ConfigError, LockstepError, NonFiniteError
from lockstep.evaluation import evaluate
from lockstep.observe.console import Console
from lockstep.observe.events import EventLog
from lockstep.observe.sinks import Sinks
from lockstep.observe.throughput import Throughput
from lockstep.parallel import bare, follow_first
from lockstep.runtime import World
from lockstep.schedule import build_schedule
from lockstep.setup import Run, banner, check_alike, prepare, versions
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
        return Trainer(run, signals, stack).train()


class Trainer:
    """Takes a prepared run through its steps."""

    def __init__(self, run: Run, signals: StopSignals, stack: ExitStack) -> None:
        self.run = run
        self.signals = signals
        self.throughput = Throughput()
        self.writer: BackgroundWriter = BackgroundWriter()
        stack.callback(self.writer.close)
        self.events = EventLog(run.config.output_dir, run.world.rank)
        stack.callback(self.events.close)
        self.metrics: dict[str, float] = {}
        self.local_ledger = Ledger()
        self.report: StepReport | None = None
        self.evaluated_step: int | None = None
        self._has_checked_parts = False
        self.saved_step = run.progress.step if run.resumed_from else None
        self._speak(stack)

    def train(self) -> RunResult:
        """Run the steps that are left."""
        run, began = self.run, time.monotonic()
        config, progress, plan = run.config, run.progress, run.contract.plan
        total_steps = run.loader.total_steps
        steps_per_epoch = None if is_stream(run.loader.dataset) else plan.steps_per_epoch
        schedule = build_schedule(config.schedule, steps_per_epoch, total_steps)
        batches = iter(run.loader)
        upcoming = self._fetch(batches)
        stopped_by = 0
        while progress.step < total_steps:
            stopped_by = self._agree(upcoming)
            if stopped_by:
                break
            assert isinstance(upcoming, StepBatch)

            # ---- the step ----
            for group, base in zip(run.optimizer.param_groups, run.base_rates, strict=True):
                group["lr"] = base * schedule(progress.step)
            try:
                self.report = train_step(
                    run.task.loss,
                    run.model,
                    run.optimizer,
                    upcoming,
                    run.world,
                    weights=run.task.weights,
                    seed=config.seed,
                    max_grad_norm=config.max_grad_norm,
                    autocast=run.autocast,
                    scaler=run.scaler,
                )
            except Exception as error:
                error.add_note(f"in step {progress.step + 1} of rank {run.world.rank}")
                raise
            progress.take(self.report, upcoming)
            run.averages.update(progress.step)
            self._enter_into_ledger(upcoming)
            if not self._has_checked_parts:
                check_alike("parts of the loss", " ".join(sorted(self.report.parts)), run.world)
                self._has_checked_parts = True
            upcoming = self._fetch(batches)  # while the device is still busy
            self.throughput.step_done(plan.global_batch)
            if run.world.device.type == "cpu":  # on a GPU, asking would mean waiting
                self._check_finite()

            # ---- once in a while ----
            step, at_end = progress.step, progress.step == total_steps
            if at_end or step % config.log_every == 0:
                self._log()
            with self.throughput.pausing():
                if progress.consumed % plan.samples_per_epoch == 0:
                    self._close_epoch()
                is_best = False
                if run.held_out is not None and (at_end or self._is_due(config.evaluation)):
                    is_best = self._evaluate()
                if at_end or is_best or self._is_due(config.checkpoint):
                    self._save(is_best)

        if self.saved_step != progress.step:
            self._save()
        together(run.world, self.writer.wait)
        if stopped_by:
            name = {code: number.name for number, code in EXIT_CODES.items()}[stopped_by]
            self.events.write("stop", progress.step, reason=name, exit_code=stopped_by)
        self.events.write("run_end", progress.step, seconds=time.monotonic() - began)
        return RunResult(progress.step, self.metrics, Path(config.output_dir), stopped_by)

    def _speak(self, stack: ExitStack) -> None:
        """Let the first rank say who trains, on what, from where; and write it down."""
        run, world = self.run, self.run.world
        if world.is_first:
            console = Console(run.loader.total_steps, log_file=run.config.sinks.log_file)
            stack.callback(console.close)
            resumed_at = run.progress.step if run.resumed_from else None
            values = json.loads(run.config.model_dump_json())
            sinks = Sinks(
                run.config.sinks,
                run.config.output_dir,
                values,
                resume_step=resumed_at,
                warn=lambda message: console.note(f"warning: {message}"),
            )
            stack.callback(sinks.close)
            self.events.listeners += [console, sinks]
            for line in banner(run):
                console.note(line)
        facts = {"world_size": world.size, "recipe": run.task.name, **run.contract.to_json()}
        self.events.write("run_start", run.progress.step, **facts)
        if run.resumed_from is not None:
            path = str(run.resumed_from.path)
            self.events.write("resume", run.progress.step, path=path)

    def _fetch(self, batches: Iterator[StepBatch]) -> StepBatch | LockstepError | None:
        with self.throughput.waiting():
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
        progress, plan = self.run.progress, self.run.contract.plan
        epochs, into_epoch = divmod(progress.consumed, plan.samples_per_epoch)
        return when.is_due(progress.step, None if into_epoch else epochs)

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

    def _enter_into_ledger(self, batch: StepBatch) -> None:
        for micro_batch in batch.micro_batches:
            if micro_batch.counts:
                self.local_ledger.add(batch.epoch, micro_batch.visited)
                for sample, reason in micro_batch.skipped:
                    self.events.write(
                        "sample_skipped", self.run.progress.step, sample=sample, reason=reason
                    )

    def _sum_ledger(self) -> Ledger:
        """Add every rank's entries to the run's ledger. Collective."""
        run = self.run
        run.progress.ledger = run.progress.ledger.plus(self.local_ledger, run.world.all_sum)
        self.local_ledger = Ledger()
        return run.progress.ledger

    def _log(self) -> None:
        """Write one line of numbers, all reduced over ranks. Collective."""
        self._check_finite()
        assert self.report is not None
        run, progress, plan = self.run, self.run.progress, self.run.contract.plan
        timing = self.throughput.interval()
        # A step is as slow as its slowest rank, and waiting is worth knowing where it is worst.
        local = torch.tensor([[timing["step_time_s"], timing["data_wait_share"]]])
        step_time, wait_share = (float(column.max()) for column in run.world.all_gather(local).T)
        pairs = {name: sums.tolist() for name, sums in progress.interval.items()}
        means = {name: value / weight for name, (value, weight) in pairs.items() if weight}
        progress.interval = {}
        self.events.write(
            "step",
            progress.step,
            loss=means.pop("loss", 0.0),
            parts=means,
            learning_rate=run.optimizer.param_groups[0]["lr"],
            grad_norm=float(self.report.grad_norm),
            epoch=progress.consumed / plan.samples_per_epoch,
            samples=progress.consumed,
            ledger=str(self._sum_ledger()),
            samples_per_second=plan.global_batch / step_time,
            step_time_s=step_time,
            data_wait_share=wait_share,
            local_step_time_s=timing["step_time_s"],
            local_data_wait_share=timing["data_wait_share"],
        )

    def _close_epoch(self) -> None:
        """Say what the epoch consumed, and prove it. Collective."""
        run, progress, plan = self.run, self.run.progress, self.run.contract.plan
        epoch = progress.consumed // plan.samples_per_epoch
        seen = self._sum_ledger()
        expected = Ledger.of_epoch(run.loader.order, plan, epoch - 1)
        loss_sum, weight = progress.epoch["loss"]
        verdict = "each once" if seen == expected else "NOT each once"
        self.events.write(
            "epoch",
            progress.step,
            epoch=epoch,
            loss=float(loss_sum / weight),
            samples=seen.count,
            num_samples=plan.samples_per_epoch,
            each_once=seen == expected,
            message=f"{seen.count} of {plan.samples_per_epoch} samples, {verdict}",
        )
        progress.epoch = {}
        progress.ledger = Ledger()

    def _evaluate(self) -> bool:
        """Evaluate the weights and their first average; say if they are the best. Collective."""
        run, config, model = self.run, self.run.config, bare(self.run.model)
        follow_first(model, run.world)
        step = self.evaluated_step = run.progress.step

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
        self.events.write("evaluation", step, metrics=self.metrics)
        return config.evaluation.save_best and self._is_best()

    def _save(self, is_best: bool = False) -> None:
        """Copy the state of the run to host memory and let the writer store it. Collective."""
        self._check_finite()
        began = time.monotonic()
        run, plan = self.run, self.run.contract.plan
        step = self.saved_step = run.progress.step
        self._sum_ledger()
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
            "config": json.loads(run.config.model_dump_json()),
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
