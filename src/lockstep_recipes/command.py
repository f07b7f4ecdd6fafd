"""Flags, run configuration and exit codes that all recipes share.

Owns: the way from `sys.argv` to an exit code; the flags every recipe has, and their
translation to a `RunConfig`; how a run shrinks to a rehearsal. Does not own: the task;
each recipe's `flags.py` adds its own flags under its own names.
"""

import argparse
import io
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from lockstep.config import RunConfig
from lockstep.dist.environment import launched_rank, leave_process
from lockstep.errors import EXIT_DELAY_S, ConfigError, LockstepError, closest, plain, shown
from lockstep.parse import Model, parse_model
from lockstep.result import RunResult
from lockstep.task import Task
from lockstep.text_input import whole_number
from lockstep.trainer import fit
from lockstep_recipes.settings import merged

Build = Callable[[Sequence[str]], tuple[Task, RunConfig] | Callable[[], RunResult]]
"""From the command line to `fit`'s arguments; a recipe with its own loop returns a function."""

EXIT_CODES = """exit codes: 0 finished; 2 wrong settings or unusable data (completed steps are
saved); 3 non-finite loss or gradient; 130, 143, 138, 129, 131 stopped and saved after
Ctrl-C, SIGTERM, SIGUSR1, SIGHUP, SIGQUIT; 5 stopped without saving; 1 any other error"""

REHEARSAL_STEPS = 4


class Flags(argparse.ArgumentParser):
    """A parser that refuses unknown flags and suggests the nearest known one.

    `--batch-size` and `--batch_size` are the same flag, for every flag.
    """

    def __init__(self, recipe: str, description: str, example: str) -> None:
        super().__init__(
            prog=f"lockstep run {recipe}",
            description=description,
            epilog=f"example: {example}\n\n{EXIT_CODES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def add_argument(self, *names: Any, **settings: Any) -> argparse.Action:
        """Add a flag; its help ends with its default."""
        action = super().add_argument(*names, **settings)
        value = action.default
        if value is not False and value not in (None, [], argparse.SUPPRESS):
            words = " ".join(map(str, value)) if isinstance(value, list) else str(value)
            default = words.replace("%", "%%")
            text = f"default: {default}"
            action.help = f"{action.help} ({text})" if action.help else text
        return action

    def add_run_flags(
        self,
        *,
        epochs: int,
        warmup_epochs: float,
        weight_decay: float,
        lr_scaling: str = "none",
        save_interval: int = 10,
    ) -> None:
        """Add the flags that every recipe has; `run_config` reads them back."""
        add = self.add_argument
        add("--epochs", type=int, default=epochs, help="passes over the training data")
        add("--max_steps", type=int, help="stop after this many weight updates")
        accumulated = "micro-batches per weight update"
        add("--gradient_accumulation_steps", type=int, default=1, help=accumulated)
        rules = ["none", "linear", "sqrt", "batch"]
        scaling = "how to scale the learning rate with the number of GPUs or the batch size"
        add("--lr_scaling", choices=rules, default=lr_scaling, help=scaling)
        rise = "epochs of linear learning-rate warm-up"
        add("--warmup_epochs", type=float, default=warmup_epochs, help=rise)
        decay = "weight decay of the optimizer"
        add("--weight_decay", type=float, default=weight_decay, help=decay)
        add(
            "--save_interval",
            type=int,
            default=save_interval,
            help="epochs between named checkpoints",
        )
        add("--eval_interval", type=int, default=1, help="epochs between evaluations")
        add("--log_interval", type=int, default=10, help="steps between log lines")
        add("--resume", default="auto", help="auto, never, discard, or a path")
        changed = "resume even if batch size, learning rate or data changed"
        add("--accept_changes", action="store_true", help=changed)
        add("--exact", action="store_true", help="the same bits on any number of GPUs")
        shards = "ddp replicates the model, fsdp shards it across GPUs"
        add("--parallel", choices=["ddp", "fsdp"], default="ddp", help=shards)
        device = "auto uses GPUs if there are any"
        add("--device", choices=["auto", "cpu", "cuda"], default="auto", help=device)
        add("--seed", type=int, default=0, help="seed of every random number")
        setting = "override any setting of the run"
        add("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help=setting)
        add(
            "--local_rank", type=int, help="accepted and ignored; the launcher's environment counts"
        )

    def add_watch_flags(self, wandb_project: str) -> None:
        """Add the flags of W&B and TensorBoard; `watch_values` reads them back."""
        add = self.add_argument
        add("--use_wandb", action="store_true", help="log to Weights & Biases")
        add("--wandb_project", default=wandb_project, help="W&B project")
        add("--wandb_name", help="name of the run in W&B")
        add("--tensorboard", action="store_true", help="write TensorBoard files")

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse `argv`.

        Raises:
            ConfigError: for an unknown flag or a value that does not fit.
        """
        known, unknown = self.parse_known_args([_underscored(word) for word in argv])
        if unknown:
            flag = unknown[0].split("=")[0]
            near = closest(flag, self._option_string_actions)
            raise ConfigError(
                f"unknown argument {plain(flag)}",
                f"use {near}" if near else "read the list of flags in --help",
            )
        return known

    def error(self, message: str) -> NoReturn:
        """Raise argparse's own errors as ConfigError."""
        raise ConfigError(message, "read the list of flags and their values in --help")


def sample_count(text: str) -> int:
    """Read a number of samples that can be generated in reasonable time."""
    number = whole_number(text, most=10**7)
    if not number:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a number from 1 to 10,000,000")
    return number


def _underscored(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def run_config(args: argparse.Namespace, **own: Any) -> RunConfig:
    """Return the run that the shared flags describe, overridden by the recipe's own values.

    Four flags have different names in different recipes; their `dest` is always `batch_size`,
    `lr`, `num_workers` and `on_bad_sample`. `output_dir` must be set before the call.
    """
    values = {
        "output_dir": args.output_dir,
        "seed": args.seed,
        "epochs": args.epochs,
        "max_steps": args.max_steps,
        "batch": {"batch_size": args.batch_size, "accumulate": args.gradient_accumulation_steps},
        "rate": {"lr": args.lr, "lr_scaling": args.lr_scaling},
        "schedule": {"warmup_epochs": args.warmup_epochs},
        "loader": {"num_workers": args.num_workers, "on_bad_sample": args.on_bad_sample},
        "evaluation": {"every_epochs": args.eval_interval},
        "checkpoint": {"every_epochs": args.save_interval},
        "exact": args.exact,
        "parallel": args.parallel,
        "device": args.device,
        "log_every": args.log_interval,
        "resume": args.resume,
        "accept_changes": args.accept_changes,
    }
    return RunConfig.parse(merged(values, own)).with_overrides(args.set)


def watch_values(args: argparse.Namespace) -> dict[str, Any]:
    """Return the `sinks` section that the flags of `add_watch_flags` describe."""
    names = ("tensorboard", "wandb_project", "wandb_name")
    return {"wandb": args.use_wandb} | {name: getattr(args, name) for name in names}


def task_config(kind: type[Model], args: argparse.Namespace, **own: Any) -> Model:
    """Return a task's config: each field from the flag of its name (its `dest`), or from `own`."""
    given: Mapping[str, Any] = vars(args) | own
    return parse_model(kind, {name: given[name] for name in kind.model_fields if name in given})


def rehearse(args: argparse.Namespace, small: str, asked: str) -> None:
    """Shrink a run to a few steps that start from scratch in a separate folder.

    Batch size and accumulation stay, so the batch contract is that of the real run. The
    recipe shrinks the rest itself; `small` and `asked` describe that change in the log.
    """
    if launched_rank() == 0:
        print(
            f"rehearsal: {small} for {REHEARSAL_STEPS} steps stands in for {asked} "
            f"for {args.epochs} epochs",
            flush=True,
        )
    args.max_steps = REHEARSAL_STEPS
    args.log_interval = 1
    args.resume = "discard"
    args.eval_interval = args.save_interval = args.epochs  # once each, at the end
    args.num_workers = min(args.num_workers, 1)
    args.output_dir = str(Path(args.output_dir) / "rehearsal")


def train(build: Build, argv: Sequence[str]) -> NoReturn:
    """Train the task that `build` returns for `argv`, and exit with the run's code."""

    def work() -> int:
        built = build(argv)
        return _report(built() if callable(built) else fit(*built))

    leave_process(_exit_code(work))


def finish(action: Callable[[Sequence[str]], str], argv: Sequence[str]) -> NoReturn:
    """Run a command that does not train, and exit with its code."""
    leave_process(answer(action, argv))


def answer(action: Callable[[Sequence[str]], str], argv: Sequence[str]) -> int:
    """Run `action`, print its result on the first rank, and return the exit code."""

    def work() -> int:
        text = action(argv)
        if launched_rank() == 0:
            print(text, flush=True)
        return 0

    return _exit_code(work)


def _exit_code(work: Callable[[], int]) -> int:
    """Run `work` and return its exit code; report errors as every command does."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for terminals without Unicode
    try:
        return work()
    except LockstepError as error:
        if launched_rank() != 0:
            time.sleep(EXIT_DELAY_S)
        if launched_rank() == 0 or not error.is_shared:
            print(f"lockstep: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except SystemExit as finished:  # --help
        return int(finished.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # prints here, or reports to the launcher
        return 1


def _report(result: RunResult) -> int:
    """Print the files that the run made, on the first rank."""
    if launched_rank() == 0:
        made = {
            "curves": result.folder / "curves.png",
            "samples": max((result.folder / "samples").glob("*.png"), default=None),
            "checkpoint": max((result.folder / "checkpoints").glob("step_*"), default=None),
            "events": result.folder / "events",
        }
        lines = [f"  {name:<11}{path}" for name, path in made.items() if path and path.exists()]
        print("\n".join([f"made in {result.folder}:", *lines]), flush=True)
    return result.exit_code
