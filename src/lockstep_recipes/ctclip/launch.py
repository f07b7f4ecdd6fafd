"""What Accelerate provides: the process group, the precision in its file, the banner.

Owns: making an `Accelerator` that matches the launched processes, or refusing to; checking a
file for `accelerate launch` before use. Does not own: training. Accelerate's data sharding
and scheduler are not used: the first repeats samples, and the second advances once per
process instead of once per weight update.

    python -m lockstep_recipes.ctclip.launch accelerate_config_single_node.yaml
"""

import sys
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from lockstep.dist.environment import group_timeout_s, launched
from lockstep.errors import ConfigError, LaunchError, closest, plain, shown
from lockstep.world import World
from lockstep.yaml_input import read_yaml_file
from lockstep_recipes.command import Flags, finish

TIMEOUT_S = 36_000
"""How long ranks wait for each other, unless `lockstep.timeout_s` or NCCL_TIMEOUT is set."""
SUPPORTED = ("NO", "MULTI_CPU", "MULTI_GPU")


def join(device: str = "auto", timeout_s: float = TIMEOUT_S) -> tuple[Any, World]:
    """Return the Accelerator and the World of this process. Collective.

    On a machine without GPUs, Accelerate would silently let every process train alone, so it
    is set to use CPUs; then it forms one group.

    Raises:
        LaunchError: if Accelerate's group does not match the launched processes.
    """
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs
    from accelerate.utils.environment import parse_flag_from_env, patch_environment

    launch = launched()
    num_gpus = torch.cuda.device_count()
    variables: dict[str, Any] = {}
    if launch.size == 1:
        World.enter(device)  # joins no group, but refuses contradictory variables
    else:  # set torchrun's variables under any launcher: Accelerate guesses missing ones
        variables = {"RANK": launch.rank, "WORLD_SIZE": launch.size}
        variables |= {"LOCAL_RANK": launch.local_rank, "LOCAL_WORLD_SIZE": launch.local_size}
        variables |= {"MASTER_ADDR": launch.head, "MASTER_PORT": launch.port}
    on_cpu = device == "cpu" or not num_gpus or parse_flag_from_env("ACCELERATE_USE_CPU")
    options: dict[str, Any] = {"timeout": timedelta(seconds=group_timeout_s(timeout_s))}
    if not on_cpu and launch.local_size > num_gpus:
        options["backend"] = "gloo"  # NCCL refuses two ranks on one GPU
    num_threads = torch.get_num_threads()
    try:
        with warnings.catch_warnings(), patch_environment(**variables):
            warnings.filterwarnings("ignore", "OMP_NUM_THREADS")
            accelerator = Accelerator(
                cpu=bool(on_cpu),
                mixed_precision="no",  # autocast is the step's; see `choose_precision`
                kwargs_handlers=[InitProcessGroupKwargs(**options)],
            )
    except (RuntimeError, ValueError, OSError, NotImplementedError) as error:
        raise LaunchError(
            f"Accelerate could not form a group of {launch.size}: {str(error).splitlines()[0]}",
            "check that every rank was started and that no other job uses this port",
        ) from error
    torch.set_num_threads(num_threads)  # Accelerate changes it, which changes the order of sums
    kind = accelerator.distributed_type.value
    num_processes = accelerator.num_processes
    if num_processes != launch.size:
        raise LaunchError(
            f"{launch.size} processes were launched, but Accelerate formed a group of "
            f"{num_processes}: each would train on its own",
            "use one launcher: accelerate launch, torchrun, or lockstep run",
        )
    if kind not in SUPPORTED:
        raise ConfigError(
            f"distributed_type {kind} would be ignored: this recipe replicates its model",
            f"write distributed_type: {' or '.join(SUPPORTED)}",
        )
    plugin = getattr(accelerator.state, "dynamo_plugin", None)
    if plugin is not None and plugin.backend.value.upper() != "NO":
        raise ConfigError("dynamo_config of the Accelerate file would be ignored", "leave it out")
    made = accelerator.device.type
    return accelerator, World.enter(made if device == "auto" else device, timeout_s)


def banner(accelerator: Any, world: World) -> list[str]:
    """Return the original script's lines about a multi-GPU run. Collective."""
    own = ""
    if world.device.type == "cuda":
        own = str(torch.cuda.get_device_properties(world.device).uuid)
    num_gpus = len(set(world.all_texts(own)) - {""})
    return [
        f"Distributed environment: {accelerator.distributed_type.value}",
        f"Number of processes: {accelerator.num_processes}",
        f"Number of GPUs: {num_gpus}",
    ]


def choose_precision(wanted: str, device: torch.device) -> str:
    """Return the precision of the settings, else of Accelerate's file, else the best of the GPU."""
    from accelerate.utils.environment import parse_choice_from_env

    if device.type == "cpu":
        return "fp32"
    if wanted == "auto":
        best = "bf16" if torch.cuda.is_bf16_supported() else "fp16"
        wanted = parse_choice_from_env("ACCELERATE_MIXED_PRECISION", best).lower()
    known = {"no": "fp32", "fp16": "fp16", "bf16": "bf16"}
    if wanted not in known:
        raise ConfigError(f"mixed_precision {wanted} is not supported", "use " + " or ".join(known))
    return known[wanted]


def check_file(path: Path, num_processes: int | None = None) -> str:
    """Check a file for `accelerate launch` and return a summary.

    Raises:
        ConfigError: for settings on which Accelerate would raise a traceback, or do nothing.
    """
    values = read_yaml_file(path, "check the path passed to --config_file")
    if "distributed_type" not in values:
        raise ConfigError(
            f"{shown(path)} has no distributed_type", "write distributed_type: MULTI_GPU"
        )
    kind = values["distributed_type"]
    if isinstance(kind, bool) or kind not in SUPPORTED:
        near = closest(str(kind), SUPPORTED) or "MULTI_GPU"
        raise ConfigError(
            f"{shown(path)}: distributed_type {plain(str(kind))} is not supported",
            f"write distributed_type: {near}",
        )
    precision = values.get("mixed_precision", "no")
    if precision not in ("no", "fp16", "bf16"):
        unquoted = (
            "an unquoted no, which YAML reads as false" if precision is False else shown(precision)
        )
        raise ConfigError(
            f"{shown(path)}: mixed_precision is {unquoted}", "write mixed_precision: 'no'"
        )
    machines = values.get("num_machines", 1)
    asked = values.get("num_processes")
    if not _is_count(machines) or not _is_count(asked) or asked % machines:
        raise ConfigError(
            f"{shown(path)}: num_processes {shown(asked)} cannot be divided among "
            f"{shown(machines)} machines",
            "write num_processes: nodes x GPUs per node",
        )
    if num_processes not in (None, asked):
        raise ConfigError(
            f"{path} says num_processes {asked}, the job has {num_processes}",
            f"write num_processes: {num_processes}, or change the nodes or GPUs of the script",
        )
    return f"{path}: {kind}, {asked} processes on {machines} machines, {precision}"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def main(argv: Sequence[str]) -> str:
    """Check the file that the command line names."""
    flags = Flags("ctclip", "Check a file for accelerate launch.", "... accelerate_config.yaml")
    flags.add_argument("file", type=Path)
    flags.add_argument("--num_processes", type=int, help="number of processes in the job")
    args = flags.read(argv)
    return check_file(args.file, args.num_processes)


if __name__ == "__main__":
    finish(main, sys.argv[1:])
