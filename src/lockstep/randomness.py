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
from numpy.random.mtrand import get_bit_generator, set_bit_generator


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
    set_others(derive_seed(*key))


def seed_everything(device: torch.device, seed: int, *key: int | str) -> None:
    """Seed torch's generators of the CPU and of `device`, NumPy's and Python's `random`."""
    seed_torch(device, seed, "torch", *key)
    seed_others(seed, "others", *key)


def seed_all(*key: int | str) -> None:
    """Seed torch's CPU generator, NumPy's and Python's alike."""
    set_all(derive_seed(*key))


def set_all(seed: int) -> None:
    """Seed them by a number that was derived already."""
    torch.default_generator.manual_seed(seed)
    set_others(seed)


def set_others(seed: int) -> None:
    """Likewise NumPy and Python's `random`."""
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


_spare: list[np.random.MT19937] = []
"""Generators that `untouched` has lent to NumPy and got back."""


@contextmanager
def untouched() -> Iterator[None]:
    """Give torch's CPU generator, NumPy's and Python's back as they were.

    NumPy's is put aside, not copied, which would take 75 us; only the second number of a pair
    of normal ones, which it may hold, is lost.
    """
    states = torch.get_rng_state(), random.getstate()
    theirs, ours = get_bit_generator(), _spare.pop() if _spare else np.random.MT19937()
    set_bit_generator(ours)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        set_bit_generator(theirs)
        _spare.append(ours)
