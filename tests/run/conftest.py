"""What the tests of whole runs share."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from whole_run import run


@pytest.fixture(scope="session")
def of_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    run(folder, 1)
    return folder
