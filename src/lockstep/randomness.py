"""Named random streams, derived from their place in the run.

Owns: turning (seed, stream, step, place, ...) into numbers. Does not own: any state. A
stream is derived again whenever it is needed, so there is nothing to save, a resumed run
repeats it, and it does not depend on the number of ranks.
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator


def derive_seed(*key: int | str) -> int:
    """Hash a key of integers and strings to a 63-bit seed.

    >>> derive_seed(0, "noise", 1, 2) == derive_seed(0, "noise", 1, 2)
    True
    >>> derive_seed(0, "noise", 1, 2) == derive_seed(0, "noise", 12)
    False
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def keyed_generator(device: torch.device, *key: int | str) -> torch.Generator:
    """Return a generator on `device` that always gives the same numbers for `key`."""
    return torch.Generator(device).manual_seed(derive_seed(*key))


def seed_everything(device: torch.device, seed: int, *key: int | str) -> None:
    """Seed torch's generators of the CPU and of `device`, NumPy's and Python's `random`.

    `torch.manual_seed` takes 100 us, because it checks every kind of device.
    """
    own = derive_seed(seed, "torch", *key)
    torch.default_generator.manual_seed(own)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(own)
    _seed_others(derive_seed(seed, "others", *key))


def seed_all(*key: int | str) -> None:
    """Seed torch's CPU generator, NumPy and Python's `random`."""
    set_all(derive_seed(*key))


def set_all(seed: int) -> None:
    """Seed the same three with an already derived seed."""
    torch.default_generator.manual_seed(seed)
    _seed_others(seed)


def _seed_others(seed: int) -> None:
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


_spare: list[np.random.MT19937] = []
"""Generators that `untouched` reuses for NumPy."""


@contextmanager
def untouched() -> Iterator[None]:
    """Restore torch's CPU generator, NumPy's and Python's after the block.

    NumPy's generator is swapped, because copying it takes 75 us. Only a cached second normal
    number is lost.
    """
    states = torch.get_rng_state(), random.getstate()
    theirs = get_bit_generator()
    ours = _spare.pop() if _spare else np.random.MT19937()
    set_bit_generator(ours)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        set_bit_generator(theirs)
        _spare.append(ours)
