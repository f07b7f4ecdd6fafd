"""Every command and every snippet in the documentation runs."""

import importlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path

import pytest
import torch

from lockstep import RunConfig
from lockstep.errors import ConfigError
from lockstep.testing import TinyTask
from lockstep_recipes.command import Flags
from lockstep_recipes.jit.flags import flags

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[str]:
    return [line for block in blocks(page, "bash") for line in block.splitlines() if line]


# These verbs reach the processes of a command as their interpreters start.
NEED_FRESH = re.compile(r"lockstep (certify|rehearse|bench|doctor)")


def in_rehearsal(
    command: str, folder: Path, warm: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run it; with `warm`, by programs that have imported torch already."""
    env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "LOCKSTEP_REHEARSAL": "1"}
    env["OMP_NUM_THREADS"] = "1"
    if warm and not NEED_FRESH.search(command):
        env |= {"PATH": f"{warm}:{env['PATH']}", "PYTHON_EXEC": str(warm / "python")}
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True, timeout=180
    )


def cases() -> list[tuple[str, str]]:
    """Return every command with the first page that shows it: translations show the same ones."""
    shown = {c: page.name for page in reversed(PAGES) for c in reversed(commands(page))}
    return [(page, command) for command, page in reversed(shown.items())]


@pytest.mark.usefixtures("fixed_ports")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("page", "command"), cases(), ids=lambda value: value[:60])
def test_a_documented_command_runs(
    page: str, command: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Those of the front page start fresh interpreters."""
    words = shlex.split(command)
    if words[0] == "make":
        # These set up or run the whole suite; that they exist is what can be shown from inside it.
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    if words[0] == "./check":
        assert os.access(ROOT / "check", os.X_OK)
        return
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    warm = None if page == "README.md" else request.getfixturevalue("warm_programs")
    ended = in_rehearsal(command, tmp_path, warm)
    assert ended.returncode == 0, f"{page}: {command}\n{ended.stdout}\n{ended.stderr}"


def test_the_demo_is_a_command_the_recipe_takes() -> None:
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    demo = re.search(r"^DEMO = (.*)$", makefile, re.MULTILINE)
    assert demo
    words = shlex.split(demo[1])
    assert words[:5] == [".venv/bin/lockstep", "run", "jit", "--gpus", "2"]
    assert flags().read(words[5:]).output_dir == "runs/demo"


# --- The recipes' pages --------------------------------------------------------

# Where the commands of a page are typed, seen from the folder that holds the recipes.
TYPED_IN = {"atlas": "."}
NUM_SHOWN = {"atlas": 6, "ctclip": 6, "jit": 4, "protein": 5, "segmentation": 8}
# These need data, or what a long run has made: that their flags are known is what can be shown.
NEED_MORE = ("protein.sample", "protein.preprocess", "segmentation.test")
JUST_PORTS = "jit"  # its page shows the guide's commands under other ports


def recipe_cases() -> list[tuple[str, str]]:
    return [
        (recipe, command)
        for recipe in NUM_SHOWN
        for command in commands(ROOT / "recipes" / recipe / "README.md")
    ]


@cache
def started_elsewhere() -> set[str]:
    """Return the command lines that the recipes' own tests start."""
    path = ROOT / "tests" / "recipes" / "test_guide_commands.py"
    spec = importlib.util.spec_from_file_location("guide_commands", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["guide_commands"] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    ours = module.module_of("atlas").OURS
    return {" ".join(text.split()) for text in (ours, *(form.command for form in module.TABLE))}


def flags_of(recipe: str, words: list[str]) -> tuple[str, Flags | None, list[str]]:
    """Return what a command starts, its flags where it has any, and the words for them."""
    if words[0] in ("bash", "tensorboard") or words[0].startswith("./"):
        return words[words[0] == "bash"], None, []
    if words[:2] == ["lockstep", "run"]:
        module, rest = f"{words[2]}.flags", words[words.index("--gpus") + 2 :]
    elif "train.py" in " ".join(words):
        at = next(n for n, word in enumerate(words) if word.endswith("train.py"))
        module, rest = f"{recipe}.flags", words[at + 1 :]
    elif "scripts/preprocess_dataset.py" in words:
        module, rest = "protein.preprocess", words[2:]
    else:
        assert words[:2] == ["python", "-m"], words
        module, rest = words[2].removeprefix("lockstep_recipes."), words[3:]
    found = importlib.import_module(f"lockstep_recipes.{module}")
    return module, found.flags() if hasattr(found, "flags") else None, rest


@pytest.fixture(scope="module")
def pages_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the recipes' folders, in which a page's commands run one after another."""
    ignored = shutil.ignore_patterns("output", "data", "log", "saves*", "checkpoints", "rehearsal")
    return shutil.copytree(
        ROOT / "recipes", tmp_path_factory.mktemp("pages") / "recipes", ignore=ignored
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("recipe", "command"), recipe_cases(), ids=lambda value: value[:60])
def test_a_command_of_a_recipes_page_runs(
    recipe: str, command: str, pages_folder: Path, request: pytest.FixtureRequest
) -> None:
    """Those that the recipe's own tests start are only looked at."""
    folder = pages_folder / TYPED_IN.get(recipe, recipe)
    plain = re.sub(r"^\w+=\S+ ", "", command)
    started, flags, rest = flags_of(recipe, shlex.split(plain))
    if flags is not None:
        args = vars(flags.read(rest))
        if args.get("config"):
            assert (folder / args["config"]).is_file()
    elif started.endswith(".sh"):
        assert os.access(folder / started, os.X_OK)
    else:
        assert shutil.which(str(BIN / started)) or started.endswith("sample_data"), command
    is_known = " ".join(command.split()) in started_elsewhere() or recipe == JUST_PORTS
    if not is_known and started not in NEED_MORE:
        request.getfixturevalue("fixed_ports")
        ended = in_rehearsal(command, folder, request.getfixturevalue("warm_programs"))
        assert ended.returncode == 0, f"{recipe}: {command}\n{ended.stdout}\n{ended.stderr}"


def test_the_pages_show_as_many_commands_as_are_looked_at() -> None:
    assert set(NUM_SHOWN) == {page.parent.name for page in ROOT.glob("recipes/*/README.md")}
    for recipe, num in NUM_SHOWN.items():
        assert len(commands(ROOT / "recipes" / recipe / "README.md")) == num, recipe


def test_a_flag_that_a_page_misspells_would_be_found(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with pytest.raises(ConfigError, match="--layers"):
        test_a_command_of_a_recipes_page_runs(
            "segmentation", "python train.py --leyers 50", tmp_path, request
        )


def test_the_snippet_on_the_front_page_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (snippet,) = blocks(ROOT / "README.md", "python")
    monkeypatch.chdir(tmp_path)
    x = torch.randn(64, 8)
    samples = [{"x": row, "y": row.sum()[None]} for row in x]
    with pytest.raises(SystemExit) as ended:
        exec(compile(snippet, "README.md", "exec"), {"samples": samples})
    assert ended.value.code == 0
    assert (tmp_path / "run" / "checkpoints" / "step_00000020" / "model.safetensors").exists()


def test_the_loop_that_is_shown_trains_and_so_does_the_average_that_is_put_into_it(
    tmp_path: Path,
) -> None:
    loop, average = blocks(ROOT / "docs" / "own_loop.md", "python")
    put_in = textwrap.indent(average, "    ")
    changed = re.sub(r"^(    run = prepare.*\n)", rf"\1{put_in}", loop, flags=re.MULTILINE)
    assert changed != loop
    for name, snippet in {"loop": loop, "changed": changed}.items():
        config = RunConfig(output_dir=str(tmp_path / name), epochs=1)
        given = {"task": TinyTask(), "config": config, "my_schedule": lambda step: 1e-3}
        exec(compile(snippet, "own_loop.md", "exec"), given)
        assert (tmp_path / name / "checkpoints" / "step_00000001").exists()


def test_links_lead_somewhere() -> None:
    for page in [*PAGES, *ROOT.glob("recipes/*/README.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_a_broken_command_would_be_found(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    page = tmp_path / "page.md"
    page.write_text("text\n```bash\nlockstep pln\n```\n")
    assert commands(page) == ["lockstep pln"]
    with pytest.raises(AssertionError, match="lockstep pln"):
        test_a_documented_command_runs("page.md", "lockstep pln", tmp_path / "run", request)
