"""Settings in YAML files: one file may build on another, and take values from the environment.

Owns: the way from a path to plain values. Does not own: which keys there are; each
recipe checks the values against its own models.

A file with `_base_: other.yaml` holds only what differs from the other, which is named
relative to it. `${NAME:default}` inside a value is the environment variable, or the
default without it; what comes out is read as YAML again, so `${LR:1e-4}` may be a number.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lockstep.errors import ConfigError

BASE = "_base_"
VARIABLE = re.compile(r"\$\{(\w+)(?::([^}]*))?\}")


class _OnceEach(yaml.SafeLoader):  # type: ignore[misc]
    """Plain YAML, in which a key given twice is an error and not a silent choice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                problem = f"{key.value!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return dict(super().construct_mapping(node, deep))


def read_settings(path: Path | str) -> dict[str, Any]:
    """Return the values of a settings file, over those of the files it builds on.

    Raises:
        ConfigError: naming the file, and the line where there is one.
    """
    return _read(Path(path), ())


def _read(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in above:
        chain = " -> ".join(p.name for p in (*above, path))
        raise ConfigError(f"settings that build on themselves: {chain}", f"another {BASE}")
    values = _load(path)
    base = values.pop(BASE, None)
    values = dict(_expand(values, path))
    if base is None:
        return values
    if not isinstance(base, str):
        raise ConfigError(f"{path}: {BASE} is not a file's name: {base!r}", f"{BASE}: other.yaml")
    inherited = _read(path.parent / _expand(base, path), (*above, path.resolve()))
    return merged(inherited, values)


def _load(path: Path) -> dict[str, Any]:
    try:
        values = yaml.load(path.read_text(), _OnceEach)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"the settings {path} cannot be read: {reason}", "--config") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "it cannot be parsed"
        raise ConfigError(f"{path}{where} is not YAML: {problem}", "`key: value`") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no keys but {type(values).__name__}", "`key: value`")
    return values


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the keys of `over` put over it, section by section.

    A section with nothing below it (all of it commented out, say) changes nothing.

    >>> merged({"data": {"a": 1, "b": 2}}, {"data": {"b": 3}})
    {'data': {'a': 1, 'b': 3}}
    >>> merged({"data": {"a": 1, "b": 2}}, {"data": None})
    {'data': {'a': 1, 'b': 2}}
    """
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping | None):
            value = merged(below, value or {})
        result[key] = value
    return result


def _expand(value: Any, path: Path) -> Any:
    """Put the environment's values for `${NAME}` and `${NAME:default}` into all texts."""
    if isinstance(value, dict):
        return {key: _expand(below, path) for key, below in value.items()}
    if isinstance(value, list):
        return [_expand(below, path) for below in value]
    if not isinstance(value, str) or not VARIABLE.search(value):
        return value

    def found(match: re.Match[str]) -> str:
        name, default = match.groups()
        text = os.environ.get(name, default)
        if text is None:
            raise ConfigError(
                f"{path} takes a value from {name}, which the environment lacks",
                f"export {name}=..., or a default: ${{{name}:value}}",
            )
        return text

    return yaml.safe_load(VARIABLE.sub(found, value))
