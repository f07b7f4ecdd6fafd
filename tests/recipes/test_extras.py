"""A recipe whose packages are not installed ends in one sentence, before it does anything."""

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from lockstep.launch.recipes import recipe_names
from lockstep_recipes.extras import DISTRIBUTIONS

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "src" / "lockstep_recipes"
EXTRA = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][
    "recipes"
]


def packages_of(recipe: str) -> set[str]:
    """Return what the recipe imports anywhere that the extra brings, under pip's names."""
    found = set()
    for path in (RECIPES / recipe).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.split(".")[0])
    return {DISTRIBUTIONS.get(name, name) for name in found} & set(EXTRA)


CASES = [(recipe, name) for recipe in recipe_names() for name in sorted(packages_of(recipe))]


def test_every_package_of_the_extra_is_that_of_a_recipe() -> None:
    assert {name for _, name in CASES} == set(EXTRA)


def run_without(package: str, folder: Path, *words: str) -> tuple[int, str]:
    """Run a command to which the package seems not to be installed."""
    module = {pip: name for name, pip in DISTRIBUTIONS.items()}.get(package, package)
    (folder / "sitecustomize.py").write_text(f"import sys; sys.modules[{module!r}] = None\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "src")])}
    command = [sys.executable, "-m", *words]
    ended = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=90)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize(("recipe", "package"), CASES)
def test_a_recipe_without_a_package_names_it_and_the_extra(
    recipe: str, package: str, tmp_path: Path
) -> None:
    said = (
        f"lockstep: packages that this recipe needs are not installed: {package}\n"
        '  try: run pip install "lockstep-train[recipes]"\n'
    )
    assert run_without(package, tmp_path, f"lockstep_recipes.{recipe}") == (2, said)
    if package == "pillow":
        assert run_without(package, tmp_path, "lockstep", "run", recipe) == (2, said)
