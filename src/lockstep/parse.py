"""Turn text and plain values into a checked model, or into an error that names a bad one.

Owns: parsing `section.key=value`, and the message for a bad key or value. Does not own: any key.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from lockstep.errors import ConfigError, closest, plain, shown
from lockstep.yaml_input import MAX_DEPTH, YamlProblem, load_yaml

Model = TypeVar("Model", bound=BaseModel)

TRY = "\n  try: "
"""Separates problem and remedy in the text of a validator's ValueError."""


def parse_override(text: str) -> tuple[list[str], Any]:
    """Return the keys and the value of `section.key=value`, as `--set` takes it.

    >>> parse_override("rate.lr=0.1"), parse_override("sinks.wandb_tags=[a, 2024-01-01]")
    ((['rate', 'lr'], 0.1), (['sinks', 'wandb_tags'], ['a', '2024-01-01']))

    Raises:
        ConfigError: if it sets nothing, or its value is not valid YAML.
    """
    path, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {shown(text)} does not set anything", "write --set name=value")
    keys = path.strip().split(".")
    if not all(keys) or len(keys) > MAX_DEPTH:
        raise ConfigError(
            f"--set {shown(text)} does not name a setting", "write --set section.key=value"
        )
    try:
        return keys, load_yaml(value)
    except YamlProblem as error:
        raise ConfigError(
            f"the value in --set {shown(text)} cannot be used: {error.problem}",
            "quote the value: --set name='\"2024\"'",
        ) from None


def parse_model(kind: type[Model], values: Mapping[str, Any]) -> Model:
    """Validate `values` as a `kind`; the error names the first problem in one sentence."""
    if isinstance(values, Mapping):
        for key in values:
            if not isinstance(key, str):  # not a valid keyword
                raise ConfigError(f"{shown(key)}: keys should be strings", f"quote {shown(key)}")
    with in_a_sentence(kind, values):
        return kind.model_validate(values)


@contextmanager
def in_a_sentence(kind: type[BaseModel], values: Mapping[str, Any]) -> Iterator[None]:
    r"""Convert pydantic's error about `values` into one sentence about the first problem.

    A validator may raise `ValueError("problem\n  try: remedy")`.

    Raises:
        ConfigError: instead of pydantic's error.
    """
    _check_storable(values, ())
    try:
        yield
    except ValidationError as invalid:
        errors = invalid.errors()
        first = errors[0]
        loc = first["loc"]
        value = first["input"]
        path = _dotted(loc)
        known = _owner(kind, loc).model_fields
        if first["type"] == "extra_forbidden":
            where = f"in section {_dotted(loc[:-1])}" if loc[:-1] else "at the top level"
            raise unknown_key(str(loc[-1]), _owner(kind, loc), where) from None
        text = first["msg"].removeprefix("Value error, ")
        problem, _, remedy = text.partition(TRY)
        said = [problem]
        same_value = [e["msg"] for e in errors if e["loc"][:-1] == loc[:-1] and e["input"] is value]
        if len(same_value) > 1 and loc[-1] not in known:  # a union: one message per type
            path = _dotted(loc[:-1])
            said = same_value
        more = f" (and {len(errors) - len(said)} more)" if len(errors) > len(said) else ""
        is_section = first["type"] == "value_error" and isinstance(value, Mapping)
        subject = path if is_section else f"{path or kind.__name__}={shown(value)}"
        raise ConfigError(
            f"{subject}: ".removeprefix(": ") + " or ".join(said) + more,
            remedy or f"correct {path or 'the settings'}",
        ) from None


def _dotted(path: tuple[int | str, ...]) -> str:
    return plain(".".join(map(str, path))) if path else ""


def _check_storable(value: Any, path: tuple[int | str, ...]) -> None:
    """Refuse values that the record of a run cannot hold: huge integers, invalid UTF-8."""
    fault = ""
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        fault = "does not fit into 64 bits"
    if isinstance(value, str | PurePath) and re.search("[\ud800-\udfff]", str(value)):
        fault = "is not UTF-8 text"
    if fault:
        raise ConfigError(f"{_dotted(path)}={shown(value)} {fault}", f"correct {_dotted(path)}")
    below: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        below = value.items()
    elif isinstance(value, list | tuple):
        below = enumerate(value)
    for key, part in below:
        _check_storable(part, (*path, key))


def _owner(kind: type[BaseModel], path: tuple[int | str, ...]) -> type[BaseModel]:
    for part in path[:-1]:
        below = section_of(kind, str(part))
        if below is None:
            break
        kind = below
    return kind


def section_of(kind: type[BaseModel], key: str) -> type[BaseModel] | None:
    """Return the class of the section that `key` names; None if it names a value, or nothing."""
    field = kind.model_fields.get(key)
    annotation = field.annotation if field else None
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return None


def unknown_key(key: str, kind: type[BaseModel], where: str) -> ConfigError:
    """Return the error for an unknown key, with the section that has it, or the nearest key."""
    known = kind.model_fields
    below = {name: section_of(kind, name) for name in known}
    dotted = [
        f"{name}.{key}" for name, owner in below.items() if owner and key in owner.model_fields
    ]
    near = " or ".join(dotted) or closest(key, known)
    remedy = f"use {near}" if near else f"use one of {', '.join(sorted(known))}"
    return ConfigError(f"unknown key {shown(key)} {where}", remedy)
