"""`lockstep`: its commands, each in a file of its own, imported when it is used."""

import sys
from typing import Annotated

import typer

from lockstep.cli.bench import benching
from lockstep.cli.interrupt import quick_to_interrupt
from lockstep.cli.words import AS_TYPED, Limit, ScriptWords, Words, check_seconds, check_words

app = typer.Typer(
    help="Train a PyTorch model on one GPU, a machine, or a cluster, from one script.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

PLAN_EXAMPLE = "Example: lockstep plan --samples 29500 --batch-size 4 --gpus 1,2,4,8"
LAUNCH_EXAMPLE = "Example: lockstep launch --gpus 4 --restarts 3 train.py --epochs 10"
SUBMIT_EXAMPLE = (
    "Example: lockstep submit --nodes 2 --gpus-per-node 8 --partition gpu --time 12:00:00 train.py"
)
RUN_EXAMPLE = (
    "Example: lockstep run jit --gpus 2 --data_path data/train --batch_size 64 --epochs 100"
)
Json = Annotated[bool, typer.Option("--json", help="print a JSON object")]


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
    from lockstep.launch.stopping import leave

    if recipe in ("", "--help"):
        typer.echo(context.get_help())
        raise typer.Exit(0 if recipe else 2)
    leave(run_recipe(recipe, gpus, context.args))


@app.command(
    epilog=LAUNCH_EXAMPLE,
    context_settings=AS_TYPED,
)
def launch(
    words: ScriptWords,
    gpus: Annotated[
        str, typer.Option(help="processes on this machine, one per GPU, or 'all'")
    ] = "all",
    nodes: Annotated[
        int | None, typer.Option(help="machines that train together (default: 1)")
    ] = None,
    node_rank: Annotated[int, typer.Option(help="rank of this node, from 0")] = 0,
    head: Annotated[
        str,
        typer.Option(
            help="HOST:PORT of node 0, the same on every node. Nodes authenticate each other with "
            "LOCKSTEP_JOB_TOKEN, or with the key in ~/.config/lockstep/job_key"
        ),
    ] = "",
    restarts: Annotated[int, typer.Option(help="maximum number of restarts after a failure")] = 0,
    logs: Annotated[str | None, typer.Option(help="folder for one log file per rank")] = None,
    wait: Annotated[
        float,
        typer.Option(callback=check_seconds, help="seconds to wait for the other machines"),
    ] = 600,
) -> None:
    """Run a script on several processes; show the first error, and end all processes together."""
    with quick_to_interrupt():
        from lockstep.cli.run import count_nodes, count_processes
        from lockstep.launch.local import launch as start
        from lockstep.launch.request import LaunchRequest
        from lockstep.launch.stopping import leave

        num = count_processes(gpus)
        num_nodes = count_nodes(nodes, head)
    leave(start(LaunchRequest(tuple(words), num, num_nodes, node_rank, head, restarts, logs, wait)))


@app.command(epilog=PLAN_EXAMPLE)
def plan(
    samples: Annotated[int, typer.Option(help="samples in the training set")],
    batch_size: Annotated[int, typer.Option(help="samples per GPU and micro-batch")],
    gpus: Annotated[str, typer.Option(help="world sizes to compare")] = "1,2,4,8",
    accumulate: Annotated[int, typer.Option(help="micro-batches per weight update")] = 1,
    lr: Annotated[float | None, typer.Option(help="base learning rate")] = None,
    lr_scaling: Annotated[str, typer.Option(help="none, linear, sqrt or batch")] = "none",
    reference_batch: Annotated[int, typer.Option(help="batch size that --lr was tuned for")] = 256,
    as_json: Annotated[bool, typer.Option("--json", help="print a JSON list")] = False,
) -> None:
    """Show batch sizes, steps and learning rate for each number of GPUs, before anything runs."""
    from lockstep.cli.plan import show_plan

    show_plan(samples, batch_size, gpus, accumulate, lr, lr_scaling, reference_batch, as_json)


@app.command(
    epilog=SUBMIT_EXAMPLE,
    context_settings=AS_TYPED,
)
def submit(
    words: ScriptWords,
    nodes: Annotated[int, typer.Option(help="machines that train together")] = 1,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs per node, one process each")] = 1,
    cpus_only: Annotated[bool, typer.Option("--cpus-only", help="request no GPUs")] = False,
    processes_per_node: Annotated[
        int | None,
        typer.Option(help="processes per node (default: one per GPU; 1 with --cpus-only)"),
    ] = None,
    cpus_per_process: Annotated[int | None, typer.Option(help="CPU cores per process")] = None,
    partition: Annotated[str, typer.Option(help="SLURM partition (default: the cluster's)")] = "",
    account: Annotated[str, typer.Option(help="SLURM account to charge")] = "",
    time: Annotated[str, typer.Option(help="wall-clock limit of each job, e.g. 12:00:00")] = "",
    warn: Annotated[int, typer.Option(help="seconds before the limit to start saving")] = 120,
    requeues: Annotated[int, typer.Option(help="maximum number of requeues")] = 100,
    restarts: Annotated[int, typer.Option(help="maximum number of restarts after a failure")] = 2,
    name: Annotated[str, typer.Option(help="job name (default: the script's)")] = "",
    folder: Annotated[str, typer.Option(help="folder for job scripts and logs")] = "lockstep_jobs",
    array: Annotated[
        str, typer.Option(help="array indices, e.g. 0-3; %a in the arguments becomes the index")
    ] = "",
    setup: Annotated[
        list[str] | None,
        typer.Option(metavar="LINE", help="shell line to run first, e.g. module load cuda"),
    ] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="any other sbatch option, e.g. qos=high"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print the job script and exit")
    ] = False,
    follow: Annotated[
        bool, typer.Option(help="follow the log and exit with the job's code")
    ] = True,
) -> None:
    """Run a script as a SLURM job that saves before its time limit and requeues itself."""
    from lockstep.cli.submit import read_options, submit_job
    from lockstep.launch.slurm import Job

    job = Job(
        words=tuple(words),
        num_nodes=nodes,
        gpus_per_node=0 if cpus_only else gpus_per_node,
        processes_per_node=processes_per_node or (1 if cpus_only else max(1, gpus_per_node)),
        cpus_per_process=cpus_per_process,
        partition=partition,
        account=account,
        time=time,
        warn_s=warn,
        requeues=requeues,
        restarts=restarts,
        name=name,
        folder=folder,
        array=array,
        setup=tuple(setup or ()),
        options=read_options(sbatch or []),
    )
    sys.exit(submit_job(job, dry_run, follow))


@app.command(
    epilog="Example: lockstep rehearse -- torchrun --nproc_per_node=2 train.py --epochs 300",
    context_settings=AS_TYPED,
)
def rehearse(
    words: Words,
    limit: Limit = 120,
    without: Annotated[
        list[str] | None,
        typer.Option(metavar="PHASE", help="phase that is not required, e.g. validate"),
    ] = None,
    as_json: Json = False,
) -> None:
    """See a command train, validate, save, die, resume and finish, in about a minute."""
    from lockstep.cli.rehearse import rehearse as play

    sys.exit(play(words, limit, without or [], as_json))


certifying = typer.Typer(
    help="Prove that resuming equals never stopping, or that N ranks equal one.",
    no_args_is_help=True,
)
app.add_typer(certifying, name="certify")
app.add_typer(benching, name="bench")
Steps = Annotated[int, typer.Option(help="steps of each run")]


@certifying.command(
    "resume",
    epilog="Example: lockstep certify resume -- torchrun --nproc_per_node=2 train.py",
    context_settings=AS_TYPED,
)
def certify_resume(
    words: Words,
    steps: Steps = 6,
    evaluate: Annotated[
        bool, typer.Option("--evaluate", help="also evaluate, on a few samples, at each save")
    ] = False,
    limit: Limit = 300,
    as_json: Json = False,
) -> None:
    """Run a command uninterrupted, then killed and resumed, and compare every bit."""
    from lockstep.cli.certify import certify

    sys.exit(
        certify("resume", words, steps=steps, evaluates=evaluate, limit_s=limit, as_json=as_json)
    )


@certifying.command(
    "parity",
    epilog="Example: lockstep certify parity --gpus 1,2,4 -- python train.py",
    context_settings=AS_TYPED,
)
def certify_parity(
    words: Words,
    gpus: Annotated[str, typer.Option(help="world sizes to compare")] = "1,2",
    steps: Steps = 4,
    exact: Annotated[
        bool, typer.Option("--exact", help="use exact mode and demand equal bits")
    ] = False,
    limit: Limit = 300,
    as_json: Json = False,
) -> None:
    """Run a single-process command at several world sizes with the same global batch."""
    from lockstep.cli.certify import certify

    sys.exit(
        certify(
            "parity", words, gpus=gpus, steps=steps, exact=exact, limit_s=limit, as_json=as_json
        )
    )


@app.command(epilog="Example: lockstep new circles")
def new(
    name: Annotated[str, typer.Argument(help="folder of the new project")],
    force: Annotated[bool, typer.Option("--force", help="overwrite existing files")] = False,
) -> None:
    """Create a project: one short training script and a page about it."""
    from lockstep.cli.new import new as start

    typer.echo("\n".join(start(name, force)))


@app.command(
    epilog="Example: lockstep init slurm train.py --epochs 300",
    context_settings={"ignore_unknown_options": True},
)
def init(
    kind: Annotated[str, typer.Argument(help="vscode, slurm, accelerate or scripts")],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[SCRIPT ...]", help="your script and its flags")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="overwrite existing files")] = False,
) -> None:
    """Write launch files for your own script."""
    from lockstep.cli.init import init as generate

    script, *args = words or ["train.py"]
    typer.echo("\n".join(generate(kind, script, args, force)))


@app.command(
    epilog="Example: lockstep doctor -- torchrun --nproc_per_node=2 train.py --batch_size 64",
    context_settings=AS_TYPED,
)
def doctor(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            callback=check_words,
            metavar="[-- COMMAND ...]",
            help="the command of a job to check, as you would type it",
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(callback=check_seconds, help="time limit for checking the job")
    ] = 120,
    as_json: Json = False,
) -> None:
    """Check this machine, and optionally a job; every failure says what to try."""
    from lockstep.cli.doctor import run_doctor

    sys.exit(run_doctor(words or [], as_json, seconds))


def main() -> None:
    """Run the command; print a LockstepError without a traceback and exit with its code."""
    from lockstep.errors import LockstepError

    try:
        app()
    except LockstepError as error:
        typer.echo(f"lockstep: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
