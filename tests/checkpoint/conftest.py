"""What all checkpoint tests share."""

import os

import pytest


@pytest.fixture(autouse=True)
def no_flushing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save the time: only a power loss takes what has been written and not flushed.

    That the flushes happen, and in the right order, is what `test_crash.py`
    checks from a trace; the store it starts from is written with real ones.
    """
    monkeypatch.setattr(os, "fsync", lambda _: None)
