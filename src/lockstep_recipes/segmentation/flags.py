"""The flags of the segmentation recipe, translated to a task and a run config and nothing more."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.config import RunConfig
from lockstep.errors import ConfigError
from lockstep.parse import parse_model
from lockstep.runtime import is_rehearsal, launched, launched_rank
from lockstep_recipes.command import Flags
from lockstep_recipes.segmentation.data import MODES
from lockstep_recipes.segmentation.model import BLOCKS
from lockstep_recipes.segmentation.sample_data import make_shapes
from lockstep_recipes.segmentation.task import SegmentationConfig, SegmentationTask

REHEARSAL_STEPS = 4
REHEARSAL_IMAGES = 128


def flags() -> Flags:
    """Return the parser: the guide's flags under their own names, then ours."""
    parser = Flags(
        "segmentation",
        "Train a dilated ResNet with ASPP and LoRM to segment, from scribbles or from masks.",
        "lockstep run segmentation --gpus 2 --distributed --layers 50 "
        "--model_type res50_ASPP_lorm --batchsize 8",
    )
    add = parser.add_argument
    add("--distributed", action="store_true", help="needed to train on several processes")
    add("--world_size", type=int, help="accepted; the launcher says it")
    add("--local_rank", type=int, help="accepted; the launcher's environment wins")
    add("--dist_url", default="env://", help="only env://: the launcher says where to meet")
    add("--batchsize", type=int, default=16, help="images per GPU")
    add("--workers", type=int, default=4, help="processes that read images, per GPU")
    add("--lr", type=float, default=1e-3, help="for one GPU; --lr_scaling adapts it")
    add("--layers", type=int, choices=BLOCKS, help="of the ResNet; 50 unless --model_type says")
    add("--model_type", help="resN_ASPP_lorm or resN_ASPP")
    add("--model_path", type=Path, help="local ImageNet weights of the ResNet, used if it exists")
    add("--width", type=int, default=64, help="channels of the first stage; published: 64")
    add("--dataset_path", default="dataset/ScribbleSup/VOC2012", help="VOC's layout or CamVid's")
    add("--dataset", choices=["auto", *MODES], default="auto", help="what is trained on")
    add("--pseudo_dir", help="folder of pseudo-labels below --dataset_path")
    add("--num_classes", type=int, help="21 in VOC's layout, 11 in CamVid's, unless given")
    add("--void", type=int, help="index to ignore: 255 in VOC's layout, --num_classes in CamVid's")
    add(
        "--crop_size", type=int, nargs="+", default=[465], metavar="N", help="side, or height width"
    )
    add("--scale", type=float, nargs=2, default=[0.5, 2.0], metavar=("LOW", "HIGH"))
    add("--rotate", type=float, default=10.0, help="degrees, either way")
    add("--blur", type=float, default=1.5, help="largest radius, every second image")
    add("--l_segs", type=float, default=1.0, help="weight of the scribbles' cross-entropy")
    add("--l_pesudo", type=float, default=1.0, help="weight of the pseudo-labels' cross-entropy")
    add("--l_ds", type=float, default=1.0, help="weight of the entropy near scribbles")
    add("--l_dc", type=float, default=1.0, help="weight of the entropy away from contours")
    add("--l_lorm", type=float, default=1.0, help="weight of LoRM's error")
    add("--label_smooth", type=float, default=0.1, help="of the pseudo-labels; 0: not smoothed")
    add("--epochs", type=int, default=50)
    add("--max_steps", type=int, help="stop after so many weight updates")
    add("--gradient_accumulation_steps", type=int, default=1)
    add("--lr_scaling", choices=["none", "linear", "sqrt", "batch"], default="linear")
    add("--warmup_epochs", type=float, default=5)
    add("--momentum", type=float, default=0.9)
    add("--weight_decay", type=float, default=5e-4)
    add("--no_amp", action="store_true", help="compute in float32 on a GPU, too")
    add("--no_sync_bn", action="store_true", help="normalise each rank's batch on its own")
    add("--compile", action="store_true", help="compile the model")
    add("--output_dir", help="./log/MODEL_TYPE unless given; the same folder resumes")
    add("--no_tensorboard", action="store_true")
    add("--num_pictures", type=int, default=4, help="predictions drawn at each evaluation")
    add("--eval_batchsize", type=int, default=1, help="more than 1 needs images of one size")
    add("--eval_interval", type=int, default=1, help="epochs between evaluations")
    add("--save_interval", type=int, default=5, help="epochs between named checkpoints")
    add("--log_interval", type=int, default=10, help="steps between log lines")
    add("--resume", default="auto", help="auto, never, discard, or a checkpoint")
    add("--accept_changes", action="store_true", help="resume although batch, rate or data changed")
    add("--on_bad_sample", choices=["stop", "skip"], default="stop")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto")
    add("--seed", type=int, default=0)
    add("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="any run setting")
    return parser


def build(argv: Sequence[str]) -> tuple[SegmentationTask, RunConfig]:
    """Turn the command line into what `fit` takes."""
    args = flags().read(argv)
    args.model_type, args.layers, args.lorm = choose_model(args.model_type, args.layers)
    args.output_dir = args.output_dir or f"./log/{args.model_type}"
    check_launch(args)
    if args.dist_url != "env://":
        raise ConfigError(
            f"--dist_url {args.dist_url} is not supported",
            "env://, with MASTER_ADDR and MASTER_PORT",
        )
    if len(args.crop_size) > 2:
        raise ConfigError(f"--crop_size takes one or two numbers, not {len(args.crop_size)}", "465")
    if is_rehearsal():
        rehearse(args)
    task = SegmentationTask(parse_model(SegmentationConfig, task_values(args)))
    return task, RunConfig.parse(run_values(args)).with_overrides(args.set)


def check_launch(args: argparse.Namespace) -> None:
    """Refuse several processes that were not asked for, or another number than was claimed."""
    size = launched().size
    if size > 1 and not args.distributed:
        raise ConfigError(f"{size} processes were started without --distributed", "--distributed")
    if args.world_size is not None and args.world_size != size:
        raise ConfigError(
            f"--world_size {args.world_size}, but {size} processes were started",
            "leave --world_size out: the launcher says it",
        )


def choose_model(model_type: str | None, layers: int | None) -> tuple[str, int, bool]:
    """Return the model's name, its layers, and whether it has LoRM.

    >>> choose_model(None, 101)
    ('res101_ASPP_lorm', 101, True)

    Raises:
        ConfigError: if there is no such model, or the two contradict each other.
    """
    model_type = model_type or f"res{layers or 50}_ASPP_lorm"
    found = re.fullmatch(r"res(\d+)_ASPP(_lorm)?", model_type)
    if found is None or int(found[1]) not in BLOCKS:
        raise ConfigError(
            f"there is no model {model_type!r}",
            f"resN_ASPP_lorm or resN_ASPP, with N one of {', '.join(map(str, BLOCKS))}",
        )
    named = int(found[1])
    if layers not in (None, named):
        raise ConfigError(
            f"--layers {layers} and --model_type {model_type} disagree",
            f"--model_type res{layers}_ASPP{found[2] or ''}",
        )
    return model_type, named, found[2] is not None


def rehearse(args: argparse.Namespace) -> None:
    """Shrink the run to a minute: a thin ResNet-18, small crops, a handful of steps.

    Batch size and accumulation stay, so that the batch contract is the one asked
    for. Data that exist are used; others are generated inside the output folder.
    """
    if launched_rank() == 0:
        print(
            f"rehearsal: res18 of width 8 at 33 px for {REHEARSAL_STEPS} steps stands in for "
            f"{args.model_type} at {args.crop_size[0]} px for {args.epochs} epochs",
            flush=True,
        )
    args.layers, args.width, args.crop_size, args.model_path = 18, 8, [33], None
    args.workers, args.num_pictures = min(args.workers, 1), min(args.num_pictures, 2)
    args.max_steps, args.log_interval, args.resume = REHEARSAL_STEPS, 1, "discard"
    args.eval_interval = args.save_interval = args.epochs  # once each, at the end
    args.output_dir = str(Path(args.output_dir) / "rehearsal")
    if not Path(args.dataset_path).exists():
        folder = Path(args.output_dir) / "sample_data"
        args.dataset_path = make_shapes(
            folder, REHEARSAL_IMAGES, num_val=8, size=48, seed=args.seed
        )


def task_values(args: argparse.Namespace) -> dict[str, Any]:
    """Return the values of a SegmentationConfig."""
    same: tuple[str, ...] = (
        "num_classes",
        "void",
        "on_bad_sample",
        "layers",
        "width",
        "lorm",
        "scale",
        "blur",
    )
    same += ("l_segs", "l_pesudo", "l_ds", "l_dc", "l_lorm", "label_smooth", "momentum")
    same += ("weight_decay", "num_pictures")
    return {name: getattr(args, name) for name in same} | {
        "data": args.dataset_path,
        "mode": args.dataset,
        "pseudo": args.pseudo_dir,
        "backbone_weights": args.model_path,
        "crop": (args.crop_size * 2)[:2],
        "degrees": args.rotate,
    }


def run_values(args: argparse.Namespace) -> dict[str, Any]:
    """Return the values of a RunConfig."""
    return {
        "output_dir": args.output_dir,
        "seed": args.seed,
        "epochs": args.epochs,
        "max_steps": args.max_steps,
        "batch": {"batch_size": args.batchsize, "accumulate": args.gradient_accumulation_steps},
        "rate": {"lr": args.lr, "lr_scaling": args.lr_scaling, "reference_batch": 16},
        "schedule": {"shape": "cosine", "warmup_epochs": args.warmup_epochs},
        "loader": {"num_workers": args.workers, "on_bad_sample": args.on_bad_sample},
        "evaluation": {
            "every_epochs": args.eval_interval,
            "batch_size": args.eval_batchsize,
            "best_metric": "miou",
            "best_is": "highest",
        },
        "checkpoint": {"every_epochs": args.save_interval, "name_epochs": True},
        "sinks": {"tensorboard": not args.no_tensorboard},
        "precision": "fp32" if args.no_amp else "auto",
        "max_grad_norm": None,
        "sync_batch_norm": not args.no_sync_bn,
        "compile": args.compile,
        "device": args.device,
        "log_every": args.log_interval,
        "resume": args.resume,
        "accept_changes": args.accept_changes,
    }
