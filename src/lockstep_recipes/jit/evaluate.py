"""Sampling images, and their Frechet distance from real ones.

Owns: the Heun sampler, the features, the Frechet distance, the picture of samples.
Does not own: when to sample, or with which weights. Nothing here keeps a gradient.

The distance reported without Inception weights, `frechet_random_features`, is **not**
FID: its features come from a small convolutional network with random weights from a
fixed seed. It falls as samples come to look like the data, and compares runs on the same
data; it cannot be compared with published numbers.

Shapes: B images, H image side, F features.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from lockstep.randomness import keyed_generator
from lockstep.run_files import replacing
from lockstep.world import World
from lockstep_recipes.jit.inception import FidInception

CPU = torch.device("cpu")
RANDOM_FEATURE_SEED = 20_251_113
RANDOM_FEATURE_CHANNELS = (16, 32, 64)


SEEN_SIZE = 64
"""Side in pixels below which samples are enlarged in a picture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSettings:
    """Settings of the sampler."""

    steps: int = 50
    guidance: float = 2.9
    guidance_interval: tuple[float, float] = (0.1, 1.0)
    noise_scale: float = 1.0


def sample_noise(seed: int, indices: range, size: int) -> Tensor:
    """Return unit noise (B, 3, H, H), drawn for each sample from its index, on the CPU."""
    draws = [
        torch.randn(3, size, size, generator=keyed_generator(CPU, seed, "sample", index))
        for index in indices
    ]
    return torch.stack(draws)


@torch.no_grad()
def sample(
    velocity: Callable[[Tensor, float, Tensor], Tensor],
    noise: Tensor,
    labels: Tensor,
    null_class: int,
    settings: SamplerSettings,
) -> Tensor:
    """Turn unit noise (B, 3, H, H) into images between -1 and 1.

    Solves dx/dt = v(x, t) from t = 0 (noise) to t = 1 (image) with Heun's method on a
    uniform grid; the last step is Euler's. `velocity(x, t, labels)` is the model's.

    Inside the guidance interval v = v_null + w (v_class - v_null), outside it
    v = v_class. If all `labels` are null, there is no guidance.
    """
    low, high = settings.guidance_interval
    null = torch.full_like(labels, null_class)
    is_conditional = bool((labels != null).any()) and settings.guidance != 1.0

    def guided(x: Tensor, t: float) -> Tensor:
        if not (is_conditional and low < t < high):
            return velocity(x, t, labels)
        both = velocity(torch.cat([x, x]), t, torch.cat([labels, null]))
        v_class, v_null = both.chunk(2)
        return v_null + settings.guidance * (v_class - v_null)

    x = settings.noise_scale * noise
    for step in range(settings.steps):
        t = step / settings.steps
        t_next = (step + 1) / settings.steps
        v = guided(x, t)
        ahead = x + (t_next - t) * v
        is_last = step == settings.steps - 1
        x = ahead if is_last else x + (t_next - t) * 0.5 * (v + guided(ahead, t_next))
    return x.clamp(-1, 1)


def to_bytes(image: Tensor) -> Tensor:
    """Round images between -1 and 1 to uint8."""
    return ((image.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def from_bytes(image: Tensor) -> Tensor:
    """Return uint8 images as floats between -1 and 1."""
    return image.float() / 127.5 - 1


def share(num: int, world: World) -> range:
    """Return this rank's contiguous share of `num` items; the last ranks may have fewer, or none.

    Every share but the last ones has `ceil(num / size)` items, so gathered shares are in order.
    """
    length = math.ceil(num / world.size)
    return range(min(num, world.rank * length), min(num, (world.rank + 1) * length))


def sample_share(
    draw: Callable[[range], Tensor], num: int, batch_size: int, world: World
) -> Iterator[Tensor]:
    """Yield this rank's share of `num` samples in batches; `draw` returns those of some indices.

    A sharded model communicates in each forward pass, so every rank must draw the same number
    of batches of the same sizes. A rank with fewer samples repeats some and drops them.
    """
    own = share(num, world)
    length = math.ceil(num / world.size)
    for start in range(0, length, batch_size):
        size = min(batch_size, length - start)
        first = min(own.start + start, num - size)
        drawn = draw(range(first, first + size))
        wanted = range(own.start + start, min(own.start + start + size, own.stop))
        if len(wanted):
            yield drawn[wanted.start - first : wanted.stop - first]


class RandomFeatures(nn.Module):
    """A fixed random convolutional network: images (B, 3, H, H) to features (B, 112).

    Its features are the spatial means after each of three layers. Not Inception, not FID.
    """

    num_features = sum(RANDOM_FEATURE_CHANNELS)

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator(CPU).manual_seed(RANDOM_FEATURE_SEED)
        channels_in = 3
        for index, channels in enumerate(RANDOM_FEATURE_CHANNELS):
            shape = (channels, channels_in, 3, 3)
            weight = torch.randn(shape, generator=generator) * math.sqrt(2 / (9 * channels_in))
            self.register_buffer(f"weight_{index}", weight)
            channels_in = channels

    def forward(self, image: Tensor) -> Tensor:
        """Return features (B, 112) of images between -1 and 1."""
        x = image
        means = []
        for index in range(len(RANDOM_FEATURE_CHANNELS)):
            stride = 1 if index == 0 else 2
            x = F.relu(F.conv2d(x, self.get_buffer(f"weight_{index}"), stride=stride, padding=1))
            means.append(x.mean(dim=(2, 3)))
        return torch.cat(means, dim=1)


FeatureNetwork = RandomFeatures | FidInception


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, sum (F) and sum of outer products (F, F) of features, in float64."""

    count: Tensor
    total: Tensor
    products: Tensor

    @classmethod
    def empty(cls, num_features: int, device: torch.device) -> Self:
        """Return the moments of an empty set."""
        zeros = torch.zeros(num_features + 1, num_features, dtype=torch.float64, device=device)
        return cls(zeros.new_zeros(()), zeros[0], zeros[1:])

    def add(self, features: Tensor) -> "Moments":
        """Return the moments with `features` (B, F) added."""
        features = features.double()
        return Moments(
            self.count + len(features),
            self.total + features.sum(dim=0),
            self.products + features.T @ features,
        )

    def all_sum(self, world: World) -> "Moments":
        """Return the moments of the features of all ranks. Collective."""
        num_features = len(self.total)
        packed = torch.cat([self.count[None], self.total, self.products.flatten()])
        packed = world.all_sum(packed)
        return Moments(
            packed[0],
            packed[1 : 1 + num_features],
            packed[1 + num_features :].reshape(num_features, num_features),
        )

    def mean_and_covariance(self) -> tuple[Tensor, Tensor]:
        """Return the mean (F) and the unbiased covariance (F, F); needs two features."""
        mean = self.total / self.count
        scatter = self.products - self.count * mean[:, None] * mean
        return mean, scatter / (self.count - 1)


def frechet_distance(
    mean_a: Tensor, covariance_a: Tensor, mean_b: Tensor, covariance_b: Tensor
) -> float:
    """Return the squared Frechet distance of two Gaussians, computed in float64 on the CPU.

    |m_a - m_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^(1/2)); the trace of that root is the sum
    of the roots of the eigenvalues of C_a^(1/2) C_b C_a^(1/2), which is symmetric.
    """
    mean_a, mean_b = mean_a.cpu().double(), mean_b.cpu().double()
    covariance_a, covariance_b = covariance_a.cpu().double(), covariance_b.cpu().double()
    values, vectors = torch.linalg.eigh(covariance_a)
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    inner = torch.linalg.eigvalsh(root @ covariance_b @ root).clamp(min=0)
    distance = (mean_a - mean_b).square().sum() + covariance_a.trace() + covariance_b.trace()
    return max(0.0, float(distance - 2 * inner.sqrt().sum()))


@torch.no_grad()
def image_moments(images: Iterator[Tensor], features: FeatureNetwork, world: World) -> Moments:
    """Return the moments of the features of this rank's uint8 images (B, 3, H, H) each."""
    moments = Moments.empty(features.num_features, world.device)
    for batch in images:
        image = from_bytes(batch.to(world.device))
        # Samples may come from autocast; features are compared between runs, so use float32.
        with torch.autocast(world.device.type, enabled=False):
            moments = moments.add(features(image))
    return moments


def frechet_of_moments(a: Moments, b: Moments, world: World) -> float:
    """Return the distance of two sets, computed by the first rank for all. Collective."""
    distance = 0.0
    if world.is_first:
        distance = frechet_distance(*a.mean_and_covariance(), *b.mean_and_covariance())
    value = torch.tensor(distance, dtype=torch.float64, device=world.device)
    return float(world.all_sum(value))


def tile(images: NDArray[np.uint8], num_classes: int = 1, gap: int = 2) -> NDArray[np.uint8]:
    """Arrange images (B, 3, H, H) in a nearly square picture with white gaps.

    If it fits, the number of columns is a multiple of the classes: then a column is a class.
    """
    num, _, size, _ = images.shape
    columns = math.ceil(math.sqrt(num))
    if 1 < num_classes <= num:
        columns = math.ceil(columns / num_classes) * num_classes
    rows = math.ceil(num / columns)
    pitch = size + gap
    picture = np.full((rows * pitch + gap, columns * pitch + gap, 3), 255, dtype=np.uint8)
    for index, image in enumerate(images):
        top = gap + index // columns * pitch
        left = gap + index % columns * pitch
        picture[top : top + size, left : left + size] = image.transpose(1, 2, 0)
    return picture


def enlarge(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Enlarge small images by drawing each pixel as a square."""
    zoom = max(1, SEEN_SIZE // images.shape[2])
    return images.repeat(zoom, axis=2).repeat(zoom, axis=3)


def save_picture(folder: str, name: str, picture: NDArray[np.uint8]) -> None:
    """Write a PNG into a run's folder atomically, so that nobody reads a partial file."""
    with replacing(folder, name) as file:
        Image.fromarray(picture).save(file, format="PNG")
