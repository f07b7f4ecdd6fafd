"""What the `lockstep` command runs first: while the rest is imported, Ctrl-C ends it in one line.

Owns: Ctrl-C until a verb has begun. Does not own: anything a verb does; from then on Ctrl-C is a
KeyboardInterrupt, or a signal to pass on to ranks. It imports nothing that takes time.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT


@contextmanager
def quick_to_interrupt() -> Iterator[None]:
    """Have Ctrl-C end this process at once, with one line and exit code 130.

    An exception would come up inside an import, which may print it, or take it for a failure of
    its own and go on.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # ignored, or somebody else's
        return
    signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, b"lockstep: interrupted\n")
    os._exit(INTERRUPTED)


def main() -> None:
    """Run the command."""
    try:
        with quick_to_interrupt():
            from lockstep.cli.main import main as run
        run()
    except KeyboardInterrupt:
        _leave(signal.SIGINT, None)


if __name__ == "__main__":
    main()
