"""`lockstep run RECIPE`: check the request, then train here or in N processes."""

import importlib
from collections.abc import Sequence

from lockstep.cli.interrupt import quick_to_interrupt
from lockstep.cli.words import MAX_PROCESSES
from lockstep.errors import ConfigError, closest, plain, shown
from lockstep.launch.recipes import recipe_names
from lockstep.text_input import whole_number


def run_recipe(recipe: str, gpus: str, argv: Sequence[str]) -> int:
    """Train `recipe` with its own flags and return the exit code.

    Raises:
        ConfigError: before any process is started, if the request is wrong.
    """
    names = recipe_names()
    if recipe not in names:
        known = closest(recipe, names) or f"one of {', '.join(names)}"
        raise ConfigError(f"there is no recipe {shown(recipe)}", f"use {known}")
    module = f"lockstep_recipes.{recipe}"
    with quick_to_interrupt():
        num_processes = count_processes(gpus)
        flags = importlib.import_module(f"{module}.flags")
    flags.flags().read(argv)
    if num_processes == 1:
        importlib.import_module("lockstep_recipes.command").train(flags.build, argv)
    from lockstep.launch.local import launch
    from lockstep.launch.request import LaunchRequest

    return launch(LaunchRequest(("-m", module, *argv), num_processes))


def count_nodes(nodes: int | None, head: str) -> int:
    """Return the number of nodes that train together.

    Refuse --head without --nodes: this node would train alone, on part of the batch.
    """
    if nodes is None and head:
        raise ConfigError(
            f"--head {shown(head)} names node 0, and --nodes is missing: how many nodes are there?",
            "pass --nodes 2, or omit --head on one machine",
        )
    return 1 if nodes is None else nodes


def count_processes(gpus: str) -> int:
    """Return the number of processes for `--gpus`.

    >>> count_processes("4")
    4
    """
    if gpus == "all":
        import torch

        return max(1, torch.cuda.device_count())
    number = whole_number(gpus, most=MAX_PROCESSES)
    if not number:
        raise ConfigError(
            f"--gpus {plain(gpus)} is not a number of processes from 1 to {MAX_PROCESSES:,}",
            "pass --gpus 2, or --gpus all",
        )
    return number
