"""The benchmarks measure what they say, and a target that is missed is said to be missed."""

import importlib.util
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lockstep import RunConfig, fit, read_events
from lockstep.testing import run_ranks

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def load(name: str) -> ModuleType:
    """Import a benchmark, which is no package."""
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


overhead, stalls = load("overhead"), load("stalls")
recipes_step, forecast = load("recipes_step"), load("forecast")


def measured(way: str, folder: Path, num_steps: int = 90) -> dict[str, Any]:
    """Run a way here, and return what it left behind."""
    overhead.work(way, overhead.Settings("cpu", num_steps, 0, str(folder)))
    return dict(json.loads((folder / "found_0.json").read_text()))


@pytest.mark.parametrize("way", ["by hand", "lockstep"])
def test_every_step_is_taken_and_trains(way: str, tmp_path: Path) -> None:
    found = measured(way, tmp_path)
    assert found["steps"] == 90
    assert found["loss"] < 1.5  # from 2.3, that of a guess
    assert found["fastest_us"] <= found["step_us"]


class Clock:
    """Time that passes as a real clock says, or not at all, and where a test lets it."""

    def __init__(self, real: Callable[[], float] = lambda: 0.0) -> None:
        self.real, self.passed = real, 0.0

    def perf_counter(self) -> float:
        return self.real() + self.passed


def test_what_a_log_line_costs_is_in_the_time_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, real = Clock(), json.dumps

    def slow(*args: Any, **kwargs: Any) -> str:
        clock.passed += 0.05
        return real(*args, **kwargs)

    monkeypatch.setattr(overhead, "time", clock)
    monkeypatch.setattr(overhead.json, "dumps", slow)
    found = measured("by hand", tmp_path, 70)
    assert found["fastest_us"] == pytest.approx(5000)  # of 50 ms each of ten steps has its part
    assert found["step_us"] == pytest.approx(5000)


def test_a_way_is_compared_with_what_the_loop_by_hand_took_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand has a thread of its own, the way the main one; a machine gets slower meanwhile."""
    clock, real, num_lines = Clock(), json.dumps, 0

    def slow(*args: Any, **kwargs: Any) -> str:
        nonlocal num_lines
        num_lines += 1
        is_by_hand = threading.current_thread() is not threading.main_thread()
        clock.passed += (1.0 if is_by_hand else 1.5) * 1.001**num_lines
        return real(*args, **kwargs)

    monkeypatch.setattr(overhead, "time", clock)
    monkeypatch.setattr(overhead.json, "dumps", slow)
    found = measured("by hand", tmp_path, 150)
    assert len(found["ratios"]) == 8  # of 14 times ten steps, five to warm up, the last alone
    assert found["ratios"] == pytest.approx([1.5] * 8, rel=1e-6)


def test_a_row_is_the_median_of_its_pairs_where_it_has_some() -> None:
    found = {"step_us": 100, "fastest_us": 90, "loss": 1.0, "ratios": [1.1, 1.2, 1.5]}
    rows = overhead.summarise({"by hand": [found | {"ratios": [0.8]}], "slow": [found]}, 1)
    assert [row["beside"] for row in rows] == [0.8, 1.2]
    assert [row["ratio"] for row in rows] == pytest.approx([1.0, 1.5])
    assert rows[1]["num_pairs"] == 3


def test_a_row_is_the_median_of_its_rounds_against_the_first_way() -> None:
    def rounds(*times: float) -> list[dict[str, float]]:
        return [{"step_us": t, "fastest_us": t - 1, "loss": 1.0} for t in times]

    rows = overhead.summarise({"by hand": rounds(100, 90, 500), "slow": rounds(150, 50, 151)}, 2)
    assert [row["step_us"] for row in rows] == [100, 150]
    assert [row["ratio"] for row in rows] == [1.0, 1.5]
    assert [row["fastest_us"] for row in rows] == [89, 49]


def test_a_peer_that_fails_is_named_and_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its process does not know the way, and ends with an error."""
    monkeypatch.setitem(overhead.WAYS, "Unknown", (overhead.by_hand, "peer"))
    args = overhead.build_parser().parse_args(["--steps", "70", "--rounds", "2"])
    assert overhead.measure(["Unknown"], 1, args) == []
    assert capsys.readouterr().out.startswith("left out: Unknown, 1 processes: exit 1")


def over_a_slow_link(folder: Path) -> None:
    """Train a model that takes no time, over a link that does."""
    forecast.FORWARD_S = forecast.BACKWARD_S = 0.0
    forecast.slow_down(0.1, 0.0)
    values = {"max_steps": 4, "batch": {"batch_size": 4}, "log_every": 1, "device": "cpu"}
    quiet = {"output_dir": str(folder), "sinks": {"curves": False}}
    fit(forecast.SleepTask(), RunConfig.parse(values | quiet))


def test_a_slow_link_takes_its_time_for_every_bucket(tmp_path: Path) -> None:
    run_ranks(2, over_a_slow_link, tmp_path)
    steps = [event for event in read_events(tmp_path) if event["event"] == "step"]
    assert len(steps) == 4
    num_buckets = len({kind for kind, _ in forecast.BLOCKS})  # small ones of a kind go together
    assert min(event["step_time_s"] for event in steps) > 0.1 * num_buckets


def test_a_seek_is_flat_and_a_slow_one_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(time.process_time)  # of this process alone, whatever else the machine does
    monkeypatch.setattr(stalls, "time", clock)
    rows = stalls.seeks(repeats=5)
    assert [row.verdict for row in rows[:4]] == ["ok"] * 4
    real = stalls.Loader.seek

    def reading_again(loader: Any, step: int, consumed: int) -> None:
        clock.passed += consumed * 1e-10
        real(loader, step, consumed)

    monkeypatch.setattr(stalls.Loader, "seek", reading_again)
    assert [row.verdict for row in stalls.seeks(repeats=5)] == ["ok"] * 3 + ["MISSED"] * 2


@pytest.mark.parametrize(("value", "code"), [(2.0, 0), (2.1, 1)])
def test_a_missed_target_is_an_exit_code(
    value: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for part in ("checkpoints", "start_up"):
        monkeypatch.setattr(stalls, part, lambda *args: [])
    monkeypatch.setattr(stalls, "seeks", lambda repeats: [stalls.Row("a wait", value, "s", 2.0)])
    monkeypatch.setattr(sys, "argv", ["stalls"])
    assert stalls.main() == code
    assert ("MISSED" in capsys.readouterr().out) == bool(code)


@pytest.mark.parametrize("case", recipes_step.CASES, ids=lambda case: case.name)
def test_a_recipe_understands_the_words_it_is_measured_with(case: Any, tmp_path: Path) -> None:
    flags = importlib.import_module(f"lockstep_recipes.{case.recipe}.flags")
    flags.build([str(word) for word in case.words(tmp_path, True)])


def test_the_table_of_recipes_is_made_of_what_was_measured() -> None:
    work = {"per_s": 3e13, "limit_per_s": 1e14, "dtype": "bf16", "mfu": 0.3, "busy": 0.9}
    work |= {"update_s": 0.002, "peak_bytes": 10**9, "kinds": {"matmul": 0.6, "copies": 0.4}}
    found = {"facts": {"device": "a GPU", "global_batch": 8}, "whole_s": [0.1, 0.1, 0.9]}
    row = recipes_step.row_of(recipes_step.CASES[0], found | {"wait_s": 0.02, "work": work})
    words = recipes_step.table([row])[1].split()
    assert words[:5] == ["jit-256", "100.0", "80", "30", "30.0"]
    assert " ".join(words[5:]) == "% 90 % 20 % matmul 60 %"
