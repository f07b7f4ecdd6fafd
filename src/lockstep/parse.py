"""From plain values to a checked model, or one sentence about the first that does not fit.

Owns: how a bad key or value is named. Does not own: any key.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from lockstep.errors import ConfigError, closest

Model = TypeVar("Model", bound=BaseModel)


def parse_model(kind: type[Model], values: Mapping[str, Any]) -> Model:
    """Validate `values` into `kind`, turning the first complaint into one clear sentence."""
    try:
        return kind.model_validate(values)
    except ValidationError as invalid:
        errors = invalid.errors()
        loc, value, said = errors[0]["loc"], errors[0]["input"], [errors[0]["msg"]]
        path, known = ".".join(map(str, loc)), _owner(kind, loc).model_fields
        if errors[0]["type"] == "extra_forbidden":
            raise unknown_key(str(loc[-1]), known, f"at {path!r}") from None
        alike = [e["msg"] for e in errors if e["loc"][:-1] == loc[:-1] and e["input"] is value]
        if len(alike) > 1 and loc[-1] not in known:  # one for each kind it may be
            path, said = ".".join(map(str, loc[:-1])), alike
        more = f" (and {len(errors) - len(said)} more)" if len(errors) > len(said) else ""
        raise ConfigError(
            f"{path or kind.__name__}={value!r}: {' or '.join(said)}{more}",
            f"another value for {path}" if path else "the keys one at a time",
        ) from None


def _owner(kind: type[BaseModel], path: tuple[int | str, ...]) -> type[BaseModel]:
    for part in path[:-1]:
        annotation = kind.model_fields[str(part)].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            break
        kind = annotation
    return kind


def unknown_key(key: str, known: Mapping[str, Any], where: str) -> ConfigError:
    """Return the error for a key nobody knows, with the nearest one that somebody does."""
    remedy = closest(key, known) or f"one of {', '.join(sorted(known))}"
    return ConfigError(f"unknown key {key!r} {where}", remedy)
