"""The record of a run: one JSON object per line, one file per rank.

Owns: writing events so that a kill or a full disk loses at most one line, and reading a log
that contains kills and resumes. Does not own: what to record, which the trainer decides, or
how to show it (`console.py`, `sinks.py`).
"""

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import DataError
from lockstep.run_files import open_to_append, read_bytes

Event = dict[str, Any]
Listener = Callable[[Event], None]

BOOKKEEPING = frozenset({"run_start", "resume", "run_end", "stop", "warning", "checkpoint"})
"""Kinds of events about a process rather than the training; an uninterrupted run has others.

`checkpoint` is recorded when a save has completed, perhaps some steps after `saving`.
"""

NOT_IN_JSON = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}

# Not `warnings.warn`: if warnings are errors, it would end the run.
_log = logging.getLogger("lockstep")


class Events(list[Event]):
    """The result of `read_events`: a list with the number of unreadable lines."""

    num_unreadable: int = 0


class EventLog:
    """Append the events of one rank to `<folder>/events/rank_K.jsonl` and call the listeners.

    A line is one `write` call on a file opened for appending, so it survives the death of
    the process. Writing never raises: a full disk loses the event and logs one warning, and
    writing continues when there is room again. A listener that raises is removed with one
    warning. Any thread may write; listeners get one event at a time, in the order of lines.
    """

    def __init__(
        self,
        folder: Path | str,
        rank: int,
        listeners: Iterable[Listener] = (),
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = Path(folder, log_name(rank))
        self.listeners = list(listeners)
        self._clock = clock
        # Re-entrant: a listener may write an event itself.
        self._lock = threading.RLock()
        self._has_warned = False
        self._is_torn = False
        self._file: int | None = None
        try:
            self._file = open_to_append(folder, log_name(rank))
            size_bytes = os.fstat(self._file).st_size
            self._is_torn = size_bytes > 0 and os.pread(self._file, 1, size_bytes - 1) != b"\n"
        except OSError as error:
            self._warn_unwritten(error)

    def write(self, kind: str, step: int, **fields: Any) -> Event:
        """Record an event and return it as listeners receive it, with plain numbers."""
        with self._lock:
            said = {"event": kind, "step": step, "time": self._clock(), **fields}
            text = json.dumps(said, default=_plain)
            event: Event = json.loads(text)
            self._append(_strict(text) if "NaN" in text or "Infinity" in text else text)
            for listener in list(self.listeners):
                try:
                    listener(event)
                except Exception as error:
                    self.listeners.remove(listener)
                    name = getattr(listener, "__name__", type(listener).__name__)
                    message = f"{name} failed and gets no more events: {error!r}"
                    _log.warning(message)
                    self.write("warning", step, message=message)
            return event

    def close(self) -> None:
        """Close the file. Listeners still receive later events."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _append(self, text: str) -> None:
        if self._file is None:
            return
        # First end a line that a kill or a full disk has truncated, or this one would be lost too.
        line = ("\n" if self._is_torn else "") + text + "\n"
        try:
            # The text is ASCII, so a count below its length means a truncated line.
            self._is_torn = os.write(self._file, line.encode("ascii")) < len(line)
        except OSError as error:
            self._is_torn = True
            self._warn_unwritten(error)

    def _warn_unwritten(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning("events are being lost, %s cannot be written: %s", self.path, error)


def read_events(folder: Path | str, rank: int = 0, *, raw: bool = False) -> Events:
    """Read the events of a run as if it had never been interrupted.

    A `resume` at step c removes every earlier event with a later step, since those steps were
    trained again. A `run_start` without a `resume` removes everything before it. The kinds in
    `BOOKKEEPING` are omitted. So no event appears twice, and a killed and resumed run reads
    like one that never stopped.

    With `raw`, every readable line is returned unchanged.

    Truncated lines and binary garbage are skipped and counted in `.num_unreadable`. The strings
    "nan", "inf" and "-inf" are converted back to floats.

    Raises:
        DataError: The folder holds no events of that rank.
    """
    path = Path(folder, log_name(rank))
    try:
        lines = read_bytes(folder, log_name(rank)).split(b"\n")
    except FileNotFoundError:
        raise DataError(
            f"no events of rank {rank} in {folder}",
            f"pass the folder of a run, which holds {path.parent.name}/{path.name}",
        ) from None
    except OSError as error:
        raise DataError(
            f"cannot read the events of rank {rank}: {error}", f"check {path}"
        ) from error
    events = Events()
    for line in lines:
        # After a power loss, a complete line may be preceded by zeros.
        line = line.strip(b"\0 \r\t")
        if line:
            event = _from_json(line)
            if event is None:
                events.num_unreadable += 1
            else:
                events.append(event)
    return events if raw else _rewound(events)


def _rewound(events: Events) -> Events:
    kept = Events()
    kept.num_unreadable = events.num_unreadable
    has_restarted = False
    rewind_to: int | None = None
    # Consecutive process starts and resumes count as one: a run writes `run_start`, then
    # `resume`, and may be killed again before it has trained a step.
    for event in events:
        kind = event["event"]
        if kind == "run_start":
            has_restarted = True
        elif kind == "resume":
            rewind_to = event["step"] if rewind_to is None else min(rewind_to, event["step"])
        elif kind not in BOOKKEEPING:
            if rewind_to is not None:
                kept[:] = [earlier for earlier in kept if earlier["step"] <= rewind_to]
            elif has_restarted:
                kept.clear()
            has_restarted = False
            rewind_to = None
            kept.append(event)
    if rewind_to is not None:
        kept[:] = [earlier for earlier in kept if earlier["step"] <= rewind_to]
    return kept


def log_name(rank: int) -> str:
    """Return the path of a rank's log, relative to the run's folder."""
    return f"events/rank_{rank}.jsonl"


def _plain(value: Any) -> Any:
    """Convert a tensor, an array, a path and so on to a JSON type."""
    if isinstance(value, Mapping):
        return dict(value)
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _strict(text: str) -> str:
    """Write floats that JSON lacks as strings."""
    return json.dumps(json.loads(text, parse_constant=NOT_IN_JSON.__getitem__))


def _from_json(line: bytes) -> Event | None:
    try:
        event = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict):
        return None
    if not isinstance(event.get("event"), str) or not isinstance(event.get("step"), int):
        return None
    if b'"nan"' in line or b'inf"' in line:
        return {key: _revived(item) for key, item in event.items()}
    return event


def _revived(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _revived(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_revived(item) for item in value]
    return float(value) if value in NOT_IN_JSON.values() else value
