"""The flags of the JiT recipe, and their translation to a task and a run config."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from lockstep.config import RunConfig
from lockstep.dist.environment import is_rehearsal
from lockstep_recipes.command import (
    Flags,
    rehearse,
    run_config,
    sample_count,
    task_config,
    watch_values,
)
from lockstep_recipes.jit.model import VARIANTS
from lockstep_recipes.jit.sample_data import make_images
from lockstep_recipes.jit.task import JiTConfig, JiTTask

REHEARSAL_IMAGES = 1024


def flags() -> Flags:
    """Return the parser: the original script's flags under their names, then our own."""
    parser = Flags(
        "jit",
        "Train JiT, a diffusion transformer that predicts the clean image from its pixels.",
        "lockstep run jit --gpus 2 --data_path data/train --model JiT-B/4 --img_size 64 "
        "--batch_size 64 --epochs 100 --lr 1e-4 --use_amp",
    )
    parser.add_run_flags(epochs=100, warmup_epochs=5, weight_decay=0.0)
    parser.add_watch_flags(wandb_project="jit-diffusion")
    add = parser.add_argument
    data = "folder of images (flat, or a folder per class) or of texts"
    add("--data_path", dest="data", default="./data/train", help=data)
    held_out = "validation folder (default: hold out 2%% of the training data)"
    add("--val_path", dest="val", help=held_out)
    kind = "what to read from --data_path"
    add("--data_format", choices=["auto", "images", "text"], default="auto", help=kind)
    generated = "train on N generated images instead of --data_path"
    add("--sample_data", type=sample_count, metavar="N", help=generated)
    add("--model", dest="variant", default="JiT-B/4", help=f"one of {', '.join(VARIANTS)}")
    add("--img_size", dest="image_size", type=int, default=64, help="side in pixels")
    add("--batch_size", type=int, default=64, help="images per GPU")
    add("--lr", type=float, default=5e-5, help="base learning rate")
    add("--max_grad_norm", type=float, default=1.0, help="clip the gradient norm to this")
    averages = "decays of the weight averages (EMA); pass no number for no average"
    add("--ema_decays", type=float, nargs="*", default=[0.9999, 0.9996], help=averages)
    amp = "mixed precision on a GPU: bf16, or fp16 where it is missing"
    add("--use_amp", action="store_true", help=amp)
    add("--compile", action="store_true", help="compile the model")
    add("--num_workers", type=int, default=4, help="processes that read images, per GPU")
    add("--pred", choices=["x", "eps", "v"], default="x", help="what the network predicts")
    add(
        "--loss",
        choices=["x", "eps", "v"],
        default="v",
        help="the quantity whose error is the loss",
    )
    dropped = "share of labels hidden in training, for guidance"
    add("--label_drop", type=float, default=0.1, help=dropped)
    add("--guidance", type=float, default=2.9, help="scale of classifier-free guidance")
    add("--sample_steps", type=int, default=50, help="steps of the sampler")
    add("--grid", type=int, default=16, help="samples drawn at each evaluation")
    compared = "samples to compare with real images at each evaluation; 0: none"
    add("--num_fid_samples", type=int, default=256, help=compared)
    weights = "local file of Inception weights; with it the FID is computed, else a proxy"
    add("--inception_weights", help=weights)
    add("--output_dir", default="./output", help="the run folder")
    choices = ["stop", "skip"]
    unreadable = "what to do about an unreadable image"
    add("--on_bad_image", dest="on_bad_sample", choices=choices, default="stop", help=unreadable)
    return parser


def build(argv: Sequence[str]) -> tuple[JiTTask, RunConfig]:
    """Turn the command line into the arguments of `fit`."""
    args = flags().read(argv)
    task_config(JiTConfig, args)  # refuse bad settings before anything is generated
    if is_rehearsal():
        rehearse(args, "JiT-T/4 at 8 px", f"{args.variant} at {args.image_size} px")
        args.variant = "JiT-T/4"
        args.image_size = 8
        args.sample_steps = 4
        args.num_fid_samples = 16
        args.grid = 4
        if not Path(args.data).exists():
            args.data = _sample_data(args, REHEARSAL_IMAGES, seed=0)  # the next rehearsal reuses it
            args.val = None
            args.data_format = "auto"
    elif args.sample_data:
        args.data = _sample_data(args, args.sample_data, args.seed)
    run = run_config(
        args,
        checkpoint={"name_epochs": True},
        sinks=watch_values(args),
        precision="auto" if args.use_amp else "fp32",
        max_grad_norm=args.max_grad_norm,
        averages=args.ema_decays,
        compile=args.compile,
    )
    return JiTTask(task_config(JiTConfig, args, seed=run.seed)), run


def _sample_data(args: argparse.Namespace, num: int, seed: int) -> Path:
    folder = Path(args.output_dir) / "sample_data"
    return make_images(folder, num=num, size=args.image_size, seed=seed)
