"""Save in the background, one job at a time, without losing an error.

Owns: the thread, and passing a failure to the training loop. Does not own: the data. A job must
save a snapshot, never a model in training.
"""

import atexit
import threading
from collections.abc import Callable


class BackgroundWriter:
    """Runs jobs one after another in a thread beside the training loop.

    A failed job is not retried. The next `submit`, `wait` or `close` raises its exception, once;
    `has_failed` does not raise. A normal exit of the interpreter waits for the running job. Before
    `os._exit`, which does not wait, call `close`.
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
        """Whether the last job failed, and its exception has not been raised yet."""
        return not self.is_busy and self._error is not None

    def submit(self, job: Callable[[], object]) -> None:
        """Start `job` after the previous one has ended, if that one succeeded."""
        if self._is_closed:
            raise RuntimeError("this writer is closed")
        self.wait()
        self._thread = threading.Thread(
            target=self._run, args=(job,), name="lockstep-writer", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until no job is running, and raise the exception of the last one."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error = self._error
            self._error = None
            raise error

    def close(self) -> None:
        """Accept no more jobs, and wait for the last one."""
        self._is_closed = True
        atexit.unregister(self.close)
        self.wait()

    def _run(self, job: Callable[[], object]) -> None:
        try:
            job()
        except BaseException as error:  # the training loop raises it, even a SystemExit
            self._error = error
