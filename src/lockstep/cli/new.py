"""`lockstep new NAME`: a project of one short file that trains."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import ConfigError, shown

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True, slots=True)
class Made:
    """A file to write."""

    path: Path
    text: str
    is_program: bool = False


def new(name: str, force: bool) -> list[str]:
    """Create a project in the folder `name` and return lines about it.

    Raises:
        ConfigError: for an invalid name, or a file that exists already.
    """
    folder = Path(name)
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", folder.name):
        raise ConfigError(
            f"{shown(name)} is not a valid project name", "use letters, digits, - and _"
        )
    words = {"NAME": folder.name}
    files = [Made(folder / file, fill(file, words)) for file in ("train.py", "README.md")]
    use = [f"python {folder}/train.py", f"lockstep launch --gpus 2 {folder}/train.py"]
    return [*write_all(files, force=force), *(f"  use: {command}" for command in use)]


def fill(template: str, words: Mapping[str, str]) -> str:
    """Return a template with its words filled in; inserted text is not searched again."""
    text = (TEMPLATES / f"{template}.tmpl").read_text()
    return re.sub("|".join(words), lambda found: words[found.group()], text)


def write_all(files: Sequence[Made], *, force: bool) -> list[str]:
    """Write all files, or none if one exists already."""
    there = [str(made.path) for made in files if os.path.exists(made.path)]
    if there and not force:
        be = "exists" if len(there) == 1 else "exist"
        raise ConfigError(f"{', '.join(there)} {be} already", "pass --force to overwrite")
    try:
        for made in files:
            made.path.parent.mkdir(parents=True, exist_ok=True)
            made.path.write_text(made.text)
            if made.is_program:
                made.path.chmod(0o755)
    except OSError as error:
        raise ConfigError(
            f"cannot write {shown(made.path)}: {error.strerror}", "choose another folder"
        ) from None
    return [f"wrote {made.path}" for made in files]
