"""Scribble segmentation as a task: five loss terms, each a mean over its own units.

Owns: the terms and their weights, and the metrics, log lines and pictures of an evaluation.
Does not own: the network, the files, the loop.

L = l_segs   mean over scribbled pixels of        cross-entropy
  + l_pesudo mean over pseudo-labelled pixels of  smoothed cross-entropy
  + l_ds     mean over pixels near scribbles of   entropy x d_s / 255
  + l_dc     mean over pixels off contours of     entropy x d_c / 255
  + l_lorm   mean over foreground positions of    LoRM's error

The number of scribbled pixels differs a lot between images, so each mean is over the whole
step: `weights` counts first. A rank without a scribble contributes zero.
"""

import sys
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lockstep.dist.batch_norm import SyncBatchNorm
from lockstep.errors import ConfigError, DataError
from lockstep.plan import Contract
from lockstep.run.evaluation import evaluating
from lockstep.run_files import append_text, replacing
from lockstep.task import Context, PartialLoss, Task
from lockstep.world import World
from lockstep_recipes.segmentation.data import (
    MODES,
    Augment,
    Listing,
    SegmentationData,
    check_files,
    choose_mode,
    open_split,
)
from lockstep_recipes.segmentation.evaluate import (
    count_pixels,
    draw_rows,
    normalise,
    read_confusion,
)
from lockstep_recipes.segmentation.labels import IGNORE
from lockstep_recipes.segmentation.model import SegmentationNet, load_backbone, shrink_labels

Batch = Mapping[str, Tensor]


class SegmentationConfig(BaseModel):
    """All settings of the task."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    data: Path = Path("dataset/ScribbleSup/VOC2012")
    mode: str = "auto"
    pseudo: str | None = None
    """Folder of pseudo-labels, if it does not have the usual name."""
    num_classes: int | None = Field(default=None, ge=2, le=IGNORE)
    void: int | None = Field(default=None, ge=0, le=IGNORE)
    on_bad_sample: Literal["stop", "skip"] = "stop"

    layers: int = 50
    width: int = Field(default=64, ge=1)
    lorm: bool = True
    backbone_weights: Path | None = None

    crop: tuple[PositiveInt, PositiveInt] = (465, 465)
    scale: tuple[PositiveFloat, PositiveFloat] = (0.5, 2.0)
    degrees: float = Field(default=10.0, ge=0, le=180)
    blur: float = Field(default=1.5, ge=0)

    l_segs: float = 1.0
    l_pesudo: float = 1.0
    l_ds: float = 1.0
    l_dc: float = 1.0
    l_lorm: float = 1.0
    label_smooth: float = Field(default=0.1, ge=0, le=1)

    momentum: float = Field(default=0.9, ge=0, lt=1)
    weight_decay: float = Field(default=5e-4, ge=0)
    num_pictures: int = Field(default=4, ge=0)


def entropy(logits: Tensor) -> Tensor:
    """Return each pixel's entropy: (B, K, H, W) to (B, H, W)."""
    log_p = F.log_softmax(logits, dim=1)
    return -(log_p.exp() * log_p).sum(dim=1)


def cross_entropy_sum(logits: Tensor, labels: Tensor, smooth: float = 0.0) -> Tensor:
    """Sum the (smoothed) cross-entropy over the labelled pixels."""
    each = F.cross_entropy(
        logits, labels.long(), ignore_index=IGNORE, reduction="none", label_smoothing=smooth
    )
    return each.sum()  # separate: the fused reduction is not deterministic on a GPU


def _sees_others(model: nn.Module, world: World) -> bool:
    """Return whether batch normalisation covers the images of other ranks too."""
    return world.size > 1 and any(isinstance(m, SyncBatchNorm) for m in model.modules())


class SegmentationTask(Task):
    """Train a ResNet with ASPP, and LoRM beside it, on scribbles or on masks."""

    name = "segmentation"
    may_change = ("data", "pseudo", "backbone_weights", "num_pictures", "on_bad_sample")

    def __init__(self, config: SegmentationConfig) -> None:
        self.config = config
        self.skipped: list[str] = []
        self._began = time.monotonic()
        self._steps_per_epoch = 1
        self._miou = 0.0

    def settings(self) -> dict[str, Any]:
        """Return every setting."""
        return self.config.model_dump(mode="json")

    # --- data ---------------------------------------------------------------------------------

    @cached_property
    def listings(self) -> tuple[Listing, Listing]:
        """The training split and the held-out split.

        Raises:
            DataError: if a folder, a list or a file is missing.
        """
        config = self.config
        train, val = (
            open_split(
                config.data,
                split,
                num_classes=config.num_classes,
                void=config.void,
                pseudo=config.pseudo,
            )
            for split in ("train", "val")
        )
        if "mask" not in val.folders:
            problem = f"{config.data} has no masks to validate with"
            raise DataError(problem, "add a folder SegmentationClassAug")
        return train, val

    @cached_property
    def mode(self) -> str:
        """The kind of labels to train on, with "auto" resolved."""
        return choose_mode(self.config.mode, self.listings[0])

    @property
    def num_classes(self) -> int:
        """Number of classes, including the background."""
        return self.listings[0].num_classes

    def train_data(self) -> SegmentationData:
        """Return the training samples, augmented."""
        config = self.config
        augment = Augment(config.crop, config.scale, config.degrees, config.blur)
        return self._open(self.listings[0], MODES[self.mode], augment)

    def eval_data(self) -> SegmentationData:
        """Return the held-out images with their masks, not augmented."""
        return self._open(self.listings[1], ("mask",), None)

    def _open(
        self, listing: Listing, kinds: tuple[str, ...], augment: Augment | None
    ) -> SegmentationData:
        data = SegmentationData(listing, kinds, augment)
        if self.config.on_bad_sample == "stop":
            check_files(listing, kinds)
            return data
        data, bad = data.without_bad()  # every rank checks every sample, so all skip the same ones
        self.skipped += bad
        return data

    # --- model --------------------------------------------------------------------------------

    def build_model(self) -> SegmentationNet:
        """Return the network; its trunk is loaded from a local file if there is one."""
        config = self.config
        model = SegmentationNet(self.num_classes, config.layers, config.width, config.lorm)
        if config.backbone_weights and config.backbone_weights.is_file():
            load_backbone(model.backbone, config.backbone_weights)
        return model.as_channels_last()

    def build_optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        """Return SGD with momentum and weight decay on all parameters."""
        parameters = list(model.parameters())
        fused = all(p.is_cuda for p in parameters)
        decay = self.config.weight_decay
        return SGD(parameters, lr, self.config.momentum, weight_decay=decay, fused=fused)

    def banner(self, world: World, contract: Contract) -> list[str]:
        """Return the start-up lines: model, initial weights, labels, learning rate."""
        config = self.config
        weights = config.backbone_weights
        self._steps_per_epoch = contract.plan.steps_per_epoch
        start = "random weights"
        if weights:
            start = str(weights) if weights.is_file() else f"random weights: {weights} is missing"
        lines = [
            f"Model: res{config.layers}_ASPP{'_lorm' if config.lorm else ''}, "
            f"{self.num_classes} classes, initialised from {start}",
            f"Dataset: {self.mode}",
            f"Effective lr : {contract.effective_lr:g}",
        ]
        if self.skipped:
            lines.append(f"skipped {len(self.skipped)} bad samples:")
            lines += [f"  {problem}" for problem in self.skipped[:5]]
        return lines

    # --- loss ---------------------------------------------------------------------------------

    def weights(self, batch: Batch, context: Context) -> dict[str, Tensor | float]:
        """Count the units of each term that this mode has."""
        kinds = {"label": "segs", "pseudo": "pesudo"}
        counts = {kinds[k]: (batch[k] != IGNORE).sum() for k in kinds if k in batch}
        counts |= {k: (batch[k] > 0).sum() for k in ("ds", "dc") if k in batch}
        if self.config.lorm:
            counts["lorm"] = self._foreground(batch).sum()
        return dict(counts)

    def loss(self, model: nn.Module, batch: Batch, context: Context) -> PartialLoss:
        """Return the weighted sum of the terms, each divided by its units in the whole step."""
        config = self.config
        if len(batch["image"]) == 1 and not _sees_others(model, context.world):
            problem = "batch normalisation cannot train on a batch of one image"
            raise ConfigError(problem, "pass --batchsize 2")
        image = normalise(batch["image"], next(model.parameters()).dtype)
        logits, lorm = model(image, self._foreground(batch) if config.lorm else None)
        sums: dict[str, Tensor] = {}
        if "label" in batch:
            sums["segs"] = cross_entropy_sum(logits, batch["label"])
        if "pseudo" in batch:
            sums["pesudo"] = cross_entropy_sum(logits, batch["pseudo"], config.label_smooth)
        if "ds" in batch or "dc" in batch:
            unsure = entropy(logits)
            for name in ("ds", "dc"):
                if name in batch:
                    sums[name] = (unsure * batch[name].to(unsure.dtype)).sum() / 255
        if config.lorm:
            sums["lorm"] = lorm
        shares = {name: getattr(config, f"l_{name}") for name in sums}
        total = sum((shares[n] * sums[n] / context.weights[n] for n in sums), torch.zeros(()))
        counts = self.weights(batch, context)
        return PartialLoss(total, 1.0, {n: (sums[n].detach(), counts[n]) for n in sums})

    def _foreground(self, batch: Batch) -> Tensor:
        """Return the grid positions that are labelled as an object, for LoRM."""
        labels = shrink_labels(batch["pseudo"] if "pseudo" in batch else batch["label"])
        known = labels != IGNORE
        background = self.listings[0].background
        return known if background is None else known & (labels != background)

    # --- evaluation ---------------------------------------------------------------------------

    def evaluate(
        self, model: nn.Module, batch: Batch, context: Context
    ) -> dict[str, tuple[Tensor, Tensor | float]]:
        """Count the pixels of held-out images, and sum their cross-entropy."""
        logits, _ = model(normalise(batch["image"], next(model.parameters()).dtype))
        labels = batch["label"]
        return {
            "loss": (cross_entropy_sum(logits, labels), (labels != IGNORE).sum()),
            "confusion": (count_pixels(logits.argmax(dim=1), labels, self.num_classes), 1.0),
        }

    def derive(self, means: Mapping[str, Tensor]) -> Mapping[str, float]:
        """Compute the IoUs from the confusion matrix of all ranks."""
        nothing = torch.zeros(self.num_classes, self.num_classes)
        measured = read_confusion(means.get("confusion", nothing))
        self._miou = measured["miou"]
        return {**super().derive(means), **measured}

    def finish_evaluation(
        self, model: nn.Module, context: Context, folder: str
    ) -> Mapping[str, float | Path]:
        """Log the mIoU and draw predictions, on the first rank."""
        name = f"samples/step_{context.step:08d}.png"
        if context.world.is_first:
            self._log(self._miou, context.step, folder)
            if self.config.num_pictures:
                self._draw(model, context.world, folder, name)
        return {"predictions": Path(folder, name)} if self.config.num_pictures else {}

    def _log(self, miou: float, step: int, folder: str) -> None:
        """Print the original script's log lines, and append them to `log.txt`."""
        epoch = step // self._steps_per_epoch
        began = self._began
        self._began = time.monotonic()
        line = f"Epoch[{epoch:02d}], iou_all[{miou:.4f}], time[{self._began - began:.1f}]s\n"
        with suppress(OSError):  # a closed output or a full disk must not end the run
            sys.stdout.write(f" * IOU_All {miou:.4f}\n{line}")
            sys.stdout.flush()
            append_text(folder, "log.txt", line)

    def _draw(self, model: nn.Module, world: World, folder: str, name: str) -> None:
        """Draw images, truths and predictions side by side; a failure must not end the run."""
        data = SegmentationData(self.listings[1], ("mask",))
        num = min(self.config.num_pictures, len(data))
        rows = []
        with evaluating(model):
            for index in (number * len(data) // num for number in range(num)):
                try:
                    image, planes = data.read(index)
                except DataError as error:
                    warnings.warn(f"not drawn: {error.problem}", stacklevel=2)
                    continue
                pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].to(world.device)
                logits, _ = model(normalise(pixels, next(model.parameters()).dtype))
                predicted = logits[0].argmax(dim=0).to(torch.uint8).cpu().numpy()
                rows.append((np.asarray(image), planes["mask"], predicted))
        try:
            if rows:
                with replacing(folder, name) as file:
                    draw_rows(rows, file)
        except OSError as error:
            warnings.warn(f"the picture was not saved: {error}", stacklevel=2)

    # --- checkpoints ----------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the settings from which `test.py` rebuilds the network."""
        config = self.config
        listing = self.listings[0]
        return {
            "num_classes": listing.num_classes,
            "void": listing.void,
            "layers": config.layers,
            "width": config.width,
            "lorm": config.lorm,
        }
