"""The flags of the JiT recipe, translated to a task and a run config and nothing more."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.config import RunConfig
from lockstep.errors import DataError
from lockstep.parse import parse_model
from lockstep.runtime import is_rehearsal, launched_rank
from lockstep_recipes.command import Flags
from lockstep_recipes.jit.model import VARIANTS
from lockstep_recipes.jit.sample_data import make_images
from lockstep_recipes.jit.task import JiTConfig, JiTTask

REHEARSAL_STEPS = 4
REHEARSAL_IMAGES = 1024


def flags() -> Flags:
    """Return the parser: the guide's flags under their own names, then ours."""
    parser = Flags(
        "jit",
        "Train JiT, a diffusion transformer that predicts the clean image from its pixels.",
        "lockstep run jit --gpus 2 --data_path data/train --model JiT-B/4 --img_size 64 "
        "--batch_size 64 --epochs 100 --lr 1e-4 --use_amp",
    )
    add = parser.add_argument
    add(
        "--data_path",
        default="./data/train",
        help="folder of images (class folders or flat) or texts",
    )
    add("--val_path", help="held-out folder; without it 2%% of the training data are held out")
    add("--data_format", choices=["auto", "images", "text"], default="auto")
    add(
        "--sample_data",
        type=_count,
        metavar="N",
        help="train on N generated images instead of --data_path",
    )
    add("--model", default="JiT-B/4", help=f"one of {', '.join(VARIANTS)}")
    add("--img_size", type=int, default=64)
    add("--batch_size", type=int, default=64, help="images per GPU")
    add("--gradient_accumulation_steps", type=int, default=1)
    add("--epochs", type=int, default=100)
    add("--max_steps", type=int, help="stop after so many weight updates")
    add("--lr", type=float, default=5e-5)
    add("--lr_scaling", choices=["none", "linear", "sqrt", "batch"], default="none")
    add("--warmup_epochs", type=float, default=5)
    add("--weight_decay", type=float, default=0.0)
    add("--max_grad_norm", type=float, default=1.0)
    add("--ema_decays", type=float, nargs="*", default=[0.9999, 0.9996])
    add(
        "--use_amp", action="store_true", help="compute in bf16 (fp16 where there is none) on a GPU"
    )
    add("--compile", action="store_true", help="compile the model")
    add("--num_workers", type=int, default=4, help="processes that read images, per GPU")
    add("--pred", choices=["x", "eps", "v"], default="x", help="what the network predicts")
    add("--loss", choices=["x", "eps", "v"], default="v", help="what the error is measured on")
    add("--label_drop", type=float, default=0.1)
    add("--guidance", type=float, default=2.9)
    add("--sample_steps", type=int, default=50)
    add("--grid", type=int, default=16, help="samples in the picture of each evaluation")
    add(
        "--num_fid_samples",
        type=int,
        default=256,
        help="samples compared with real images; 0: none",
    )
    add(
        "--inception_weights", help="local file; with it the distance is FID, without a named proxy"
    )
    add("--use_wandb", action="store_true")
    add("--wandb_project", default="jit-diffusion")
    add("--wandb_name")
    add("--tensorboard", action="store_true")
    add("--output_dir", default="./output")
    add("--save_interval", type=int, default=10, help="epochs between named checkpoints")
    add("--eval_interval", type=int, default=1, help="epochs between evaluations")
    add("--log_interval", type=int, default=10, help="steps between log lines")
    add("--resume", default="auto", help="auto, never, discard, or a checkpoint")
    add("--accept_changes", action="store_true", help="resume although batch, rate or data changed")
    add("--on_bad_image", choices=["stop", "skip"], default="stop")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto")
    add("--seed", type=int, default=0)
    add("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="any run setting")
    add(
        "--local_rank",
        type=int,
        help="accepted from torch.distributed.launch; the environment wins",
    )
    return parser


def _count(text: str) -> int:
    """Read a number of images that can be drawn in reasonable time."""
    if not 0 < int(text) <= 10**7:
        raise ValueError(text)
    return int(text)


def build(argv: Sequence[str]) -> tuple[JiTTask, RunConfig]:
    """Turn the command line into what `fit` takes."""
    args = flags().read(argv)
    if is_rehearsal():
        rehearse(args)
    elif args.sample_data:
        parse_model(JiTConfig, task_values(args))  # before anything is drawn
        args.data_path = _sample_data(args, args.sample_data)
    task = JiTTask(parse_model(JiTConfig, task_values(args)))
    return task, RunConfig.parse(run_values(args)).with_overrides(args.set)


def rehearse(args: argparse.Namespace) -> None:
    """Shrink the run to a minute: smallest model, small images, a handful of steps.

    Batch size and accumulation stay, so that the batch contract is the one asked
    for. Data that exist are used; others are generated inside the output folder.
    """
    if launched_rank() == 0:
        print(
            f"rehearsal: JiT-T/4 at 16 px for {REHEARSAL_STEPS} steps stands in for "
            f"{args.model} at {args.img_size} px for {args.epochs} epochs",
            flush=True,
        )
    args.model, args.img_size, args.sample_steps = "JiT-T/4", 16, 4
    args.num_fid_samples, args.grid, args.num_workers = 16, 4, min(args.num_workers, 1)
    args.max_steps, args.log_interval, args.resume = REHEARSAL_STEPS, 1, "discard"
    args.eval_interval = args.save_interval = args.epochs  # once each, at the end
    args.output_dir = str(Path(args.output_dir) / "rehearsal")
    if not Path(args.data_path).exists():
        args.data_path = _sample_data(args, REHEARSAL_IMAGES)


def _sample_data(args: argparse.Namespace, count: int) -> str:
    folder = Path(args.output_dir) / "sample_data"
    try:
        return str(make_images(folder, num=count, size=args.img_size, seed=args.seed))
    except OSError as error:
        raise DataError(f"cannot make images in {folder}: {error}", "another output_dir") from error


def task_values(args: argparse.Namespace) -> dict[str, Any]:
    """Return the values of a JiTConfig."""
    return {
        "variant": args.model,
        "image_size": args.img_size,
        "data": args.data_path,
        "val": args.val_path,
        "data_format": args.data_format,
        "pred": args.pred,
        "loss": args.loss,
        "label_drop": args.label_drop,
        "weight_decay": args.weight_decay,
        "guidance": args.guidance,
        "sample_steps": args.sample_steps,
        "grid": args.grid,
        "num_fid_samples": args.num_fid_samples,
        "inception_weights": args.inception_weights,
        "seed": args.seed,
    }


def run_values(args: argparse.Namespace) -> dict[str, Any]:
    """Return the values of a RunConfig."""
    return {
        "output_dir": args.output_dir,
        "seed": args.seed,
        "epochs": args.epochs,
        "max_steps": args.max_steps,
        "batch": {"batch_size": args.batch_size, "accumulate": args.gradient_accumulation_steps},
        "rate": {"lr": args.lr, "lr_scaling": args.lr_scaling},
        "schedule": {"warmup_epochs": args.warmup_epochs},
        "loader": {"num_workers": args.num_workers, "on_bad_sample": args.on_bad_image},
        "evaluation": {"every_epochs": args.eval_interval},
        "checkpoint": {"every_epochs": args.save_interval, "name_epochs": True},
        "sinks": {
            "tensorboard": args.tensorboard,
            "wandb": args.use_wandb,
            "wandb_project": args.wandb_project,
            "wandb_name": args.wandb_name,
        },
        "precision": "auto" if args.use_amp else "fp32",
        "max_grad_norm": args.max_grad_norm,
        "averages": args.ema_decays,
        "compile": args.compile,
        "device": args.device,
        "log_every": args.log_interval,
        "resume": args.resume,
        "accept_changes": args.accept_changes,
    }
