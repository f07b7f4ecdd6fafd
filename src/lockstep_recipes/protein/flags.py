"""The flags of the protein recipe, and their translation to a task and a run config."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from lockstep.config import RunConfig
from lockstep.dist.environment import is_rehearsal
from lockstep.errors import ConfigError
from lockstep_recipes.command import (
    Flags,
    rehearse,
    run_config,
    sample_count,
    task_config,
    watch_values,
)
from lockstep_recipes.protein.sample_data import make_cache
from lockstep_recipes.protein.task import ProteinConfig, ProteinTask

REHEARSAL_CHAINS = 96
LOWEST_LR = 1e-6


def flags() -> Flags:
    """Return the parser: the original script's flags under their names, then our own."""
    parser = Flags(
        "protein",
        "Train a network that designs protein side chains on a fixed backbone.",
        "lockstep run protein --gpus 4 --pdb_path data/cache --cache_dir data/cache "
        "--use_predefined_split --epochs 300 --batch_size 4 --use_discrete_diffusion",
    )
    parser.add_run_flags(epochs=300, warmup_epochs=20, weight_decay=1e-5)
    parser.add_watch_flags(wandb_project="protein-diffusion")
    add = parser.add_argument
    add("--pdb_path", default="data/cache", help="a cache folder, a folder of .pdb/.cif, or a file")
    add("--cache_dir", help="cache folder; preferred to --pdb_path if it holds entries")
    add("--use_predefined_split", action="store_true", help="split by train.txt and val.txt")
    add("--val_split", type=float, default=0.1, help="share to hold out without predefined lists")
    generated = "train on N generated chains instead"
    add("--sample_data", type=sample_count, metavar="N", help=generated)
    add("--batch_size", type=int, default=4, help="chains per GPU")
    add(
        "--use_discrete_diffusion",
        action="store_true",
        help="diffuse; without it, predict masked residues in one step",
    )
    add("--num_diffusion_steps", type=int, default=1000, help="steps of the diffusion")
    noise = "how residues are corrupted: masked, or replaced uniformly or by BLOSUM"
    add("--transition", choices=["absorbing", "uniform", "blosum"], default="absorbing", help=noise)
    add("--schedule", choices=["cosine", "linear"], default="cosine", help="noise schedule")
    masked = "share of residues to mask, when diffusion is off"
    add("--mask_ratio", type=float, default=0.15, help=masked)
    tokens = "what a token stands for"
    add("--vocab", choices=["residue", "fragment"], default="residue", help=tokens)
    weighting = "mean cross-entropy, or the weighted variational bound"
    add("--loss", choices=["simple", "elbo"], default="simple", help=weighting)
    unset = argparse.SUPPRESS
    add(
        "--chi_weight",
        type=float,
        default=unset,
        help="weight of the torsion loss (default: 1; 0.5 for fragments)",
    )
    add("--learning_rate", dest="lr", type=float, default=5e-4, help="base learning rate")
    add("--max_grad_norm", type=float, default=1.0, help="clip the gradient norm to this")
    averages = "decays of the weight averages (EMA); pass no number for no average"
    add("--ema_decays", type=float, nargs="*", default=[0.999], help=averages)
    add("--hidden_dim", type=int, default=128, help="width of the network")
    add("--num_layers", type=int, default=3, help="layers of the encoder, and of the decoder")
    add("--num_neighbors", type=int, default=30, help="nearest residues that each one sees")
    add("--dropout", type=float, default=0.1, help="dropout in training")
    add("--backbone_noise", type=float, default=0.1, help="noise on coordinates, in angstrom")
    similar = "put chains of similar length into one batch"
    add("--group_by_length", choices=["on", "off"], default="on", help=similar)
    add("--use_amp", action="store_true", help="mixed precision: bf16, or fp16 where it is missing")
    add("--num_workers", type=int, default=0, help="processes that read chains, per GPU")
    add("--sample_steps", type=int, default=10, help="steps to sample a design in")
    order = "adaptive reveals the most certain residues first"
    add("--sampler", choices=["plain", "adaptive"], default="adaptive", help=order)
    add("--num_designs", type=int, default=16, help="held-out chains to design at each evaluation")
    add("--save_dir", help="folder of the checkpoints (default: checkpoints)")
    add("--output_dir", help="the run folder, instead of --save_dir")
    unreadable = "what to do about an unreadable chain"
    add("--on_bad_sample", choices=["stop", "skip"], default="stop", help=unreadable)
    return parser


def build(argv: Sequence[str]) -> tuple[ProteinTask, RunConfig]:
    """Turn the command line into the arguments of `fit`."""
    args = flags().read(argv)
    args.output_dir = run_folder(args.save_dir, args.output_dir)
    num_generated = args.sample_data
    if is_rehearsal():
        rehearse(args, "width 16", f"width {args.hidden_dim}")
        args.hidden_dim = 16
        args.num_layers = 1
        args.num_neighbors = 8
        args.num_designs = 2
        args.sample_steps = 2
        given = [Path(path) for path in (args.pdb_path, args.cache_dir) if path]
        num_generated = 0 if any(path.exists() for path in given) else REHEARSAL_CHAINS
    if num_generated:
        seed = 0 if is_rehearsal() else args.seed  # the next rehearsal reuses it
        folder = make_cache(Path(args.output_dir) / "sample_data", num_generated, seed=seed)
        args.pdb_path = args.cache_dir = folder
    run = run_config(
        args,
        schedule={
            "shape": "cosine",
            "floor": min(1.0, LOWEST_LR / args.lr) if args.lr > 0 else 0.0,
        },
        evaluation={"best_metric": "ema_perplexity" if args.ema_decays else "perplexity"},
        sinks=watch_values(args),
        precision="auto" if args.use_amp else "fp32",
        max_grad_norm=args.max_grad_norm,
        averages=args.ema_decays,
    )
    own = {"batch_size": run.batch.batch_size, "seed": run.seed}  # --set may have changed them
    return ProteinTask(task_config(ProteinConfig, args, **own)), run


def run_folder(save_dir: str | None, output_dir: str | None) -> str:
    """Return the run's folder; its checkpoints are in `checkpoints` below it.

    >>> run_folder("checkpoints", None), run_folder("runs/a/checkpoints", None)
    ('.', 'runs/a')
    >>> run_folder("elsewhere", None), run_folder(None, "runs/b")
    ('elsewhere', 'runs/b')
    """
    if save_dir and output_dir:
        raise ConfigError("--save_dir and --output_dir name the same thing", "pass one of them")
    if output_dir:
        return output_dir
    path = Path(save_dir or "checkpoints")
    return str(path.parent if path.name == "checkpoints" else path)
