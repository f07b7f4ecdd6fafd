"""The folder tree is a promise; these tests keep it.

A newcomer may trust that the core imports no tool, that importing
does nothing, and that the tree of docs/architecture.md is the tree. Every guard here has a
companion that plants a fault and sees it caught.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
SRC = REPOSITORY / "src"
TOOLS = {
    "launch",
    "harness",
    "rehearse",
    "doctor",
    "bench",
    "certify",
    "cli",
    "testing",
    "__main__",
}

PUBLIC_NAMES = {
    "Averaging",
    "BatchConfig",
    "Callback",
    "Context",
    "RunResult",
    "StepReport",
    "StopSignals",
    "Trainer",
    "plan_for",
    "prepare",
    "fit",
    "RunConfig",
    "Task",
    "PartialLoss",
    "World",
    "Loader",
    "train_step",
    "unwrap",
    "CheckpointStore",
    "read_events",
    "file_fingerprints",
    "shard",
    "LockstepError",
}

EMPTY_NAMES = {"utils", "common", "helpers", "manager", "tools"}


def files_of(package: str) -> list[Path]:
    return sorted((SRC / package).rglob("*.py"))


def core_files() -> list[Path]:
    root = SRC / "lockstep"
    return [f for f in files_of("lockstep") if Path(f.relative_to(root).parts[0]).stem not in TOOLS]


def tool_files() -> list[Path]:
    return sorted(set(files_of("lockstep")) - set(core_files()))


def name_of(file: Path) -> str:
    """Return the path below src, as in "lockstep/data/order.py"."""
    return file.relative_to(SRC).as_posix()


def each(files: Iterable[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("file", list(files), ids=name_of)


def test_the_guards_have_files_to_look_at() -> None:
    assert core_files()
    assert tool_files()
    assert files_of("lockstep_recipes")


# --- Layers: recipes -> core, tools -> core, nothing upward -------------------


def nodes_at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run when the module is imported: all but function bodies."""
    for child in ast.iter_child_nodes(tree):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from nodes_at_import(child)


def imported_names(source: str, package: str = "lockstep", *, at_import: bool = False) -> set[str]:
    """Return the dotted names that `source`, a module of `package`, imports.

    Relative imports are resolved; so is `import_module` with a constant, or with
    an f-string, of which the constant beginning counts.
    """
    tree = ast.parse(source)
    names: set[str] = set()
    for node in nodes_at_import(tree) if at_import else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level]
            base = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            names |= {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func).rsplit(".", 1)[-1]
            if called in {"import_module", "__import__"}:
                start = node.args[0]
                start = start.values[0] if isinstance(start, ast.JoinedStr) else start
                if isinstance(start, ast.Constant) and isinstance(start.value, str):
                    names.add(start.value)
    return names


def package_of(file: Path) -> str:
    return ".".join(file.relative_to(SRC).parent.parts)


def tool_packages(source: str, package: str = "lockstep") -> set[str]:
    """Return the tools that `source` imports."""
    ours = {n for n in imported_names(source, package) if n.startswith("lockstep.")}
    return {n.split(".")[1] for n in ours} & TOOLS


def reaches_recipes(source: str, *, at_import: bool = False) -> bool:
    names = imported_names(source, at_import=at_import)
    return any(n.split(".")[0] == "lockstep_recipes" for n in names)


@each(core_files())
def test_the_core_never_imports_a_tool(file: Path) -> None:
    assert not tool_packages(file.read_text(), package_of(file))


@each(core_files())
def test_the_core_knows_no_recipe(file: Path) -> None:
    assert not reaches_recipes(file.read_text())


@each(tool_files())
def test_tools_find_recipes_only_at_run_time(file: Path) -> None:
    assert not reaches_recipes(file.read_text(), at_import=True)


def imports_the_doubles(source: str, package: str = "lockstep") -> bool:
    """Say whether `source` needs what is there for tests."""
    return "testing" in tool_packages(source, package)


@each(tool_files())
def test_no_tool_needs_what_is_there_for_tests(file: Path) -> None:
    assert not imports_the_doubles(file.read_text(), package_of(file))


@pytest.mark.parametrize(
    "planted",
    ["from lockstep.testing import run_ranks", "def late():\n    import lockstep.testing"],
)
def test_the_guard_of_the_doubles_can_fail(planted: str) -> None:
    assert imports_the_doubles(planted)


@each(f for f in tool_files() if f.relative_to(SRC).parts[1] not in ("cli", "__main__.py"))
def test_only_cli_imports_cli(file: Path) -> None:
    assert "cli" not in tool_packages(file.read_text(), package_of(file))


@each(files_of("lockstep_recipes"))
def test_recipes_never_import_a_tool(file: Path) -> None:
    assert not tool_packages(file.read_text(), package_of(file))


@pytest.mark.parametrize(
    "planted",
    [
        "import lockstep.launch.local",
        "import lockstep.launch.local as local",
        "from lockstep.launch import local",
        "from lockstep.launch.local import start",
        "from lockstep import launch",
        "from .launch import local",
        "from . import launch",
        "def late():\n    from lockstep import launch",
        "if TYPE_CHECKING:\n    from lockstep.launch import local",
        "importlib.import_module('lockstep.launch.local')",
        "import_module(f'lockstep.launch.{name}')",
    ],
)
def test_the_tools_guard_can_fail(planted: str) -> None:
    assert tool_packages(planted) == {"launch"}


def test_the_tools_guard_follows_dots_upward() -> None:
    assert tool_packages("from ..cli import main", "lockstep.data") == {"cli"}
    assert tool_packages("from .launch import x", "lockstep.data") == set()


@pytest.mark.parametrize(
    "planted",
    [
        "import lockstep_recipes",
        "import lockstep_recipes.jit.task",
        "from lockstep_recipes.jit import task",
        "class Late:\n    import lockstep_recipes",
        "found = import_module(f'lockstep_recipes.{name}')",
    ],
)
def test_the_recipe_guard_can_fail(planted: str) -> None:
    assert reaches_recipes(planted, at_import=True)


def test_the_recipe_guard_tells_run_time_from_import() -> None:
    late = "def find(name):\n    return import_module(f'lockstep_recipes.{name}')"
    assert reaches_recipes(late)
    assert not reaches_recipes(late, at_import=True)


# --- No import cycles -----------------------------------------------------------


def import_graph(root: Path) -> dict[str, set[str]]:
    """Return which modules below `root` each of them imports, in function bodies too."""
    files = {}
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    graph = {}
    for name, file in files.items():
        package = ".".join(file.relative_to(root.parent).parent.parts)
        reached = set()
        for imported in imported_names(file.read_text(), package):
            while imported and imported not in files:  # a name in a module, or not ours
                imported = imported.rpartition(".")[0]
            reached.add(imported)
        graph[name] = reached - {name, ""}
    return graph


def in_cycles(graph: dict[str, set[str]]) -> set[str]:
    """Return the modules that reach themselves."""

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = list(graph[start])
        while ahead:
            name = ahead.pop()
            if name not in seen:
                seen.add(name)
                ahead += graph[name]
        return seen

    return {name for name in graph if name in reach(name)}


def test_no_module_imports_itself_through_others() -> None:
    assert in_cycles(import_graph(SRC / "lockstep")) == set()


def test_the_cycle_guard_can_fail(tmp_path: Path) -> None:
    """Planted: a circle of three, one of its imports in a function; a fourth only looks at it."""
    package = tmp_path / "planted"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "one.py").write_text("from planted.two import x")
    (package / "two.py").write_text("from planted import three")
    (package / "three.py").write_text("def late():\n    import planted.one")
    (package / "four.py").write_text("import planted.one")
    circle = {"planted.one", "planted.two", "planted.three"}
    assert in_cycles(import_graph(package)) == circle


# --- The order of the core's packages ---------------------------------------------

# What each package of the core, and each file of the top folder, imports at module level. A line
# imports from lines above it. The one exception: `errors` knows one text of torch's errors, from
# torch_compat/error_texts.py, which imports nothing.
ORDER = {
    "__init__": "",
    "errors": "torch_compat",
    "torch_compat": "errors",
    "contents": "",
    "nested": "",
    "parent": "",
    "phases": "",
    "randomness": "",
    "result": "",
    "schedule": "",
    "plan": "errors",
    "run_files": "errors",
    "text_input": "errors",
    "yaml_input": "errors",
    "parse": "errors yaml_input",
    "dist": "contents errors plan text_input torch_compat",
    "signals": "dist errors",
    "callback": "dist errors",
    "observe": "errors run_files",
    "checkpoint": "dist errors nested plan run_files",
    "data": "contents dist errors nested parent plan randomness signals torch_compat",
    "config": "data dist errors observe parse plan schedule",
    "exact": "config data dist errors torch_compat",
    "task": "data dist errors exact plan randomness",
    "step": "data dist errors exact randomness task torch_compat",
    "custom_loop": "callback data dist result step",
    "world": "callback custom_loop dist errors phases",
    "run": "callback checkpoint config data dist errors exact observe plan randomness run_files "
    "schedule signals step task torch_compat world",
    "trainer": "callback config data dist errors exact result run schedule signals step task world",
}


def imports_of_packages(files: Iterable[Path], src: Path = SRC) -> dict[str, set[str]]:
    """Return what each package of lockstep imports from others at module level.

    A file of the top folder counts as a package. Imports for types alone do not count.
    """
    found: dict[str, set[str]] = {}
    for file in files:
        tree = ast.parse(file.read_text())
        tree.body = [
            node
            for node in tree.body
            if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        ]
        folder, own, *_ = file.relative_to(src).with_suffix("").parts
        above = ".".join(file.relative_to(src).parent.parts)
        names = imported_names(ast.unparse(tree), above, at_import=True)
        others = {name.split(".")[1] for name in names if name.startswith(f"{folder}.")}
        found.setdefault(own, set()).update(others - {own})
    return found


def test_each_package_of_the_core_imports_what_the_table_says() -> None:
    table = {name: set(others.split()) for name, others in ORDER.items()}
    assert imports_of_packages(core_files()) == table


def test_the_table_is_an_order() -> None:
    names = list(ORDER)
    pairs = [(name, other) for name, others in ORDER.items() for other in others.split()]
    upward = [pair for pair in pairs if names.index(pair[1]) >= names.index(pair[0])]
    assert upward == [("errors", "torch_compat")]


def test_the_guard_of_the_order_can_fail(tmp_path: Path) -> None:
    """Planted: `dist` imports `data`, absolutely, relatively and inside a class; twice it may."""
    package = tmp_path / "lockstep" / "dist"
    package.mkdir(parents=True)
    allowed = (
        "if TYPE_CHECKING:\n    from lockstep.data import a\ndef late():\n    import lockstep.run"
    )
    files = [package / "one.py", package / "two.py"]
    for planted in [
        "from lockstep.data.order import share",
        "import lockstep.data.order",
        "from ..data import order",
        "class A:\n    from lockstep import data",
        "if True:\n    from lockstep import data",
    ]:
        files[0].write_text(f"from lockstep.errors import x\n{allowed}")
        files[1].write_text(f"from lockstep.dist import one\n{planted}")
        assert imports_of_packages(files, tmp_path) == {"dist": {"errors", "data"}}


# --- Every file of the core says what it owns --------------------------------------


def says_what_it_owns(source: str) -> bool:
    words = " ".join((ast.get_docstring(ast.parse(source)) or "").split())
    return "Owns: " in words and "Does not own: " in words


@each(f for f in core_files() if f.name != "__init__.py")
def test_each_file_of_the_core_says_what_it_owns_and_what_not(file: Path) -> None:
    assert says_what_it_owns(file.read_text())


@pytest.mark.parametrize("planted", ["", '"""A file."""', '"""A file.\n\nOwns: all of it.\n"""'])
def test_the_guard_of_what_a_file_owns_can_fail(planted: str) -> None:
    assert not says_what_it_owns(planted)


# --- Nobody replaces what belongs to another module -----------------------------

# Python and torch have these set from outside.
SETTINGS = {
    "sys.argv",
    "sys.excepthook",
    "sys.stdout",
    "sys.stderr",
    "compiler.optimize_ddp",
    "compiler.triton.cudagraphs",
    "worker._worker_info",
}


def root_name(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def assignments(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Yield each target of an assignment or `del` with what it is set to; tuples are undone."""

    def undone(target: ast.expr, value: ast.expr | None) -> Iterator[Any]:
        if not isinstance(target, ast.Tuple | ast.List):
            yield target, value
            return
        values = value.elts if isinstance(value, ast.Tuple | ast.List) else []
        for index, one in enumerate(target.elts):
            yield from undone(one, values[index] if len(values) == len(target.elts) else None)

    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from undone(target, node.value)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            yield node.target, node.value
        elif isinstance(node, ast.Delete):
            yield from ((target, None) for target in node.targets)


def replacements(source: str) -> list[str]:
    """Return where `source` changes a module or class that is not its own, or how imports work.

    Foreign are names that were imported, in whatever way, parameters annotated as a module or a
    class, and names for a module or a class taken from one of these. An object that reaches
    `source` without an annotation, or under `Any`, is not known to be a class, so a replacement
    there is not seen.
    """
    tree = ast.parse(source)
    foreign = set()
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            foreign |= {a.asname or a.name.split(".")[0] for a in node.names}
            modules |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            foreign |= {a.asname or a.name for a in node.names}
        elif isinstance(node, ast.arg) and node.annotation is not None:
            kind = ast.unparse(node.annotation).split("[")[0].rsplit(".")[-1]
            foreign |= {node.arg} if kind in ("ModuleType", "type") else set()
    for target, value in assignments(tree):
        if not isinstance(target, ast.Name) or value is None:
            continue
        is_class = isinstance(value, ast.Attribute) and value.attr[:1].isupper()
        name = ast.unparse(value)
        is_module = name in modules or re.match(r"(\w+\.)?import_module\(|sys\.modules\b", name)
        if is_module or (is_class and root_name(value) in foreign):
            foreign.add(target.id)
    found = []
    for target, _ in assignments(tree):
        if isinstance(target, ast.Attribute) and root_name(target) in foreign:
            name = ast.unparse(target)
            found += [f"line {target.lineno}: {name} ="] if name not in SETTINGS else []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            is_ours = called not in ("setattr", "delattr") or root_name(node.args[0]) == "self"
            if not is_ours or called.startswith("sys.meta_path."):
                found.append(f"line {node.lineno}: {called}")
        elif isinstance(node, ast.Constant) and "sitecustomize" in str(node.value):
            found.append(f"line {node.lineno}: sitecustomize")
    return found


@each(files_of("lockstep") + files_of("lockstep_recipes"))
def test_nothing_is_replaced_in_another_module(file: Path) -> None:
    assert not replacements(file.read_text())


@pytest.mark.parametrize(
    "planted",
    [
        "import os\nos._exit = print",
        "import torch.optim\ntorch.optim.SGD.step = None",
        "from lockstep.data.loader import Loader\nLoader.__iter__ = None",
        "from lockstep.data import loader as it\ndef late():\n    del it.Loader",
        "def enter(module: ModuleType):\n    module.prepare = None",
        "def enter(kind: type[Loader]):\n    kind.steps += 1",
        "def enter(module: ModuleType):\n    a, kind = 1, module.Loader\n    kind.steps, b = 1, 2",
        "import lockstep.trainer as t\nsetattr(t, 'fit', None)",
        "t: Any = importlib.import_module('lockstep.trainer')\nt.fit = None",
        "t = sys.modules['lockstep.trainer']\nt.fit = None",
        "import lockstep.trainer\nt: Any = lockstep.trainer\nt.fit = None",
        "for name in names:\n    setattr(world, name, None)",
        "import sys\nsys.meta_path.insert(0, Finder())",
        "(folder / 'sitecustomize.py').write_text('')",
    ],
)
def test_the_replacement_guard_can_fail(planted: str) -> None:
    assert replacements(planted)


def test_the_replacement_guard_lets_one_set_what_is_ones_own() -> None:
    own = "class A:\n    def f(self):\n        self.x.y = 1\n        setattr(self, 'z', 2)\n"
    assert not replacements("import sys\n" + own + "sys.argv = []\nworld = W()\nworld.size = 1")


# --- Names ---------------------------------------------------------------------


def run_python(code: str, *arguments: object, **changes: str) -> str:
    """Run `code` in a fresh interpreter and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **changes},
        cwd=changes.get("HOME"),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


SURFACE = """
import json, sys
sys.path.insert(0, sys.argv[2])
package = __import__(sys.argv[1])
eager = "torch" in sys.modules
shown = [n for n in dir(package) if not n.startswith("_")]
missing = [n for n in package.__all__ if not hasattr(package, n)]
print(json.dumps(dict(eager=eager, all=list(package.__all__), shown=shown, missing=missing)))
"""


def surface_faults(package: str, path: Path, names: set[str]) -> dict[str, object]:
    """Return what is wrong with the public surface of `package`, just imported."""
    seen = json.loads(run_python(SURFACE, package, path))
    faults: dict[str, object] = {}
    if seen["eager"]:
        faults["import torch"] = "at import"
    if sorted(seen["all"]) != sorted(names):
        faults["__all__"] = seen["all"]
    if set(seen["shown"]) != names:
        faults["dir"] = sorted(set(seen["shown"]) ^ names)
    if seen["missing"]:
        faults["missing"] = seen["missing"]
    return faults


def test_the_public_names_are_listed_and_imported_lazily() -> None:
    assert not surface_faults("lockstep", SRC, PUBLIC_NAMES)


@pytest.mark.parametrize(
    ("planted", "fault"),
    [
        ("import torch\n__all__ = ['fit']\nfit = 1\ndel torch", "import torch"),
        ("__all__ = ['fit', 'more']\nfit = more = 1", "__all__"),
        ("__all__ = ['fit', 'fit']\nfit = 1", "__all__"),
        ("__all__ = ['fit']\nfit = 1\nhelper = 2", "dir"),
        ("__all__ = ['fit']\ndef __dir__():\n    return ['fit']", "missing"),
    ],
)
def test_the_surface_guard_can_fail(planted: str, fault: str, tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(planted)
    assert fault in surface_faults("planted", tmp_path, {"fit"})


def empty_names(paths: Iterable[str]) -> set[str]:
    """Return the paths with a part whose name says nothing about what is inside."""
    return {p for p in paths if EMPTY_NAMES & {part.split(".")[0] for part in p.split("/")}}


def test_files_are_called_after_what_they_hold() -> None:
    files = [name_of(f) for package in ("lockstep", "lockstep_recipes") for f in files_of(package)]
    assert not empty_names(files)


@pytest.mark.parametrize("planted", ["lockstep/utils.py", "lockstep/common/order.py"])
def test_the_name_guard_can_fail(planted: str) -> None:
    assert empty_names([planted, "lockstep/toolshed.py"]) == {planted}


# --- Importing does nothing ------------------------------------------------------

IMPORT_EVERYTHING = """
import atexit, faulthandler, gc, importlib, json, logging, os, pkgutil, random, signal, sys
import threading, warnings
from pathlib import Path

sys.path.insert(0, sys.argv[2])
import numpy, sympy, torch  # torch imports sympy at times, which filters its own warnings

# Neither fork hooks nor exit hooks can be listed. What other packages register is theirs.
registered = []

def noting(register):
    def note(*words, **named):
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.split(".")[0] == sys.argv[1]:
            registered.append(caller)
        return register(*words, **named)
    return note

os.register_at_fork, atexit.register = noting(os.register_at_fork), noting(atexit.register)

watched = [Path(folder) for folder in sys.argv[2:]]

def look():
    return {
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "threads": sorted(t.name for t in threading.enumerate()),
        "files": sorted(str(f) for w in watched for f in w.rglob("*") if f.suffix != ".pyc"),
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "torch threads": torch.get_num_threads(),
        "determinism": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "process group": torch.distributed.is_initialized(),
        "cuda": torch.cuda.is_initialized(),
        "random state": [
            hash(torch.get_rng_state().numpy().tobytes()),
            hash(random.getstate()),
            hash(numpy.random.get_state()[1].tobytes()),
        ],
        "signals": [str(signal.getsignal(s)) for s in signal.valid_signals()],
        "excepthook": sys.excepthook is sys.__excepthook__,
        "other hooks": [str(h) for h in (sys.unraisablehook, threading.excepthook)],
        "log handlers": len(logging.getLogger().handlers),
        "fork or exit hooks": list(registered),
        "open files": sorted(os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
                             if os.path.exists(f"/proc/self/fd/{n}")),
        "warning filters": [str(one[:4]) for one in warnings.filters],
        "import hooks": [str(one) for one in sys.meta_path + sys.path_hooks],
        "import path": list(sys.path),
        "collector": [gc.isenabled(), gc.get_threshold(), faulthandler.is_enabled()],
    }

before = look()
package = importlib.import_module(sys.argv[1])
found = [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
# `warm` is there to be imported for what that loads; only the launcher's own process does.
modules = [name for name in found if not name.endswith(("__main__", "launch.warm"))]
for name in modules:
    importlib.import_module(name)
after = look()
print()
print(json.dumps([len(modules), [key for key in before if before[key] != after[key]]]))
"""


def import_side_effects(package: str, path: Path, empty: Path) -> tuple[int, set[str]]:
    """Import all of `package` in a fresh process; return how many modules, and what that changed.

    HOME, the temporary folder and the working folder of that process lie in
    `empty`, so that a file written to any of them is seen.
    """
    here = str(empty)
    output = run_python(IMPORT_EVERYTHING, package, path, empty, HOME=here, TMPDIR=here)
    num_modules, changed = json.loads(output.splitlines()[-1])
    said = {"printed"} if output.strip().count("\n") else set()
    return num_modules, {*changed, *said}


@pytest.mark.parametrize("package", ["lockstep", "lockstep_recipes"])
def test_importing_has_no_side_effects(package: str, tmp_path: Path) -> None:
    num_modules, changed = import_side_effects(package, SRC, tmp_path)
    assert not changed
    skipped_steps = ("__init__.py", "__main__.py", "warm.py")
    assert num_modules >= len([f for f in files_of(package) if f.name not in skipped_steps])


PLANTED_EFFECTS = """
import gc, os, pathlib, random, signal, sys, threading, logging, torch, numpy, warnings
os.environ["PLANTED"] = "1"
threading.Thread(target=threading.Event().wait, name="planted", daemon=True).start()
pathlib.Path.home().joinpath("planted").write_text("")
torch.set_default_dtype(torch.float64)
torch.set_default_device("meta")
torch.set_num_threads(torch.get_num_threads() + 1)
torch.use_deterministic_algorithms(True)
torch.set_float32_matmul_precision("medium")
random.seed(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.excepthook = print
logging.basicConfig()
os.register_at_fork(before=int)
kept = open(os.devnull)
warnings.simplefilter("ignore")
threading.excepthook = print
sys.meta_path.append(None)
sys.path.append("planted")
gc.disable()
print("hello")
"""


def test_the_import_guard_can_fail(tmp_path: Path) -> None:
    package, empty = tmp_path / "src" / "planted", tmp_path / "empty"
    package.mkdir(parents=True)
    empty.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text(PLANTED_EFFECTS)
    num_modules, changed = import_side_effects("planted", package.parent, empty)
    assert num_modules == 1
    assert changed == {
        "environment",
        "threads",
        "files",
        "default dtype",
        "default device",
        "torch threads",
        "determinism",
        "matmul precision",
        "random state",
        "signals",
        "excepthook",
        "other hooks",
        "log handlers",
        "fork or exit hooks",
        "open files",
        "warning filters",
        "import hooks",
        "import path",
        "collector",
        "printed",
    }


# --- Who may read the environment, issue a collective --------------------------------

# Other packages communicate through World.
MAY_COMMUNICATE = (
    "lockstep/dist/",
    "lockstep/testing.py",
    "lockstep/launch/",
    "lockstep/cli/",
)
MAY_READ_ENVIRONMENT = (
    *MAY_COMMUNICATE,
    "lockstep/harness/",  # what a started command inherits
    "lockstep_recipes/settings.py",  # what a file asks for
)

ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv"}
COLLECTIVES = {
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "gather",
    "gather_object",
    "init_process_group",
    "irecv",
    "isend",
    "monitored_barrier",
    "new_group",
    "new_subgroups",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
}


def names_used(source: str) -> set[str]:
    """Return the dotted names `source` imports or uses, with import aliases undone."""
    tree = ast.parse(source)
    full: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            full |= {a.asname: a.name for a in node.names if a.asname}
        elif isinstance(node, ast.ImportFrom):
            full |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    names = imported_names(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            first, *rest = ast.unparse(node).split(".")
            names.add(".".join([full.get(first, first), *rest]))
    return names


def environment_reads(source: str) -> set[str]:
    return names_used(source) & ENVIRONMENT


def collectives_used(source: str) -> set[str]:
    distributed = {n for n in names_used(source) if n.startswith("torch.distributed.")}
    return {n for n in distributed if n.rsplit(".", 1)[-1] in COLLECTIVES}


ALL_FILES = files_of("lockstep") + files_of("lockstep_recipes")


@each(f for f in ALL_FILES if not name_of(f).startswith(MAY_READ_ENVIRONMENT))
def test_only_the_runtime_reads_the_environment(file: Path) -> None:
    assert not environment_reads(file.read_text())


@each(f for f in ALL_FILES if not name_of(f).startswith(MAY_COMMUNICATE))
def test_only_the_runtime_issues_collectives(file: Path) -> None:
    assert not collectives_used(file.read_text())


@pytest.mark.parametrize(
    "planted",
    [
        "import os\nrank = os.environ['RANK']",
        "import os\nrank = os.environ.get('RANK')",
        "import os as system\nrank = system.environ['RANK']",
        "from os import environ",
        "from os import environ as e\ne['RANK'] = '0'",
        "import os\nrank = os.getenv('RANK')",
        "def late():\n    import os\n    return dict(os.environ)",
    ],
)
def test_the_environment_guard_can_fail(planted: str) -> None:
    assert environment_reads(planted)


@pytest.mark.parametrize(
    "planted",
    [
        "import torch\ntorch.distributed.all_reduce(x)",
        "import torch.distributed as dist\ndist.barrier()",
        "from torch import distributed as dist\ndist.barrier()",
        "from torch.distributed import broadcast",
        "from torch.distributed.nn.functional import all_gather as gather\ngather(x)",
        "import torch.distributed.nn as dnn\ndnn.functional.all_reduce(x)",
        "import torch.distributed as dist\nwait = dist.all_to_all_single",
    ],
)
def test_the_collective_guard_can_fail(planted: str) -> None:
    assert collectives_used(planted)


def test_the_collective_guard_lets_world_methods_and_sharding_pass() -> None:
    fine = "from torch.distributed.fsdp import fully_shard\nworld.all_reduce(x)\nfully_shard(model)"
    assert not collectives_used(fine)


# --- The tree of docs/architecture.md is the tree -------------------------------------------------

ROOT = "src/lockstep/"
FILE_NAME = re.compile(r"[\w-]+\.\w+")


def readme_tree(readme: str) -> set[str]:
    """Return the paths below src/lockstep in the fenced tree of `readme`.

    The tree begins at the line `src/lockstep/`. Deeper lines begin with a file
    name, several, or a folder ending in a slash; the words after it say what it
    is. A folder's own line may name its files, separated by commas, each with a
    remark in parentheses. Folders are in the result, with their slash.

    >>> sorted(
    ...     readme_tree('''
    ... ```
    ... src/lockstep/
    ...   step.py   one step
    ...   data/     order.py (pure), loader.py
    ...   board/    the page
    ...     page.html  markup
    ... ```
    ... ''')
    ... )
    ['board/', 'board/page.html', 'data/', 'data/loader.py', 'data/order.py', 'step.py']
    """
    found: set[str] = set()
    for block in re.findall(r"^```[^\n]*\n(.*?)^```", readme, flags=re.MULTILINE | re.DOTALL):
        folders: list[tuple[int, str]] = []  # (indent, path) of the folders that are open
        for raw in block.splitlines():
            line = re.sub(r"[│├└─|`]", " ", raw)
            words = line.split()
            if not words:
                continue
            indent = len(line) - len(line.lstrip())
            while folders and indent <= folders[-1][0]:
                folders.pop()
            if words[0] == ROOT:
                folders = [(indent, "")]
            elif folders and words[0].endswith("/"):
                path = folders[-1][1] + words[0]
                folders.append((indent, path))
                remarks = re.sub(r"\([^)]*\)", "", line.split(words[0], 1)[1])
                listed = [part.strip() for part in remarks.split(",")]
                found |= {path, *(path + name for name in listed if FILE_NAME.fullmatch(name))}
            elif folders:
                for word in words:
                    if not FILE_NAME.fullmatch(word):
                        break
                    found.add(folders[-1][1] + word)
    return found


def tree_faults(readme: str, files: set[str]) -> list[str]:
    """Return where the tree in `readme` differs from `files`, paths below src/lockstep.

    Package markers need no line, and a folder's line stands for what is in it
    that is not Python.
    """
    tree = readme_tree(readme)
    if not tree:
        return [f"no fenced tree that begins with {ROOT}"]
    folders = {f.rsplit("/", 1)[0] + "/" for f in files if "/" in f}
    unlisted = {
        f
        for f in files - tree
        if not f.endswith(("/__init__.py", "py.typed"))
        and (f.endswith(".py") or not any(f.startswith(d) for d in tree if d.endswith("/")))
    }
    gone = {t for t in tree - files if not any(d.startswith(t) for d in folders)}
    return sorted(f"not in the tree: {f}" for f in unlisted) + sorted(f"gone: {t}" for t in gone)


def test_the_architecture_page_lists_every_file() -> None:
    root = SRC / "lockstep"
    paths = [f.relative_to(root) for f in root.rglob("*") if f.is_file()]
    files = {p.as_posix() for p in paths if "__pycache__" not in p.parts}
    page = REPOSITORY / "docs" / "architecture.md"
    assert not tree_faults(page.read_text(), files)


TREE = """
Text, and a block without a tree:

```
make test
```

```text
README.md         this page
src/lockstep/
  __init__.py     the public names
  step.py         one step, see trainer.py
  data/           order.py (which sample, pure), feed.py
  board/
    server.py     serve
    page/         what the browser shows
src/lockstep_recipes/
  jit/
    task.py       elsewhere
```
"""
TREE_FILES = {
    "__init__.py",
    "py.typed",
    "step.py",
    "data/__init__.py",
    "data/order.py",
    "data/feed.py",
    "board/__init__.py",
    "board/server.py",
    "board/page/index.html",
}


def test_the_tree_is_read_as_written() -> None:
    assert tree_faults(TREE, TREE_FILES) == []
    drawn = "```\nsrc/lockstep/\n├── step.py   a step\n└── data/\n    └── order.py  pure\n```\n"
    assert tree_faults(drawn, {"step.py", "data/order.py"}) == []


def test_the_tree_guard_can_fail() -> None:
    assert tree_faults("# lockstep\n", TREE_FILES)
    assert tree_faults(TREE, TREE_FILES | {"new.py"}) == ["not in the tree: new.py"]
    assert tree_faults(TREE, TREE_FILES | {"data/new.py"}) == ["not in the tree: data/new.py"]
    assert tree_faults(TREE, TREE_FILES | {"guard/a.txt"}) == ["not in the tree: guard/a.txt"]
    assert tree_faults(TREE, TREE_FILES - {"step.py"}) == ["gone: step.py"]
    assert tree_faults(TREE, TREE_FILES - {"board/page/index.html"}) == ["gone: board/page/"]


# --- Ruff looks at every file, and its exceptions name files that exist ------------


def unused_exceptions(settings: str, root: Path) -> list[str]:
    """Return the patterns of ruff's per-file-ignores that no file below `root` matches."""
    ignores = tomllib.loads(settings)["tool"]["ruff"]["lint"]["per-file-ignores"]
    files = [pattern.removesuffix("/**") for pattern in ignores]
    return [file for file in files if next(root.glob(file), None) is None]


def test_the_exceptions_of_ruff_name_files_that_exist() -> None:
    assert not unused_exceptions((REPOSITORY / "pyproject.toml").read_text(), REPOSITORY)


def test_the_guard_of_exceptions_can_fail(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "__init__.py").touch()
    settings = (
        '[tool.ruff.lint.per-file-ignores]\n"kept/**" = []\n"gone/**" = []\n"kept/gone.py" = []\n'
        '"**/__init__.py" = []\n"**/gone.py" = []\n'
    )
    assert unused_exceptions(settings, tmp_path) == ["gone", "kept/gone.py", "**/gone.py"]


def files_ruff_misses(root: Path, folder: str) -> set[str]:
    """Return the Python files below `root/folder` that ruff, run in `root`, does not look at."""
    shown = subprocess.run(
        [sys.executable, "-m", "ruff", "check", ".", "--show-files"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    ).stdout
    files = {str(file) for file in (root / folder).rglob("*.py")}
    return {Path(file).relative_to(root).as_posix() for file in files - set(shown.splitlines())}


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks"])
def test_ruff_looks_at_every_file(folder: str) -> None:
    assert not files_ruff_misses(REPOSITORY, folder)


def test_the_guard_of_what_ruff_looks_at_can_fail(tmp_path: Path) -> None:
    """Planted: a folder that ruff leaves out unless it is told not to."""
    for name in ("dist", "run"):
        (tmp_path / "src" / name).mkdir(parents=True)
        (tmp_path / "src" / name / "planted.py").touch()
    assert files_ruff_misses(tmp_path, "src") == {"src/dist/planted.py"}


# --- The leak police of conftest.py ---------------------------------------------

PLANTED_LEAKS = """
import os, subprocess, sys, threading
import pytest, torch.distributed as dist

def test_sets_a_variable(): os.environ["PLANTED_VARIABLE"] = "1"
def test_changes_a_variable(): os.environ["PLANTED_BEFORE"] = "other"
def test_removes_a_variable(): del os.environ["PLANTED_BEFORE"]
def test_leaves_a_thread(): threading.Timer(6, int).start()
def test_leaves_a_process(): subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

def test_leaves_a_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

def test_leaves_nothing(monkeypatch):
    monkeypatch.setenv("PLANTED_VARIABLE", "1")
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    subprocess.run([sys.executable, "-c", ""], check=True)
    assert os.environ["PLANTED_BEFORE"] == "before"
    assert not {"RANK", "MASTER_ADDR", "SLURM_PROCID"} & set(os.environ)

@pytest.mark.gpu
def test_needs_a_gpu(): pass
"""


@pytest.fixture(scope="module")
def leak_report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return what pytest says about the planted leaks, under the conftest of this folder."""
    folder = tmp_path_factory.mktemp("leaks")
    for name in ("conftest.py", "warm_python.py", "slow_files.json"):
        shutil.copy(Path(__file__).with_name(name), folder)
    (folder / "test_planted.py").write_text(PLANTED_LEAKS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    launcher = {"RANK": "3", "MASTER_ADDR": "nowhere", "SLURM_PROCID": "3"}
    kept = {n: v for n, v in os.environ.items() if not n.startswith("PYTEST_")}
    options = ["-v", "-p", "no:cacheprovider", "-p", "no:xdist"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, "."],
        env={**kept, **launcher, "PLANTED_BEFORE": "before", "CUDA_VISIBLE_DEVICES": ""},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    ).stdout


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("sets_a_variable", "environment variable PLANTED_VARIABLE was set"),
        ("changes_a_variable", "environment variable PLANTED_BEFORE was changed"),
        ("removes_a_variable", "environment variable PLANTED_BEFORE was removed"),
        ("leaves_a_thread", r"thread 'Thread-\d+' is still running"),
        ("leaves_a_process", r"child process \d+ is still alive: .*time\.sleep\(60\)"),
        ("leaves_a_group", r"process group was not left \(rank 0 of 1\)"),
    ],
)
def test_the_leak_police_can_fail(test: str, message: str, leak_report: str) -> None:
    heading = rf"^_+ ERROR at teardown of test_{test} _+$"
    assert re.search(heading + rf"\nthe test leaked:\n  {message}", leak_report, re.MULTILINE)


def test_the_leak_police_lets_a_clean_test_pass(leak_report: str) -> None:
    assert "ERROR at teardown of test_leaves_nothing" not in leak_report
    assert "7 passed, 1 skipped, 6 errors" in leak_report


def test_tests_skipped_for_want_of_a_gpu_are_counted(leak_report: str) -> None:
    assert "\n1 test needs a GPU and was skipped\n" in leak_report
