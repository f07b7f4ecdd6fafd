"""A cluster for the tests of this folder, and jobs on it that end with their test."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# The files beside this one are imported by the tests and run by jobs.
sys.path.insert(0, str(Path(__file__).parent))

from cluster import Cluster, NoCluster, start_cluster
from submitted import HERE, Submit, Submitted

SHAPE = ("--nodes", "2", "--cpus-only", "--time", "10")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Return a cluster of this process's own, or skip and say why there is none."""
    try:
        one = start_cluster()
    except NoCluster as reason:
        pytest.skip(f"no test cluster: {str(reason).splitlines()[0]}")
    yield one
    one.stop()


@pytest.fixture
def submit(cluster: Cluster, tmp_path: Path) -> Iterator[Submit]:
    """Submit the script of this folder; what it makes is in `tmp_path / "run"`."""
    submitted: list[Submitted] = []
    shutil.copy(HERE / "train_steps.py", tmp_path)

    def begin(*words: str, flags: tuple[str, ...] = SHAPE) -> Submitted:
        for earlier in submitted:
            earlier.output.rename(earlier.output.with_suffix(f".{len(submitted)}"))
        one = Submitted(cluster, tmp_path, (*flags, *words))
        submitted.append(one)
        return one

    yield begin
    for one in submitted:
        one.end()
    cluster.wait_for_nodes()
