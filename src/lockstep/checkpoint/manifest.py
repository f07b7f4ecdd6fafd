"""Check every field of a manifest before it is used.

Owns: the bounds and types of a manifest's fields, and naming the first wrong one. Does not own: the
hashes that detect damaged files (`layout.py`), or the meta data, which the saving code defines
(`saved_run.py` checks those of `fit`).

A hash does not protect against a person who computes it again. So fields are checked although the
manifest has a hash.
"""

import json
import math
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lockstep.plan import MAX_COUNT

MAX_ENTRIES: Final = 4_000_000
"""The most values in a manifest: 100,000 tensors with optimizer state have half as many."""
MAX_DEPTH: Final = 200
_SHOWN: Final = 60

Text = Annotated[str, Field(max_length=200)]
Count = Annotated[int, Field(ge=0, lt=MAX_COUNT)]


class FileFacts(BaseModel):
    """A manifest's entry for one file."""

    model_config = ConfigDict(strict=True)

    size_bytes: Count
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    part: Text | None = None


class Manifest(BaseModel):
    """A manifest without its hash. Unknown fields, from a later version, are ignored."""

    model_config = ConfigDict(strict=True)

    format_version: Literal[1, 2]
    step: Count
    recipe: Text
    generation: Count = 0
    meta: dict[str, Any]
    files: dict[str, FileFacts]
    skeletons: dict[str, Any]


def read_json(raw: bytes) -> Any:
    """Parse JSON of unknown origin.

    Raises:
        ValueError: it is not JSON, or is larger or nested more deeply than any manifest.
    """
    if (num := raw.count(b",") + raw.count(b"[") + raw.count(b"{")) > MAX_ENTRIES:
        raise ValueError(f"it holds {num:,} values, more than {MAX_ENTRIES:,}")
    try:
        tree = json.loads(raw)
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep") from None
    level = [tree]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
        inner = [node for node in level if isinstance(node, dict | list)]
        level = [v for node in inner for v in (node.values() if isinstance(node, dict) else node)]
    return tree


def checked_manifest(tree: Any) -> Manifest:
    """Return the manifest if every field is valid.

    Raises:
        ValueError: names the first invalid field.
    """
    try:
        manifest = Manifest.model_validate(tree)
    except ValidationError as invalid:
        raise ValueError(first_fault(invalid)) from None
    for part, skeleton in manifest.skeletons.items():
        check_skeleton(skeleton, f"skeletons.{part}")
    return manifest


def first_fault(invalid: ValidationError) -> str:
    """Return pydantic's first error: the field, its value and what it should be."""
    fault = invalid.errors()[0]
    path = ".".join(in_brief(part) for part in fault["loc"]) or "it"
    if fault["type"] == "missing":
        return f"{path} is missing"
    message = fault["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    return f"{path} is {in_brief(fault['input'])}: {message}"


def in_brief(value: Any) -> str:
    """Return a value of unknown origin for a message: short, in ASCII, on one line."""
    if isinstance(value, dict | list):
        return f"a {type(value).__name__} of {len(value)}"
    text = value if isinstance(value, str) and value.isidentifier() else ascii(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def check_skeleton(skeleton: Any, path: str) -> None:
    """Compare a skeleton with what `flatten` writes.

    Raises:
        ValueError: names the first wrong entry.
    """
    waiting = [(skeleton, path)]
    while waiting:
        node, where = waiting.pop()
        match node:
            case None | bool() | int() | str():
                pass
            case float() if math.isfinite(node):
                pass
            case {"float": "inf" | "-inf" | "nan"} if len(node) == 1:
                pass
            case {"tensor": str()} if _is_tensor(node):
                pass
            case {"list": list(items)} | {"tuple": list(items)} if len(node) == 1:
                waiting += [(item, f"{where}.{index}") for index, item in enumerate(items)]
            case {"dict": list(items)} if len(node) == 1:
                keys = set()
                for item in items:
                    if not (isinstance(item, list) and len(item) == 2):
                        raise ValueError(
                            f"{where} has {in_brief(item)} instead of a key and a value"
                        )
                    key, value = item
                    if type(key) not in (str, int):
                        raise ValueError(f"{where} has {in_brief(key)} instead of a key")
                    if key in keys:
                        raise ValueError(f"{where} has the key {in_brief(key)} twice")
                    keys.add(key)
                    waiting.append((value, f"{where}.{in_brief(key)}"))
            case _:
                raise ValueError(f"{where} is {in_brief(node)}, which is not a saved value")


def _is_tensor(node: dict[str, Any]) -> bool:
    is_known = node.keys() <= {"tensor", "dtype", "tied_to"}
    return is_known and all(isinstance(value, str) for value in node.values())
