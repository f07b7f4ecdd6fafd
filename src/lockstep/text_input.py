"""Text from a user or another program: numbers, JSON, and lines of a script.

Owns: reading such text within limits, so that no text causes a traceback. Does not own: YAML
(`yaml_input.py`), or quoting a value in a message (`errors.shown`).
"""

import json
import re
from typing import Any

from lockstep.errors import ConfigError, shown

LARGEST = 2**31 - 1
"""The largest number of anything that is counted here: what C++ and SLURM can hold."""

_NOT_ON_A_LINE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Control characters, unusual line separators, and bytes that were not UTF-8."""


def whole_number(text: str, most: int = LARGEST) -> int | None:
    """Return a number from 0 to `most` written in ASCII digits; None for any other text.

    Python's `int` also takes underscores, spaces and other scripts' digits, and raises
    ValueError for more than 4,300 digits although `str.isdecimal` is true.

    >>> whole_number("29500"), whole_number("-1"), whole_number("9" * 5000), whole_number("")
    (29500, None, None, None)
    """
    if re.fullmatch(r"[0-9]{1,20}", text) is None:
        return None
    number = int(text)
    return number if number <= most else None


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text.

    Raises:
        ValueError: for any fault, including too deep nesting.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check_line(name: str, value: str) -> None:
    """Refuse a value that would not stay on one line of a generated script.

    Raises:
        ConfigError: if it holds a newline, another control character, or bytes that are not UTF-8.
    """
    if _NOT_ON_A_LINE.search(value):
        raise ConfigError(
            f"{name} {shown(value)} contains a control character or bytes that are not UTF-8",
            f"pass {name} as one line of plain text",
        )
