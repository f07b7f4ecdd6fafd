"""What a run prints and logs: its banner, its log lines, and the count of each epoch's samples.

Owns: the listeners of events, the numbers in events, and the ledger of samples. Does not own:
when to log, which the trainer decides. Every number is reduced over ranks, except those called
`local_`.
"""

import logging
import math
from contextlib import ExitStack
from dataclasses import asdict

import numpy as np
import torch

from lockstep.data.batch import StepBatch
from lockstep.data.fingerprint import READ_S
from lockstep.data.ledger import Ledger
from lockstep.data.order import Ids
from lockstep.data.reader import is_stream
from lockstep.dist.batch_norm import has_batch_norm, synchronises_itself
from lockstep.dist.ddp import own_seconds
from lockstep.dist.environment import is_rehearsal
from lockstep.dist.fsdp import is_sharded
from lockstep.dist.pace import slow_rank
from lockstep.dist.trained import list_names, not_optimized
from lockstep.exact.determinism import changes
from lockstep.observe.console import Console
from lockstep.observe.events import EventLog
from lockstep.observe.sinks import Sinks
from lockstep.observe.throughput import Throughput
from lockstep.run.resume import describe_micro_batches, warnings_of
from lockstep.run.run import Run
from lockstep.schedule import warmup_length
from lockstep.step.report import StepReport

_log = logging.getLogger("lockstep")


class Record:
    """The events of one rank; on the first rank, console and sinks listen to them."""

    def __init__(self, run: Run, stack: ExitStack) -> None:
        self.run = run
        self.throughput = Throughput()
        self.local_ledger = Ledger()
        self._entered: dict[int, list[Ids]] = {}
        """This rank's samples that are not in its ledger yet, by epoch."""
        self._slow: int | None = None
        """The slow rank at the last log line, if any."""
        self.events = EventLog(run.config.output_dir, run.world.rank)
        stack.callback(self.events.close)
        if run.world.is_first:
            self._open_console(stack)
        facts = {"world_size": run.world.size, "recipe": run.task.name, **run.contract.to_json()}
        self.events.write("run_start", run.progress.step, **facts)
        if checkpoint := run.resumed.checkpoint:
            self.events.write("resume", run.progress.step, path=str(checkpoint.path))

    def _open_console(self, stack: ExitStack) -> None:
        """Open console and sinks, and print the banner."""
        run = self.run
        config = self.run.config
        console = Console(run.loader.total_steps, log_file=config.sinks.log_file)
        stack.callback(console.close)
        sinks = Sinks(
            config.sinks,
            config.output_dir,
            {**config.model_dump(mode="json"), "task": run.task.settings()},
            resume_step=run.progress.step if run.resumed.checkpoint else None,
            warn=lambda message: console.note(f"warning: {message}"),
        )
        stack.callback(sinks.close)
        self.events.listeners += [console, sinks]
        for line in banner(run):
            console.note(line)

    def enter(self, batch: StepBatch) -> None:
        """Record this rank's samples of a step; log lost workers and skipped samples."""
        step = self.run.progress.step
        for micro_batch in batch.micro_batches:
            for fault in micro_batch.faults:
                self.events.write("worker_lost", step, **asdict(fault), message=str(fault))
                self._warn_if_not_first(str(fault))
            if not micro_batch.leaf.is_padding:
                self._entered.setdefault(batch.epoch, []).append(micro_batch.visited)
                for sample, reason in micro_batch.skipped:
                    self.events.write("sample_skipped", step, sample=sample, reason=reason)
                    self._warn_if_not_first(f"skipped sample {sample}: {reason}")

    def _warn_if_not_first(self, message: str) -> None:
        """Print a warning of this rank; on the first rank the console prints it."""
        if not self.run.world.is_first:
            _log.warning("rank %d: %s", self.run.world.rank, message)

    def sum_ledger(self) -> Ledger:
        """Add every rank's entries to the run's ledger. Collective."""
        run = self.run
        for epoch, ids in self._entered.items():  # adding many at once is cheap
            self.local_ledger.add(epoch, np.concatenate(ids))
        self._entered = {}
        run.progress.ledger = run.progress.ledger.plus(self.local_ledger, run.world.all_sum)
        self.local_ledger = Ledger()
        return run.progress.ledger

    def log(self, report: StepReport) -> None:
        """Write one line of numbers, all reduced over ranks. Collective."""
        run = self.run
        progress = self.run.progress
        plan = self.run.contract.plan
        progress.sum_pending()  # waits for the device, so that the interval ends here
        timing = self.throughput.interval()
        own = torch.tensor([[*timing.values(), own_seconds(run.model), len(run.logged)]])
        # A step is as slow as its slowest rank, so report the worst rank of each number.
        columns = zip(*run.world.all_gather(own).tolist(), strict=True)
        rates, times, waits, paces, num_logged = columns
        stands_out = max(waits) - min(waits) > 0.1
        slow, ratio = slow_rank(paces) or (None, None)
        is_slow = slow is not None and slow == self._slow  # once may be an accident
        self._slow = slow
        sums = progress.interval.items()
        means = {name: value / weight for name, (value, weight) in sums if weight}
        progress.interval = {}
        self.events.write(
            "step",
            progress.step,
            loss=means.pop("loss", math.nan),  # NaN if every step was skipped
            parts=means,
            **({"logged": self._all_logged()} if max(num_logged) else {}),
            learning_rate=run.optimizer.param_groups[0]["lr"],
            grad_norm=float(report.grad_norm),
            epoch=progress.consumed / plan.samples_per_epoch,
            samples=progress.consumed,
            ledger=str(self.sum_ledger()),
            samples_per_second=min(rates),
            step_time_s=max(times),
            data_wait_share=max(waits),
            data_wait_rank=waits.index(max(waits)) if stands_out else None,
            slow_rank=slow if is_slow else None,
            slow_ratio=ratio if is_slow else None,
            local_step_time_s=timing["step_time_s"],
            local_data_wait_share=timing["data_wait_share"],
        )

    def _all_logged(self) -> dict[str, float]:
        """Return the mean of what callbacks of all ranks logged since the last line. Collective."""
        local = {name: [float(total), num] for name, (total, num) in self.run.logged.items()}
        self.run.logged = {}
        sums: dict[str, list[float]] = {}
        for found in self.run.world.all_values(local):
            for name, (total, num) in found.items():
                before = sums.get(name, [0.0, 0])
                sums[name] = [before[0] + total, before[1] + num]
        return {name: total / num for name, (total, num) in sums.items()}

    def close_epoch(self) -> None:
        """Log the samples of the epoch, and whether each was visited once. Collective."""
        run = self.run
        progress = self.run.progress
        plan = self.run.contract.plan
        epoch = progress.consumed // plan.samples_per_epoch
        seen = self.sum_ledger()
        expected = Ledger.of_epoch(run.loader.order, plan, epoch - 1)
        progress.sum_pending()
        loss_sum, weight = progress.epoch.get("loss", (0.0, 0.0))  # if every step was skipped
        verdict = "each once" if seen == expected else "NOT each once"
        self.events.write(
            "epoch",
            progress.step,
            epoch=epoch,
            loss=loss_sum / weight if weight else math.nan,
            samples=seen.count,
            num_samples=plan.samples_per_epoch,
            each_once=seen == expected,
            message=f"{seen.count} of {plan.samples_per_epoch} samples, {verdict}",
        )
        progress.epoch = {}
        progress.ledger = Ledger()


def banner(run: Run) -> list[str]:
    """Return the lines that a run prints before its first step."""
    world = run.world
    plan = run.contract.plan
    rate = run.config.rate
    total_steps = run.loader.total_steps
    by = world.launcher + (f", {world.backend}" if world.backend else "")
    lines = [f"lockstep: {run.task.name} on {world.size} x {world.device.type} (started by {by})"]
    if is_rehearsal():
        where = run.config.output_dir
        reason = "because LOCKSTEP_REHEARSAL=1 is set"
        lines.append(f"rehearsal: the run ends after {total_steps} steps, in {where}, {reason}")
    lines += [*run.task.banner(world, run.contract), *run.contract.describe()]
    limit = run.config.max_grad_norm
    lines.append(f"Gradient clipping: {'none' if limit is None else f'at norm {limit:g}'}")
    lines += [f"skipped checkpoint {path}: {reason}" for path, reason in run.resumed.rejected]
    lines += [
        f"warning: accepted a change since the checkpoint: {text}" for text in run.resumed.accepted
    ]
    lines += [
        f"warning: the checkpoint holds the state of callback {name}, which this run does not have"
        for name in run.resumed.unclaimed_states
    ]
    lost = not_optimized(run.trained.named, run.optimizer)
    if lost and not run.resumed.pending_optimizer:  # which the run may yet add
        lines.append(
            "warning: these parameters require a gradient, but no parameter group of the optimizer "
            f"has them, so they are not trained: {list_names([*lost])}"
        )
    warmup = warmup_length(run.config.schedule, plan.steps_per_epoch)
    if warmup > total_steps:
        lines.append(f"warning: the warm-up of {warmup} steps outlasts the run of {total_steps}")
    fixed = run.config.batch.global_batch_size or rate.reference_batch
    # A resumed run keeps the rate of the ranks it began on.
    if rate.lr_scaling == "linear" and plan.began_on > 1 and plan.global_batch == fixed:
        lines.append(
            f"warning: linear scaling multiplies the rate by {plan.began_on}, but the effective "
            f"batch is still {plan.global_batch}"
        )
    lines += [
        f"warning: the {name} samples were not compared between ranks: two reads of a sample gave "
        f"different contents, or took longer than {READ_S:g} s"
        for name in run.not_compared
    ]
    if is_stream(run.loader.dataset):
        lines.append(
            "the training data are a stream: it is read in order, and again from the start when it "
            "ends. Every rank reads all of it, and a resume reads it again up to its position"
        )
    if is_sharded(run.model):
        num = sum(map(is_sharded, run.model.modules())) - 1
        blocks = f"{num} blocks gathered in turn" if num else "warning: no block (Task.blocks)"
        lines.append(f"fsdp: parameters sharded over {world.size} ranks, {blocks}")
    is_merged = run.config.sync_batch_norm or run.config.exact or synchronises_itself(run.model)
    if world.size > 1 and has_batch_norm(run.model) and not is_merged:
        lines.append(
            "warning: the running statistics of batch normalisation are the first rank's, so "
            "metrics depend on the number of ranks; set sync_batch_norm=true, or exact=true"
        )
    if run.config.gradients.dtype and world.size > 1:
        lines.append(f"gradients: exchanged in {run.config.gradients.exchange_in}")
    if run.config.exact:
        lines.append(
            f"exact: {', '.join(f'{name} {value}' for name, value in run.numerics.items())}"
        )
    checkpoint = run.resumed.checkpoint
    if checkpoint is not None:
        lines += [f"warning: {text}" for text in warnings_of(checkpoint, run.config)]
        lines += describe_micro_batches(checkpoint, plan, run.model, run.config.exact)
    before = checkpoint.meta.get("numerics", {}) if checkpoint else {}
    if run.config.exact and before and (changed := changes(before, run.numerics)):
        lines.append(f"warning: the bits may differ from here on: {', '.join(changed)}")
    if not run.model.training:
        lines.append("warning: build_model returned the model in evaluation mode; it stays there")
    evaluation_pending = run.progress.evaluation_pending and run.held_out is not None
    if evaluation_pending:
        lines.append(f"evaluating first: the evaluation at step {run.progress.step} is missing")
    elif checkpoint is not None and run.progress.step >= total_steps:
        lines.append(f"nothing to do: the run is complete at step {run.progress.step}")
    return lines
