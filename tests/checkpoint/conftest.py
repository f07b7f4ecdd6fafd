"""What all checkpoint tests share."""

import os
import sys
from pathlib import Path

import pytest

# What is measured at length there is done in small here.
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture(autouse=True)
def no_flushing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save the time: only a power loss takes what has been written and not flushed.

    That the flushes happen, and in the right order, is what `test_power_loss.py`
    checks on a model of a disk.
    """
    monkeypatch.setattr(os, "fsync", lambda _: None)
