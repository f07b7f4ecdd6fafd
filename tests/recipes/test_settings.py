"""Settings files: what is inherited, what the environment says, and what is refused by name."""

from importlib import import_module
from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep_recipes.settings import read_settings


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_file_holds_only_what_differs_from_its_base(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "data:\n  batch_size: 4\n  num_workers: 8\ntraining: {epochs: 20}")
    over = write(tmp_path, "sub/debug.yaml", "_base_: ../base.yaml\ndata:\n  num_workers: 0")
    assert read_settings(over) == {
        "data": {"batch_size": 4, "num_workers": 0},
        "training": {"epochs": 20},
    }


def test_a_section_with_nothing_below_it_leaves_the_base_alone(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "training:\n  learning_rate: 5e-4\n  epochs: 7")
    over = write(tmp_path, "mine.yaml", "_base_: base.yaml\ntraining:\n  # learning_rate: 1e-3\n")
    assert read_settings(over) == {"training": {"learning_rate": "5e-4", "epochs": 7}}


def test_values_come_from_the_environment_or_their_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(
        tmp_path, "a.yaml", "root: ${ROOT:/data}/ct\nbatch: ${BATCH:4}\nnames: ['${ROOT:x}']"
    )
    assert read_settings(path) == {"root": "/data/ct", "batch": 4, "names": ["x"]}
    monkeypatch.setenv("ROOT", "/mnt")
    monkeypatch.setenv("BATCH", "2")
    assert read_settings(path) == {"root": "/mnt/ct", "batch": 2, "names": ["/mnt"]}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: ${NOT_THERE}", "NOT_THERE"),
        ("_base_: missing.yaml", "missing.yaml cannot be read"),
        ("_base_: a.yaml", "build on each other"),
        ("_base_: [1]", "is not a file name"),
        ("a: [1", "line 1 is not YAML"),
        ("- 1", "holds a value of type list instead of `key: value` pairs"),
        ("a: 1\na: 2", "twice"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path, "a.yaml", text)
    with pytest.raises(ConfigError, match=said) as caught:
        read_settings(path)
    assert "\n" not in caught.value.problem


def test_an_empty_file_holds_nothing(tmp_path: Path) -> None:
    assert read_settings(write(tmp_path, "a.yaml", "# nothing yet\n")) == {}


@pytest.mark.parametrize("recipe", ["protein", "segmentation"])
def test_a_rehearsal_with_another_seed_uses_the_data_that_the_last_one_made(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_REHEARSAL", "1")
    monkeypatch.chdir(tmp_path)
    build = import_module(f"lockstep_recipes.{recipe}.flags").build

    def made(seed: str) -> dict[Path, tuple[int, int]]:
        """Build the run; return every file there is, by what changes when it is written again."""
        build(["--output_dir=run", "--seed", seed])
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}

    first = made(seed="0")
    assert first
    assert made(seed="1") == first
