"""One step passes through the files that docs/architecture.md lists."""

import re
import sys
import traceback
from pathlib import Path
from typing import Any

from lockstep import Callback, RunConfig, fit
from lockstep.testing import TinyTask, run_ranks

ROOT = Path(__file__).parents[2]
PACKAGE = f"{ROOT}/src/lockstep/"


def listed(page: str) -> tuple[list[str], set[str]]:
    """Return the files of the numbered walk, and the others that a step calls."""
    walk = page.split("## One step, file by file")[1].split("\n## ")[0]
    others: set[str] = set()
    for rooms in re.findall(r"^- (.*?)[;.]$", walk, re.MULTILINE | re.DOTALL):
        room = re.match(r"`(\w+/)`", rooms)
        names = re.findall(r"`([\w/]+\.py)`", rooms)
        others |= {n if room is None or "/" in n else room[1] + n for n in names}
    return re.findall(r"^\d\. `([\w/]+\.py)`", walk, re.MULTILINE), others


class Walker(Callback):
    """Notes the files whose functions are called in a step, and the stack of optimizer.step()."""

    def __init__(self) -> None:
        self.called: set[str] = set()
        self.stack: list[str] = []

    def on_run_start(self, run: Any) -> None:
        run.optimizer.register_step_pre_hook(lambda *_: self.note_stack())

    def note_stack(self) -> None:
        here = str(Path(__file__))
        files = [frame.filename for frame in traceback.extract_stack() if frame.filename != here]
        ours = [file.removeprefix(PACKAGE) for file in files if file.startswith(PACKAGE)]
        self.stack = list(dict.fromkeys(ours))

    def on_step_start(self, run: Any, batch: Any) -> None:
        sys.setprofile(self.note_call)

    def note_call(self, frame: Any, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.called.add(frame.f_code.co_filename.removeprefix(PACKAGE))

    def on_step_end(self, run: Any, batch: Any, report: Any) -> None:
        sys.setprofile(None)


def walk_a_step(folder: str) -> tuple[set[str], list[str]]:
    walker = Walker()
    config = RunConfig(output_dir=folder, max_steps=2, device="cpu")
    small = ["sinks.curves=false", "batch.batch_size=8"]
    fit(TinyTask(), config.with_overrides(small), [walker])
    return walker.called - {"testing.py"}, walker.stack


def test_one_step_passes_through_the_files_that_are_listed(tmp_path: Path) -> None:
    walk, others = listed((ROOT / "docs" / "architecture.md").read_text())
    assert len(walk) <= 6
    for called, stack in run_ranks(2, walk_a_step, str(tmp_path)):
        assert called == {*walk, *others}
        assert stack[-3:] == ["trainer.py", "step/train_step.py", "step/update.py"]


def test_a_file_that_the_page_forgets_would_be_found() -> None:
    page = (
        "## One step, file by file\n1. `trainer.py`: x\n2. `step/update.py`: y\n\n"
        "- top folder: `task.py`;\n- `run/`: `a.py`,\n  `b.py`; and `data/c.py`.\n\n## B\n1. `a.py`"
    )
    expected = ["trainer.py", "step/update.py"], {"task.py", "run/a.py", "run/b.py", "data/c.py"}
    assert listed(page) == expected
