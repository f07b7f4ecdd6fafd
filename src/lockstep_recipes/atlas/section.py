"""A section of the settings file, which refuses unknown keys and unquoted yes and no."""

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Section(BaseModel):
    """Keys of one section; each section is defined next to the code it configures."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_stray_truth(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `batch_size: yes`, which would otherwise silently become 1, and `name: no`."""
        kind = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and kind is not bool and bool not in get_args(kind):
            raise ValueError(
                "YAML reads an unquoted yes, no, on or off as true or false\n  try: quote the value"
            )
        return value
