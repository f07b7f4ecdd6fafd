"""Named random streams derived from where in the run they are used.

Owns: turning (seed, stream, step, place, ...) into numbers. Does not own any
state: a stream is re-derived where it is needed, so there is nothing to save,
a resumed run repeats it, and it does not depend on the number of ranks.
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive_seed(*key: int | str) -> int:
    """Hash a key of integers and words into a 63-bit seed.

    >>> derive_seed(0, "noise", 1, 2) == derive_seed(0, "noise", 1, 2)
    True
    >>> derive_seed(0, "noise", 1, 2) == derive_seed(0, "noise", 12)
    False
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def keyed_generator(device: torch.device, *key: int | str) -> torch.Generator:
    """Return a generator on `device` that always draws the same numbers for `key`."""
    return torch.Generator(device).manual_seed(derive_seed(*key))


def seed_torch(device: torch.device, *key: int | str) -> None:
    """Seed torch's own generators (dropout, `torch.randn`) of the CPU and of `device`.

    `torch.manual_seed` asks every kind of device there might be, for 100 us a call.
    """
    seed = derive_seed(*key)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)


def seed_others(*key: int | str) -> None:
    """Seed NumPy and Python's `random`."""
    seed = derive_seed(*key)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def seed_all(*key: int | str) -> None:
    """Seed torch, NumPy and Python's `random` alike."""
    torch.default_generator.manual_seed(derive_seed(*key))
    seed_others(*key)


@contextmanager
def untouched() -> Iterator[None]:
    """Give torch's CPU generator, NumPy's and Python's back as they were."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
