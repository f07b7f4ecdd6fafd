"""Ctrl-C while modules are imported: the process ends at once, with one line.

Owns: Ctrl-C until a command has begun. Does not own: Ctrl-C in commands, where it is a
KeyboardInterrupt, or a signal to forward to ranks. This module imports nothing slow.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT


@contextmanager
def quick_to_interrupt() -> Iterator[None]:
    """Make Ctrl-C end this process at once, with one line and exit code 130.

    A KeyboardInterrupt inside an import might be printed, or caught as an import error.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # SIGINT is ignored or handled elsewhere
        return
    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def leave(number: int, frame: FrameType | None) -> None:
    """End this process."""
    os.write(2, b"lockstep: interrupted\n")
    os._exit(INTERRUPTED)
