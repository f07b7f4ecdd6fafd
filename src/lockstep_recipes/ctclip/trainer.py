"""The second entrance: a loop of its own around the spine's parts, launched by Accelerate.

Owns: the order of events in a CT-CLIP run. Does not own: the group (`launch.py`), the
parts (`setup.py`), or any arithmetic: step, data order, schedule and checkpoints are
lockstep's. What must be alike on all ranks is decided from reduced values or by a vote.
"""

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path

import torch

from lockstep.agreement import raise_together, together
from lockstep.data.ledger import Ledger
from lockstep.data.loader import StepBatch
from lockstep.errors import LockstepError, NonFiniteError
from lockstep.evaluation import evaluate
from lockstep.observe.console import Console
from lockstep.observe.events import EventLog
from lockstep.observe.sinks import SinkConfig, Sinks
from lockstep.observe.throughput import Throughput
from lockstep.parallel import bare
from lockstep.schedule import warmup_cosine
from lockstep.signals import EXIT_CODES, StopSignals
from lockstep.step import StepReport, train_step
from lockstep.task import Context
from lockstep.trainer import RunResult
from lockstep_recipes.ctclip.config import CTClipConfig
from lockstep_recipes.ctclip.launch import banner, join
from lockstep_recipes.ctclip.setup import Run, prepare
from lockstep_recipes.ctclip.task import CTClipTask


def run(config: CTClipConfig, task: CTClipTask | None = None) -> RunResult:
    """Train as `config` says, on as many ranks as were launched.

    Goes on from the newest good checkpoint in the run's folder if there is one. SIGTERM
    and Ctrl-C save at the next step, on all ranks alike; a second signal leaves at once.

    Raises:
        LockstepError: the same on every rank, with what is wrong and what to try.
    """
    with ExitStack() as stack:
        accelerator, world = join()
        stack.enter_context(world)
        signals = stack.enter_context(StopSignals())
        parts = prepare(config, task or CTClipTask(config), world, stack)
        return Loop(parts, signals, stack, banner(accelerator, world)).train()


class Loop:
    """Takes a prepared run through its steps."""

    def __init__(
        self, run: Run, signals: StopSignals, stack: ExitStack, launched: list[str]
    ) -> None:
        self.run = run
        self.signals = signals
        self.throughput = Throughput()
        self.metrics: dict[str, float] = {}
        self.local_ledger = Ledger()
        self.report: StepReport | None = None
        self.saved_step = run.progress.step if run.resumed_from else None
        self.events = EventLog(run.config.folder, run.world.rank)
        stack.callback(self.events.close)
        if run.world.is_first:
            self._speak(stack, launched)
        facts = {"world_size": run.world.size, "recipe": run.task.name, **run.contract.to_json()}
        self.events.write("run_start", run.progress.step, **facts)
        if run.resumed_from is not None:
            self.events.write("resume", run.progress.step, path=str(run.resumed_from.path))

    def _speak(self, stack: ExitStack, launched: list[str]) -> None:
        """Say who trains, on what, from where, and let console and sinks follow the events."""
        run, log, total_steps = self.run, self.run.config.logging, self.run.loader.total_steps
        console = Console(total_steps)
        stack.callback(console.close)
        sinks = Sinks(
            SinkConfig(
                wandb=log.use_wandb,
                wandb_project=log.wandb_project,
                wandb_name=run.config.experiment.name,
                curves=log.curves,
            ),
            run.config.folder,
            json.loads(run.config.model_dump_json()),
            resume_step=run.progress.step if run.resumed_from else None,
            warn=lambda message: console.note(f"warning: {message}"),
        )
        stack.callback(sinks.close)
        self.events.listeners += [console, sinks]
        for line in introduction(run, launched):
            console.note(line)

    def train(self) -> RunResult:
        """Run the steps that are left."""
        run, began = self.run, time.monotonic()
        config, progress, plan = run.config, run.progress, run.contract.plan
        training, total_steps = config.training, run.loader.total_steps
        schedule = warmup_cosine(training.warmup_steps, total_steps, training.min_lr_ratio)
        batches = iter(run.loader)
        upcoming = self._fetch(batches)
        stopped_by = 0
        while progress.step < total_steps:
            stopped_by = self._agree(upcoming)
            if stopped_by:
                break
            assert isinstance(upcoming, StepBatch)

            # ---- the step ----
            for group in run.optimizer.param_groups:
                group["lr"] = run.contract.effective_lr * schedule(progress.step)
            self.report = train_step(
                run.task.loss,
                run.model,
                run.optimizer,
                upcoming,
                run.world,
                seed=config.experiment.seed,
                max_grad_norm=training.max_grad_norm,
                autocast=run.autocast,
                scaler=run.scaler,
            )
            progress.take(self.report, upcoming)
            self._enter_into_ledger(upcoming)
            upcoming = self._fetch(batches)  # while the device is still busy
            self.throughput.step_done(plan.global_batch)
            if run.world.device.type == "cpu":  # on a GPU, asking would mean waiting
                self._check_finite()

            # ---- once in a while ----
            at_end = progress.step == total_steps
            if at_end or progress.step % config.logging.log_every_n_steps == 0:
                self._log()
            with self.throughput.pausing():
                if progress.consumed % plan.samples_per_epoch == 0:
                    self._close_epoch()
                is_best = False
                if run.held_out and (at_end or self._due(config.validation.eval_every_n_epochs)):
                    is_best = self._evaluate()
                if at_end or is_best or self._due(training.save_every_n_epochs):
                    self._save(is_best)

        if self.saved_step != progress.step:
            self._save()
        if stopped_by:
            name = {code: number.name for number, code in EXIT_CODES.items()}[stopped_by]
            self.events.write("stop", progress.step, reason=name, exit_code=stopped_by)
        self.events.write("run_end", progress.step, seconds=time.monotonic() - began)
        return RunResult(progress.step, self.metrics, Path(config.folder), stopped_by)

    def _fetch(self, batches: Iterator[StepBatch]) -> StepBatch | LockstepError | None:
        with self.throughput.waiting():
            try:
                return next(batches, None)
            except LockstepError as error:
                return error

    def _agree(self, upcoming: object) -> int:
        """Return the exit code to stop with, or 0; raise on all ranks what one of them met."""
        problem = upcoming if isinstance(upcoming, LockstepError) else None
        stop, failed = self.run.world.all_max(self.signals.exit_code, int(problem is not None))
        if failed:
            if self.saved_step != self.run.progress.step:
                self._save()  # the steps that were good are not lost
            raise_together(self.run.world, problem)
        return stop

    def _due(self, every_epochs: float) -> bool:
        return is_due(self.run.progress.step, every_epochs * self.run.contract.plan.steps_per_epoch)

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
                "a lower training.learning_rate, more warmup_steps, or mixed_precision: 'no'",
            )

    def _enter_into_ledger(self, batch: StepBatch) -> None:
        for micro_batch in batch.micro_batches:
            if micro_batch.counts:
                self.local_ledger.add(batch.epoch, micro_batch.visited)
                for sample, reason in micro_batch.skipped:
                    step = self.run.progress.step
                    self.events.write("sample_skipped", step, sample=sample, reason=reason)

    def _sum_ledger(self) -> Ledger:
        """Add every rank's entries to the run's ledger. Collective."""
        progress, world = self.run.progress, self.run.world
        progress.ledger = progress.ledger.plus(self.local_ledger, world.all_sum)
        self.local_ledger = Ledger()
        return progress.ledger

    def _log(self) -> None:
        """Write one line of numbers, all reduced over ranks. Collective."""
        self._check_finite()
        assert self.report is not None
        run, progress, plan = self.run, self.run.progress, self.run.contract.plan
        timing = self.throughput.interval()
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
        )
        waited = step_time * wait_share
        self._time(step_s=step_time, compute_s=step_time - waited, data_wait_s=waited)

    def _time(self, **seconds: float) -> None:
        if self.run.config.logging.profile_timing:
            self.events.write("timing", self.run.progress.step, **seconds)

    def _close_epoch(self) -> None:
        """Say what the epoch consumed, and prove it. Collective."""
        progress, plan = self.run.progress, self.run.contract.plan
        epoch, seen = progress.consumed // plan.samples_per_epoch, self._sum_ledger()
        each_once = seen == Ledger.of_epoch(self.run.loader.order, plan, epoch - 1)
        loss_sum, weight = progress.epoch["loss"]
        verdict = "each once" if each_once else "NOT each once"
        self.events.write(
            "epoch",
            progress.step,
            epoch=epoch,
            loss=float(loss_sum / weight),
            samples=seen.count,
            num_samples=plan.samples_per_epoch,
            each_once=each_once,
            message=f"{seen.count} of {plan.samples_per_epoch} samples, {verdict}",
        )
        progress.epoch, progress.ledger = {}, Ledger()

    def _evaluate(self) -> bool:
        """Measure held-out volumes, each once; say if the weights are the best. Collective."""
        run, config, world = self.run, self.run.config, self.run.world
        model, step, began = bare(run.model), run.progress.step, time.monotonic()
        seed = config.experiment.seed
        measured = evaluate(
            run.task,
            model,
            run.held_out,
            world,
            batch_size=config.data.batch_size,
            seed=seed,
            step=step,
            loader=run.reading,
            autocast=run.autocast,
        )
        context = Context(world, seed, step, 0, training=False)
        with run.autocast or nullcontext():
            whole = together(
                world, lambda: run.task.finish_evaluation(model, context, str(config.folder))
            )
        self.metrics = measured | whole
        self.events.write("evaluation", step, metrics=self.metrics)
        self._time(evaluation_s=time.monotonic() - began)
        value, best = self.metrics.get(config.checkpoint.best_metric), run.progress.best
        if value is None or (best is not None and value <= best):
            return False
        run.progress.best = value
        return True

    def _save(self, is_best: bool = False) -> None:
        """Store the whole state of the run, from the first rank. Collective."""
        self._check_finite()
        run, step, began = self.run, self.run.progress.step, time.monotonic()
        self.saved_step = step
        self._sum_ledger()
        # Written before the checkpoint can exist: a resume from it must find this in the record.
        self.events.write("checkpoint", step, path=str(run.store.path(step)))

        def save() -> None:
            if run.world.is_first:
                run.store.save(step, run.parts(), run.meta(self.metrics))
                if is_best:
                    run.store.name(step, "best_model.pt")

        together(run.world, save)
        self._time(save_s=time.monotonic() - began)


def introduction(run: Run, launched: list[str]) -> list[str]:
    """Return what a run says of itself before its first step."""
    world, plan, warmup = run.world, run.contract.plan, run.config.training.warmup_steps
    by = world.launcher + (f", {world.backend}" if world.backend else "")
    dtype = str(run.autocast.fast_dtype).removeprefix("torch.") if run.autocast else "no"
    lines = [f"lockstep: ctclip on {world.size} x {world.device.type} (started by {by})"]
    lines += [*launched, f"Mixed precision: {dtype}", *run.contract.describe()]
    lines.append(f"Pairs told apart at a time: {plan.total_batch}")
    lines += [f"passed over {path}: {reason}" for path, reason in run.rejected]
    total_steps = run.loader.total_steps
    if warmup > total_steps:
        lines.append(f"warning: the warm-up of {warmup} steps outlasts the run of {total_steps}")
    if run.progress.step >= total_steps:
        lines.append(f"nothing to do: the run is complete at step {run.progress.step}")
    return lines


def is_due(step: int, every_steps: float) -> bool:
    """Say whether `step` is the first at or past a multiple of `every_steps`.

    >>> [step for step in range(1, 12) if is_due(step, 2.75)]
    [3, 6, 9, 11]
    """
    return step // every_steps > (step - 1) // every_steps
