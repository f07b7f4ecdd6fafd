"""`lockstep`: the verbs, each in a file of its own, imported when it is used."""

import sys
from typing import Annotated

import typer

app = typer.Typer(
    help="Train a PyTorch model on one GPU, a machine, or a cluster, from one script.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

PLAN_EXAMPLE = "Example: lockstep plan --samples 29500 --batch-size 4 --gpus 1,2,4,8"
LAUNCH_EXAMPLE = "Example: lockstep launch --gpus 4 --restarts 3 train.py --epochs 10"
RUN_EXAMPLE = (
    "Example: lockstep run jit --gpus 2 --data_path data/train --batch_size 64 --epochs 100"
)


@app.command(
    epilog=RUN_EXAMPLE,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def run(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="atlas, ctclip, jit, protein or segmentation")] = "",
    gpus: Annotated[str, typer.Option(help="processes to start, one per GPU, or 'all'")] = "1",
) -> None:
    """Train a built-in recipe. `lockstep run RECIPE --help` lists the recipe's own flags."""
    from lockstep.cli.run import run_recipe

    if recipe in ("", "--help"):
        typer.echo(context.get_help())
        raise typer.Exit(0 if recipe else 2)
    sys.exit(run_recipe(recipe, gpus, context.args))


@app.command(
    epilog=LAUNCH_EXAMPLE,
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
)
def launch(
    words: Annotated[
        list[str],
        typer.Argument(metavar="SCRIPT ...", help="a script, or -m MODULE, and its flags"),
    ],
    gpus: Annotated[str, typer.Option(help="processes here, one per GPU, or 'all'")] = "all",
    nodes: Annotated[int, typer.Option(help="machines that train together")] = 1,
    node_rank: Annotated[int, typer.Option(help="which of them this is, from 0")] = 0,
    head: Annotated[str, typer.Option(help="HOST:PORT of the first, the same on all")] = "",
    restarts: Annotated[int, typer.Option(help="how often to start again after a failure")] = 0,
    logs: Annotated[str | None, typer.Option(help="folder for a log file per rank")] = None,
    wait: Annotated[float, typer.Option(help="seconds to wait for the other machines")] = 600,
) -> None:
    """Run a script on several processes: free port, first error shown, nothing left behind."""
    from lockstep.cli.run import count_processes
    from lockstep.launch.local import Launch
    from lockstep.launch.local import launch as start

    num = count_processes(gpus)
    sys.exit(start(Launch(tuple(words), num, nodes, node_rank, head, restarts, logs, wait)))


@app.command(epilog=PLAN_EXAMPLE)
def plan(
    samples: Annotated[int, typer.Option(help="samples in the training set")],
    batch_size: Annotated[int, typer.Option(help="samples per GPU and micro-batch")],
    gpus: Annotated[str, typer.Option(help="world sizes to compare")] = "1,2,4,8",
    accumulate: Annotated[int, typer.Option(help="micro-batches per weight update")] = 1,
    lr: Annotated[float | None, typer.Option(help="base learning rate")] = None,
    lr_scaling: Annotated[str, typer.Option(help="none, linear, sqrt or batch")] = "none",
    reference_batch: Annotated[int, typer.Option(help="batch that --lr was found at")] = 256,
    as_json: Annotated[bool, typer.Option("--json", help="print a list of objects")] = False,
) -> None:
    """Show batch sizes, steps and learning rate for each number of GPUs, before anything runs."""
    from lockstep.cli.plan import show_plan

    show_plan(samples, batch_size, gpus, accumulate, lr, lr_scaling, reference_batch, as_json)


def main() -> None:
    """Run the command; errors raised on purpose end with one clear line and exit code 2."""
    from lockstep.errors import LockstepError

    try:
        app()
    except LockstepError as error:
        typer.echo(f"lockstep: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
