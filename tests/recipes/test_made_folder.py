"""A folder of sample data is whole or not there, and nobody's files are written over."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.errors import DataError
from lockstep.testing import run_ranks
from lockstep_recipes.made_folder import RECORD, is_made, make_folder


def fill(aside: Path) -> None:
    for number in range(50):
        (aside / str(number)).write_text("sample")


def test_a_folder_is_made_once(tmp_path: Path) -> None:
    made = make_folder(tmp_path / "deep" / "data", {"num": 50}, fill)
    assert len(list(made.iterdir())) == 51
    assert json.loads((made / RECORD).read_text()) == {"num": 50}

    def refuse(aside: Path) -> None:
        raise AssertionError("made twice")

    assert make_folder(made, {"num": 50}, refuse) == made


def test_ranks_may_race(tmp_path: Path) -> None:
    made = run_ranks(4, make_folder, tmp_path / "data", {"num": 50}, fill)
    assert made == [tmp_path / "data"] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_folder_that_another_rank_makes_between_two_looks_is_no_stranger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Path.read_text

    def made_too_late(path: Path) -> str:
        try:
            return read(path)
        finally:
            if not path.parent.exists():
                path.parent.mkdir()
                fill(path.parent)
                path.write_text(json.dumps({"num": 50}))

    monkeypatch.setattr(Path, "read_text", made_too_late)
    assert not is_made(tmp_path / "data", {"num": 50})
    assert is_made(tmp_path / "data", {"num": 50})


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda folder: make_folder(folder, {"num": 51}, fill), "another sample set"),
        (lambda folder: folder.mkdir() or fill(folder), "not a sample set"),
        (lambda folder: folder.write_text("a file"), "not a sample set"),
    ],
)
def test_anything_else_is_left_alone(
    tmp_path: Path, spoil: Callable[[Path], object], word: str
) -> None:
    spoil(tmp_path / "data")
    with pytest.raises(DataError, match=word):
        make_folder(tmp_path / "data", {"num": 50}, fill)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_failed_writing_leaves_nothing_and_says_why(tmp_path: Path) -> None:
    def fail(aside: Path) -> None:
        fill(aside)
        raise OSError("disk full")

    with pytest.raises(DataError, match="disk full"):
        make_folder(tmp_path / "data", {"num": 50}, fail)
    assert list(tmp_path.iterdir()) == []
