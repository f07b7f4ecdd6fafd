"""The flags of the segmentation recipe, and their translation to a task and a run config."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from lockstep.config import RunConfig
from lockstep.dist.environment import is_rehearsal, planned_size
from lockstep.errors import ConfigError, plain, shown
from lockstep.text_input import whole_number
from lockstep_recipes.command import Flags, rehearse, run_config, task_config
from lockstep_recipes.segmentation.data import MODES
from lockstep_recipes.segmentation.model import BLOCKS
from lockstep_recipes.segmentation.sample_data import make_shapes
from lockstep_recipes.segmentation.task import SegmentationConfig, SegmentationTask

REHEARSAL_IMAGES = 128


def flags() -> Flags:
    """Return the parser: the original script's flags under their names, then our own."""
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
    add("--distributed", action="store_true", help="required to train on several processes")
    add("--world_size", type=int, help="ignored unless it contradicts the launcher")
    add("--dist_url", default="env://", help="only env:// is supported")
    add("--batchsize", dest="batch_size", type=int, default=16, help="images per GPU")
    workers = "processes that read images, per GPU"
    add("--workers", dest="num_workers", type=int, default=4, help=workers)
    add("--lr", type=float, default=1e-3, help="learning rate for one GPU; see --lr_scaling")
    add("--layers", type=int, choices=BLOCKS, help="layers of the ResNet (default: 50)")
    add("--model_type", help="resN_ASPP_lorm or resN_ASPP, with N layers")
    weights = "local file of ImageNet weights; random weights if it does not exist"
    add("--model_path", dest="backbone_weights", type=Path, help=weights)
    add("--width", type=int, default=64, help="channels of the first stage")
    voc = "dataset/ScribbleSup/VOC2012"
    add("--dataset_path", dest="data", default=voc, help="folder in the layout of VOC or CamVid")
    modes = ["auto", *MODES]
    add("--dataset", dest="mode", choices=modes, default="auto", help="kind of labels to train on")
    add("--pseudo_dir", dest="pseudo", help="folder of pseudo-labels below --dataset_path")
    add("--num_classes", type=int, help="classes (default: 21 for VOC, 11 for CamVid)")
    add("--void", type=int, help="index to ignore (default: 255 for VOC, --num_classes for CamVid)")
    side = "side of the crop in pixels, or height and width"
    add("--crop_size", dest="crop", type=int, nargs="+", default=[465], metavar="N", help=side)
    zoom = "range of random scaling"
    add("--scale", type=float, nargs=2, default=[0.5, 2.0], metavar=("LOW", "HIGH"), help=zoom)
    add(
        "--rotate",
        dest="degrees",
        type=float,
        default=10.0,
        help="largest random rotation in degrees",
    )
    add(
        "--blur",
        type=float,
        default=1.5,
        help="largest blur radius; half of the images are blurred",
    )
    add("--l_segs", type=float, default=1.0, help="weight of the scribbles' cross-entropy")
    add("--l_pesudo", type=float, default=1.0, help="weight of the pseudo-labels' cross-entropy")
    add("--l_ds", type=float, default=1.0, help="weight of the entropy near scribbles")
    add("--l_dc", type=float, default=1.0, help="weight of the entropy away from contours")
    add("--l_lorm", type=float, default=1.0, help="weight of LoRM's error")
    add("--label_smooth", type=float, default=0.1, help="label smoothing of the pseudo-labels")
    add("--momentum", type=float, default=0.9, help="momentum of SGD")
    add("--no_amp", action="store_true", help="use float32 on GPUs too")
    add(
        "--no_sync_bn",
        action="store_true",
        help="do not synchronise batch normalisation across ranks",
    )
    add("--compile", action="store_true", help="compile the model")
    add("--output_dir", help="the run folder (default: ./log/MODEL_TYPE)")
    add("--no_tensorboard", action="store_true", help="write no TensorBoard files")
    add("--num_pictures", type=int, default=4, help="predictions drawn at each evaluation")
    add(
        "--eval_batchsize",
        type=int,
        default=1,
        help="images per evaluation batch; more than 1 needs equal sizes",
    )
    unreadable = "what to do about an unreadable image"
    add("--on_bad_sample", choices=["stop", "skip"], default="stop", help=unreadable)
    return parser


def build(argv: Sequence[str]) -> tuple[SegmentationTask, RunConfig]:
    """Turn the command line into the arguments of `fit`."""
    args = flags().read(argv)
    args.model_type, args.layers, args.lorm = choose_model(args.model_type, args.layers)
    args.output_dir = args.output_dir or f"./log/{args.model_type}"
    check_launch(args)
    if len(args.crop) > 2:
        problem = f"--crop_size takes one or two numbers, not {len(args.crop)}"
        raise ConfigError(problem, "pass --crop_size 465")
    if is_rehearsal():
        rehearse(args, "res18 of width 8 at 33 px", f"{args.model_type} at {args.crop[0]} px")
        args.layers = 18
        args.width = 8
        args.crop = [33]
        args.backbone_weights = None
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
    """Refuse processes without --distributed, a wrong --world_size, and other --dist_url."""
    size = planned_size()
    if size > 1 and not args.distributed:
        problem = f"{size} processes were started without --distributed"
        raise ConfigError(problem, "add --distributed")
    if args.world_size is not None and args.world_size != size:
        raise ConfigError(
            f"--world_size {args.world_size}, but {size} processes were started",
            "leave out --world_size; the launcher sets it",
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
        ConfigError: for an unknown model, or if the two contradict each other.
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
