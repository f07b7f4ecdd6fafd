"""Text painted as pixels: one token is one RGB pixel.

Owns: the byte-level tokens, and their encoding in base 256 (red is the low byte, then
green and blue), row by row, padded with black. Does not own: files or folders.
"""

import numpy as np
from numpy.typing import NDArray

PAD = 0
"""Black: padding after the text, which the mask marks too."""
END = 1
SEPARATOR = 2
"""Separates a prompt from its answer."""
FIRST_BYTE = 3
"""The token of byte 0; the other bytes follow in order."""


def encode(text: bytes, answer: bytes | None = None) -> list[int]:
    """Return the tokens of a text, or of a prompt and its answer, closed by `END`.

    >>> encode(b"ab")
    [100, 101, 1]
    >>> encode(b"a", answer=b"b")
    [100, 2, 101, 1]
    """
    tokens = [FIRST_BYTE + byte for byte in text]
    if answer is not None:
        tokens += [SEPARATOR, *(FIRST_BYTE + byte for byte in answer)]
    return [*tokens, END]


def decode(tokens: list[int]) -> str:
    """Return the text before the first `END`; a token that is not a byte becomes a question mark.

    >>> decode(encode("grün".encode()))
    'grün'
    >>> decode([100, 9_000, 101, END, 102])
    'a?b'
    """
    text = bytearray()
    for token in tokens:
        if token == END:
            break
        if token == SEPARATOR:
            text += b" | "
        elif token != PAD:
            text.append(token - FIRST_BYTE if FIRST_BYTE <= token < FIRST_BYTE + 256 else ord("?"))
    return text.decode(errors="replace")


def paint(tokens: list[int], size: int) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Paint tokens into an image (3, size, size); also return the mask (size, size) of its tokens.

    Tokens beyond `size` x `size` are dropped.
    """
    ids = np.full(size * size, PAD, dtype=np.uint32)
    num_valid = min(len(tokens), size * size)
    ids[:num_valid] = tokens[:num_valid]
    pixels = np.stack([ids & 255, ids >> 8 & 255, ids >> 16 & 255]).astype(np.uint8)
    mask = np.arange(size * size) < num_valid
    return pixels.reshape(3, size, size), mask.reshape(size, size)


def read_pixels(pixels: NDArray[np.uint8]) -> list[int]:
    """Return the tokens of an image (3, H, W), padding included: the inverse of `paint`."""
    red, green, blue = pixels.reshape(3, -1).astype(np.uint32)
    ids: list[int] = (red | green << 8 | blue << 16).tolist()
    return ids
