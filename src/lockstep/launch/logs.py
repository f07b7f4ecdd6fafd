"""Copy the output of the ranks to the launcher's streams, each line prefixed with its rank.

Owns: following the log files of all ranks but the first, which prints directly (`worker.keep_log`).
Does not own: writing these files; torch's elastic agent redirects the ranks there.
"""

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

LOOK_S = 0.1


class LogFollowers:
    """Threads that copy the log files of local ranks.

    They replace those of torch's agent, which sleep between two reads: every restart would wait for
    two of these pauses.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._finished = threading.Event()
        self._threads = []
        for local, folder in enumerate(folders[1:], 1):
            for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
                words = f"[rank{local}]:", str(folder / f"{name}.log"), stream, self._finished
                self._threads.append(
                    threading.Thread(target=follow_log, args=(*words, LOOK_S), daemon=True)
                )
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        """Copy the rest after the ranks have ended."""
        self._finished.set()
        for thread in self._threads:
            thread.join()


def follow_log(
    header: str, file: str, destination: TextIO, finished: threading.Event, interval_s: float
) -> None:
    """Copy the lines of a file as they are written, until `finished` is set."""
    line = ""
    is_last = False
    while not os.path.exists(file):
        if finished.wait(interval_s):
            return
    with open(file, errors="replace") as lines:
        while not is_last:
            is_last = finished.wait(interval_s)  # lines written before the end are still read below
            for piece in lines:
                line += piece
                if line.endswith("\n"):
                    destination.write(header + line)
                    line = ""
    if line:
        destination.write(f"{header}{line}\n")
