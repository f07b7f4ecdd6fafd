"""YAML from a user, read within limits: settings files, and values of `--set`.

Owns: the only YAML loader of the package, its limits, and the errors for a text or a file. Does
not own: the keys, or the meaning of a value.

The loader supports text, numbers, true and false, null, lists, and mappings with text keys.
Dates and base-60 numbers (`12:30`) stay text. Anchors, aliases and `<<` work as long as their
expansion stays within the limits.
"""

import os
import stat
from pathlib import Path
from typing import Any

import yaml

from lockstep.errors import ConfigError, shown

MAX_BYTES = 256 * 1024
"""Largest file. The recipes' largest one has 5 kB; this much is parsed in under a second."""
MAX_DEPTH = 32
MAX_NODES = 10_000
"""Most keys and values of a text, after expanding aliases."""
MAX_NUMBER_LENGTH = 100

_TAG = "tag:yaml.org,2002:"
_PLAIN_TAGS = {_TAG + kind for kind in ("str", "int", "float", "bool", "null", "seq", "map")}
_LEFT_AS_TEXT = {_TAG + "timestamp", _TAG + "value"}
_CONTROL = {chr(code) for code in range(32)} - set("\t\n\r") | {"\x7f"}


class YamlProblem(Exception):
    """A fault in a YAML text, and its line (counted from 1) if known."""

    def __init__(self, problem: str, line: int | None = None) -> None:
        super().__init__(problem)
        self.problem = problem
        self.line = line


def load_yaml(text: str) -> Any:
    r"""Return the one value that `text` holds; None if it is empty.

    >>> load_yaml("lr: 0.1\nstarted: 2024-13-45\naverages: [0.9, 0.99]")
    {'lr': 0.1, 'started': '2024-13-45', 'averages': [0.9, 0.99]}

    Raises:
        YamlProblem: if it is not YAML, or exceeds the limits.
    """
    if len(text) > MAX_BYTES:
        raise YamlProblem(f"it is larger than {MAX_BYTES:,} bytes")
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _measure(node, 0, {})
        return loader.construct_document(node)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlProblem(f"character {shown(error.character)} is not allowed", line) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = ", ".join(filter(None, [error.context, error.problem])) or "it cannot be parsed"
        raise YamlProblem(problem, mark.line + 1 if mark else None) from None
    except (ValueError, OverflowError, LookupError) as error:
        # A tag that does not fit its value (!!int x), or an escape outside Unicode ("\UFFFFFFFF").
        raise YamlProblem(f"a value cannot be converted: {error}") from None


def read_yaml_file(path: Path, remedy: str) -> dict[str, Any]:
    """Return the keys and values of a file; an empty file has none.

    `remedy` is the remedy if the file cannot be opened.

    Raises:
        ConfigError: naming the file, and the line where there is one.
    """
    content = _read_bytes(path, remedy)
    try:
        values = load_yaml(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{shown(path)} is not UTF-8 text (byte {error.start + 1})", "save the file as UTF-8"
        ) from None
    except YamlProblem as error:
        where = f", line {error.line}" if error.line else ""
        raise ConfigError(
            f"{shown(path)}{where} is not YAML that can be used: {error.problem}",
            "write plain `key: value` lines, indented with spaces; put text in quotes",
        ) from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"{shown(path)} holds a value of type {type(values).__name__} instead of `key: value` "
            "pairs",
            "write `key: value` lines",
        )
    return values


def _read_bytes(path: Path, remedy: str) -> bytes:
    """Read a regular file of at most MAX_BYTES; never block on a pipe or read a device."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ConfigError(
                f"{shown(path)} cannot be read: it is not a regular file",
                "pass the path of a regular file",
            )
        # Non-blocking: a pipe may have replaced the file since.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as f:
            content = f.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{shown(path)} cannot be read: {reason}", remedy) from None
    if len(content) > MAX_BYTES:
        raise ConfigError(
            f"{shown(path)} is larger than {MAX_BYTES:,} bytes, too large for settings",
            "check that the path names a settings file",
        )
    return content


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """PyYAML's safe loader with limits, without dates, and with unique text keys."""

    yaml_implicit_resolvers = {
        first: [(tag, shape) for tag, shape in rows if tag not in _LEFT_AS_TEXT]
        for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._num_nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        """Compose a node; refuse too many nodes, too deep nesting, and special tags."""
        event = self.peek_event()
        self._num_nodes += 1
        self._depth += 1
        if self._num_nodes > MAX_NODES:
            raise _error(f"there are more than {MAX_NODES:,} values", event)
        if self._depth > MAX_DEPTH:
            raise _error(f"values are nested more than {MAX_DEPTH} deep", event)
        tag = getattr(event, "tag", None)
        if tag is not None and tag not in ("!", *_PLAIN_TAGS):
            raise _error(f"the tag {shown(tag)} is not supported", event)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:
        """Build a mapping; a repeated key is an error."""
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag not in (_TAG + "str", _TAG + "merge"):
                read_as = self.construct_object(key, deep=True)
                raise _error(f"the key {shown(read_as)} is not text: put it in quotes", key)
            if key.value in seen:
                raise _error(f"{shown(key.value)} is given twice", key)
            seen.add(key.value)
        return dict(super().construct_mapping(node, deep))

    def construct_number(self, node: yaml.ScalarNode) -> int | float | str:
        """Read a 64-bit number; `12:30` stays text, which YAML 1.1 would read as 750."""
        text = self.construct_scalar(node)
        if ":" in text:
            return str(text)
        if len(text) > MAX_NUMBER_LENGTH:
            raise _error(f"a number of {len(text):,} characters is too long", node)
        if node.tag == _TAG + "float":
            return float(self.construct_yaml_float(node))
        number = int(self.construct_yaml_int(node))
        if not -(2**63) <= number < 2**64:
            raise _error(f"{shown(text)} does not fit into 64 bits", node)
        return number

    def construct_text(self, node: yaml.ScalarNode) -> str:
        """Read text; quoted escapes must not produce control characters or surrogates."""
        text = str(self.construct_scalar(node))
        for character in text:
            if character in _CONTROL or "\ud800" <= character <= "\udfff":
                raise _error(f"text with the character {shown(character)} is not supported", node)
        return text


for _kind in ("int", "float"):
    _Loader.add_constructor(_TAG + _kind, _Loader.construct_number)
_Loader.add_constructor(_TAG + "str", _Loader.construct_text)


def _error(problem: str, place: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=place.start_mark)


def _measure(node: yaml.Node, depth: int, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Return the size and depth of `node` after expansion; refuse to exceed the limits.

    Loading shares the value of an alias, but copying the result expands it. A node that contains
    itself is refused because of its depth.
    """
    size, height = known.get(id(node), (0, 0))
    if not size:
        if depth > MAX_DEPTH:
            raise _error(f"aliases nest values more than {MAX_DEPTH} deep", node)
        children: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in node.value for child in pair]
        elif isinstance(node, yaml.SequenceNode):
            children = node.value
        measured = [_measure(child, depth + 1, known) for child in children]
        size = 1 + sum(below for below, _ in measured)
        height = 1 + max((below for _, below in measured), default=0)
        known[id(node)] = size, height
    if size > MAX_NODES:
        raise _error(f"aliases expand to more than {MAX_NODES:,} values", node)
    if depth + height > MAX_DEPTH + 1:
        raise _error(f"aliases nest values more than {MAX_DEPTH} deep", node)
    return size, height
