"""The flags of the protein recipe, translated to a task and a run config and nothing more."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from lockstep.config import RunConfig
from lockstep.errors import ConfigError, LockstepError
from lockstep.parse import parse_model
from lockstep.runtime import is_rehearsal, launched_rank
from lockstep_recipes.command import Flags
from lockstep_recipes.protein.sample_data import make_cache
from lockstep_recipes.protein.task import ProteinConfig, ProteinTask

REHEARSAL_STEPS = 4
REHEARSAL_CHAINS = 96
LOWEST_LR = 1e-6


def flags() -> Flags:
    """Return the parser: the guide's flags under their own names, then ours."""
    parser = Flags(
        "protein",
        "Train a network that designs protein side chains on a fixed backbone.",
        "lockstep run protein --gpus 4 --pdb_path data/cache --cache_dir data/cache "
        "--use_predefined_split --epochs 300 --batch_size 4 --use_discrete_diffusion",
    )
    add = parser.add_argument
    add("--pdb_path", default="data/cache", help="a cache folder, a folder of .pdb/.cif, or a file")
    add("--cache_dir", help="cache folder; where it holds entries, they are used")
    add("--use_predefined_split", action="store_true", help="train.txt and val.txt decide")
    add("--val_split", type=float, default=0.1, help="share held out without predefined lists")
    add("--sample_data", type=int, metavar="N", help="train on N generated chains instead")
    add("--epochs", type=int, default=300)
    add("--max_steps", type=int, help="stop after so many weight updates")
    add("--batch_size", type=int, default=4, help="chains per GPU")
    add("--gradient_accumulation_steps", type=int, default=1)
    add("--use_discrete_diffusion", action="store_true", help="without it: one masked step")
    add("--num_diffusion_steps", type=int, default=1000)
    add("--transition", choices=["absorbing", "uniform", "blosum"], default="absorbing")
    add("--schedule", choices=["cosine", "linear"], default="cosine")
    add("--mask_ratio", type=float, default=0.15, help="hidden share without diffusion")
    add("--vocab", choices=["residue", "fragment"], default="residue")
    add("--loss", choices=["simple", "elbo"], default="simple")
    add("--chi_weight", type=float, help="1, and 0.5 for fragments, unless given")
    add("--learning_rate", type=float, default=5e-4)
    add("--lr_scaling", choices=["none", "linear", "sqrt", "batch"], default="none")
    add("--warmup_epochs", type=float, default=20)
    add("--weight_decay", type=float, default=1e-5)
    add("--max_grad_norm", type=float, default=1.0)
    add("--ema_decays", type=float, nargs="*", default=[0.999])
    add("--hidden_dim", type=int, default=128)
    add("--num_layers", type=int, default=3, help="in the encoder and in the decoder")
    add("--num_neighbors", type=int, default=30)
    add("--dropout", type=float, default=0.1)
    add("--backbone_noise", type=float, default=0.1, help="angstrom, in training")
    add("--group_by_length", choices=["on", "off"], default="on")
    add("--use_amp", action="store_true", help="compute in bf16 (fp16 where there is none)")
    add("--num_workers", type=int, default=0, help="processes that read chains, per GPU")
    add("--sample_steps", type=int, default=10)
    add("--sampler", choices=["plain", "adaptive"], default="adaptive")
    add("--num_designs", type=int, default=16, help="held-out chains to design; 0: none")
    add("--use_wandb", action="store_true")
    add("--wandb_project", default="protein-diffusion")
    add("--wandb_name")
    add("--tensorboard", action="store_true")
    add("--save_dir", help="folder of the checkpoints, `checkpoints` unless given")
    add("--output_dir", help="instead: the run's folder, with the checkpoints below it")
    add("--save_interval", type=int, default=10, help="epochs between named checkpoints")
    add("--eval_interval", type=int, default=1, help="epochs between evaluations")
    add("--log_interval", type=int, default=10, help="steps between log lines")
    add("--resume", default="auto", help="auto, never, discard, or a checkpoint")
    add("--accept_changes", action="store_true", help="resume although batch, rate or data changed")
    add("--on_bad_sample", choices=["stop", "skip"], default="stop")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto")
    add("--seed", type=int, default=0)
    add("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="any run setting")
    add("--local_rank", type=int, help="accepted from torch.distributed.launch")
    return parser


def build(argv: Sequence[str]) -> tuple[ProteinTask, RunConfig]:
    """Turn the command line into what `fit` takes."""
    args = flags().read(argv)
    args.output_dir = run_folder(args.save_dir, args.output_dir)
    if is_rehearsal():
        rehearse(args)
    elif args.sample_data:
        _use_sample_data(args, args.sample_data)
    config = RunConfig.parse(run_values(args)).with_overrides(args.set)
    values = {**task_values(args), "batch_size": config.batch.batch_size}
    return ProteinTask(parse_model(ProteinConfig, values)), config


def run_folder(save_dir: str | None, output_dir: str | None) -> str:
    """Return the run's folder; its checkpoints are in `checkpoints` below it.

    >>> run_folder("checkpoints", None), run_folder("runs/a/checkpoints", None)
    ('.', 'runs/a')
    >>> run_folder("elsewhere", None), run_folder(None, "runs/b")
    ('elsewhere', 'runs/b')
    """
    if save_dir and output_dir:
        raise ConfigError("--save_dir and --output_dir name the same thing", "one of them")
    if output_dir:
        return output_dir
    path = Path(save_dir or "checkpoints")
    return str(path.parent if path.name == "checkpoints" else path)


def rehearse(args: argparse.Namespace) -> None:
    """Shrink the run to a minute: a tiny network, a handful of steps.

    Batch size and accumulation stay, so that the batch contract is the one asked
    for. Data that exist are used; others are generated inside the output folder.
    """
    if launched_rank() == 0:
        print(
            f"rehearsal: width 16 for {REHEARSAL_STEPS} steps stands in for width "
            f"{args.hidden_dim} for {args.epochs} epochs",
            flush=True,
        )
    args.hidden_dim, args.num_layers, args.num_neighbors = 16, 1, 8
    args.num_designs, args.sample_steps, args.num_workers = 2, 2, min(args.num_workers, 1)
    args.max_steps, args.log_interval, args.resume = REHEARSAL_STEPS, 1, "discard"
    args.eval_interval = args.save_interval = args.epochs  # once each, at the end
    args.output_dir = str(Path(args.output_dir) / "rehearsal")
    if not Path(args.cache_dir or args.pdb_path).exists() and not Path(args.pdb_path).exists():
        _use_sample_data(args, REHEARSAL_CHAINS)


def _use_sample_data(args: argparse.Namespace, num: int) -> None:
    folder = make_cache(Path(args.output_dir) / "sample_data", num, seed=args.seed)
    args.pdb_path = args.cache_dir = str(folder)


def task_values(args: argparse.Namespace) -> dict[str, Any]:
    """Return the values of a ProteinConfig."""
    same = (
        "pdb_path", "cache_dir", "use_predefined_split", "val_split", "on_bad_sample",
        "use_discrete_diffusion", "num_diffusion_steps", "transition", "schedule", "mask_ratio",
        "vocab", "loss", "hidden_dim", "num_layers", "num_neighbors", "dropout", "backbone_noise",
        "weight_decay", "sample_steps", "sampler", "num_designs", "seed",
    )  # fmt: skip
    return {name: getattr(args, name) for name in same} | {
        "group_by_length": args.group_by_length == "on",
        "chi_weight": "auto" if args.chi_weight is None else args.chi_weight,
    }


def run_values(args: argparse.Namespace) -> dict[str, Any]:
    """Return the values of a RunConfig."""
    best = "ema_perplexity" if args.ema_decays else "perplexity"
    return {
        "output_dir": args.output_dir,
        "seed": args.seed,
        "epochs": args.epochs,
        "max_steps": args.max_steps,
        "batch": {"batch_size": args.batch_size, "accumulate": args.gradient_accumulation_steps},
        "rate": {"lr": args.learning_rate, "lr_scaling": args.lr_scaling},
        "schedule": {
            "shape": "cosine",
            "warmup_epochs": args.warmup_epochs,
            "floor": min(1.0, LOWEST_LR / args.learning_rate) if args.learning_rate > 0 else 0.0,
        },
        "loader": {"num_workers": args.num_workers, "on_bad_sample": args.on_bad_sample},
        "evaluation": {"every_epochs": args.eval_interval, "best_metric": best},
        "checkpoint": {"every_epochs": args.save_interval},
        "sinks": {
            "tensorboard": args.tensorboard,
            "wandb": args.use_wandb,
            "wandb_project": args.wandb_project,
            "wandb_name": args.wandb_name,
        },
        "precision": "auto" if args.use_amp else "fp32",
        "max_grad_norm": args.max_grad_norm,
        "averages": args.ema_decays,
        "device": args.device,
        "log_every": args.log_interval,
        "resume": args.resume,
        "accept_changes": args.accept_changes,
    }


def finish(action: Callable[[Sequence[str]], str], argv: Sequence[str]) -> NoReturn:
    """Run a command of this recipe that is no training, and end with its exit code."""
    try:
        print(action(argv))
    except LockstepError as error:
        print(f"lockstep: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    sys.exit(0)
