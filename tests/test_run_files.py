"""A link in a run's folder leads nowhere, and a folder that others can change is refused."""

import ast
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep import CheckpointStore, RunConfig, fit, read_events, run_files
from lockstep.errors import LockstepError
from lockstep.observe.console import Console
from lockstep.observe.events import EventLog
from lockstep.run_files import append_text, make_folder, read_bytes, replace_text, replacing
from lockstep.testing import TinyTask, run_ranks

SRC = Path(__file__).resolve().parents[1] / "src"
PRECIOUS = "what a user would miss\n"


def train(folder: Path, max_steps: int = 2, **others: Any) -> str:
    """Train a tiny run; return how that ended."""
    values = {
        "output_dir": str(folder),
        "max_steps": max_steps,
        "batch": {"batch_size": 4},
        "checkpoint": {"every_steps": 2, "keep_last": 1, "background": False},
        "evaluation": {"every_epochs": None, "save_best": False},
        "sinks": {"log_file": str(folder / "train.log")},
        "device": "cpu",
        "num_threads": 1,
    }
    try:
        return f"done at {fit(TinyTask(48, 4), RunConfig.parse({**values, **others})).step}"
    except LockstepError as error:
        return f"{type(error).__name__}, exit code {error.exit_code}: {error}"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the folder of a run that has not begun."""
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "elsewhere" / "precious"
    path.parent.mkdir()
    path.write_text(PRECIOUS)
    return path


# --- Planted links ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "refusal"),
    [
        ("lock", "cannot lock {path}: [Errno 40] it is a link to {victim}: '{path}'"),
        ("events/rank_0.jsonl", "{path} is a link to {victim}, and a run does not write through"),
        ("config.json", ""),
        ("curves.png", ""),
        ("train.log", ""),
    ],
)
def test_a_link_in_the_place_of_a_file_leads_nowhere(
    name: str, refusal: str, run: Path, victim: Path
) -> None:
    path = run / name
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(victim)
    said = train(run)
    assert victim.read_text() == PRECIOUS
    if refusal:
        assert said.startswith("CheckpointError, exit code 2: ")
        assert refusal.format(path=path, victim=victim) in said
        assert "try: remove" in said
    else:
        assert said == "done at 2"
        assert path.is_symlink() == (name == "train.log"), "it is replaced, or left alone"


@pytest.mark.parametrize("name", ["events", "samples", "tensorboard", "wandb", "non_finite"])
def test_a_link_in_the_place_of_a_folder_is_refused(name: str, run: Path, victim: Path) -> None:
    (run / name).symlink_to(victim.parent)
    said = train(run)
    assert said.startswith(f"CheckpointError, exit code 2: {run / name} is a link to")
    assert os.listdir(victim.parent) == ["precious"]


def test_a_link_for_another_rank_is_refused_on_all(run: Path, victim: Path) -> None:
    (run / "events").mkdir()
    (run / "events" / "rank_1.jsonl").symlink_to(victim)
    said = run_ranks(2, train, run)
    assert said[0] == said[1]
    assert "rank 1: " in said[0]
    assert "is a link to" in said[0]
    assert victim.read_text() == PRECIOUS


def test_events_beside_a_link_are_lost_and_said(
    run: Path, victim: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A custom loop writes events without `fit`, which would have refused."""
    (run / "events").mkdir()
    (run / "events" / "rank_0.jsonl").symlink_to(victim)
    EventLog(run, 0).write("step", 1)
    assert victim.read_text() == PRECIOUS
    assert f"it is a link to {victim}" in caplog.text
    with pytest.raises(LockstepError, match="it is a link to"):
        read_events(run)


def test_a_log_beside_a_link_is_lost_and_said(
    run: Path, victim: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "train.log").symlink_to(victim)
    Console(10, log_file=run / "train.log").note("hello")
    assert victim.read_text() == PRECIOUS
    assert (
        f"warning: cannot write the log {run / 'train.log'}: it is a link"
        in capsys.readouterr().out
    )


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(run: Path) -> None:
    (run / "events").mkdir()
    os.mkfifo(run / "events" / "rank_0.jsonl")
    EventLog(run, 0).write("step", 1)
    with pytest.raises(LockstepError, match="not a regular file"):
        read_events(run)
    os.mkfifo(run / "lock")
    assert "it is not a regular file" in train(run)


def test_the_folder_of_a_run_may_itself_be_a_link(run: Path, tmp_path: Path) -> None:
    (tmp_path / "output").symlink_to(run)
    assert train(tmp_path / "output") == "done at 2"
    assert (run / "config.json").is_file()


# --- The functions ----------------------------------------------------------------------

WRITERS: dict[str, Callable[[Path, str], object]] = {
    "replace": lambda folder, name: replace_text(folder, name, "new"),
    "append": lambda folder, name: append_text(folder, name, "new"),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_no_folder_on_the_way_may_be_a_link(writer: str, run: Path, victim: Path) -> None:
    (run / "samples").symlink_to(victim.parent)
    for name in ("samples/precious", "samples/deeper/new.png"):
        with pytest.raises(OSError, match="it is a link to"):
            WRITERS[writer](run, name)
    with pytest.raises(OSError, match="it is a link to"):
        make_folder(run, "samples")
    assert os.listdir(victim.parent) == ["precious"]
    assert victim.read_text() == PRECIOUS


def test_a_file_is_replaced_in_one_piece_or_not_at_all(run: Path) -> None:
    replace_text(run, "samples/a.txt", "old")

    def fail_halfway() -> None:
        with replacing(run, "samples/a.txt") as file:
            file.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_halfway()
    assert read_bytes(run, "samples/a.txt") == b"old"
    assert os.listdir(run / "samples") == ["a.txt"]
    replace_text(run, "samples/a.txt", "a lone \ud800")
    assert read_bytes(run, "samples/a.txt") == b"a lone \\ud800"


def test_a_link_at_the_name_of_the_unfinished_file_is_not_followed(run: Path, victim: Path) -> None:
    (run / f".config.json.{os.getpid()}").symlink_to(victim)
    replace_text(run, "config.json", "{}")
    assert victim.read_text() == PRECIOUS
    assert os.listdir(run) == ["config.json"]


def test_what_is_larger_than_it_can_be_is_not_read(run: Path) -> None:
    replace_text(run, "wandb_id", "x" * 2000)
    with pytest.raises(OSError, match=r"it has 2,000 bytes, more than 1,000") as caught:
        read_bytes(run, "wandb_id", max_bytes=1000)
    assert caught.value.errno == errno.EFBIG
    with pytest.raises(FileNotFoundError):
        read_bytes(run, "missing/file")
    assert not (run / "missing").exists(), "reading makes no folder"


def test_files_of_a_group_are_made_for_the_group(run: Path) -> None:
    before = os.umask(0o002)
    try:
        append_text(run, "log.txt", "hello")
        replace_text(run, "config.json", "{}")
    finally:
        os.umask(before)
    for name in ("log.txt", "config.json"):
        assert stat.S_IMODE((run / name).stat().st_mode) == 0o664


# --- Who may write to the folder --------------------------------------------------------


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o1777])
def test_a_folder_that_everyone_can_write_to_is_refused(mode: int, run: Path) -> None:
    run.chmod(mode)
    said = train(run)
    assert said.startswith("CheckpointError, exit code 2: every user of this machine can write to")
    assert f"(mode {mode:o})" in said
    assert f"try: run chmod go-w {run}, use another output_dir, or set allow_shared_fold" in said
    assert os.listdir(run) == []
    assert train(run, allow_shared_folder=True) == "done at 2"


def test_checkpoints_that_everyone_can_write_to_are_refused(run: Path) -> None:
    assert train(run) == "done at 2"
    (run / "checkpoints").chmod(0o777)
    assert f"chmod go-w {run / 'checkpoints'}" in train(run)


def test_a_folder_that_a_group_shares_is_used(run: Path) -> None:
    run.chmod(0o2770)
    assert train(run) == "done at 2"


AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")


@AS_ROOT
def test_a_folder_of_another_user_is_refused(run: Path) -> None:
    os.chown(run, 4321, -1)
    said = train(run)
    assert said.startswith(f"CheckpointError, exit code 2: {run} belongs to user 4321 and this")
    assert train(run, allow_shared_folder=True) == "done at 2"


@AS_ROOT
def test_a_colleagues_folder_that_our_group_may_write_to_is_used(run: Path) -> None:
    os.chown(run, 4321, os.getegid())
    run.chmod(0o2770)
    assert train(run) == "done at 2"


@AS_ROOT
def test_a_server_that_gives_what_root_makes_to_another_user_is_no_reason_to_refuse(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS with root squash does; the server is faked by the owner of a new folder."""
    os.chown(run, 65534, -1)
    squashed = os.stat(run)
    monkeypatch.setattr(run_files, "_stat_of_new_folder", lambda folder: squashed)
    assert train(run) == "done at 2"


def test_a_run_makes_folders_that_not_everyone_may_write_to_whatever_the_umask(
    tmp_path: Path,
) -> None:
    before = os.umask(0)
    try:
        assert train(tmp_path / "open") == "done at 2"
        assert train(tmp_path / "open") == "done at 2", "started again"
    finally:
        os.umask(before)


# --- Checkpoints that were moved to another disk ----------------------------------------


def moved(run: Path, step: int) -> Path:
    """Move a checkpoint elsewhere and leave a link in its place."""
    target = run.parent / "disk" / f"step_{step:08d}"
    target.parent.mkdir(exist_ok=True)
    (run / "checkpoints" / target.name).rename(target)
    (run / "checkpoints" / target.name).symlink_to(target)
    return target


def test_a_checkpoint_moved_to_another_disk_is_resumed_from(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train(run) == "done at 2"
    target = moved(run, 2)
    before = sorted(os.listdir(target))
    assert train(run, 6) == "done at 6"
    assert "resumed at step 2 from" in capfd.readouterr().out
    assert sorted(os.listdir(target)) == before, "retention removes neither the link nor what it is"
    store = CheckpointStore(run / "checkpoints", keep_last=1, recipe="tiny")
    assert store.steps() == [2, 6]
    assert store.aliases() == {}


def test_a_link_to_a_disk_that_is_not_there_is_named(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train(run) == "done at 2"
    assert train(run, 3, checkpoint={"keep_last": 3}) == "done at 3"
    link = run / "checkpoints" / "step_00000003"
    target = moved(run, 3)
    target.rename(target.with_name("unmounted"))
    assert train(run, 3, checkpoint={"keep_last": 3}) == "done at 3"
    printed = capfd.readouterr().out
    assert f"skipped checkpoint {link}: {link}: manifest.json is missing" in printed
    assert "resumed at step 2 from" in printed
    assert not link.is_symlink(), "the step was trained and saved again"
    assert (link.with_name("superseded_1_step_00000003")).is_symlink()


def test_a_link_to_anything_else_is_named_too(run: Path, victim: Path) -> None:
    store = CheckpointStore(run)
    for step, target in ((1, victim), (2, victim.parent), (3, Path("/dev/null"))):
        store.path(step).symlink_to(target)
    checkpoint, rejected = store.latest()
    assert checkpoint is None
    assert [path.name[-1] for path, _ in rejected] == ["3", "2", "1"]
    store.save(2, {"model": {}}, {})
    assert store.latest()[0].step == 2  # type: ignore[union-attr]
    assert sorted(os.listdir(victim.parent)) == ["precious"]


def test_the_folder_of_checkpoints_may_be_a_link_of_the_users_own(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").mkdir()
    (run / "checkpoints").symlink_to(tmp_path / "disk")
    assert train(run) == "done at 2"
    assert (tmp_path / "disk" / "step_00000002").is_dir()
    assert train(run, resume="discard") == "done at 2"
    os.chown(run / "checkpoints", 4321, -1, follow_symlinks=False) if os.geteuid() == 0 else None
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    said = train(run, allow_shared_folder=True)
    assert f"{run / 'checkpoints'} is a link to {tmp_path / 'disk'} that user" in said


# --- There is no second way -------------------------------------------------------------

OWN_WAYS = ("run_files.py", "checkpoint/layout.py", "checkpoint/generation.py", "dist/position.py")
"""Files that open files themselves: exclusively, without following links, or in the launcher's
own temporary folder (position.py)."""
TOOLS = ("bench", "certify", "cli", "doctor", "harness", "launch")
WRITING = {"write_text", "write_bytes", "to_csv"}


def writes(source: str) -> list[str]:
    """Return the calls in `source` that write a file, by a path, in a way that follows links."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rsplit(".", 1)[-1]
        words = [a.value for a in node.args if isinstance(a, ast.Constant)]
        opens = name == "open" and any(isinstance(w, str) and set(w) & set("wax+") for w in words)
        creates = ast.unparse(node.func) == "os.open" and "O_CREAT" in ast.unparse(node)
        if name in WRITING or opens or creates:
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_the_core_opens_files_in_one_way() -> None:
    root = SRC / "lockstep"
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    core = {n: p for n, p in files.items() if n.split("/")[0] not in TOOLS and n not in OWN_WAYS}
    assert len(core) > 40
    assert {name: found for name, path in core.items() if (found := writes(path.read_text()))} == {}


def test_tasks_write_to_a_run_in_one_way() -> None:
    files = sorted((SRC / "lockstep_recipes").glob("*/task.py"))
    assert len(files) == 5
    assert {str(path): found for path in files if (found := writes(path.read_text()))} == {}


@pytest.mark.parametrize(
    "planted",
    ["Path(x).write_text('')", "path.open('a')", "open(x, 'wb')", "os.open(x, os.O_CREAT)"],
)
def test_the_guard_can_fail(planted: str) -> None:
    assert writes(planted)
    assert not writes("path.open('rb')\nopen(x)\nos.open(x, os.O_RDONLY)")
