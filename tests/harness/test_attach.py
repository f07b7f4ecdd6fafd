"""How a tool's callback is named to the runs of a command, and what it leaves for the tool."""

import json
from pathlib import Path

import pytest

from lockstep.harness.attach import NOTES, attached, read_notes, write_note


def test_a_process_alone_in_an_allocation_is_all_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}.items():
        monkeypatch.setenv(name, value)
    write_note(tmp_path, "process")
    note = json.loads((tmp_path / NOTES).read_text())
    assert (note["rank"], note["size"]) == (0, 1)


def test_a_note_that_is_being_written_is_left_for_the_next_look(tmp_path: Path) -> None:
    attached(tmp_path, "a:B")
    write_note(tmp_path, "saved", step=2)
    with (tmp_path / NOTES).open("a") as file:
        file.write('{"event": "trai')
    assert [(note["event"], note["step"]) for note in read_notes(tmp_path)] == [("saved", 2)]


def test_callbacks_that_a_user_attached_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_CALLBACKS", "mine:Watch")
    assert attached(tmp_path, "a:B")["LOCKSTEP_CALLBACKS"] == "mine:Watch,a:B"
