"""Saving in the background, one job at a time, without losing an error.

Owns: the thread, and carrying a failure back to the training loop. Does not
own: what is saved; hand it a snapshot, never a live model.
"""

import atexit
import threading
from collections.abc import Callable


class BackgroundWriter:
    """Run jobs one after another beside the training loop.

    A failed job is neither retried nor hidden: the next `submit`, `wait` or
    `close` raises its exception, once; `has_failed` tells without raising. An
    interpreter that exits normally waits for the running job; one that leaves
    by `os._exit` does not, so `close` first.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_closed = False
        atexit.register(self.close)

    @property
    def is_busy(self) -> bool:
        """Whether a job is running now."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """Whether a job has ended with a failure that nobody has been told yet."""
        return not self.is_busy and self._error is not None

    def submit(self, job: Callable[[], object]) -> None:
        """Start `job`, once the one before it has ended and only if that one succeeded."""
        if self._is_closed:
            raise RuntimeError("this writer is closed")
        self.wait()
        self._thread = threading.Thread(
            target=self._run, args=(job,), name="lockstep-writer", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until no job is running, and raise the failure of the last one."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Take no more jobs, and wait for the last one."""
        self._is_closed = True
        atexit.unregister(self.close)
        self.wait()

    def _run(self, job: Callable[[], object]) -> None:
        try:
            job()
        except BaseException as error:  # SystemExit too: it is for the training loop to hear
            self._error = error
