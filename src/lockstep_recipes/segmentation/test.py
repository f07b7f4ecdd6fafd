"""`python -m lockstep_recipes.segmentation.test`: the final, multi-scale test of a checkpoint.

Owns: rebuilding the network of a checkpoint, predicting whole images in windows at several
scales, writing masks. Runs on one process or, under torchrun, on several.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from lockstep.checkpoint import CheckpointStore, load_model_state
from lockstep.dist.agreement import together
from lockstep.errors import CheckpointError
from lockstep.world import World
from lockstep_recipes.command import Flags, finish
from lockstep_recipes.segmentation.data import SegmentationData, check_files, open_split
from lockstep_recipes.segmentation.evaluate import (
    TEST_SCALES,
    TEST_WINDOW,
    count_pixels,
    draw_rows,
    normalise,
    predict_in_windows,
    read_confusion,
)
from lockstep_recipes.segmentation.model import SegmentationNet
from lockstep_recipes.segmentation.task import SegmentationTask


def flags() -> Flags:
    """Return the parser."""
    parser = Flags(
        "segmentation",
        "Test a checkpoint on a split, with windows over several scales.",
        "python -m lockstep_recipes.segmentation.test --checkpoint log/res50_ASPP_lorm/checkpoints/"
        "best_model.pt --dataset_path dataset/ScribbleSup/VOC2012",
    )
    parser.prog = "python -m lockstep_recipes.segmentation.test"
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, help="a checkpoint of a run of this recipe")
    add("--dataset_path", type=Path, default=Path("dataset/ScribbleSup/VOC2012"))
    add("--split", default="val")
    add("--scales", type=float, nargs="+", default=list(TEST_SCALES))
    add("--window", type=int, default=TEST_WINDOW)
    add("--max_images", type=int, help="test only this many images")
    add("--output", type=Path, help="folder for masks (class indices) and pictures (colours)")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto")
    add("--local_rank", type=int, help="accepted and ignored; the launcher's environment counts")
    return parser


def load_network(path: Path) -> tuple[SegmentationNet, int]:
    """Rebuild the network of a checkpoint; return it with the index its labels ignore.

    Raises:
        CheckpointError: if it is missing, damaged, or of another recipe.
    """
    checkpoint = CheckpointStore(path.parent, recipe=SegmentationTask.name).open(path)
    made = checkpoint.load("task")
    if "layers" not in made:
        raise CheckpointError(
            f"{path} does not say which network it holds",
            "pass a checkpoint that this recipe saved",
        )
    void = made.pop("void")
    model = SegmentationNet(**made)
    load_model_state(model, checkpoint.load("model"))
    return model.eval(), void


@torch.no_grad()
def test_split(args: Namespace, world: World) -> dict[str, float]:
    """Predict the split, each image on one rank, and return the metrics. Collective."""
    model, void = load_network(args.checkpoint)
    model = model.to(world.device).as_channels_last()
    num_classes = model.num_classes
    listing = open_split(args.dataset_path, args.split, num_classes=num_classes, void=void)
    check_files(listing, ["mask"])
    data = SegmentationData(listing, ("mask",))
    local_matrix = torch.zeros(num_classes, num_classes, dtype=torch.int64, device=world.device)
    on_gpu = world.device.type == "cuda"

    def look() -> None:
        for index in range(min(len(data), args.max_images or len(data)))[world.rank :: world.size]:
            image, planes = data.read(index)
            pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].to(world.device)
            with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu):
                seen = normalise(pixels, torch.float32)[0]
                predicted = predict_in_windows(model, seen, args.scales, args.window).argmax(dim=0)
            truth = torch.from_numpy(planes["mask"]).to(world.device)
            local_matrix.add_(count_pixels(predicted, truth, num_classes))
            if args.output:
                mask = predicted.to(torch.uint8).cpu().numpy()
                name = f"{listing.names[index]}.png"
                for kind in ("pictures", "masks"):
                    (args.output / kind).mkdir(parents=True, exist_ok=True)
                draw_rows(
                    [(np.asarray(image), planes["mask"], mask)], args.output / "pictures" / name
                )
                Image.fromarray(mask).save(args.output / "masks" / name)

    together(world, look)  # an unreadable image on one rank ends all of them
    return read_confusion(world.all_sum(local_matrix).double().cpu())


def run(argv: Sequence[str]) -> str:
    """Run the test that `argv` describes and return its report. Collective.

    Raises:
        LockstepError: if the request, the checkpoint or the data cannot be used.
    """
    args = flags().read(argv)
    with World.enter(args.device) as world:
        measured = test_split(args, world)
    lines = [f"{name:<24}{value:.4f}" for name, value in measured.items()]
    return "\n".join([f" * IOU_All {measured['miou']:.4f}", *lines])


if __name__ == "__main__":
    finish(run, sys.argv[1:])
