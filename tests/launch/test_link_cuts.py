"""The network between two nodes is cut during a save: at most one half commits checkpoints."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import link_cuts
from link_cuts import Plan

from lockstep.checkpoint import store as store_module

pytestmark = pytest.mark.timeout(240)

OUTLASTED = Plan(
    ending="other alone",
    is_sharded=False,
    is_background=False,
    keep_last=100,
    locks_reach=False,
    restarts=0,
    cut_rank=0,
    cut_save=4,
    cut_place=0.5,
    stall_s=0.0,
    outlasts=True,
    pause_s=0.0,
    is_restored_later=False,
    is_killed=True,
)
"""The first rank is in the middle of a save when the other node takes the folder over."""
RESTORED = replace(OUTLASTED, ending="restored", outlasts=False, is_sharded=True, restarts=2)


def test_a_link_cut_in_a_save_leaves_one_chain_of_checkpoints(tmp_path: Path) -> None:
    """What `benchmarks/link_cuts.py` does a hundred times."""
    outlasted, restored = link_cuts.sweep([OUTLASTED, RESTORED], 2, tmp_path)
    assert outlasted["faults"] == restored["faults"] == []
    assert outlasted["half_written"]
    assert outlasted["refused"] == 1, outlasted
    assert restored["codes"] == {"node 0": 0, "node 1": 0}


def test_the_planted_fault_without_the_two_looks_both_halves_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_is_stale", lambda *_: False)
    (found,) = link_cuts.sweep([replace(OUTLASTED, is_fenced=False)], 1, tmp_path)
    assert any("of both halves, after one had resumed" in one for one in found["faults"]), found
