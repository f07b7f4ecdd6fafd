"""docs/versions.md lists exactly what `torch_compat` uses of torch that another version may lack.

The names are read from the source: what is private, and what is looked up by its name as text.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "src" / "lockstep" / "torch_compat"
NAMES = "".join(
    file.read_text() for file in sorted(FOLDER.glob("*.py")) if file.name != "error_texts.py"
)
TEXTS = (FOLDER / "error_texts.py").read_text()
PAGE = (REPOSITORY / "docs" / "versions.md").read_text()

PATH = re.compile(r"[A-Za-z_]\w*(\.\w+)*")
LOOKUPS = {"getattr": 1, "hasattr": 1, "needed": 1}
"""Functions that take a name of torch's as text, and which argument it is."""


def is_private(path: str) -> bool:
    return any(re.match(r"_(?!_)\w", name) for name in path.split("."))


def own_names(tree: ast.AST) -> set[str]:
    """Return the functions and classes that a module defines."""
    kinds = ast.FunctionDef | ast.ClassDef
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def text_of(node: ast.AST) -> list[str]:
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def found_names(tree: ast.AST) -> Iterator[str]:
    """Yield each name, or dotted path of names, that another version of torch may lack."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.ImportFrom):
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (path for path in paths if is_private(path))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in LOOKUPS:
            yield from text_of(node.args[LOOKUPS[ast.unparse(node.func)]])
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In):
            yield from text_of(node.left)
        else:
            yield from (text for text in text_of(node) if PATH.fullmatch(text) and is_private(text))


def names_of(source: str) -> set[str]:
    """Return what `found_names` finds, without what the source defines itself."""
    tree = ast.parse(source)
    return set(found_names(tree)) - own_names(tree) - {"__name__"}


def words_of(source: str) -> set[str]:
    """Return every name in the code, and every word of its texts."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name | ast.Attribute):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.alias):
            found |= set(node.name.split("."))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= set(re.findall(r"\w+", node.value)) if " " not in node.value else set()
    return found


def rows(page: str, heading: str) -> list[str]:
    """Return what stands in backticks in the first column of the table below a heading."""
    section = re.split(r"^## ", page.partition(f"\n## {heading}\n")[2], flags=re.MULTILINE)[0]
    columns = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return [name for column in columns for name in re.findall(r"`([^`]+)`", column)]


def is_in(name: str, row: str) -> bool:
    """Say whether a name or dotted path is part of a row: `_foreach_` is of `torch._foreach_*`."""
    return f".{name}." in f".{row.removesuffix('*')}."


def not_listed(source: str, page: str) -> list[str]:
    """Return the names in the source that no row of the page has."""
    listed = rows(page, "Names")
    return sorted(name for name in names_of(source) if not any(is_in(name, r) for r in listed))


def not_used(source: str, page: str) -> list[str]:
    """Return the rows of the page that name nothing in the source."""
    words = words_of(source)
    return [row for row in rows(page, "Names") if row.split(".")[-1].rstrip("*") not in words]


def test_every_name_that_torch_may_lack_is_in_the_table() -> None:
    assert not not_listed(NAMES, PAGE), "add them to the table of docs/versions.md"


def test_the_table_names_nothing_that_is_not_used() -> None:
    assert rows(PAGE, "Names")
    assert not not_used(NAMES, PAGE), "remove them from the table of docs/versions.md"


def test_the_table_of_texts_has_a_row_for_each_text() -> None:
    assigned = [node for node in ast.parse(TEXTS).body if isinstance(node, ast.Assign)]
    assert rows(PAGE, "Error texts") == [ast.unparse(node.targets[0]) for node in assigned]


@pytest.mark.parametrize(
    ("planted", "missing"),
    [
        ("import torch._planted", "torch._planted"),
        ("from torch._planted import config", "torch._planted.config"),
        ("from torch._C import Planted", "torch._C.Planted"),
        ("tensor._planted", "_planted"),
        ("self.reducer._planted()", "_planted"),
        ("getattr(torch, 'planted', None)", "planted"),
        ("getattr(torch, f'_planted_{operation}', None)", "_planted_"),
        ("hasattr(torch, 'planted')", "planted"),
        ("needed(torch, 'config.planted', 'to plant')", "config.planted"),
        ("path = '_planted.config.option'", "_planted.config.option"),
        ("METHODS = ('_planted',)", "_planted"),
        ("is_new = 'planted' in parameters", "planted"),
    ],
)
def test_a_name_that_is_not_in_the_table_is_found(planted: str, missing: str) -> None:
    assert not_listed(f"{NAMES}\n{planted}", PAGE) == [missing]


def test_our_own_private_names_need_no_row() -> None:
    own = "def _planted(): ...\nvalue = self._planted()"
    assert not names_of(own)


@pytest.mark.parametrize("row", ["Tensor._planted", "torch._foreach_planted", "torch.planted"])
def test_a_row_that_nothing_uses_is_found(row: str) -> None:
    planted = PAGE.replace("\n## Names\n", f"\n## Names\n| `{row}` | | |\n")
    assert not_used(NAMES, planted) == [row]
