"""Folders of sample data that appear whole or not at all, so that ranks may race for them.

Owns: writing aside and renaming, and recognising a folder that was made before. Does
not own: what is in it.
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
"""Says what a folder was made from; written last. Hidden, so that no scan takes it for data."""


def make_folder(
    folder: Path | str, record: Mapping[str, Any], fill: Callable[[Path], None]
) -> Path:
    """Let `fill` write a folder, unless it already holds exactly what `record` says.

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
            if not is_made(folder, record):  # not another rank that was faster
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def is_made(folder: Path, record: Mapping[str, Any]) -> bool:
    """Say whether `folder` holds exactly this set; False when it is missing or empty.

    Raises:
        DataError: if it holds anything else.
    """
    was_there = folder.exists()  # asked first: another rank may make it at any moment
    try:
        made = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):
        made = None
    if made == record:
        return True
    if was_there and (made is not None or not folder.is_dir() or any(folder.iterdir())):
        held = f"another sample set ({made})" if made else "files that are no sample set"
        raise DataError(f"{folder} holds {held}", "name another folder, or remove this one")
    return False
