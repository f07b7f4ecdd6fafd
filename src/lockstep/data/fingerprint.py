"""Fingerprints of a data set, to compare ranks, and to detect changes since a checkpoint.

Owns: the fingerprint that checkpoints keep and ranks compare, and the messages about differences.
Does not own: when to compare. A fingerprint does not depend on the folder of the data: a copy
elsewhere has the same one.

A data set may define `fingerprint()`, which returns one string per sample, in order; it changes
with the sample. `file_fingerprints` makes such strings from files. For any other data set a few
samples are read, in a separate process: reading may open files, which forked workers must not
share.
"""

import hashlib
import math
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from torch import set_num_threads
from torch.utils.data import TensorDataset

from lockstep.contents import contents_of, same_contents
from lockstep.data.reader import is_stream, names_of, sample_seeds
from lockstep.dist.collectives import Collectives
from lockstep.errors import ConfigError
from lockstep.randomness import set_all, untouched

MAX_ENTRIES = 4096
"""The most entries of a fingerprint, 32 kB. With more samples, several share an entry."""
MAX_READ = 10_000
"""The most samples whose files are read, evenly spread."""
WHOLE_BYTES = 16_384
PIECE_BYTES = 4096
NUM_PIECES = 4
NUM_NAMES = 64
"""The number of sample names that every rank compares if the data set has `fingerprint()`."""
NUM_SAMPLES = 8
READ_S = 20.0
"""The time limit for reading samples; after half of it no further sample is read."""


def is_full_fingerprint_due(world: Collectives) -> bool:
    """Return whether this rank calls `fingerprint()`: only one per node needs to."""
    return world.is_first or world.local_rank == 0


def take_fingerprint(
    dataset: Any, seed: int, like: Mapping[str, Any] | None = None, is_full: bool = True
) -> dict[str, Any]:
    """Return the fingerprint of a data set, comparable with `like` if that is given.

    If `is_full` is false, that of a data set with the method `fingerprint()` is only its length.

    If an earlier version took `like`, `old_samples` are samples in its form. Only `differences`
    uses them: ranks compare `samples`, and the next checkpoint stores only `samples`.
    """
    if dataset is None or is_stream(dataset):
        return {}
    length = len(dataset)
    if hasattr(dataset, "fingerprint"):
        if not is_full:
            return {"length": length}
        per_entry = like.get("per_entry") if like else None
        per_entry = per_entry or math.ceil(length / MAX_ENTRIES)
        texts = list(dataset.fingerprint())
        blocks = ("\n".join(texts[i : i + per_entry]) for i in range(0, length, per_entry))
        entries = [_digest(block.encode(errors="surrogateescape"), 4) for block in blocks]
        return {"length": length, "per_entry": per_entry, "entries": entries}
    before = like.get("samples", {}) if like else {}
    wanted = {int(index) for index in before}
    indices = [i for i in sorted(wanted or spread(length, NUM_SAMPLES)) if i < length]
    old_form = {int(index) for index, contents in before.items() if len(contents) == 3}
    read = partial(_read_samples, dataset, seed, indices, old_form)
    is_in_memory = isinstance(dataset, list | tuple | TensorDataset)
    contents = read() if is_in_memory else _in_subprocess(read)
    return {"length": length, "samples": {}, **contents}


def check_same_samples(
    what: str, dataset: Any, own: Mapping[str, Any], world: Collectives, remedy: str
) -> bool:
    """Refuse ranks whose fingerprints of a data set differ from the first rank's. Collective.

    If reading is slow on a rank, it may have read fewer samples: only samples that both have read
    are compared. A rank whose fingerprint is not full compares some names; the first rank of its
    node compares the contents of files.

    Args:
        what: "training" or "held-out".
        dataset: The data set, for the names of samples that differ.
        own: This rank's fingerprint.
        world: The ranks to compare.
        remedy: The remedy of the error.

    Returns:
        Whether every rank could compare something.
    """
    if world.size == 1 or not own:
        return True
    own = {**own, "names": {} if "samples" in own else _some_names(dataset)}
    first = world.all_values(own if world.is_first else {})[0]
    compared, difference = _compare_with_first(first, own, dataset)
    found = world.all_values([compared, difference])
    for rank, (_, difference) in enumerate(found):
        if difference:
            problem = f"ranks 0 and {rank} see different {what} samples: {difference}"
            error = ConfigError(problem, remedy)
            error.is_shared = True
            raise error
    return all(compared for compared, _ in found)


def _compare_with_first(
    first: Mapping[str, Any], own: Mapping[str, Any], dataset: Any
) -> tuple[int, str]:
    """Return the number of compared entries, samples or names, and their differences."""
    if "entries" in first and "entries" in own:
        return len(own["entries"]), differences(first, own, dataset)
    held = "samples" if "samples" in first and "samples" in own else "names"
    compared, different = _compare_samples(first.get(held, {}), own.get(held, {}))
    if not different:
        # Without names this rank has nothing to compare, but the first rank of its node has.
        return (compared if held == "samples" else max(1, compared)), ""
    verb = "differs" if len(different) == 1 else "differ"
    return compared, f"{_names(dataset, different)} {verb} ({compared} compared)"


def _some_names(dataset: Any) -> dict[str, Any]:
    """Return the contents of the names of a few samples, evenly spread."""
    if not hasattr(dataset, "describe"):
        return {}
    indices = spread(len(dataset), NUM_NAMES)
    return {str(i): contents_of(names_of(dataset, np.array([i]))) for i in indices}


def _compare_samples(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[int, list[int]]:
    """Return the number of samples that are in both, and those that differ."""
    both = [index for index in a if index in b]
    different = [int(index) for index in both if not same_contents(a[index], b[index])]
    return len(both), different


def spread(length: int, count: int) -> list[int]:
    """Return up to `count` indices, including the first and the last.

    >>> spread(10, 4), spread(2, 4)
    ([0, 3, 6, 9], [0, 1])
    """
    count = min(length, count)
    return [i * (length - 1) // max(1, count - 1) for i in range(count)]


def differences(old: Mapping[str, Any], new: Mapping[str, Any], dataset: Any) -> str:
    """Describe what has changed between two fingerprints; "" if nothing has."""
    if not any(kind in old and kind in new for kind in ("entries", "samples")):
        return ""
    name = partial(_names, dataset)
    grown = new["length"] - old["length"]
    if "samples" in old:
        in_old_form = new.get("old_samples", {})
        _, edited = _compare_samples(old["samples"], {**new["samples"], **in_old_form})
        changes = [f"{abs(grown)} {'added' if grown > 0 else 'removed'}"] if grown else []
        return ", ".join(changes + ([f"different contents: {name(edited)}"] if edited else []))
    before = old["entries"]
    now = new["entries"]
    each = old["per_entry"]
    if before == now and old["length"] == new["length"]:
        return ""
    first = next((i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), None)
    at = min(len(before), len(now)) if first is None else first
    place = name([min(at * each, new["length"] - 1)])
    if grown > 0:
        kept = before if old["length"] % each == 0 else before[:-1]
        where = "appended" if now[: len(kept)] == kept else "added among the others"
        return f"{grown} samples {where}, the first about {place}"
    if grown < 0:
        return f"{-grown} samples removed, the first about {place}"
    if Counter(before) == Counter(now):
        return f"the same samples in a different order, from {place} on"
    edited = [i * each for i, (a, b) in enumerate(zip(before, now, strict=True)) if a != b]
    return f"{len(edited)} with different names or contents: {name(edited)}"


def _names(dataset: Any, indices: Sequence[int]) -> str:
    more = f" and {len(indices) - 3} more" if len(indices) > 3 else ""
    return names_of(dataset, np.array(indices[:3], dtype=np.int64)) + more


# --- Files ------------------------------------------------------------------------------------

Span = tuple[Path, int, int | None]
"""A file, or the bytes of it from a start to an end."""


def file_fingerprints(samples: Sequence[tuple[str, Sequence[Path | Span]]]) -> list[str]:
    """Return a text for each sample, from its name and from the size and some bytes of its files.

    Files up to 16 kB are read whole, larger ones at four places. If there are more than 10,000
    samples, the files of only 10,000 are read. Names should not contain the folder of the data.
    """
    every = math.ceil(len(samples) / MAX_READ) or 1
    return [
        "\0".join([name, *(_file_fingerprint(file, index % every == 0) for file in files)])
        for index, (name, files) in enumerate(samples)
    ]


def _file_fingerprint(file: Path | Span, is_read: bool) -> str:
    path, start, stop = file if isinstance(file, tuple) else (file, 0, None)
    try:
        if not is_read:
            return str((os.stat(path).st_size if stop is None else stop) - start)
        opened = os.open(path, os.O_RDONLY)
        try:
            size = (os.fstat(opened).st_size if stop is None else stop) - start
            if size <= WHOLE_BYTES:
                return f"{size} {_digest(os.pread(opened, size, start))}"
            last = size - PIECE_BYTES
            places = [start + i * last // (NUM_PIECES - 1) for i in range(NUM_PIECES)]
            pieces = b"".join(os.pread(opened, PIECE_BYTES, place) for place in places)
            return f"{size} {_digest(pieces)}"
        finally:
            os.close(opened)
    except OSError as error:  # the loader reports it when it reads the sample
        return f"unreadable: {error.strerror}"


# --- Samples ----------------------------------------------------------------------------------


def _read_samples(
    dataset: Any, seed: int, indices: Iterable[int], old_form: Collection[int]
) -> dict[str, dict[str, Any]]:
    """Return the contents of a few samples; for those in `old_form` also in the old form.

    Samples that differ between two reads are skipped.
    """

    def read(index: int) -> dict[str, list[Any]]:
        set_all(*sample_seeds(seed, 0, np.array([index])))
        try:
            sample = dataset[index]
            found = {"samples": contents_of(sample)}
            if index in old_form:
                found["old_samples"] = contents_of(sample, whole_paths=True)
            return found
        except Exception as error:  # the loader reports bad samples
            return {"samples": [_digest(type(error).__name__.encode()), 0.0, 0.0, 0]}

    kept: dict[str, dict[str, Any]] = {"samples": {}}
    ends = time.monotonic() + READ_S / 2
    with untouched():
        for index in indices:
            if time.monotonic() >= ends:
                break
            first = read(index)
            second = read(index)
            for form in first.keys() & second.keys():
                if same_contents(first[form], second[form]):
                    kept.setdefault(form, {})[str(index)] = first[form]
    return kept


def _in_subprocess(action: "partial[dict[str, dict[str, Any]]]") -> dict[str, dict[str, Any]]:
    """Call `action` in a forked process; return {} if that dies or takes too long."""
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(
        target=_send_result, args=(sender, action), daemon=True
    )
    child.start()
    sender.close()
    try:
        return dict(receiver.recv()) if receiver.poll(READ_S) else {}
    except EOFError:
        return {}
    finally:
        child.kill()
        child.join()
        receiver.close()


def _send_result(sender: Connection, action: "partial[dict[str, dict[str, Any]]]") -> None:
    set_num_threads(1)  # a forked process lacks the parent's threads, and would wait for them
    sender.send(action())


def _digest(content: bytes | memoryview, size: int = 8) -> str:
    return hashlib.blake2b(content, digest_size=size).hexdigest()
