"""Settings in YAML files: a file may build on another, and take values from the environment.

Owns: reading a path into plain values. Does not own: which keys exist; each recipe
checks the values against its own models.

A file with `_base_: other.yaml` holds only its differences from the other file, whose path
is relative to it. `${NAME:default}` inside a value becomes the environment variable, or the
default if it is unset; the result is parsed as YAML again, so `${LR:1e-4}` may be a number.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError, shown
from lockstep.yaml_input import MAX_BYTES, YamlProblem, load_yaml, read_yaml_file

BASE = "_base_"
MAX_CHAIN = 20
"""Longest chain of files that build on each other."""
VARIABLE = re.compile(r"\$\{(\w+)(?::([^}]*))?\}")


def read_settings(path: Path | str) -> dict[str, Any]:
    """Return the values of a settings file, merged over those of the files it builds on.

    Raises:
        ConfigError: naming the file, and the line where there is one.
    """
    return _read(Path(path), ())


def _read(path: Path, above: tuple[str, ...]) -> dict[str, Any]:
    values = read_yaml_file(path, "check the path passed to --config")
    base = values.pop(BASE, None)
    values = dict(_expand(values, path))
    if base is None:
        return values
    name = _expand(base, path)
    if not isinstance(name, str):
        raise ConfigError(
            f"{shown(path)}: {BASE} is not a file name: {shown(name)}",
            f"write {BASE}: other.yaml",
        )
    chain = (*above, os.path.realpath(path))
    if os.path.realpath(path.parent / name) in chain or len(chain) == MAX_CHAIN:
        names = " -> ".join(Path(file).name for file in (*chain, name))
        raise ConfigError(
            f"settings files build on each other, or on more than {MAX_CHAIN} files: {names}",
            f"change {BASE} in {shown(path)}",
        )
    return merged(_read(path.parent / name, chain), values)


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` overridden by the keys of `over`, section by section.

    An empty section (one that is all commented out, say) changes nothing.

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
    """Replace `${NAME}` and `${NAME:default}` in all texts by the environment's values."""
    if isinstance(value, dict):
        return {key: _expand(below, path) for key, below in value.items()}
    if isinstance(value, list):
        return [_expand(below, path) for below in value]
    if not isinstance(value, str) or "}" not in value:
        return value
    # No variable begins after the last brace, and the regex would take quadratic time there.
    end = value.rindex("}") + 1
    if not VARIABLE.search(value[:end]):
        return value

    length = len(value)

    def found(match: re.Match[str]) -> str:
        nonlocal length
        name, default = match.groups()
        text = os.environ.get(name, default)
        if text is None:
            raise ConfigError(
                f"{shown(path)} takes a value from {name}, which is not set in the environment",
                f"export {name}=..., or give a default: ${{{name}:value}}",
            )
        length += len(text)
        if length > MAX_BYTES:
            raise ConfigError(
                f"{shown(path)}: {shown(value)} expands to more than {MAX_BYTES:,} characters",
                f"set {name} to a shorter value",
            )
        return text

    text = VARIABLE.sub(found, value[:end]) + value[end:]
    try:
        return load_yaml(text)
    except YamlProblem as error:
        raise ConfigError(
            f"{shown(path)}: {shown(value)} becomes {shown(text)}, which cannot be used: "
            f"{error.problem}",
            "quote the value of the variable",
        ) from None
