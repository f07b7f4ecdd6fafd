"""Flags that all recipes share, what they become, and how a command ends."""

from argparse import Namespace
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest
from pydantic import BaseModel

from lockstep.errors import ConfigError, DataError
from lockstep.launch.recipes import recipe_names
from lockstep.testing import TinyTask
from lockstep.trainer import RunResult
from lockstep_recipes.command import (
    Flags,
    answer,
    rehearse,
    run_config,
    task_config,
    watch_values,
)


def read(*argv: str) -> Namespace:
    parser = Flags("tiny", "Train something.", "lockstep run tiny")
    parser.add_run_flags(epochs=7, warmup_epochs=2, weight_decay=0.5, save_interval=3)
    parser.add_watch_flags(wandb_project="tiny")
    parser.add_argument("--batchsize", dest="batch_size", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--workers", dest="num_workers", type=int, default=2)
    parser.add_argument("--on_bad_image", dest="on_bad_sample", default="stop")
    parser.add_argument("--output_dir", default="run")
    return parser.read(argv)


def test_every_run_flag_reaches_the_run() -> None:
    argv = (
        "--epochs 9 --max-steps 5 --batchsize 6 --gradient_accumulation_steps 2 --lr 0.2 "
        "--lr_scaling sqrt --warmup_epochs 1.5 --workers 0 --on_bad_image skip --eval_interval 4 "
        "--save_interval 8 --log_interval 3 --resume never --accept_changes --device cpu --seed 11 "
        "--output_dir there --use_wandb --wandb_name mine --tensorboard"
    )
    args = read(*argv.split())
    config = run_config(args, sinks=watch_values(args), schedule={"shape": "cosine"})
    assert (config.epochs, config.max_steps, config.output_dir, config.seed) == (9, 5, "there", 11)
    assert (config.batch.batch_size, config.batch.accumulate) == (6, 2)
    assert (config.rate.lr, config.rate.lr_scaling) == (0.2, "sqrt")
    assert (config.schedule.warmup_epochs, config.schedule.shape) == (1.5, "cosine")
    assert (config.loader.num_workers, config.loader.on_bad_sample) == (0, "skip")
    assert (config.evaluation.every_epochs, config.checkpoint.every_epochs) == (4, 8)
    assert (config.log_every, config.resume, config.accept_changes) == (3, "never", True)
    assert (config.device, config.sinks.tensorboard, config.sinks.wandb) == ("cpu", True, True)
    assert (config.sinks.wandb_project, config.sinks.wandb_name) == ("tiny", "mine")


def test_help_says_what_a_flag_is_by_default() -> None:
    parser = Flags("tiny", "Train something.", "lockstep run tiny")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn")
    parser.add_argument("--decays", type=float, nargs="*", default=[0.9, 0.99])
    parser.add_argument("--share", default="2%", help="a part")
    parser.add_argument("--fast", action="store_true", help="be quick")
    parser.add_argument("--where", help="a folder")
    lines = parser.format_help().split("options:")[1].split("example:")[0]
    words = " ".join(lines.split())
    assert "--lr LR default: 0.1 --seed SEED of all that is drawn (default: 0)" in words
    assert "default: 0.9 0.99 --share SHARE a part (default: 2%) --fast be quick --where" in words


@pytest.mark.parametrize("recipe", recipe_names())
def test_every_flag_says_what_it_is(recipe: str) -> None:
    parser = import_module(f"lockstep_recipes.{recipe}.flags").flags()
    silent = [
        action.option_strings
        for action in parser._actions
        if not action.help or action.help.startswith("default:")
    ]
    assert not silent


def test_a_recipes_own_values_win_and_the_users_win_over_them() -> None:
    args = read("--set", "max_grad_norm=3", "--set", "evaluation.every_epochs=6")
    config = run_config(args, max_grad_norm=2.0, evaluation={"best_metric": "miou"})
    assert (config.max_grad_norm, config.epochs) == (3.0, 7)
    assert (config.evaluation.best_metric, config.evaluation.every_epochs) == ("miou", 6)


class TinyConfig(BaseModel):
    weight_decay: float = 0.0
    seed: int = 5
    width: int = 3
    unasked: str = "default"


def test_a_tasks_config_takes_the_flags_of_its_fields_names() -> None:
    config = task_config(TinyConfig, read("--seed", "8"), width=9)
    assert config == TinyConfig(weight_decay=0.5, seed=8, width=9, unasked="default")
    with pytest.raises(ConfigError, match="width"):
        task_config(TinyConfig, read(), width="wide")


def test_a_rehearsal_keeps_the_batch_and_says_what_it_stands_for(capsys) -> None:
    args = read("--batchsize", "64", "--gradient_accumulation_steps", "4", "--resume", "never")
    rehearse(args, "a toy", "the real thing")
    config = run_config(args)
    assert (config.batch.batch_size, config.batch.accumulate) == (64, 4)
    assert (config.max_steps, config.resume, config.output_dir) == (4, "discard", "run/rehearsal")
    said = "rehearsal: a toy for 4 steps stands in for the real thing for 7 epochs\n"
    assert capsys.readouterr().out == said


def test_a_recipe_may_bring_its_own_loop(command, tmp_path: Path) -> None:
    def build(argv: Sequence[str]) -> object:
        def run() -> RunResult:
            print("looping over", *argv)
            return RunResult(3, {}, tmp_path / "run", exit_code=143)

        return run

    ended = command(build, ["--these"])
    assert ended.code == 143
    assert ended.out.startswith("looping over --these\nmade in ")


def test_a_task_and_a_config_are_trained(command) -> None:
    def build(argv: Sequence[str]) -> object:
        return TinyTask(), run_config(read(*argv), sinks={"curves": False})

    ended = command(build, ["--max_steps", "2", "--workers", "0", "--device", "cpu"])
    assert ended.code == 0, ended.err
    assert "made in run:" in ended.out


def test_a_command_without_training_answers_once_and_fails_like_the_others(capsys) -> None:
    def refuse(argv: Sequence[str]) -> str:
        raise DataError(f"{argv[0]} is missing", "another")

    assert answer(" ".join, ["a", "b"]) == 0
    assert answer(refuse, ["a.pdb"]) == 2
    assert answer(lambda argv: str(1 // 0), []) == 1
    said = capsys.readouterr()
    assert said.out == "a b\n"
    assert said.err.startswith("lockstep: a.pdb is missing\n  try: another\n")
    assert "ZeroDivisionError" in said.err
