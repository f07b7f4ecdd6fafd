"""A run struck again and again ends as one that never was, and a broken product is seen."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos.drive import Launcher, Story
from chaos.mutants import MUTANTS, NUM_STEPS
from chaos.schedule import POINTS, Fault, Leg

from chaos import drive, oracles, schedule
from lockstep.testing import run_ranks

CLEAN = (
    Leg(3, (Fault("kill", "reduce_send", 1, 7), Fault("segfault", "restore", 2, attempt=1)), 0, 1),
    Leg(2, (Fault("worker", "loader_next", 0, 2), Fault("term", "", 1, 4)), workers=1),
    Leg(1, (Fault("no_space", "ckpt_write", 0, 3, nth=2),)),
    Leg(3, (Fault("kill", "log_flush", 0, 4), Fault("exit", "import", 1, attempt=1)), 0, 1),
    Leg(2, (Fault("flip", "after_update", 1, 7),)),
    Leg(3, (Fault("kill", "ckpt_write", 1, 9),), background=True, sharded=True),
    Leg(1, (Fault("power_loss", "ckpt_rename", 0, 3),), background=True),
)
BROKEN = (
    Leg(2, (Fault("kill", "after_update", 1, 17),)),
    Leg(1, (Fault("flip", "after_update", 0, 8),)),
)


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    with Launcher(tmp_path_factory.mktemp("launcher")) as one:
        yield one


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    run_ranks(1, plain_run, folder)
    return folder


def plain_run(folder: Path) -> None:
    from chaos.train import Chaotic, config_for

    from lockstep import fit

    fit(Chaotic(), config_for(folder, NUM_STEPS, Leg(1, ())))


def broken(story: Story, golden: Path) -> dict[str, str]:
    """Return what did not hold, and what was seen."""
    return {v.name: v.seen for v in oracles.judge(story, golden) if not v.held}


def test_ten_faults_leave_no_trace(launcher: Launcher, golden: Path, tmp_path: Path) -> None:
    story = drive.run(tmp_path / "run", CLEAN, NUM_STEPS, launcher, limit_s=100)
    assert broken(story, golden) == {}
    struck = [str(story.fault(told)) for told in story.told("struck")]
    assert len(struck) == 10, struck
    found = oracles.figures(story)
    assert found["recovery_warm_s"]["count"] + found["overtaken"] == 9


@pytest.mark.parametrize("mutant", ["momentum_forgotten", "no_hash_check", "oldest_taken"])
def test_a_broken_product_is_seen(
    mutant: str, launcher: Launcher, golden: Path, tmp_path: Path
) -> None:
    story = drive.run(tmp_path / "run", BROKEN, NUM_STEPS, launcher, mutant, limit_s=100)
    seen = broken(story, golden)
    assert MUTANTS[mutant].seen_by in seen, seen


def plant(mutant: str) -> None:
    MUTANTS[mutant].plant()


def test_every_mutant_can_be_planted() -> None:
    for mutant in MUTANTS:
        run_ranks(1, plant, mutant)


def test_a_fault_strikes_at_every_point(launcher: Launcher, golden: Path, tmp_path: Path) -> None:
    legs = tuple(Leg(2, (Fault("kill", point, 0, 1),)) for point in POINTS)
    story = drive.run(tmp_path / "run", legs, NUM_STEPS * 4, launcher, limit_s=100)
    struck = [str(story.fault(told)) for told in story.told("struck")]
    assert struck == [f"kill at {point}" for point in POINTS]


def test_a_schedule_is_drawn_from_its_seed_and_written_down(tmp_path: Path) -> None:
    legs = schedule.draw(seed=3, num_legs=200, num_steps=3000, max_ranks=4)
    assert legs == schedule.draw(seed=3, num_legs=200, num_steps=3000, max_ranks=4)
    assert legs != schedule.draw(seed=4, num_legs=200, num_steps=3000, max_ranks=4)
    schedule.write(legs, tmp_path / "legs.json")
    assert schedule.read(tmp_path / "legs.json") == legs
    first = [leg.faults[0] for leg in legs]
    at_points = sum(bool(fault.point) for fault in first)
    assert 80 < at_points < 130
    assert {leg.size for leg in legs} == {1, 2, 3, 4}
    assert len({fault.kind for fault in first}) > 12
