"""Reports as numbers: a vocabulary of the words they use, or a local model's tokenizer.

Owns: cutting text into words and counting them. Does not own: what the numbers mean to
the network.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import ConfigError

PAD, FIRST, UNKNOWN = 0, 1, 2
NUM_SPECIAL = 3
WORD = re.compile(r"\w+|[^\w\s]")


def words_of(text: str) -> list[str]:
    """Cut a text into lower-case words and signs.

    >>> words_of("There is no Lung nodule.")
    ['there', 'is', 'no', 'lung', 'nodule', '.']
    """
    return WORD.findall(text.lower())


class Vocabulary:
    """The words of the training reports, the most frequent first; a checkpoint keeps them."""

    def __init__(self, words: Sequence[str], max_length: int) -> None:
        self.words = list(words)
        self.max_length = max_length
        self._ids = {word: number for number, word in enumerate(words, NUM_SPECIAL)}

    @classmethod
    def build(cls, reports: Iterable[str], max_words: int, max_length: int) -> "Vocabulary":
        """Count the words of `reports`; ties go by the alphabet, so that all ranks agree."""
        counts = Counter(word for report in reports for word in words_of(report))
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        return cls([word for word, _ in ranked[:max_words]], max_length)

    def __len__(self) -> int:
        return len(self.words) + NUM_SPECIAL

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Return a row of word numbers for each text, behind a first token, padded with 0."""
        rows = [
            [FIRST, *(self._ids.get(word, UNKNOWN) for word in words_of(text))][: self.max_length]
            for text in texts
        ]
        tokens = torch.full((len(rows), max(map(len, rows), default=1)), PAD)
        for row, numbers in zip(tokens, rows, strict=True):
            row[: len(numbers)] = torch.tensor(numbers)
        return tokens


class LocalTokenizer:
    """The tokenizer of a Hugging Face model on this disk; its padding becomes 0."""

    def __init__(self, path: Path, max_length: int) -> None:
        transformers = import_transformers(path)
        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
            path, local_files_only=True
        )
        self.max_length = max_length

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Return a row of token numbers for each text, plus 1, padded with 0."""
        found = self._tokenizer(
            list(texts), padding=True, truncation=True, max_length=self.max_length
        )
        numbers, mask = (torch.tensor(found[k]) for k in ("input_ids", "attention_mask"))
        return (numbers + 1) * mask  # so that 0 is padding, whatever its own number is


def import_transformers(path: Path) -> Any:
    """Return the transformers package, for a model that is on this disk.

    Raises:
        ConfigError: if either is missing.
    """
    if not path.is_dir():
        raise ConfigError(
            f"model.text_encoder.path {path} is not a folder, and nothing is downloaded",
            "name a folder that save_pretrained wrote, or set path: null for the small encoder",
        )
    try:
        import transformers  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise ConfigError(
            f"model.text_encoder.path {path} needs the package transformers",
            "run pip install transformers, or set path: null for the small encoder",
        ) from error
    return transformers
