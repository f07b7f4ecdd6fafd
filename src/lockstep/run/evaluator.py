"""Evaluate a run: its weights, their first average, and `Task.finish_evaluation`.

Owns: the weights to evaluate, the names of metrics, and the best result so far. Does not own: the
pass over the held-out samples (`evaluation.py`), or when to evaluate.
"""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from lockstep.dist.agreement import agree_to_continue, before_each_collective, together
from lockstep.dist.ddp import sync_buffers, unwrap
from lockstep.dist.fsdp import gathered_whole
from lockstep.errors import ConfigError
from lockstep.observe.events import EventLog
from lockstep.randomness import seed_everything
from lockstep.run.evaluation import as_numbers, can_agree, evaluate
from lockstep.run.run import Run
from lockstep.task import Context, Task


class Evaluator:
    """Evaluates a run.

    Args:
        run: The run to evaluate.
        events: The log that results are written to.
        stop_code: Returns the exit code of a stop signal that this rank has received, or 0.
    """

    def __init__(self, run: Run, events: EventLog, stop_code: Callable[[], int]) -> None:
        self.run = run
        self.events = events
        self.stop_code = stop_code
        resumed = run.resumed.checkpoint
        self.metrics: dict[str, float] = dict(resumed.meta.get("metrics", {})) if resumed else {}
        """The metrics of the last evaluation."""
        self.step = run.progress.step if self.metrics else None
        """The step of the last evaluation."""
        self.best_step: int | None = None
        """The step of the last evaluation of this process that was the best so far."""

    def evaluate(self) -> None:
        """Evaluate the current weights, and note whether they are the best so far. Collective.

        A checkpoint saved before this is done records that the evaluation is missing.

        Raises:
            StopRequested: on all ranks, because one of them was asked to stop.
        """
        run = self.run
        run.progress.evaluation_pending = True
        with run.world.phase("evaluate"):
            self.metrics = self._measure()
        self.step = run.progress.step
        is_best = together(run.world, self._is_best, every_exception=True)
        run.progress.evaluation_pending = False
        if run.world.all_max(int(is_best))[0]:
            self.best_step = self.step

    def _measure(self) -> dict[str, float]:
        """Return the metrics of the weights and of their first average. Collective."""
        run = self.run
        averages = run.config.averages
        began = time.monotonic()
        sync_buffers(unwrap(run.model), run.world)
        metrics = self._pass_over_held_out()
        if averages:
            with run.averages.applied(averages[0]):
                measured = self._pass_over_held_out()
                metrics |= {f"ema_{name}": value for name, value in measured.items()}
                metrics |= self._finish()
        else:
            metrics |= self._finish()
        stall_s = time.monotonic() - began
        self.events.write("evaluation", run.progress.step, metrics=metrics, local_stall_s=stall_s)
        return metrics

    def _pass_over_held_out(self) -> dict[str, float]:
        run = self.run
        config = self.run.config
        return evaluate(
            run.task,
            unwrap(run.model),
            run.held_out,
            run.world,
            batch_size=config.evaluation.batch_size or run.contract.plan.batch_size,
            seed=config.seed,
            step=run.progress.step,
            loader=config.loader,
            autocast=run.autocast,
            stop_code=self.stop_code,
        )

    def _finish(self) -> dict[str, float]:
        """Return the metrics of `Task.finish_evaluation`, and log its pictures. Collective."""
        run = self.run
        model = unwrap(self.run.model)
        step = run.progress.step
        folder = run.config.output_dir
        context = Context(
            run.world, run.config.seed, step, 0, training=False, stop_code=self.stop_code
        )
        is_default = type(run.task).finish_evaluation is Task.finish_evaluation
        if not is_default:
            context.raise_if_stopping()
        agrees = can_agree(model, run.world)
        seed_everything(run.world.device, run.config.seed, "finish_evaluation", step)

        def call_task() -> dict[str, float]:
            vote = before_each_collective(run.world, lambda: agree_to_continue(run.world))
            with vote if agrees else nullcontext():
                results = run.task.finish_evaluation(model, context, folder)
            for name, value in results.items():
                if isinstance(value, Path):
                    self.events.write("picture", step, name=name, path=str(value))
            return as_numbers({n: v for n, v in results.items() if not isinstance(v, Path)})

        stays_sharded = run.task.calls_model_equally or is_default
        with run.autocast or nullcontext(), gathered_whole(model, unless=stays_sharded):
            return together(run.world, call_task, every_exception=agrees)

    def _is_best(self) -> bool:
        """Return whether the metrics are the best so far, and remember the best one.

        The first rank decides, because a task's metrics may differ between ranks. So `best` is
        up to date on that rank only.
        """
        progress = self.run.progress
        evaluation = self.run.config.evaluation
        if not (evaluation.save_best and self.run.world.is_first):
            return False
        value = self.metrics.get(evaluation.best_metric)
        if value is None:
            raise ConfigError(
                f"evaluation.best_metric={evaluation.best_metric!r} is not measured",
                f"set it to one of {', '.join(self.metrics)}"
                if self.metrics
                else "return metrics from the task",
            )
        sign = 1 if evaluation.best_is == "lowest" else -1
        best = math.inf if progress.best is None else sign * progress.best
        if not (math.isfinite(value) and sign * value < best):
            return False
        progress.best = value
        return True
