"""Folders of sample data that appear complete or not at all, so ranks may race to make them.

Owns: writing to a temporary folder and renaming it, and recognising a folder made earlier.
Does not own: the contents.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import DataError

RECORD = ".lockstep_sample.json"
"""Records what a folder was made from; written last. Hidden, so that no scan reads it as data."""


def make_folder(
    folder: Path | str, record: Mapping[str, Any], fill: Callable[[Path], None]
) -> Path:
    """Let `fill` write a folder, unless it already holds exactly the set that `record` describes.

    Raises:
        DataError: if the folder holds anything else, or cannot be written.
    """
    folder = Path(folder)
    try:
        if not is_made(folder, record):
            _write(folder, record, fill)
    except OSError as error:
        problem = f"cannot make sample data in {folder}: {error}"
        raise DataError(problem, "use another folder") from error
    return folder


def _write(folder: Path, record: Mapping[str, Any], fill: Callable[[Path], None]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        aside.chmod(0o755)
        fill(aside)
        (aside / RECORD).write_text(json.dumps(record))
        try:
            os.rename(aside, folder)
        except OSError:
            if not is_made(folder, record):  # and no other rank was faster
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def is_made(folder: Path, record: Mapping[str, Any]) -> bool:
    """Return whether `folder` holds exactly this set; False if it is missing or empty.

    Raises:
        DataError: if it holds anything else.
    """
    was_there = folder.exists()  # check first: another rank may create it at any moment
    try:
        made = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):
        made = None
    if made == record:
        return True
    if was_there and (made is not None or not folder.is_dir() or any(folder.iterdir())):
        held = f"another sample set ({made})" if made else "files that are not a sample set"
        raise DataError(f"{folder} holds {held}", "name another folder, or remove this one")
    return False
