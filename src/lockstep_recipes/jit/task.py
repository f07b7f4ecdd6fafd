"""JiT as a task: add noise to an image, predict the clean one, weight the error by time.

Owns: the flow between noise and image, the nine losses, the held-out split, the samples and
metrics of an evaluation. Does not own: the network, decoding files, the loop.

With t from 0 (noise) to 1 (image), noise e and its scale s:
    x_t = t x + (1 - t) s e        v = dx_t/dt = x - s e
The network may predict x, e or v, and the error may be measured on any of them.

Shapes: B images, H image side.
"""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from lockstep.errors import ConfigError, DataError
from lockstep.randomness import seed_all, untouched
from lockstep.run.evaluation import evaluating
from lockstep.run_files import replace_text
from lockstep.task import Context, PartialLoss, Task
from lockstep.torch_compat.private import known_options, replays_graphs
from lockstep_recipes.jit import evaluate, text_pixels
from lockstep_recipes.jit.data import (
    DataFormat,
    ImageFolder,
    Listing,
    TextFolder,
    hold_out,
    match_classes,
    open_listing,
    scan,
)
from lockstep_recipes.jit.evaluate import FeatureNetwork, Moments
from lockstep_recipes.jit.inception import load_inception
from lockstep_recipes.jit.model import Block, JiT, build_jit, check_image_size

Quantity = Literal["x", "eps", "v"]

TIME_BINS = {"loss_t_low": (0.0, 0.25), "loss_t_mid": (0.25, 0.5), "loss_t_high": (0.5, 1.0)}
"""Number of parts that the loss is reported in, from the noisiest images to the cleanest."""


class JiTConfig(BaseModel):
    """All settings of the task."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    variant: str = "JiT-B/4"
    image_size: int = Field(default=64, ge=1)
    data: Path = Path("data/train")
    val: Path | None = None
    data_format: DataFormat = "auto"
    val_fraction: float = Field(default=0.02, ge=0, le=0.5)
    """Share of `data` to hold out if there is no `val`."""
    flip: bool = True

    pred: Quantity = "x"
    loss: Quantity = "v"
    p_mean: float = -0.8
    p_std: float = Field(default=0.8, gt=0)
    noise_scale: float | Literal["auto"] = "auto"
    """1 up to 256 pixels, 2 from 512."""
    t_eps: float = Field(default=0.05, gt=0, lt=1)
    """Smallest divisor."""
    label_drop: float = Field(default=0.1, ge=0, le=1)

    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)

    guidance: float = 2.9
    guidance_interval: tuple[float, float] = (0.1, 1.0)
    sample_steps: int = Field(default=50, ge=1)
    sample_batch_size: int = Field(default=64, ge=1)
    grid: int = Field(default=16, ge=0)
    """Samples to draw at an evaluation; 0: none."""
    num_fid_samples: int = Field(default=256, ge=0)
    """Samples to compare with real images; 0: none."""
    inception_weights: Path | None = None
    """With this file the distance is FID; without it, random features are compared."""
    seed: int = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_image_size(self.variant, self.image_size)
        if self.num_fid_samples == 1:
            raise ConfigError("num_fid_samples=1 has no covariance", "use 0 (off), or 2 or more")
        low, high = self.guidance_interval
        if not 0 <= low < high <= 1:
            problem = f"guidance_interval=({low}, {high}) does not lie within 0 and 1"
            raise ConfigError(problem, "use for example (0.1, 1.0)")
        return self

    @property
    def resolved_noise_scale(self) -> float:
        """The noise scale s, with "auto" decided."""
        if self.noise_scale == "auto":
            return 2.0 if self.image_size >= 512 else 1.0
        return self.noise_scale


def velocity_of(
    prediction: Tensor, x_t: Tensor, t: Tensor, pred: Quantity, noise_scale: float, t_eps: float
) -> Tensor:
    """Return the velocity that a prediction of x, eps or v implies; `t` broadcasts."""
    if pred == "x":
        return (prediction - x_t) / (1 - t).clamp(min=t_eps)
    if pred == "eps":
        return (x_t - noise_scale * prediction) / t.clamp(min=t_eps)
    return prediction


def error_factor(
    t: Tensor, pred: Quantity, loss: Quantity, noise_scale: float, t_eps: float
) -> Tensor:
    """Return the factor from an error of the predicted quantity to one of the loss's quantity.

    For a given x_t, each of x, eps and v is a linear function of each other one. So the
    conversion of truth and prediction multiplies their difference by this factor. Every
    division is by at least `t_eps`.
    """
    noise_share = (1 - t).clamp(min=t_eps)
    image_share = t.clamp(min=t_eps)
    factors: dict[tuple[Quantity, Quantity], Tensor] = {
        ("x", "eps"): t / (noise_scale * noise_share),
        ("x", "v"): 1 / noise_share,
        ("eps", "x"): noise_scale * (1 - t) / image_share,
        ("eps", "v"): noise_scale / image_share,
        ("v", "x"): 1 - t,
        ("v", "eps"): t / noise_scale,
    }
    return factors.get((pred, loss), torch.ones_like(t))


def compiler_options() -> dict[str, Any]:
    """Return options that avoid a fault of torch 2.11, which fails on some batch sizes (64).

    Its reduction raises "shape '[1024, 768]' is invalid for input of size 0".
    """
    return known_options({"triton.mix_order_reduction": False})


class JiTTask(Task):
    """Train a JiT on a folder of images, or of texts painted as pixels.

    Raises:
        DataError: if Inception weights are given and cannot be used.
    """

    name = "jit"
    calls_model_equally = True
    may_change = (
        "data",
        "val",
        "data_format",
        "grid",
        "guidance",
        "guidance_interval",
        "sample_steps",
        "sample_batch_size",
        "num_fid_samples",
        "inception_weights",
    )

    def __init__(self, config: JiTConfig) -> None:
        self.config = config
        self._noise_scale = config.resolved_noise_scale
        weights = config.inception_weights
        self._features: FeatureNetwork = (
            load_inception(weights) if weights else evaluate.RandomFeatures()
        )
        self._reference_moments: Moments | None = None

    def settings(self) -> dict[str, Any]:
        """Return every setting."""
        return self.config.model_dump(mode="json")

    # --- data ---------------------------------------------------------------------------------

    @cached_property
    def listings(self) -> tuple[Listing, Listing]:
        """The training files and the held-out files; the latter may be empty.

        Raises:
            DataError: if a folder cannot be used.
        """
        config = self.config
        found = scan(config.data, config.data_format)
        if config.val is None:
            return hold_out(found, config.val_fraction)
        return found, match_classes(scan(config.val, config.data_format), found)

    @property
    def num_classes(self) -> int:
        """Number of classes in the data; 0 means unconditional."""
        return len(self.listings[0].classes)

    @property
    def is_text(self) -> bool:
        """Whether the images are texts painted as pixels."""
        return self.listings[0].kind == "text"

    def train_data(self) -> ImageFolder | TextFolder:
        """Return the training samples; half of the images are mirrored."""
        return open_listing(self.listings[0], self.config.image_size, flip=self.config.flip)

    def eval_data(self) -> ImageFolder | TextFolder | None:
        """Return the held-out samples, never mirrored."""
        held_out = self.listings[1]
        return open_listing(held_out, self.config.image_size, flip=False) if held_out else None

    # --- model --------------------------------------------------------------------------------

    def build_model(self) -> JiT:
        """Return the network; its weights depend only on the seed."""
        with untouched():
            seed_all(self.config.seed, "weights")
            return build_jit(self.config.variant, self.config.image_size, self.num_classes)

    def build_optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        """Return AdamW; norms, biases and single vectors never decay."""
        trained = [p for p in model.parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in trained if p.ndim >= 2]},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]
        return AdamW(
            groups,
            lr=lr,
            betas=self.config.betas,
            weight_decay=self.config.weight_decay,
            fused=all(p.is_cuda for p in trained),
        )

    def compile(self, model: nn.Module) -> None:
        """Compile one block, which the others reuse, and both ends; use fused kernels if possible.

        If CUDA graphs are replayed, each replay has a cost, so some blocks share one.
        """
        from lockstep_recipes.jit import fused  # imports triton, if there is one

        assert isinstance(model, JiT)
        options = compiler_options()
        for block in model.blocks:
            assert isinstance(block, Block)
            block.fused = fused.forward if fused.fits(block) else None
            if not replays_graphs():
                block.compile(options=options)
        if replays_graphs():
            all_fit = all(block.fused for block in model.blocks)
            run_blocks: Any = fused.run_blocks if all_fit else model.run_blocks
            model.run_blocks = torch.compile(run_blocks, options=options)
        model.embed = torch.compile(model.embed, options=options)  # type: ignore[method-assign]
        model.read_out = torch.compile(  # type: ignore[method-assign]
            model.read_out, options=options
        )

    # --- loss ---------------------------------------------------------------------------------

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor], context: Context) -> PartialLoss:
        """Add noise to the images, predict, and sum the error; the unit is an image.

        For texts the unit is a valid pixel.
        """
        label = batch["label"]
        if context.training and self.config.label_drop > 0:
            chance = torch.rand(
                label.shape, generator=context.generator("label_drop"), device=label.device
            )
            label = torch.where(chance < self.config.label_drop, self.num_classes, label)
        return self._noised_loss(model, batch, label, context)

    def evaluate(
        self, model: nn.Module, batch: Mapping[str, Tensor], context: Context
    ) -> PartialLoss:
        """Return the loss of held-out images, with all labels and without dropout."""
        with evaluating(model):
            return self._noised_loss(model, batch, batch["label"], context)

    def _noised_loss(
        self, model: nn.Module, batch: Mapping[str, Tensor], label: Tensor, context: Context
    ) -> PartialLoss:
        config = self.config
        scale = self._noise_scale
        x = evaluate.from_bytes(batch["image"])
        z = torch.randn(len(x), generator=context.generator("t"), device=x.device)
        t = torch.sigmoid(config.p_mean + config.p_std * z)
        eps = torch.randn(x.shape, generator=context.generator("noise"), device=x.device)

        t_wide = t[:, None, None, None]
        x_t = t_wide * x + (1 - t_wide) * scale * eps
        predicted = model(x_t, t, label).float()
        truth = {"x": x, "eps": eps, "v": x - scale * eps}[config.pred]
        squared = (truth - predicted).square().mean(dim=1)  # (B, H, H)

        if "mask" in batch:
            mask = batch["mask"]
            per_image = (squared * mask).sum(dim=(1, 2))
            weight = mask.sum(dim=(1, 2)).float()
        else:
            per_image = squared.mean(dim=(1, 2))
            weight = torch.ones_like(t)
        per_image = per_image * error_factor(t, config.pred, config.loss, scale, config.t_eps) ** 2
        parts = _by_time(t, per_image.detach(), weight)
        return PartialLoss(per_image.sum(), weight.sum(), parts)

    # --- evaluation ---------------------------------------------------------------------------

    def finish_evaluation(
        self, model: nn.Module, context: Context, folder: str
    ) -> Mapping[str, float | Path]:
        """Draw samples into `folder/samples` and measure their distance from real images.

        Collective. Each rank draws its share; a sample depends on its index, its class, the
        seed and the weights, not on the number of ranks. The picture shows equally many of
        each class; the measured samples have the classes of the images they are compared to.
        """
        config = self.config
        world = context.world
        made: dict[str, float | Path] = {}
        with evaluating(model):
            if config.grid:
                batches = self._samples(model, context, config.grid)
                own = torch.cat([_no_images(config.image_size, world.device), *batches])
                images = world.all_gather(own)
                name = f"samples/step_{context.step:08d}"
                made["samples"] = Path(folder, f"{name}.png")
                if world.is_first:
                    self._draw(images, folder, name)
            if not config.num_fid_samples:
                return made
            self._features.to(world.device)
            reference = self._reference(context)
            if reference.count < 2:
                return made
            classes = self._compared.labels
            batches = self._samples(model, context, config.num_fid_samples, classes)
            moments = evaluate.image_moments(batches, self._features, world).all_sum(world)
        distance = evaluate.frechet_of_moments(moments, reference, world)
        return made | {"fid" if config.inception_weights else "frechet_random_features": distance}

    def _samples(
        self, model: nn.Module, context: Context, num: int, classes: Sequence[int] = ()
    ) -> Iterator[Tensor]:
        """Yield this rank's share of `num` samples, of `classes` (or all) in turn, as uint8."""
        config = self.config
        world = context.world
        classes = classes or range(max(1, self.num_classes))
        settings = evaluate.SamplerSettings(
            steps=config.sample_steps,
            guidance=config.guidance,
            guidance_interval=config.guidance_interval,
            noise_scale=self._noise_scale,
        )

        def velocity(x: Tensor, t: float, labels: Tensor) -> Tensor:
            context.raise_if_stopping()  # on every rank equally often: see `sample_share`
            times = torch.full((len(x),), t, device=x.device)
            prediction = model(x, times, labels).float()
            t_wide = times[:, None, None, None]
            return velocity_of(prediction, x, t_wide, config.pred, self._noise_scale, config.t_eps)

        def draw(indices: range) -> Tensor:
            noise = evaluate.sample_noise(context.seed, indices, config.image_size)
            chosen = [classes[index % len(classes)] for index in indices]
            labels = torch.tensor(chosen, device=world.device)
            noise = noise.to(world.device)
            return evaluate.to_bytes(
                evaluate.sample(velocity, noise, labels, self.num_classes, settings)
            )

        return evaluate.sample_share(draw, num, config.sample_batch_size, world)

    def _draw(self, images: Tensor, folder: str, name: str) -> None:
        """Write the picture, and the texts it shows; a full disk must not end the run."""
        pixels = images.cpu().numpy()
        try:
            picture = evaluate.tile(evaluate.enlarge(pixels), self.num_classes)
            evaluate.save_picture(folder, f"{name}.png", picture)
            if self.is_text:
                texts = [text_pixels.decode(text_pixels.read_pixels(image)) for image in pixels]
                replace_text(folder, f"{name}.txt", "\n".join(texts) + "\n")
        except OSError as error:
            warnings.warn(f"the samples of this evaluation were not saved: {error}", stacklevel=2)

    @cached_property
    def _compared(self) -> Listing:
        """The real images to compare samples with.

        They are taken evenly from the held-out images, or from the training set if these are few.
        """
        trained, held_out = self.listings
        listing = trained if len(held_out) < self.config.num_fid_samples else held_out
        num = min(self.config.num_fid_samples, len(listing))
        return listing.select([index * len(listing) // num for index in range(num)])

    def _reference(self, context: Context) -> Moments:
        """Return the moments of the real images; each rank reads its share, once. Collective."""
        if self._reference_moments is None:
            world = context.world
            num = len(self._compared)
            mine = self._compared.select(list(evaluate.share(num, world)))
            data = open_listing(mine, self.config.image_size, flip=False)
            longest = math.ceil(num / world.size)
            batches = _in_batches(data, self.config.sample_batch_size, longest, context)
            moments = evaluate.image_moments(batches, self._features, world)
            self._reference_moments = moments.all_sum(world)
        return self._reference_moments


def _by_time(t: Tensor, per_image: Tensor, weight: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Split a loss into its parts by time, without waiting for the device."""
    parts = {}
    for name, (low, high) in TIME_BINS.items():
        inside = (low <= t) & ((t < high) if high < 1 else (t <= high))
        parts[name] = ((per_image * inside).sum(), (weight * inside).sum())
    return parts


def _no_images(size: int, device: torch.device) -> Tensor:
    return torch.empty(0, 3, size, size, dtype=torch.uint8, device=device)


def _in_batches(
    data: ImageFolder | TextFolder, batch_size: int, longest: int, context: Context
) -> Iterator[Tensor]:
    """Yield the readable images: a bad file on one rank must not leave the others waiting.

    The ranks agree to stop before each batch, so each rank asks as often as the one with the
    `longest` share.
    """
    for start in range(0, longest, batch_size):
        context.raise_if_stopping()
        images = []
        for index in range(start, min(start + batch_size, len(data))):
            try:
                images.append(data[index]["image"])
            except DataError as error:
                warnings.warn(f"skipped in the reference: {error.problem}", stacklevel=2)
        if images:
            yield torch.stack(images)
