"""Ending a process together with the process that started it.

Owns: the request to the kernel, the same for ranks, loader workers and measured commands. Does not
own: starting processes.
"""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to kill this process when the one that started it ends.

    Args:
        parent: The process id of the one that started it, if known. It may have ended before
            this was called; then this process ends now.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
