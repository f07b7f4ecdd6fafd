"""How `lockstep bench` reaches the processes of a command: by the environment, under any launcher.

Owns: a `sitecustomize` in a folder on PYTHONPATH that calls `set_up(folder)` in every Python
process, and an import hook. Does not own: what happens there (`bench/part.py`).
"""

import importlib.util
import os
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

SITE = """# Written by `lockstep bench`; see lockstep/cli/stage.py.
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


def reach(folder: Path, module: str) -> dict[str, str]:
    """Return the variables with which every Python process calls `set_up(folder)` of a module."""
    (folder / "sitecustomize.py").write_text(SITE.format(module=module))
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONFAULTHANDLER": "1",  # or a hang could not be asked where it hangs
        "PYTHONUNBUFFERED": "1",
    }


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
