"""The variables of ranks that a tool starts by hand."""

from pathlib import Path

import pytest

from lockstep.harness.ranks import threads_of_each
from lockstep.harness.runs import CommandRuns


@pytest.mark.parametrize(
    ("given", "threads"),
    [("3", 3), ("4,2", 4), (" 4 , 2", 4), ("", None), ("many", None), ("0", None)],
)
def test_threads_may_be_a_list_as_openmp_allows(
    given: str, threads: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    assert threads_of_each(1) == (threads or 6)
    assert CommandRuns(["true"], tmp_path, "a:B", limit_s=1).threads == (threads or 1)
