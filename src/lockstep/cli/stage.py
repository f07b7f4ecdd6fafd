"""What a process of a rehearsed command does differently, and what it notes for the onlooker.

Owns: how every Python process of a command is reached, under any launcher: by the environment,
for `sitecustomize` in a folder on PYTHONPATH calls `set_up`; nothing is imported before the
command imports it itself. And the few places of lockstep at which `lockstep rehearse` steps in:
a run gets a config with a middle, a loop of one's own gets two short epochs and a folder that is
thrown away, and whoever commits the first checkpoint waits to be killed. Does not own: the
verdict, nor what `certify` and `bench` do in such a process (`certify/part.py`, `bench/part.py`).
"""

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from lockstep.certify.part import Actor
from lockstep.harness.attach import SETTINGS

NOTES = "notes.jsonl"
GOING_ON = "going_on"
"""A file that exists once the run has been killed: from then on the same command resumes."""
HOLD_S = 300.0
"""How long the holder of a first checkpoint waits for its end, should nobody come."""
EPOCHS = STEPS_PER_EPOCH = 2

SITE = """# Written by `lockstep rehearse`, `certify` or `bench`; see lockstep/cli/stage.py.
import os
import sys

here = os.path.dirname(os.path.abspath(__file__))
this = sys.modules.pop("sitecustomize")
sys.path[:] = [path for path in sys.path if path != here]
try:
    import sitecustomize  # the machine's own, if it has one
except ImportError:
    sys.modules["sitecustomize"] = this
try:
    from {module} import set_up
except ImportError:  # some other Python
    pass
else:
    set_up(here)
"""


def build_stage(folder: Path) -> dict[str, str]:
    """Prepare `folder` for a rehearsal and return the variables that bring processes there."""
    (folder / NOTES).touch()
    return {"LOCKSTEP_REHEARSAL": "1", **reach(folder)}


def reach(folder: Path, module: str = __name__) -> dict[str, str]:
    """Return the variables by which every Python process of a command calls `set_up(folder)`.

    Of this file, or of another that puts an `OnImport` of its own in the way of imports.
    """
    (folder / "sitecustomize.py").write_text(SITE.format(module=module))
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONFAULTHANDLER": "1",  # or a hang could not be asked where it hangs
        "PYTHONUNBUFFERED": "1",
    }


def set_up(folder: str) -> None:
    """Have the parts of lockstep play along as soon as this process imports them."""
    is_certified = (Path(folder) / SETTINGS).exists()
    actor = Actor(Path(folder)) if is_certified else Stage(Path(folder))
    sys.meta_path.insert(0, OnImport(actor.scenes))


class OnImport(MetaPathFinder):
    """Do something to a module once it has been imported."""

    def __init__(self, actions: dict[str, Callable[[ModuleType], None]]) -> None:
        self.actions = actions

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Let the others find it, and come back to it afterwards."""
        action = self.actions.pop(fullname, None)
        spec = importlib.util.find_spec(fullname) if action else None
        if action is None or spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            action(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class Stage:
    """One process's share of a rehearsal."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_in_run = False
        self.num_stores = 0

    @property
    def scenes(self) -> dict[str, Callable[[ModuleType], None]]:
        """Return what to do to which module once it is imported."""
        return {
            "lockstep.run.build": self.enter_setup,
            "lockstep.data.loader": self.enter_loader,
            "lockstep.checkpoint.store": self.enter_store,
        }

    @property
    def goes_on(self) -> bool:
        """Say whether the run has been killed already."""
        return (self.folder / GOING_ON).exists()

    def note(self, event: str, step: int = 0, **more: Any) -> None:
        """Tell the onlooker."""
        from lockstep.dist.environment import launched  # which the command has imported by now

        launch = launched()
        said = {"event": event, "step": step, "time": time.time(), "pid": os.getpid()}
        line = json.dumps({**said, "rank": launch.rank, "size": launch.size, **more}) + "\n"
        with (self.folder / NOTES).open("a") as file:
            file.write(line)  # short, so in one piece

    def enter_setup(self, module: ModuleType) -> None:
        """Give a run an evaluation and a save in the middle, and let it go on after the kill."""
        prepare = module.prepare

        def staged(task: Any, config: Any, *more: Any, **named: Any) -> Any:
            self.is_in_run = True
            return prepare(task, with_a_middle(config, self.goes_on), *more, **named)

        module.prepare = staged  # type: ignore[attr-defined]

    def enter_loader(self, module: ModuleType) -> None:
        """Shorten a loop of one's own to two epochs of two steps."""
        stage, kind = self, module.Loader
        begin, steps = kind.__init__, kind.__iter__

        def init(self: Any, dataset: Any, world: Any, **named: Any) -> None:
            is_own = not stage.is_in_run
            if is_own and named.get("plan") is None and hasattr(dataset, "__len__"):
                num = STEPS_PER_EPOCH * named.get("batch_size", 32) * world.size
                named |= {"epochs": EPOCHS, "max_steps": None}
                dataset = Beginning(dataset, min(num, len(dataset)))
            elif is_own:
                named["max_steps"] = EPOCHS * STEPS_PER_EPOCH
            begin(self, dataset, world, **named)

        def iterate(self: Any) -> Iterator[Any]:
            for batch in steps(self):
                yield batch
                if not stage.is_in_run:
                    stage.note("trained", batch.step + 1)

        kind.__init__, kind.__iter__ = init, iterate

    def enter_store(self, module: ModuleType) -> None:
        """Keep a real run's checkpoints out of it; note what is saved; wait there to be killed."""
        stage, kind = self, module.CheckpointStore
        begin, save, load_into = kind.__init__, kind.save, kind.load_into

        def init(self: Any, folder: Any, **named: Any) -> None:
            if not stage.is_in_run or "rehearsal" not in Path(folder).parts:
                folder = stage.folder / f"store_{stage.num_stores}" / Path(folder).name
            stage.num_stores += 1
            begin(self, folder, **named)
            stage.note("store", folder=str(Path(folder).absolute()))

        def noted_save(self: Any, step: int, *more: Any, **named: Any) -> Any:
            path = save(self, step, *more, **named)
            is_first = not stage.goes_on
            stage.note("saved", step, path=str(Path(path).absolute()))
            parent, deadline = os.getppid(), time.monotonic() + HOLD_S
            while is_first and time.monotonic() < deadline and os.getppid() == parent:
                time.sleep(0.05)  # the kill comes here
            return path

        def noted_load(self: Any, **objects: Any) -> int:
            step = int(load_into(self, **objects))
            stage.note("loaded", step, path=str(self.folder))
            return step

        kind.__init__, kind.save, kind.load_into = init, noted_save, noted_load


class Beginning:
    """The first samples of a data set."""

    def __init__(self, dataset: Any, num: int) -> None:
        self.dataset = dataset
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def with_a_middle(config: Any, goes_on: bool) -> Any:
    """Return a rehearsal's config that also evaluates and saves half-way, and can go on."""
    from lockstep.run.rehearsal import STEPS, rehearsed

    config = rehearsed(config)
    total = config.max_steps or config.epochs or STEPS
    half = {"every_epochs": None, "every_steps": max(1, total // 2)}
    # The first save is waited for, so that the kill finds the run where it is expected.
    saving = half | ({} if goes_on else {"background": False})
    return config.model_copy(
        update={
            "resume": "auto" if goes_on else config.resume,
            "evaluation": config.evaluation.model_copy(update=half),
            "checkpoint": config.checkpoint.model_copy(update=saving),
        }
    )
