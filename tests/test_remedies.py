"""Every error says what to do in the imperative: "pass ...", "lower ...", never a bare noun.

Remedies are found in the source by `ast`, not by running it. A new verb is added to VERBS.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"

VERBS = re.compile(
    "activate|add|allow|bring|build|call|certify|change|check|choose|convert|copy|correct|count|"
    "create|define|download|draw|export|fix|free|freeze|give|halve|install|keep|leave|let|load|"
    "look|lower|make|mount|move|name|pass|put|quote|raise|read|register|remove|rename|replace|"
    "restore|resume|return|run|save|scale|seed|set|start|train|try|unset|update|use|wait|write"
)
"""First words of a remedy."""

IS_REMEDY = re.compile(r"(^|_)(remedy|REMEDY|fix)$")
"""Names of parameters and variables that hold a remedy."""
IS_TABLE = re.compile(r"TRY|REMEDIES")
"""Names of dicts whose values are remedies."""
SAID = re.compile(r"(?:^|\n) *try: (\w.*)")
"""A line of a text that is printed as it is."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Source:
    """The modules in which remedies are looked for, and what their names stand for."""

    def __init__(self, texts: dict[str, str]) -> None:
        self.trees = {name: ast.parse(text) for name, text in texts.items()}
        nodes = [node for tree in self.trees.values() for node in ast.walk(tree)]
        self.positions = dict.fromkeys(self._error_classes(nodes), 1)
        self.positions |= self._fields(nodes)
        self.assigned: dict[str, list[ast.expr]] = defaultdict(list)
        for node in nodes:
            if isinstance(node, Function):
                self._note_parameter(node)
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        self.assigned[target.id].append(node.value)

    @staticmethod
    def _error_classes(nodes: list[ast.AST]) -> set[str]:
        """Return the names of LockstepError and of all classes derived from it."""
        classes = {"LockstepError"}
        definitions = [node for node in nodes if isinstance(node, ast.ClassDef)]
        for _ in definitions:
            classes |= {
                found.name
                for found in definitions
                if classes & {base.id for base in found.bases if isinstance(base, ast.Name)}
            }
        return classes

    @staticmethod
    def _fields(nodes: list[ast.AST]) -> dict[str, int]:
        """Return the place of the remedy among the fields of each class that has such a field."""
        found: dict[str, int] = {}
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                fields = [f for f in node.body if isinstance(f, ast.AnnAssign)]
                for place, field in enumerate(fields):
                    if IS_REMEDY.search(ast.unparse(field.target)):
                        found[node.name] = place
        return found

    def _note_parameter(self, function: Function) -> None:
        """Remember at which place of its arguments a function takes a remedy."""
        names = [argument.arg for argument in function.args.args if argument.arg != "self"]
        for place, name in enumerate(names):
            if IS_REMEDY.search(name) and function.name != "__init__":
                self.positions[function.name] = place

    def remedies(self) -> Iterator[tuple[str, ast.expr]]:
        """Yield each expression that is shown after "try:", and where it stands."""
        for name, tree in self.trees.items():
            for node in ast.walk(tree):
                found: list[ast.expr] = []
                if isinstance(node, ast.Call):
                    found = list(self._remedies_of_call(node))
                elif isinstance(node, Function):
                    arguments = node.args.args[len(node.args.args) - len(node.args.defaults) :]
                    pairs = list(zip(arguments, node.args.defaults, strict=True))
                    pairs += zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
                    for argument, default in pairs:
                        if IS_REMEDY.search(argument.arg) and default is not None:
                            found.append(default)
                elif isinstance(node, ast.AnnAssign):
                    is_remedy = IS_REMEDY.search(ast.unparse(node.target))
                    if is_remedy and node.value and ast.unparse(node.value) not in ("''", "None"):
                        found = [node.value]
                elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
                    if IS_TABLE.fullmatch(ast.unparse(node.targets[0])):
                        found = node.value.values
                elif isinstance(node, ast.Constant) and (said := SAID.search(str(node.value))):
                    found = [ast.copy_location(ast.Constant(said[1]), node)]
                elif isinstance(node, ast.Assign) and IS_REMEDY.search(
                    ast.unparse(node.targets[0])
                ):
                    found = [node.value]
                for remedy in found:
                    yield f"{name}:{remedy.lineno}", remedy

    def _remedies_of_call(self, call: ast.Call) -> Iterator[ast.expr]:
        called = call.func
        name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
        place = self.positions.get(name)
        if place is not None and len(call.args) > place:
            yield call.args[place]
        for keyword in call.keywords:
            if keyword.arg and IS_REMEDY.search(keyword.arg):
                yield keyword.value

    def first_words(self, remedy: ast.expr) -> Iterator[str]:
        """Yield the first word of each text that an expression can become.

        An expression whose beginning cannot be read in the source is yielded as code, which is
        no verb, unless it was checked where it came from: `error.remedy`, a parameter `remedy`.
        """
        match remedy:
            case ast.Constant(value=str(text)):
                yield text.split(" ")[0].rstrip(":,")
            case ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]) if " " in text:
                yield text.split(" ")[0].rstrip(":,")
            case ast.JoinedStr(values=[ast.FormattedValue(value=ast.Name() as value), *_]):
                yield from self.first_words(value)
            case ast.BinOp(left=left, op=ast.Add()):
                yield from self.first_words(left)
            case ast.IfExp(body=body, orelse=orelse):
                yield from self.first_words(body)
                yield from self.first_words(orelse)
            case ast.BoolOp(values=values):
                for value in values:
                    yield from self.first_words(value)
            case ast.Attribute(attr=name) if IS_REMEDY.search(name):
                return
            case ast.Subscript(value=ast.Name(id=name)) if IS_TABLE.fullmatch(name):
                return
            case ast.Call(
                func=ast.Name(id="str"), args=[ast.Subscript(slice=ast.Constant(value="remedy"))]
            ):
                return  # it came from another node, where it was checked
            case ast.Name(id=name) if IS_REMEDY.search(name):
                return
            case ast.Name(id=name) if name.isupper() and name in self.assigned:
                for value in self.assigned[name]:
                    yield from self.first_words(value)
            case _:
                yield f"<{ast.unparse(remedy)}>"

    def faults(self) -> list[str]:
        """Return each remedy that does not start with a verb."""
        return [
            f"{place}: {word!r}"
            for place, remedy in self.remedies()
            for word in self.first_words(remedy)
            if not VERBS.fullmatch(word)
        ]


def test_every_remedy_starts_with_a_verb() -> None:
    files = sorted(SRC.rglob("*.py"))
    source = Source({file.relative_to(SRC).as_posix(): file.read_text() for file in files})
    assert len(list(source.remedies())) > 300, "remedies were not found"
    faults = source.faults()
    assert not faults, "remedies that do not start with a verb:\n" + "\n".join(faults)


ERRORS = "class LockstepError(Exception): ...\nclass DataError(LockstepError): ...\n"


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ('raise DataError("no file", "another folder")', "'another'"),
        ('raise DataError("no file", remedy="--folder")', "'--folder'"),
        ('raise DataError("no file", f"{near} or none")', "'<near>'"),
        ('raise DataError("no file", near or "pass one")', "'<near>'"),
        ('raise DataError("no file", "pass one" if near else "one that exists")', "'one'"),
        ('WHERE = "a folder"\nraise DataError("no file", WHERE)', "'a'"),
        ('remedy = "a folder"', "'a'"),
        ('def refuse(what, remedy="mended"): ...', "'mended'"),
        ('def refuse(what, remedy): ...\nrefuse("no file", "quotes")', "'quotes'"),
        ('result(fix="more memory")', "'more'"),
        ('raise DataError("no file", pairs[0][1])', "'<pairs[0][1]>'"),
        ('def refuse(what, *, remedy="mended"): ...', "'mended'"),
        ('remedy: str = "a folder"', "'a'"),
        (
            'class Failure:\n    text: str\n    remedy: str\nFailure("no file", "quotes")',
            "'quotes'",
        ),
        ('TRY = {"no file": "another folder"}', "'another'"),
        ('print("no file\\n  try: another folder")', "'another'"),
        ('raise DataError("no file", f"pass {folder}")', None),
        ('raise DataError("no file", "set " + name)', None),
        ("raise DataError(error.problem, error.remedy)", None),
    ],
)
def test_a_remedy_without_a_verb_is_seen(code: str, fault: str | None) -> None:
    faults = Source({"planted.py": ERRORS + code}).faults()
    assert [found.partition(": ")[2] for found in faults] == ([fault] if fault else [])
