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
        error = invalid.errors()[0]
        path = ".".join(str(part) for part in error["loc"])
        if error["type"] == "extra_forbidden":
            owner = _owner(kind, error["loc"])
            raise unknown_key(str(error["loc"][-1]), owner.model_fields, f"at {path!r}") from None
        more = f" (and {len(invalid.errors()) - 1} more)" if len(invalid.errors()) > 1 else ""
        raise ConfigError(
            f"{path or kind.__name__}={error['input']!r}: {error['msg']}{more}",
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
