"""Every command and every snippet in the documentation runs."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lockstep_recipes.jit.flags import flags

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[str]:
    return [line for block in blocks(page, "bash") for line in block.splitlines() if line]


def cases() -> list[tuple[str, str]]:
    found = [(page.name, command) for page in PAGES for command in commands(page)]
    return list(dict.fromkeys(found))


@pytest.mark.usefixtures("fixed_ports")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("page", "command"), cases(), ids=lambda value: value[:60])
def test_a_documented_command_runs(page: str, command: str, tmp_path: Path) -> None:
    words = shlex.split(command)
    if words[0] == "make":
        # These set up or run the whole suite; that they exist is what can be shown from inside it.
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    if words[0] == "./check":
        assert os.access(ROOT / "check", os.X_OK)
        return
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "LOCKSTEP_REHEARSAL": "1"}
    ended = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=110
    )
    assert ended.returncode == 0, f"{page}: {command}\n{ended.stdout}\n{ended.stderr}"


def test_the_demo_is_a_command_the_recipe_takes() -> None:
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    demo = re.search(r"^DEMO = (.*)$", makefile, re.MULTILINE)
    assert demo
    words = shlex.split(demo[1])
    assert words[:5] == [".venv/bin/lockstep", "run", "jit", "--gpus", "2"]
    assert flags().read(words[5:]).output_dir == "runs/demo"


def test_the_recipes_page_shows_commands_its_folder_can_run() -> None:
    page = ROOT / "recipes" / "jit" / "README.md"
    shown = commands(page)
    assert len(shown) == 4
    for command in shown:
        words = shlex.split(command)
        if words[0].startswith("./"):
            assert os.access(page.parent / words[0], os.X_OK)
        else:
            flags().read(words[words.index("train.py") + 1 :])


def test_the_snippet_on_the_front_page_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (snippet,) = blocks(ROOT / "README.md", "python")
    monkeypatch.chdir(tmp_path)
    x = torch.randn(64, 8)
    samples = [{"x": row, "y": row.sum()[None]} for row in x]
    exec(compile(snippet, "README.md", "exec"), {"samples": samples})
    assert (tmp_path / "run" / "checkpoints" / "step_00000020" / "model.safetensors").exists()


def test_links_lead_somewhere() -> None:
    for page in [*PAGES, *ROOT.glob("recipes/*/README.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_a_broken_command_would_be_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("text\n```bash\nlockstep pln\n```\n")
    assert commands(page) == ["lockstep pln"]
    with pytest.raises(AssertionError, match="lockstep pln"):
        test_a_documented_command_runs("page.md", "lockstep pln", tmp_path / "run")
