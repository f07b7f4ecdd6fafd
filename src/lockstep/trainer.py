"""The loop: step; then log, evaluate, save when due; stop cleanly.

Owns: the order of a run, from the launch to the exit code. Does not own: any arithmetic; it calls
the parts. All ranks must make the same decisions, so the trainer decides from reduced values or
by `World.all_max`, never on one rank alone.
"""

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import NoReturn

from lockstep.callback import Callback
from lockstep.config import Cadence, RunConfig
from lockstep.data.batch import StepBatch
from lockstep.dist import position
from lockstep.dist.agreement import (
    SAME_STATE,
    agree_to_continue,
    call_together,
    check_same,
    first_of_ranks,
    is_shared,
    raise_together,
    state_difference,
)
from lockstep.dist.buffer_places import BufferChanges
from lockstep.dist.ddp import unwrap
from lockstep.dist.fsdp import raise_if_out_of_reach
from lockstep.dist.same_state import check_same_weights
from lockstep.dist.training_buffers import TrainingBuffers
from lockstep.errors import (
    EXIT_DELAY_S,
    CheckpointError,
    ConfigError,
    LockstepError,
    OtherRankError,
    OutOfMemoryError,
    StopRequested,
    TrainedParametersError,
    own_exit_code,
)
from lockstep.exact.determinism import raise_if_not_deterministic
from lockstep.result import RunResult
from lockstep.run.build import prepare
from lockstep.run.early_exit import refuse_early_exit
from lockstep.run.evaluator import Evaluator
from lockstep.run.halving import halve
from lockstep.run.next_batch import NextBatch
from lockstep.run.record import Record
from lockstep.run.run import Run
from lockstep.run.saver import Saver
from lockstep.run.skipped_steps import SkippedSteps, is_finite
from lockstep.schedule import build_schedule
from lockstep.signals import (
    EXIT_CODES,
    EXIT_NOT_SAVED,
    StopSignals,
    note_exit_code,
)
from lockstep.step.report import StepReport
from lockstep.task import Task
from lockstep.world import World

SAME_SETTINGS = "set the same run.config and run.held_out on every rank"
ERROR_TIMEOUT_S = 10.0
"""How long a rank with an error in a step waits for the others to report one too."""


@dataclass
class Votes:
    """What a rank has to say between two steps, or all ranks together."""

    stop_code: int
    """The exit code to stop with, or 0."""
    has_failed: bool
    trained_changed: bool
    has_new_buffers: bool
    wants_to_stop: bool
    """Whether a callback asked the run to stop."""
    stops_unsaved: bool
    """Whether it asked to stop without a last checkpoint."""
    save_has_failed: bool
    save_is_busy: bool

    def of_all_ranks(self, world: World) -> "Votes":
        """Return the largest value of each field over all ranks. Collective."""
        names = list(vars(self))
        highest = world.all_max(*(int(getattr(self, name)) for name in names))
        kinds = (type(getattr(self, name)) for name in names)
        return Votes(**{n: kind(v) for n, kind, v in zip(names, kinds, highest, strict=True)})


def fit(task: Task, config: RunConfig, callbacks: Sequence[Callback] = ()) -> RunResult:
    """Train `task` as `config` says, on as many ranks as were launched.

    Resumes from the newest valid checkpoint in `config.output_dir` if there is one. On SIGTERM
    or Ctrl-C all ranks save after the current step, or before the next batch of an evaluation,
    and stop. A second signal ends the process at once, without saving.

    Raises:
        LockstepError: the same on every rank, with the problem and a remedy.
    """
    with own_exit_code(), ExitStack() as stack:
        world = World.enter(config.device, config.timeout_s)
        stack.push(world.keep_group)
        signals = stack.enter_context(StopSignals())
        run = prepare(task, config, world, stack, callbacks)
        trainer = Trainer(run, signals, stack)
        trainer.agrees_every_step = False  # no other code runs between two steps
        plan = run.loader.plan
        total_steps = run.loader.total_steps
        schedule = build_schedule(run.config.schedule, plan.steps_per_epoch, total_steps)
        for batch in trainer.steps():
            run.set_rate(schedule(batch.step))
            trainer.step(batch)
        return trainer.finish()


class Trainer:
    """Runs a prepared run; the caller takes the steps.

    Loop over `trainer.steps()`. For each batch call `trainer.step(batch)`, or take your own step
    and call `trainer.record_step(report, batch)`. After the loop call `trainer.finish()`. `fit` is
    such a loop; docs/own_loop.md shows another.

    Args:
        run: From `prepare`.
        signals: Already entered.
        stack: Closes the trainer's files and threads.
    """

    def __init__(self, run: Run, signals: StopSignals, stack: ExitStack) -> None:
        self.run = run
        self.signals = signals
        # Pushed first, so that it runs after the last save is closed and knows what was saved.
        refuse_early_exit(stack, run.world, self._lost_by_exit)
        self.record = Record(run, stack)
        self.events = self.record.events
        self.saver = Saver(run, self.record, stack)
        self.evaluator = Evaluator(run, self.events, lambda: signals.exit_code)
        self.buffer_changes = BufferChanges(unwrap(run.model))
        self.skipped_steps = SkippedSteps(run, self.events, self.buffer_changes)
        self.buffers = TrainingBuffers(self.buffer_changes, run.world)
        self.report: StepReport | None = None
        self.stopped_by = 0
        """The exit code of the signal that ended the steps early."""
        self.stop_reason = ""
        """Why a callback ended the steps early."""
        self.stops_unsaved = False
        """Whether that callback asked for no last checkpoint."""
        self.agrees_every_step = True
        """Whether ranks agree before every step, as they must if code between two steps may change
        something they share. Otherwise, and if callbacks have no part in the steps, they do so
        only where a vote within the step before asks for it, and around evaluations and saves."""
        self.has_finished = False
        """Whether everything is saved and nothing is left to do."""
        self._announced_step = self.saver.saved_step
        """The newest checkpoint that callbacks were called for."""
        self._late_evaluation_step: int | None = None
        """The step of a checkpoint that lacked its evaluation, which this run has made up for."""
        self._next_batch = NextBatch(run.loader, self.record.throughput, signals)
        self._agrees_next = True
        """Whether ranks must agree before the next step."""
        self._num_new = 0
        """The number of samples in the last step."""
        self._repeats_step = False
        """Whether to repeat the current step with smaller micro-batches."""
        self._num_replications = 0
        """How often the model was replicated again during the current step."""
        self._began = time.monotonic()
        self._step_began = self._began
        signals.unsaved = self._unsaved
        signals.is_quiet = not run.world.is_first
        position.this_rank.reach(run.progress.step)
        stack.push(self._add_place)
        stack.push(self._save_good_steps)

    def steps(self) -> Iterator[StepBatch]:
        """Yield the batches of the remaining steps; log, evaluate and save between them.

        Ends early on all ranks if one of them was asked to stop: after the step, or before the
        next batch of an evaluation. A resume then repeats the evaluation. Collective.

        Raises:
            LockstepError: on all ranks, if one of them raised it. Finished steps are saved first.
            Exception: raised by the task in an evaluation, on that rank; the others raise an
                OtherRankError. Finished steps are saved first, except with a sharded model.
        """
        run = self.run
        progress = self.run.progress
        self._call("on_run_start")
        if run.callbacks.overrides("on_run_start"):  # which may have failed, or set something
            self._agree()
            check_same("settings", self._settings(), run.world, SAME_SETTINGS)
        if not self._evaluate_late():
            return
        self._next_batch.seek()
        while progress.step < run.loader.total_steps:
            if not self._agrees_next:
                self.buffers.synchronise()
            elif (stop_code := self._agree(self._next_batch.error)) or self.stop_reason:
                self.stopped_by = stop_code
                return
            batch = self._next_batch.take()
            self._repeats_step = False
            self._agrees_next = True
            self._step_began = time.monotonic()
            self.buffer_changes.begin_step()
            self.skipped_steps.buffers.keep(run.non_finite)
            self._call("on_step_start", batch)
            if run.callbacks.overrides("on_step_start"):  # which may have failed, half-way
                self._agree()
                self.buffer_changes.mark()  # what they wrote is theirs, not the step's
                self.skipped_steps.buffers.keep(run.non_finite)
            yield batch
            if self._repeats_step:
                self._next_batch.seek()
                continue
            if progress.step != batch.step + 1:
                raise RuntimeError(
                    "the last batch of trainer.steps() was not recorded exactly once: call "
                    "trainer.step(batch) or trainer.record_step(report, batch) once for each batch"
                )
            self._next_batch.read()  # while the device is still busy
            self.record.throughput.step_done(self._num_new)
            self._log_evaluate_save()
            if self.stopped_by:
                return

    def step(self, batch: StepBatch) -> None:
        """Take a step with the run's own loss and settings, and count it. Collective.

        A step that does not fit in memory is repeated with micro-batches of half the size. If
        `requires_grad` of a parameter changed in the step, the model is replicated again and the
        step repeated.
        """
        run = self.run
        run.uses_task_loss = True
        too_large = ""
        try:
            report = self._train(batch)
        except OutOfMemoryError as error:
            too_large = error.problem
        except TrainedParametersError:
            if run.world.size > 1 and not run.agrees_on_memory:  # maybe on this rank only
                raise
        else:
            self._num_replications = 0
            self.record_step(report, batch)
            return
        # Outside the handlers: the exception keeps the tensors and the old replica alive.
        self._drop_step()
        failure: LockstepError | None = None
        try:
            if too_large:
                halve(run, too_large, self.events)
                self._repeats_step = True
            else:
                self._replicate_for_trained()
        except LockstepError as error:
            failure = error
        if failure:
            self._agree(failure)  # saves the steps before, then raises
        if not self._repeats_step:
            self.step(batch)

    def _train(self, batch: StepBatch) -> StepReport:
        take_step = self.run.take_step
        assert take_step is not None  # `prepare` has replicated the model
        self.run.non_finite = take_step.non_finite
        if self._agrees_within_steps:
            take_step.look_ahead = self._look_ahead
        try:
            report = take_step(batch)
        except RuntimeError as error:
            raise_if_not_deterministic(error)
            raise_if_out_of_reach(error)
            raise
        self._agrees_next = not self._next_batch.is_read or take_step.votes.needs_attention
        return report

    @property
    def _agrees_within_steps(self) -> bool:
        """Whether the votes of a step say if ranks must agree before the next one."""
        overrides = self.run.callbacks.overrides
        has_part = overrides("on_step_start") or overrides("on_step_end")
        return not (self.agrees_every_step or has_part)

    def _look_ahead(self) -> bool:
        """Read the next batch, between the passes of a step and its votes.

        Returns:
            Whether this rank has something that all must agree on before the next step.
        """
        self.buffer_changes.end_step()
        self._next_batch.read()
        votes = self._own_votes(self._problem(self._next_batch.error))
        votes.save_is_busy = self.saver.is_ready or self._is_checkpoint_new
        return any(vars(votes).values())

    def _replicate_for_trained(self) -> None:
        """Replicate the model again in this step, for its new trained parameters. Collective."""
        self._num_replications += 1
        if self._num_replications > 1:
            raise ConfigError(
                "requires_grad changes each time the loss is computed",
                "change it once, depending on context.step",
            )
        self._update_trained()

    def record_step(self, report: StepReport, batch: StepBatch) -> None:
        """Count a finished step; on a GPU nothing here waits for it. Collective."""
        run = self.run
        before = self.run.progress.consumed
        if not self._next_batch.is_read:
            self.buffer_changes.end_step()
        if self.report is None:
            self._check_first_step(report)
        self.report = report
        if run.non_finite is None and not is_finite(report, run):
            self.saver.finish_save()
            numbers = report.loss, report.grad_norm, report.weight
            self.skipped_steps.add(batch.step, *map(float, numbers))
            run.progress.count(None, batch)
        else:
            run.progress.count(report, batch)
            run.averages.update(run.progress.step)
        self._num_new = run.progress.consumed - before
        position.this_rank.reach(run.progress.step)
        self.record.enter(batch)
        self._call("on_step_end", batch, report)

    def _check_first_step(self, report: StepReport) -> None:
        """Refuse differences between ranks now: the first save may be hours away. Collective."""
        run = self.run
        if run.exact_reducer:
            run.exact_reducer.raise_if_unused()
        check_same("parts of the loss", " ".join(report.names), run.world)
        state = call_together(run.world, run.task_state)
        if difference := state_difference(state, run.world):
            raise ConfigError(f"Task.state() differs between ranks: {difference}", SAME_STATE)
        check_same_weights({"": unwrap(run.model)}, {"": run.optimizer}, run.world)
        if run.config.compile:
            seconds = time.monotonic() - self._step_began
            self.events.write("compiled", run.progress.step, local_seconds=seconds)

    def finish(self) -> RunResult:
        """Save the last steps, unless a callback asked not to, and report how the run ended.

        Collective.

        Raises:
            CheckpointError: on all ranks, if the save failed.
        """
        step = self.run.progress.step
        try:
            self.saver.finish_save()
            self.saver.is_last = True
            if self._has_unsaved_steps and not self.stops_unsaved:
                self._save()
            self.saver.finish_save()
        except CheckpointError as error:
            if self.stopped_by:
                error.exit_code = EXIT_NOT_SAVED
            raise
        self._announce_checkpoint()
        self.has_finished = True
        if self.stop_reason:
            self.events.write("stop", step, reason=self.stop_reason, exit_code=0)
        if self.stopped_by:
            name = {code: number.name for number, code in EXIT_CODES.items()}[self.stopped_by]
            self.events.write("stop", step, reason=name, exit_code=self.stopped_by)
        self.events.write("run_end", step, seconds=time.monotonic() - self._began)
        position.this_rank.finish_run()
        note_exit_code(self.stopped_by)
        folder = Path(self.run.config.output_dir)
        metrics = self.evaluator.metrics
        result = RunResult(step, metrics, folder, self.stopped_by, self.stop_reason)
        self._call("on_run_end", result)
        if self.run.callbacks:
            agree_to_continue(self.run.world, self.run.callbacks.error)
        return result

    def _settings(self) -> str:
        """Return, as text, what a callback may set before the first step."""
        num_held_out = 0 if self.run.held_out is None else len(self.run.held_out)
        settings = self.run.config.model_dump_json(exclude={"output_dir"})
        return f"{settings}, {num_held_out} samples held out"

    def _call(self, method: str, *args: object) -> None:
        """Call a method of every callback; the next `_agree` raises its error on all ranks."""
        self.run.callbacks.call(method, self.run, *args)

    @property
    def _is_checkpoint_new(self) -> bool:
        """Whether callbacks have not been called for the newest checkpoint yet."""
        is_known = self.saver.saved_step in (None, self._announced_step)
        return bool(self.run.callbacks) and not is_known

    def _announce_checkpoint(self) -> None:
        """Call callbacks for a checkpoint that is now complete on every rank. Collective."""
        if not self._is_checkpoint_new:
            return
        self.saver.finish_save()
        if self.saver.saved_step is not None:  # None if the save failed
            self._announced_step = self.saver.saved_step
            self._call("on_checkpoint_saved", self.run.store.path(self._announced_step))

    def _log_evaluate_save(self) -> None:
        """Log, end the epoch, evaluate and save, each if due. Collective."""
        run = self.run
        config = self.run.config
        progress = self.run.progress
        at_end = progress.step == run.loader.total_steps
        if at_end or progress.step % config.log_every == 0:
            self._check_finite()
            assert self.report is not None
            self.record.log(self.report)
        closes = progress.consumed % run.contract.plan.samples_per_epoch == 0
        evaluates = run.held_out is not None and (at_end or self._is_due(config.evaluation))
        saves = at_end or self._is_due(config.checkpoint)
        if not (closes or evaluates or saves):
            return
        self._agrees_next = True
        progress.sum_pending()  # waits for the GPU, which counts as training time
        self._check_finite()
        with self.record.throughput.pausing():
            if closes:
                self.record.close_epoch()
            if run.callbacks:
                progress.evaluation_pending = evaluates  # if a callback has failed
                self._agree()
                if self.stops_unsaved:
                    return
            if evaluates:
                self._evaluate()
            is_best = self.evaluator.best_step == progress.step
            if (saves or is_best) and not self.stopped_by:  # if stopped, `finish` saves
                self._agree()  # on the trained parameters, which the checkpoint lists
                if not self.stops_unsaved:
                    self._save()

    def _problem(self, error: Exception | None) -> Exception | None:
        """Return the error of this rank that ends the run: the given one, or a callback's."""
        return error if error is not None else self.run.callbacks.error

    def _own_votes(self, problem: Exception | None) -> Votes:
        """Return what this rank has to say between two steps."""
        run = self.run
        return Votes(
            stop_code=self.signals.exit_code,
            has_failed=problem is not None,
            trained_changed=run.trained.have_changed,
            has_new_buffers=self.buffers.has_news,
            wants_to_stop=bool(run.stop_reason),
            stops_unsaved=run.stops_unsaved,
            save_has_failed=self.saver.writer.has_failed,
            save_is_busy=self.saver.writer.is_busy,
        )

    def _agree(self, error: Exception | None = None) -> int:
        """Let all ranks vote between two steps, and do what the votes ask for. Collective.

        Args:
            error: That of this rank, if it has one that is not a callback's.

        Returns:
            The exit code to stop with, or 0.

        Raises:
            Exception: on all ranks, if one of them has an error. Finished steps are saved first.
        """
        problem = self._problem(error)
        votes = self._own_votes(problem).of_all_ranks(self.run.world)
        if votes.has_new_buffers:
            self.buffers.agree()
        self.buffers.synchronise()
        self._finish_save(votes)
        self._take_stop_request(votes)
        if votes.has_failed:
            self._save_and_raise(problem)
        if votes.trained_changed:
            self._train_changed_parameters()
        return votes.stop_code

    def _finish_save(self, votes: Votes) -> None:
        """Finish a save that is complete or has failed, and announce its checkpoint. Collective."""
        self.saver.run_has_failed = votes.has_failed
        self.saver.finish_save_if_ready(votes.save_has_failed, votes.save_is_busy)
        if not votes.save_is_busy:
            self._announce_checkpoint()

    def _take_stop_request(self, votes: Votes) -> None:
        """Stop if a callback of any rank asked for it, with the first reason given. Collective."""
        if votes.wants_to_stop:
            self.stop_reason = first_of_ranks(self.run.stop_reason, self.run.world)
            self.stops_unsaved = votes.stops_unsaved

    def _train_changed_parameters(self) -> None:
        """Train the parameters that now require a gradient, or save and raise. Collective."""
        try:
            self._update_trained()
        except LockstepError as error:
            problem = error
        else:
            return
        self._save_and_raise(problem)

    def _save_and_raise(self, problem: Exception | None) -> NoReturn:
        """Save the finished steps, then raise the error on all ranks. Collective."""
        self.saver.run_has_failed = True
        if self._has_unsaved_steps:
            self._save()
        self.saver.finish_save()
        if isinstance(problem, OtherRankError):
            time.sleep(EXIT_DELAY_S)  # only the other rank has the traceback
        raise_together(self.run.world, problem)

    def _update_trained(self) -> None:
        """Train the parameters that now require a gradient, and log the change. Collective."""
        changes = self.run.update_trained()
        self.events.write("trained_parameters", self.run.progress.step, message=changes)

    def _is_due(self, when: Cadence) -> bool:
        progress = self.run.progress
        per_epoch = self.run.contract.plan.samples_per_epoch
        epochs = Fraction(progress.consumed, per_epoch) if when.every_epochs else None
        return when.is_due(progress.step, epochs, Fraction(self._num_new, per_epoch))

    def _evaluate_late(self) -> bool:
        """Make the evaluation that the checkpoint lacks; return whether to continue. Collective."""
        if not self.run.progress.evaluation_pending or self.run.held_out is None:
            return True
        self._evaluate()
        if self.stopped_by:
            return False
        self._late_evaluation_step = self.run.progress.step
        self._save()
        return True

    def _evaluate(self) -> None:
        """Evaluate, and call callbacks with the metrics. Collective.

        If a rank is asked to stop meanwhile, all ranks set `stopped_by` and drop the results. If
        the evaluation fails, the steps are saved before the error is raised. In both cases the
        next run starts with this evaluation.
        """
        try:
            self.evaluator.evaluate()
        except (StopRequested, KeyboardInterrupt) as request:
            if isinstance(request, KeyboardInterrupt) and self.run.world.size > 1:
                raise  # the other ranks were not interrupted, and wait
            interrupted = EXIT_CODES[signal.SIGINT]
            self.stopped_by = getattr(request, "exit_code", interrupted)
            self.events.write("evaluation_interrupted", self.run.progress.step)
            return
        except Exception as error:
            if isinstance(error, LockstepError) or is_shared(error):
                self._agree(error)
            raise
        self._call("on_evaluation_end", self.evaluator.metrics)

    def _save(self) -> None:
        """Save the run, with the metrics of an evaluation at this step. Collective."""
        self._announce_checkpoint()
        self._check_finite()
        step = self.run.progress.step
        metrics = self.evaluator.metrics if self.evaluator.step == step else {}
        is_best = self.evaluator.best_step == step
        with self.run.world.phase("save"):
            self.saver.save(metrics, is_best, replace=self._late_evaluation_step == step)

    def _check_finite(self) -> None:
        """Raise on all ranks if a step since the last check was non-finite. Collective."""
        non_finite = None if self.run.non_finite is None else self.run.progress.sum_pending()
        if non_finite:
            self.saver.finish_save()
            self.skipped_steps.add(*non_finite)

    @property
    def _has_unsaved_steps(self) -> bool:
        """Whether there are steps without a checkpoint.

        A checkpoint of step 0 would save nothing, and refuse the next start if the user corrects
        settings or data.
        """
        return self.run.progress.step not in (0, self.saver.saved_step)

    def _unsaved(self) -> str:
        """Describe what a run that ended now would lose; "" if everything is saved.

        The signal thread calls this, so it only reads numbers.
        """
        step = self.run.progress.step
        saved = self.saver.committed_step
        if self.has_finished or step == saved:
            return ""
        if saved is None:
            return f"there is no checkpoint yet, and the run, at step {step}, will start over"
        return f"the steps since checkpoint step {saved} will be repeated (the run was at {step})"

    def _lost_by_exit(self) -> str:
        """Describe what an exit now loses; only the first rank knows every checkpoint."""
        lost = self.signals.unsaved()
        if not lost or self.run.world.is_first:
            return lost
        step = self.run.progress.step
        return f"the steps since the newest checkpoint will be repeated (the run was at {step})"

    def _save_good_steps(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Save the finished steps if a step fails before it changes a weight.

        Such an error may leave a custom loop without returning to `steps`. Collective if all
        ranks have an error; a rank that fails alone does not save.
        """
        step = self.run.progress.step
        if error is None or not getattr(error, "is_before_update", False):
            return
        if not self._has_unsaved_steps:
            return
        place = f"failed after step {step} of run {position.this_rank.num_runs}"
        if is_shared(error) or self.run.world.all_reach(place, ERROR_TIMEOUT_S):
            self._drop_step()
            self.saver.run_has_failed = True
            try:
                self._save()
                self.saver.finish_save()
            except LockstepError as lost:  # must not hide the first error
                self.events.write("warning", step, message=f"NOT SAVED: {lost.problem}")

    def _drop_step(self) -> None:
        """Undo what the forward passes of a failed step did to buffers."""
        self.skipped_steps.buffers.restore()
        if self.run.exact_reducer:
            self.run.exact_reducer.drop_step()

    def _add_place(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Add the rank and the step to an exception that ends the run."""
        position.this_rank.leave_run()
        if error is not None:
            error.add_note(f"on rank {self.run.world.rank}, after step {self.run.progress.step}")
