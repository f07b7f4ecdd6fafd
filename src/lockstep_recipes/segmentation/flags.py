"""The flags of the segmentation recipe, translated to a task and a run config and nothing more."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from lockstep.config import RunConfig
from lockstep.dist.environment import is_rehearsal, launched
from lockstep.errors import ConfigError, plain, shown
from lockstep.text_input import whole_number
from lockstep_recipes.command import Flags, rehearse, run_config, task_config
from lockstep_recipes.segmentation.data import MODES
from lockstep_recipes.segmentation.model import BLOCKS
from lockstep_recipes.segmentation.sample_data import make_shapes
from lockstep_recipes.segmentation.task import SegmentationConfig, SegmentationTask

REHEARSAL_IMAGES = 128


def flags() -> Flags:
    """Return the parser: the guide's flags under their own names, then ours."""
    parser = Flags(
        "segmentation",
        "Train a dilated ResNet with ASPP and LoRM to segment, from scribbles or from masks.",
        "lockstep run segmentation --gpus 2 --distributed --layers 50 "
        "--model_type res50_ASPP_lorm --batchsize 8",
    )
    parser.add_run_flags(
        epochs=50, warmup_epochs=5, weight_decay=5e-4, lr_scaling="linear", save_interval=5
    )
    add = parser.add_argument
    add("--distributed", action="store_true", help="needed to train on several processes")
    add("--world_size", type=int, help="ignored unless it contradicts the launcher")
    add("--dist_url", default="env://", help="only env:// is supported")
    add("--batchsize", dest="batch_size", type=int, default=16, help="images per GPU")
    workers = "processes that read images, per GPU"
    add("--workers", dest="num_workers", type=int, default=4, help=workers)
    add("--lr", type=float, default=1e-3, help="for one GPU; --lr_scaling adapts it")
    add("--layers", type=int, choices=BLOCKS, help="of the ResNet; 50 unless --model_type says")
    add("--model_type", help="resN_ASPP_lorm or resN_ASPP")
    weights = "local ImageNet weights of the ResNet, used if it exists"
    add("--model_path", dest="backbone_weights", type=Path, help=weights)
    add("--width", type=int, default=64, help="channels of the first stage; published: 64")
    voc = "dataset/ScribbleSup/VOC2012"
    add("--dataset_path", dest="data", default=voc, help="VOC's layout or CamVid's")
    modes = ["auto", *MODES]
    add("--dataset", dest="mode", choices=modes, default="auto", help="what is trained on")
    add("--pseudo_dir", dest="pseudo", help="folder of pseudo-labels below --dataset_path")
    add("--num_classes", type=int, help="21 in VOC's layout, 11 in CamVid's, unless given")
    add("--void", type=int, help="index to ignore: 255 in VOC's layout, --num_classes in CamVid's")
    side = "side, or height width"
    add("--crop_size", dest="crop", type=int, nargs="+", default=[465], metavar="N", help=side)
    add("--scale", type=float, nargs=2, default=[0.5, 2.0], metavar=("LOW", "HIGH"))
    add("--rotate", dest="degrees", type=float, default=10.0, help="degrees, either way")
    add("--blur", type=float, default=1.5, help="largest radius, every second image")
    add("--l_segs", type=float, default=1.0, help="weight of the scribbles' cross-entropy")
    add("--l_pesudo", type=float, default=1.0, help="weight of the pseudo-labels' cross-entropy")
    add("--l_ds", type=float, default=1.0, help="weight of the entropy near scribbles")
    add("--l_dc", type=float, default=1.0, help="weight of the entropy away from contours")
    add("--l_lorm", type=float, default=1.0, help="weight of LoRM's error")
    add("--label_smooth", type=float, default=0.1, help="of the pseudo-labels; 0: not smoothed")
    add("--momentum", type=float, default=0.9)
    add("--no_amp", action="store_true", help="compute in float32 on a GPU, too")
    add("--no_sync_bn", action="store_true", help="normalise each rank's batch on its own")
    add("--compile", action="store_true", help="compile the model")
    add("--output_dir", help="./log/MODEL_TYPE unless given; the same folder resumes")
    add("--no_tensorboard", action="store_true")
    add("--num_pictures", type=int, default=4, help="predictions drawn at each evaluation")
    add("--eval_batchsize", type=int, default=1, help="more than 1 needs images of one size")
    add("--on_bad_sample", choices=["stop", "skip"], default="stop")
    return parser


def build(argv: Sequence[str]) -> tuple[SegmentationTask, RunConfig]:
    """Turn the command line into what `fit` takes."""
    args = flags().read(argv)
    args.model_type, args.layers, args.lorm = choose_model(args.model_type, args.layers)
    args.output_dir = args.output_dir or f"./log/{args.model_type}"
    check_launch(args)
    if len(args.crop) > 2:
        problem = f"--crop_size takes one or two numbers, not {len(args.crop)}"
        raise ConfigError(problem, "pass --crop_size 465")
    if is_rehearsal():
        rehearse(args, "res18 of width 8 at 33 px", f"{args.model_type} at {args.crop[0]} px")
        args.layers, args.width, args.crop, args.backbone_weights = 18, 8, [33], None
        args.num_pictures = min(args.num_pictures, 2)
        if not Path(args.data).exists():
            folder = Path(args.output_dir) / "sample_data"
            args.data = make_shapes(folder, REHEARSAL_IMAGES, num_val=8, size=48)
    run = run_config(
        args,
        rate={"reference_batch": 16},
        schedule={"shape": "cosine"},
        evaluation={
            "batch_size": args.eval_batchsize,
            "best_metric": "miou",
            "best_is": "highest",
        },
        checkpoint={"name_epochs": True},
        sinks={"tensorboard": not args.no_tensorboard},
        precision="fp32" if args.no_amp else "auto",
        max_grad_norm=None,
        sync_batch_norm=not (args.no_sync_bn or args.exact),
        compile=args.compile,
    )
    crop = (args.crop * 2)[:2]
    return SegmentationTask(task_config(SegmentationConfig, args, crop=crop)), run


def check_launch(args: argparse.Namespace) -> None:
    """Refuse processes that were not asked for, another number than claimed, another place."""
    size = launched().size
    if size > 1 and not args.distributed:
        problem = f"{size} processes were started without --distributed"
        raise ConfigError(problem, "add --distributed")
    if args.world_size is not None and args.world_size != size:
        raise ConfigError(
            f"--world_size {args.world_size}, but {size} processes were started",
            "leave --world_size out: the launcher says it",
        )
    if args.dist_url != "env://":
        raise ConfigError(
            f"--dist_url {plain(args.dist_url)} is not supported",
            "use env://, with MASTER_ADDR and MASTER_PORT",
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
    named = whole_number(found[1]) if found else None
    if found is None or named not in BLOCKS:
        raise ConfigError(
            f"there is no model {shown(model_type)}",
            f"use resN_ASPP_lorm or resN_ASPP, with N one of {', '.join(map(str, BLOCKS))}",
        )
    if layers not in (None, named):
        raise ConfigError(
            f"--layers {layers} and --model_type {model_type} disagree",
            f"pass --model_type res{layers}_ASPP{found[2] or ''}",
        )
    return model_type, named, found[2] is not None
