"""The record survives kills, garbage and full disks, and reads as one run."""

import errno
import json
import math
import os
import random
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import DataError
from lockstep.observe.events import Event, EventLog, read_events


def log_path(folder: Path) -> Path:
    return folder / "events" / "rank_0.jsonl"


def without_time(events: list[Event]) -> list[Event]:
    return [{key: value for key, value in e.items() if key != "time"} for e in events]


def train(log: EventLog, first: int, last: int) -> None:
    """Write what a trainer would between two steps."""
    for step in range(first, last + 1):
        log.write("step", step, loss=1 / step)
        if step % 4 == 0:
            log.write("evaluation", step, metrics={"loss": 2 / step})
        if step % 5 == 0:
            log.write("saving", step, path=f"step_{step}")


def test_an_event_is_returned_and_read_back_as_written(tmp_path: Path) -> None:
    log = EventLog(tmp_path, rank=3, clock=lambda: 17.5)
    written = log.write("step", 7, loss=0.25, parts={"head": 1.5}, path=Path("a/b"))
    assert written == {
        "event": "step",
        "step": 7,
        "time": 17.5,
        "loss": 0.25,
        "parts": {"head": 1.5},
        "path": "a/b",
    }
    assert read_events(tmp_path, rank=3) == [written]


def test_tensors_and_arrays_become_plain_numbers(tmp_path: Path) -> None:
    import numpy
    import torch

    log = EventLog(tmp_path, rank=0)
    event = log.write("step", 1, loss=torch.tensor(0.5), norms=numpy.arange(2), n=numpy.int64(3))
    assert (event["loss"], event["norms"], event["n"]) == (0.5, [0, 1], 3)


def test_floats_that_json_lacks_are_strings_in_the_file_and_floats_again_when_read(
    tmp_path: Path,
) -> None:
    log = EventLog(tmp_path, rank=0)
    event = log.write("step", 1, loss=math.nan, parts={"a": math.inf, "b": [-math.inf, 1.0]})
    assert math.isnan(event["loss"])

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    line = json.loads(log_path(tmp_path).read_text(), parse_constant=refuse)
    assert line["loss"] == "nan"
    assert line["parts"] == {"a": "inf", "b": ["-inf", 1.0]}
    (back,) = read_events(tmp_path)
    assert math.isnan(back["loss"])
    assert back["parts"] == {"a": math.inf, "b": [-math.inf, 1.0]}


def test_a_torn_tail_costs_only_itself(tmp_path: Path) -> None:
    EventLog(tmp_path, rank=0).write("step", 1)
    with log_path(tmp_path).open("ab") as file:
        file.write(b'{"event": "step", "st')
    assert len(read_events(tmp_path)) == 1

    EventLog(tmp_path, rank=0).write("step", 2)
    events = read_events(tmp_path)
    assert [event["step"] for event in events] == [1, 2]
    assert events.num_unreadable == 1


def test_binary_garbage_is_skipped_and_counted(tmp_path: Path) -> None:
    log = EventLog(tmp_path, rank=0)
    log.write("step", 1)
    garbage = [b"\xff\xfe\x00{", b"[1, 2]", b'{"step": 1}', b'{"event": "step"}', b"[" * 100_000]
    with log_path(tmp_path).open("ab") as file:
        file.write(b"\n".join(garbage) + b"\n\n" + bytes(64))
    log.write("step", 2)
    events = read_events(tmp_path, raw=True)
    assert [event["step"] for event in events] == [1, 2]
    assert events.num_unreadable == len(garbage)


def test_a_killed_and_resumed_log_reads_like_an_uninterrupted_one(tmp_path: Path) -> None:
    straight = EventLog(tmp_path / "straight", rank=0)
    straight.write("run_start", 0)
    train(straight, 1, 40)
    straight.write("run_end", 40)
    expected = without_time(read_events(tmp_path / "straight"))

    for seed in range(30):
        dice = random.Random(seed)
        folder = tmp_path / str(seed)
        done = 0
        while done < 40:
            log = EventLog(folder, rank=0)
            log.write("run_start", done)
            if done:
                if dice.random() < 0.5:
                    log.write("warning", 0, message="the newest checkpoint was rejected")
                log.write("resume", done, path=f"step_{done}")
            killed_at = min(40, done + dice.randint(0, 13))
            train(log, done + 1, killed_at)
            log.close()
            if killed_at == 40:
                break
            # Sometimes an older checkpoint is the newest good one; without any, it starts over.
            done = max(0, killed_at // 5 * 5 - dice.choice([0, 0, 5]))
            if dice.random() < 0.5:
                with log_path(folder).open("ab") as file:
                    file.write(b'{"event": "step", "step": 9')
        assert without_time(read_events(folder)) == expected, f"seed {seed}"


def test_a_resume_at_the_end_of_the_log_already_takes_back(tmp_path: Path) -> None:
    log = EventLog(tmp_path, rank=0)
    train(log, 1, 9)
    log.write("run_start", 0)
    assert [e["step"] for e in read_events(tmp_path) if e["event"] == "step"][-1] == 9
    log.write("resume", 5, path="step_5")
    assert [e["step"] for e in read_events(tmp_path) if e["event"] == "step"][-1] == 5


def test_raw_returns_every_line(tmp_path: Path) -> None:
    log = EventLog(tmp_path, rank=0)
    for kind, step in [("run_start", 0), ("step", 1), ("resume", 0), ("step", 1), ("run_end", 1)]:
        log.write(kind, step)
    assert [e["event"] for e in read_events(tmp_path, raw=True)] == [
        "run_start",
        "step",
        "resume",
        "step",
        "run_end",
    ]
    assert [e["event"] for e in read_events(tmp_path)] == ["step"]


def test_a_folder_without_events_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no events of rank 0"):
        read_events(tmp_path)


def test_a_full_disk_warns_once_and_writing_goes_on_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[Event] = []
    log = EventLog(tmp_path, rank=0, listeners=[heard.append])
    log.write("step", 1)

    really_write = os.write
    room = [20]  # bytes before the disk is full: the first failing line is cut short

    def full(file: int, data: bytes) -> int:
        if room[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = really_write(file, data[: room[0]])
        room[0] = 0
        return written

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        for step in (2, 3, 4):
            log.write("step", step)
    log.write("step", 5)

    assert [event["step"] for event in read_events(tmp_path)] == [1, 5]
    assert [event["step"] for event in heard] == [1, 2, 3, 4, 5]
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text


def test_a_folder_that_cannot_be_made_warns_once_and_listeners_still_hear(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "events").write_text("in the way")
    heard: list[Event] = []
    log = EventLog(tmp_path, rank=0, listeners=[heard.append])
    log.write("step", 1)
    log.close()
    assert len(heard) == 1
    assert len(caplog.records) == 1


def test_a_listener_that_raises_is_dropped_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []
    heard: list[Any] = []

    def broken(event: Event) -> None:
        calls.append(event["step"])
        raise RuntimeError("no colour")

    log = EventLog(tmp_path, rank=0, listeners=[broken, heard.append])
    for step in (1, 2, 3):
        log.write("step", step)
    assert calls == [1]
    assert [e["step"] for e in heard if e["event"] == "step"] == [1, 2, 3]
    warnings = [e for e in read_events(tmp_path, raw=True) if e["event"] == "warning"]
    assert len(warnings) == len(caplog.records) == 1
    assert "broken" in warnings[0]["message"]
    assert "no colour" in warnings[0]["message"]
