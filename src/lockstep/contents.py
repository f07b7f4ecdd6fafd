"""Summarise a sample or a state in four values that processes and runs can compare.

Owns: the digest, and the tolerance for rounding. Does not own: the decision what to compare.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from torch import Tensor

ROUNDING = 1e-5
"""Relative to the mean size of the floats: processors differ in the last bits of a float."""

Contents = Sequence[Any]
"""A digest of everything except floats, then the floats' weighted sum, mean size and number.
Checkpoints of earlier versions lack the number."""


def contents_of(value: Any, whole_paths: bool = False) -> list[Any]:
    """Return the `Contents` of a sample or a state as JSON values.

    Only the last part of an absolute path counts, because a copy of the data in another folder is
    the same data. For objects of unknown types only the type counts.

    Args:
        value: The sample or state.
        whole_paths: Whether to digest absolute paths whole and to sum infinities as the largest
            float, as earlier versions did for the three values that their checkpoints hold.
    """
    digest = hashlib.blake2b(digest_size=8)
    floats = [np.zeros(0)]

    def visit(part: Any) -> None:
        if isinstance(part, Tensor):
            part = _as_array(part)
        if isinstance(part, float | np.floating):
            part = np.asarray(part)
        if isinstance(part, str) and os.path.isabs(part) and not whole_paths:
            part = os.path.basename(part)
        digest.update(type(part).__name__.encode())
        if isinstance(part, np.ndarray) and part.dtype.kind == "f":
            digest.update(str(part.shape).encode())
            flat = part.astype(np.float64).ravel()
            if whole_paths:
                flat = np.nan_to_num(flat)
            is_finite = np.isfinite(flat)
            if not is_finite.all():  # a sum would be inf or NaN, so digest their positions
                places = np.flatnonzero(~is_finite).astype(np.int64)
                kinds = np.nan_to_num(flat[places], nan=0.0, posinf=1.0, neginf=-1.0)
                digest.update(places.tobytes() + kinds.astype(np.int8).tobytes())
                flat = np.where(is_finite, flat, 0.0)
            floats.append(flat)
        elif isinstance(part, np.ndarray) and part.dtype.kind != "O":
            digest.update(str((part.shape, part.dtype)).encode() + part.tobytes())
        elif isinstance(part, Mapping):
            for key in part:
                visit(key)
                visit(part[key])
        elif isinstance(part, list | tuple):
            for item in part:
                visit(item)
        elif is_dataclass(part) and not isinstance(part, type):
            for own in fields(part):
                visit(getattr(part, own.name))
        elif part is None or isinstance(part, str | bytes | int | np.generic):
            digest.update(repr(part).encode())
        elif hasattr(part, "__array_interface__"):  # an image
            visit(np.asarray(part))

    visit(value)
    values = np.concatenate(floats)
    wave = np.cos(np.arange(len(values)))
    with np.errstate(over="ignore", invalid="ignore"):  # of values near the largest float
        scale = float(np.abs(values).mean()) if len(values) else 0.0
        weighted_sum = float(values @ wave)
    return [digest.hexdigest(), weighted_sum, scale, len(values)]


def same_contents(a: Contents, b: Contents) -> bool:
    """Return whether two values have the same contents, apart from the rounding of floats."""
    tolerance = ROUNDING * (max(a[2], b[2]) or 1.0)
    count = a[3] if len(a) > 3 else 1
    sum_tolerance = tolerance * max(1.0, count**0.5)  # rounding errors add up as a random walk
    same_floats = abs(a[1] - b[1]) <= sum_tolerance and abs(a[2] - b[2]) <= tolerance
    return bool(a[0] == b[0] and same_floats)


def _as_array(tensor: Tensor) -> Any:
    tensor = tensor.detach().cpu()
    try:
        return tensor.float().numpy() if tensor.is_floating_point() else tensor.numpy()
    except (RuntimeError, TypeError):  # sparse or nested: only the type counts
        return tensor
