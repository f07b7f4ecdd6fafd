"""Opening the files in a run's folder.

Owns: opening files without following links, replacing a file atomically, and refusing a folder
that other users can change. Does not own: the contents of files, or checkpoints, which
`checkpoint/layout.py` writes into folders that it has just created.

Names are relative to the run's folder (`"samples/step_00000004.png"`). The folder itself may be a
link, because the user chose that path. Nothing below it may be a link: names there are
predictable, so another user could plant a link where the run is going to write.
"""

import errno
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import BinaryIO, Final

from lockstep.errors import CheckpointError

SUBFOLDERS: Final = ("events", "samples", "tensorboard", "wandb", "non_finite")
"""Subfolders that a run creates, apart from `checkpoints`, which has its own rule."""
FOLDER_MODE: Final = 0o775
"""Mode of folders that a run creates: under any umask, not writable by everyone."""
_LINKED: Final = (errno.ELOOP, errno.ENOTDIR)
"""Errors of the kernel on opening a link without following it, as a file or a folder."""


@contextmanager
def replacing(folder: Path | str, name: str) -> Iterator[BinaryIO]:
    """Write a temporary file, and rename it into place if the block succeeds.

    A reader sees the old file or the new one. A link of that name is replaced, not followed.

    Raises:
        OSError: the file cannot be written; an old file is unchanged.
    """
    path = PurePath(name)
    with _opened_folder(folder, path.parent.parts, make=True) as parent:
        aside = f".{path.name}.{os.getpid()}"
        with suppress(FileNotFoundError):  # left by a dead process with the same id
            os.unlink(aside, dir_fd=parent)
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=parent)
        try:
            with open(descriptor, "wb") as file:
                yield file
            os.rename(aside, path.name, src_dir_fd=parent, dst_dir_fd=parent)
        except BaseException:
            with suppress(OSError):
                os.unlink(aside, dir_fd=parent)
            raise


def replace_text(folder: Path | str, name: str, text: str) -> None:
    """Replace the contents of a run's file atomically by `text`."""
    with replacing(folder, name) as file:
        file.write(text.encode(errors="backslashreplace"))


def open_to_append(folder: Path | str, name: str) -> int:
    """Open a file of a run for reading and appending, and return its descriptor.

    A missing file is created.

    Raises:
        OSError: it cannot be opened, or is not a regular file (a link, a pipe).
    """
    return _open(folder, name, os.O_RDWR | os.O_APPEND | os.O_CREAT)


def append_text(folder: Path | str, name: str, text: str) -> None:
    """Add `text` to the end of a file of a run."""
    with open(open_to_append(folder, name), "ab") as file:
        file.write(text.encode(errors="backslashreplace"))


def open_to_update(folder: Path | str, name: str) -> int:
    """Open a file of a run for reading and writing in place; return its descriptor.

    Raises:
        OSError: as `open_to_append`.
    """
    return _open(folder, name, os.O_RDWR | os.O_CREAT)


def read_bytes(folder: Path | str, name: str, max_bytes: int | None = None) -> bytes:
    """Return the contents of a file of a run.

    Raises:
        OSError: as `open_to_append`, or it holds more than `max_bytes`.
    """
    with open(_open(folder, name, os.O_RDONLY), "rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if max_bytes is not None and size_bytes > max_bytes:
            problem = f"it has {size_bytes:,} bytes, more than {max_bytes:,}"
            raise OSError(errno.EFBIG, problem, str(Path(folder, name)))
        return file.read()


def make_folder(folder: Path | str, name: str) -> Path:
    """Create a subfolder of a run for a package that opens its own files.

    Raises:
        OSError: it cannot be created, or is a link.
    """
    with _opened_folder(folder, PurePath(name).parts, make=True):
        return Path(folder, name)


def refuse_shared(folder: Path, is_accepted: bool = False) -> None:
    """Refuse a run's folder that other users can change, and links where the run will write.

    A group may write to it: research groups share folders that way on purpose.

    Args:
        folder: The run's folder; if it does not exist yet, the run will create a safe one.
        is_accepted: The user accepts that others can write there. Links are still refused.

    Raises:
        CheckpointError: with the command or the setting that helps.
    """
    for path in (folder, folder / "checkpoints"):
        if path.is_dir() and not is_accepted:
            _refuse_writable(path)
    for name in SUBFOLDERS:
        refuse_link(folder, name)
    _refuse_foreign_link(folder / "checkpoints")


def refuse_link(folder: Path, name: str) -> None:
    """Refuse a link at the path of a file or folder that the run will write.

    Raises:
        CheckpointError: with the target of the link.
    """
    path = folder / name
    if path.is_symlink():
        raise CheckpointError(
            f"{path} is a link to {os.readlink(path)}, and a run does not write through links in "
            "its folder",
            f"remove the link (rm {path}), or set output_dir to a folder on the other disk",
        )


def _refuse_writable(folder: Path) -> None:
    found = folder.stat()
    new = _stat_of_new_folder(folder)
    accept = "allow_shared_folder=true if you trust everyone who can"
    # Some mounts show every folder as open to all, even one just created for its owner only.
    has_modes = new is None or not new.st_mode & stat.S_IWOTH
    if found.st_mode & stat.S_IWOTH and has_modes:
        raise CheckpointError(
            f"every user of this machine can write to {folder} "
            f"(mode {stat.S_IMODE(found.st_mode):o}), and could replace checkpoints or plant links",
            f"run chmod go-w {folder}, use another output_dir, or set {accept}",
        )
    # An NFS server may assign root's files to another user; then that user is us.
    ours = (os.geteuid(), 0, new.st_uid if new is not None else 0)
    is_shared = found.st_mode & stat.S_IWGRP and found.st_gid in (os.getegid(), *os.getgroups())
    if found.st_uid not in ours and not is_shared:
        raise CheckpointError(
            f"{folder} belongs to user {found.st_uid} and this run to user {os.geteuid()}: its "
            "owner could replace checkpoints or plant links",
            f"use an output_dir of your own, or set {accept}",
        )


def _stat_of_new_folder(folder: Path) -> os.stat_result | None:
    """Return the stat of a private folder created in `folder`, or None if that fails."""
    try:
        probe = tempfile.mkdtemp(dir=folder, prefix=".probe_")
        try:
            return os.stat(probe)
        finally:
            os.rmdir(probe)
    except OSError:
        return None


def _refuse_foreign_link(folder: Path) -> None:
    """Refuse a link at the path of the checkpoints, unless the user created it."""
    if folder.is_symlink() and folder.lstat().st_uid not in (os.geteuid(), 0):
        raise CheckpointError(
            f"{folder} is a link to {os.readlink(folder)} that user {folder.lstat().st_uid} made",
            "remove it, or create it again yourself if checkpoints belong there",
        )


def _open(folder: Path | str, name: str, flags: int) -> int:
    """Open a regular file without following a link or blocking on a pipe."""
    path = PurePath(name)
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK
    with _opened_folder(folder, path.parent.parts, make=bool(flags & os.O_CREAT)) as parent:
        try:
            descriptor = os.open(path.name, flags, 0o666, dir_fd=parent)
        except OSError as error:
            raise _named(error, Path(folder, name)) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(Path(folder, name)))
    return descriptor


@contextmanager
def _opened_folder(folder: Path | str, below: Sequence[str], *, make: bool) -> Iterator[int]:
    """Open the subfolder with the path `below` in `folder`; no part of it may be a link."""
    if make:
        Path(folder).mkdir(FOLDER_MODE, parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        path = Path(folder)
        for name in below:
            path /= name
            try:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(name, FOLDER_MODE, dir_fd=descriptor)
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
                inner = os.open(name, flags, dir_fd=descriptor)
            except OSError as error:
                raise _named(error, path) from error
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def _named(error: OSError, path: Path) -> OSError:
    """Replace the kernel's "Too many levels of symbolic links" by a message that names the link."""
    if error.errno in _LINKED and path.is_symlink():
        return OSError(error.errno, f"it is a link to {os.readlink(path)}", str(path))
    return OSError(error.errno, os.strerror(error.errno or 0), str(path))
