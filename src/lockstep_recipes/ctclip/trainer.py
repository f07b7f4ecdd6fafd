"""A custom training loop around lockstep's `Trainer`, launched by Accelerate.

Owns: the order of events in a CT-CLIP run, and optional timing of its steps. Does not own:
the process group (`launch.py`), the parts of a run (`lockstep.run.build`), everything
between steps (`lockstep.trainer`), or any arithmetic.
"""

from collections.abc import Callable
from contextlib import ExitStack

from lockstep.dist.agreement import check_same
from lockstep.observe.events import Event, EventLog
from lockstep.result import RunResult
from lockstep.run.build import prepare
from lockstep.schedule import build_schedule
from lockstep.signals import StopSignals
from lockstep.trainer import Trainer
from lockstep_recipes.ctclip.config import CTClipConfig
from lockstep_recipes.ctclip.launch import banner, choose_precision, join
from lockstep_recipes.ctclip.task import CTClipTask


def run(config: CTClipConfig, task: CTClipTask | None = None) -> RunResult:
    """Train as `config` describes, on all launched ranks.

    Resumes from the newest valid checkpoint in the run's folder if there is one. After SIGTERM
    or Ctrl-C, all ranks save at the same next step; a second signal exits at once.

    Raises:
        LockstepError: the same on every rank.
    """
    with ExitStack() as stack:
        asked = config.run_config()
        accelerator, world = join(asked.device, asked.timeout_s)
        stack.enter_context(world)
        signals = stack.enter_context(StopSignals())
        precision = choose_precision(config.training.mixed_precision, world.device)
        task = task or CTClipTask(config)
        run = prepare(task, config.run_config(precision), world, stack)
        check_same("findings", " ".join(task.findings), world)
        precision = {"fp32": "no"}.get(run.config.precision, run.config.precision)
        task.launch_lines = [*banner(accelerator, world), f"Mixed precision: {precision}"]
        trainer = Trainer(run, signals, stack)
        if config.logging.profile_timing:
            trainer.events.listeners.append(timing(trainer.events))
        loader = run.loader
        curve = run.config.schedule
        schedule = build_schedule(curve, loader.plan.steps_per_epoch, loader.total_steps)
        for batch in trainer.steps():
            run.set_rate(schedule(batch.step))
            trainer.step(batch)
        return trainer.finish()


def timing(events: EventLog) -> Callable[[Event], None]:
    """Return a listener that logs the seconds spent on steps, data, evaluations and saves."""

    def listen(event: Event) -> None:
        seconds: dict[str, float] = {}
        if event["event"] == "step":
            step_s = event["step_time_s"]
            waited_s = step_s * event["data_wait_share"]
            seconds = {"step_s": step_s, "compute_s": step_s - waited_s, "data_wait_s": waited_s}
        elif event["event"] == "evaluation":
            seconds = {"evaluation_s": event["local_stall_s"]}
        elif event["event"] == "saving":
            seconds = {"save_s": event["stall_s"]}
        if seconds:
            events.write("timing", event["step"], **seconds)

    return listen
