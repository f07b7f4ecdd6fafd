"""What the callback of `lockstep rehearse` asks of a run and notes of it."""

import json
import os
from pathlib import Path

from lockstep import RunConfig, fit
from lockstep.harness.attach import KILLED, attached, read_notes
from lockstep.rehearse.callback import CALLBACK, saving_halfway
from lockstep.testing import TinyTask, run_ranks


def test_a_rehearsed_run_evaluates_and_saves_half_way() -> None:
    asked = RunConfig.parse({"max_steps": 4, "resume": "discard", "batch": {"batch_size": 48}})
    middle = saving_halfway(asked, was_killed=False)
    assert (middle.evaluation.every_steps, middle.checkpoint.every_steps) == (2, 2)
    assert not middle.checkpoint.background
    assert (middle.resume, middle.batch) == ("discard", asked.batch)
    assert saving_halfway(asked, was_killed=True).resume == "auto"
    assert RunConfig.parse(json.loads(middle.model_dump_json())) == middle, "a valid config"


def train(folder: Path, tool_folder: Path) -> None:
    os.environ |= {**attached(tool_folder, CALLBACK), "LOCKSTEP_REHEARSAL": "1"}
    config = {"output_dir": str(folder), "epochs": 9, "batch": {"batch_size": 4}}
    fit(TinyTask(), RunConfig.parse({**config, "sinks": {"curves": False}}))


def test_every_rank_notes_what_it_does(tmp_path: Path) -> None:
    """A run that was killed already is not held at its first checkpoint."""
    (tmp_path / KILLED).touch()
    run_ranks(2, train, tmp_path / "run", tmp_path)
    notes = read_notes(tmp_path)
    for rank in range(2):
        seen = [(note["event"], note["step"]) for note in notes if note["rank"] == rank]
        trained = [("trained", step) for step in (1, 2, 3, 4)]
        own = [one for one in seen if one[0] != "saved"]
        assert own == [("process", 0), ("run", 0), ("start", 0), *trained]
        saved = [Path(n["path"]).name for n in notes if (n["event"], n["rank"]) == ("saved", rank)]
        assert saved == ([] if rank else ["step_00000002", "step_00000004"])
    (folder,) = {note["output_dir"] for note in notes if note["event"] == "run"}
    assert folder == str(tmp_path / "run" / "rehearsal")
    assert {note["size"] for note in notes} == {2}
