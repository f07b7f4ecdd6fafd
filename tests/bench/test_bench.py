"""`lockstep bench`: the model against sums done by hand, and the command line on real ranks.

How well the model foretells a step over a link of known bandwidth or latency is scored by
`benchmarks/forecast.py`.
"""

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep import Loader, RunConfig
from lockstep.bench.callback import SHARDED
from lockstep.bench.forecast import SUM_BYTES, Bucket, Timeline, forecast, slowest_of, step_s
from lockstep.bench.link import Link, fit_link
from lockstep.bench.measured import Measured
from lockstep.bench.probe import input_samples_per_s
from lockstep.bench.report import Scaling, alone_s, limit_of
from lockstep.bench.runs import BenchRuns
from lockstep.cli.main import main
from lockstep.dist.pace import Clock
from lockstep.plan import BatchConfig, plan_batches
from lockstep.testing import FakeWorld, ManualClock

pytestmark = pytest.mark.timeout(120)

DEEP = """
import sys
import time

import torch
from torch import nn

from lockstep import Averaging, PartialLoss, RunConfig, Task, fit

LAYERS, READ_S, EXCHANGE_S = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
exchange = Averaging.exchange


def slow(self, bucket):
    time.sleep(EXCHANGE_S)
    return exchange(self, bucket)


class Samples:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(READ_S)
        return torch.ones(256)


class Deep(Task):
    name = "deep"

    def build_model(self):
        return nn.Sequential(*(nn.Linear(256, 256) for _ in range(LAYERS)))

    def build_optimizer(self, model, lr):
        return torch.optim.SGD(model.parameters(), lr=lr)

    def train_data(self):
        return Samples()

    def loss(self, model, batch, context):
        return PartialLoss(model(batch).square().sum(), len(batch))


Averaging.exchange = slow
small = {"epochs": 1, "batch": {"batch_size": 4}, "gradients": {"bucket_mb": 1}}
sys.exit(fit(Deep(), RunConfig.parse(small)).exit_code)
"""


def say(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    """Run `lockstep bench WORDS` in this process and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["lockstep", "bench", *map(str, words)])
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


# --- The model, by hand ---

TIMELINE = Timeline(
    step_s=1.0,
    backward_end_s=0.8,
    buckets=(Bucket(1_000_000, 0.4), Bucket(2_000_000, 0.6), Bucket(1_000_000, 0.8)),
    samples=10,
)
LINK = Link("by hand", latency_s=0.01, bytes_per_s=1e7, ring_only=True)


def test_a_ring_and_a_tree_cost_what_they_send() -> None:
    # Four ranks, 4 MB: six rounds of 10 ms and a MB each; up and down two levels, 8 MB in all.
    assert LINK.ring_s(4e6, 4) == pytest.approx(6 * (0.01 + 0.1))
    assert LINK.tree_s(4e6, 4) == pytest.approx(4 * 0.01 + 0.8)
    # Of many small messages the tree takes fewer, and NCCL would take it.
    assert replace(LINK, ring_only=False).all_reduce_s(1000, 64) == LINK.tree_s(1000, 64)
    assert LINK.all_reduce_s(1000, 64) == LINK.ring_s(1000, 64) > LINK.tree_s(1000, 64)
    assert LINK.ring_s(4e6, 1) == LINK.tree_s(4e6, 1) == 0


def test_buckets_hide_behind_the_backward_pass_and_queue_behind_each_other() -> None:
    # 0.4 + 0.12 = 0.52; the second waits for its gradients: 0.6 + 0.22 = 0.82; the third, ready
    # at 0.8, for the second: 0.82 + 0.12 = 0.94. Then the 0.2 after the backward pass.
    assert step_s(TIMELINE, [0.12, 0.22, 0.12]) == pytest.approx(0.94 + 0.2)
    # Quick ones hide, but for the last, which has nothing left to hide behind.
    assert step_s(TIMELINE, [0.1, 0.1, 0.05]) == pytest.approx(0.85 + 0.2)
    assert step_s(TIMELINE, [0.0, 0.0, 0.0]) == pytest.approx(1.0)


def test_a_forecast_is_the_ring_over_the_buckets_the_sums_and_the_slowest() -> None:
    made = forecast(replace(TIMELINE, num_sums=2.0, spread_s=0.1), LINK, 2)
    sums_s = 2 * (0.02 + SUM_BYTES / 1e7)
    late_s = 0.1 * slowest_of(2)
    assert made.step_s == pytest.approx(1.14 + sums_s + late_s)
    assert made.exposed_s == pytest.approx(0.14 + sums_s)
    assert made.all_reduce_s == pytest.approx(0.46)
    assert made.samples_per_s == pytest.approx(20 / made.step_s)
    assert made.efficiency == pytest.approx(1.0 / made.step_s)
    assert made.low_s == pytest.approx(1.14 + sums_s)
    assert made.high_s == pytest.approx(1.14 + sums_s + 2 * late_s)
    # The spread of the link is in the bars too. A tenth faster, the third finds the way free:
    # 0.8 + 0.108; a tenth slower, it waits until 0.6 + 0.242, and arrives 0.132 later.
    wide = forecast(TIMELINE, replace(LINK, spread=0.1), 2)
    assert (wide.low_s, wide.high_s) == pytest.approx((0.908 + 0.2, 0.974 + 0.2))


def test_a_fixed_global_batch_leaves_each_gpu_fewer_micro_batches() -> None:
    own = replace(TIMELINE, micro_batches=4, fixed_batch=True, samples=40).on(2)
    assert (own.micro_batches, own.samples) == (2, 20)
    assert (own.step_s, own.backward_end_s) == pytest.approx((0.6, 0.4))
    assert own.buckets[-1].ready_s == pytest.approx(0.4)
    assert replace(TIMELINE, micro_batches=4).on(2).step_s == 1.0


def test_fewer_micro_batches_are_waited_for_as_much_shorter() -> None:
    waits = replace(ONE, facts=ONE.facts | {"micro_batches": 4, "fixed_batch": True}, wait_s=0.08)
    waits = replace(waits, backward_end_s=0.016)  # 4 ms after it that are not of the loader
    own = waits.timeline().on(4)
    assert own.step_s == pytest.approx(0.004 + 0.02 + 0.004)
    assert alone_s(replace(TWO, ranks=4), waits) == pytest.approx(0.004 + 0.004)
    # On a GPU most of it hides behind the step, which gets shorter by what does not.
    assert replace(waits, backward_end_s=0.08).timeline().on(4).step_s == pytest.approx(0.025)


def test_micro_batches_that_do_not_share_out_evenly_speed_up_as_the_busiest_rank() -> None:
    own = replace(TIMELINE, step_s=12.0, backward_end_s=12.0, buckets=(), samples=120)
    own = replace(own, micro_batches=12, fixed_batch=True)
    speed_ups = [forecast(own, LINK, ranks).speed_up for ranks in (2, 5, 8, 12)]
    assert speed_ups == pytest.approx([2, 4, 6, 12])  # 6, 3, 2 and 1 micro-batches


def test_the_fit_recovers_latency_and_bandwidth() -> None:
    link = Link("true", latency_s=50e-6, bytes_per_s=1.5e9)
    sizes = [4096 * 4**power for power in range(7)]
    exact = fit_link([(size, link.ring_s(size, 4)) for size in sizes], 4)
    assert exact.latency_s == pytest.approx(50e-6, rel=1e-6)
    assert exact.bytes_per_s == pytest.approx(1.5e9, rel=1e-6)
    assert exact.spread == pytest.approx(0, abs=1e-9)
    noisy = [(size, link.ring_s(size, 4) * (1.05, 0.95)[n % 2]) for n, size in enumerate(sizes)]
    near = fit_link(noisy, 4)
    assert near.latency_s == pytest.approx(50e-6, rel=0.05)
    assert near.bytes_per_s == pytest.approx(1.5e9, rel=0.1)
    assert 0.03 < near.spread < 0.06


# --- What limits a step, in words ---

ONE = Measured(
    facts={"global_batch": 8, "micro_batches": 1, "fixed_batch": False},
    ranks=1,
    whole_s=[0.100] * 5,
    local_s=[0.100] * 5,
    wait_s=0.001,
    local_wait_s=0.001,
    forward_s=0.03,
    backward_s=0.06,
    after_s=0.01,
    backward_end_s=0.09,
    buckets=[],
    exchange_s=0.0,
    sizes=[],
    sums_per_step=2.0,
    input_samples_per_s=8000.0,
)
QUICK = [(size, 1e-5 + size * 1e-9) for size in (4096, 2**20)]
TWO = replace(ONE, facts={**ONE.facts, "global_batch": 16}, ranks=2, sizes=QUICK, exchange_s=0.05)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (TWO, "compute: 99.0 of 100 ms"),
        (replace(ONE, local_s=[0.120] * 5), "compute: 99.0 of 100 ms"),  # nobody to blame
        (
            replace(TWO, whole_s=[0.138] * 5),
            "communication: 38.0 ms of all-reduce do not overlap with 60.0 ms of backward (50.0 ms",
        ),
        (
            replace(TWO, whole_s=[0.15] * 5, local_s=[0.149] * 5, wait_s=0.05, local_wait_s=0.05),
            "input: 50.0 of 150 ms wait for data; the loader alone reads 8000 samples/s, the steps "
            "could use 160",
        ),
        (
            replace(TWO, whole_s=[0.15] * 5, local_s=[0.15] * 5),
            "contention: a step's own work takes 149 ms beside the other processes, 99.0 ms on ",
        ),
        (
            replace(TWO, sizes=[(4096, 0.004), (2**24, 0.04)], local_s=[0.099] * 5),
            "communication: 2 small sums over ranks in a step of 100 ms take 8.0 ms",
        ),
    ],
)
def test_the_limit_is_named(found: Measured, words: str) -> None:
    assert limit_of(found, ONE).startswith(words)


def test_of_a_sharded_model_nothing_is_told_apart_or_forecast() -> None:
    facts = {**ONE.facts, "parallel": "fsdp", "remarks": [SHARDED]}
    one = replace(ONE, facts=facts)
    two = replace(one, facts={**facts, "global_batch": 16}, ranks=2, whole_s=[0.15] * 5)
    found = Scaling.of(["train.py"], [one, replace(two, local_s=[0.148] * 5)], None)
    assert found.forecasts == []
    assert found.rows[1].communication == 0
    assert found.rows[1].limit.startswith("sharding or contention: a step's own work takes 147 ms")
    assert found.lines()[-1] == f"  remark: {SHARDED}"


def test_what_is_left_out_of_a_measurement_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = {**ONE.facts, "num_workers": 0, "device": "cpu", "remarks": ["without exact mode"]}
    monkeypatch.setattr(BenchRuns, "measure", lambda *args, **named: replace(ONE, facts=facts))
    for verb in ("step", "input"):
        assert say(monkeypatch, verb, "--", "train.py") == 0
        assert capsys.readouterr().out.endswith("  remark: without exact mode\n")


def test_a_batch_that_a_rank_reads_to_keep_in_step_is_no_input(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Three micro-batches of two on two ranks: the first has one, and borrows one."""
    clock, world = ManualClock(), FakeWorld(rank=0, size=2)

    class Slow(list[int]):
        def __getitem__(self, index: Any) -> Any:
            clock.advance(0.01)
            return super().__getitem__(index)

    plan = plan_batches(BatchConfig(batch_size=2, global_batch_size=6), 60, 2)
    loader = Loader(Slow(range(60)), world, plan=plan, max_steps=1000)
    config = RunConfig(output_dir=str(tmp_path))
    run: Any = SimpleNamespace(loader=loader, world=world, config=config)
    monkeypatch.setattr("lockstep.bench.probe.time.perf_counter", clock)
    assert input_samples_per_s(run, Clock(world.device)) == pytest.approx(50)


# --- On real ranks ---


def test_scaling_is_measured_drawn_and_forecast(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A model with three buckets, each of which takes a twentieth of a second to exchange."""
    (tmp_path / "deep.py").write_text(DEEP)
    report, picture = tmp_path / "scaling.json", tmp_path / "scaling.png"
    options = ["--gpus", "2", "--steps", "4", "--interconnect", "ethernet100"]
    options += ["--json", str(report), "--picture", str(picture)]
    command = [sys.executable, str(tmp_path / "deep.py"), "10", "0", "0.05"]
    assert say(monkeypatch, "scaling", *options, "--", *command) == 0
    said = capsys.readouterr().out
    found = json.loads(report.read_text())
    one, two = found["rows"]
    assert (one["ranks"], two["ranks"]) == (1, 2)
    assert one["actual"] == 1.0
    assert two["actual"] == pytest.approx(2 * one["step_ms"] / two["step_ms"])
    assert two["overhead"] == pytest.approx(1 - two["actual"] / 2)
    assert two["all_reduce_ms"] > 150
    exposed_ms = two["step_ms"] - two["compute_ms"]
    assert 120 < exposed_ms < 1.9 * two["all_reduce_ms"]  # all of it, and not twice
    assert two["limit"].startswith("communication: ")
    assert not one["limit"].startswith("communication: ")
    cut = found["one_process"]["timeline"]["buckets"]
    assert len(cut) == 3
    assert [bucket["size_bytes"] for bucket in cut] == two["buckets"]
    ready = [bucket["ready_s"] for bucket in cut]
    timeline = found["one_process"]["timeline"]
    assert 0 < ready[0] < ready[1] < ready[2] <= timeline["backward_end_s"]
    for ranks, work in zip((1, 2), found["work"], strict=True):  # 4 samples a rank, 10 layers
        assert work["operations_each"] == ranks * [4 * [2 * 4 * 256**2 * (3 * 10 - 1)]]
        assert 0 < work["mfu"] < 1
    assert found["measured_link"]["bytes_per_s"] > 1e7
    (made,) = found["forecasts"]
    assert made["link"]["bytes_per_s"] == 1e10
    assert [at["ranks"] for at in made["gpus"]] == [8, 64, 1024]
    assert all(at["low_s"] <= at["step_s"] <= at["high_s"] for at in made["gpus"])
    assert "theoretical" in said
    assert f"  2 limited by {two['limit']}" in said
    assert "forecast, ethernet100: 10 GB/s, 30 us (80 % of nominal, assumed)" in said
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "output").exists()


def test_slow_reading_is_called_the_limit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "deep.py").write_text(DEEP)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    report = tmp_path / "input.json"
    words = ["input", "--steps", "4", "--json", str(report), "--"]
    assert (
        say(monkeypatch, *words, sys.executable, str(tmp_path / "deep.py"), "1", "0.01", "0") == 0
    )
    found = json.loads(report.read_text())
    assert 0 < found["input_samples_per_s"] <= 100  # for each it sleeps a hundredth of a second
    assert found["wait_s"] >= 4 / 100
    assert "input is the limit: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("scaling --gpus 1,two -- python x.py", "--gpus 1,two is not a list of numbers"),
        ("scaling --gpus 0,2 -- python x.py", "--gpus 0,2 is not a list of numbers"),
        ("scaling -- no_such_program x.py", "no_such_program cannot be started: No such file"),
        (f"step -- {sys.executable} no_such.py", "the command failed (as typed: "),
        (f"scaling -- {sys.executable} -c pass", "the command ended before it could be measured"),
        (
            "scaling --interconnect nvlnk4 -- x",
            "--interconnect nvlnk4 is not known\n  try: pass nvlink4",
        ),
        ("scaling --link 10,1 -- x", "--link 10,1 is not a bandwidth and a latency"),
        ("scaling --picture no/a.png -- x", "no/a.png is in a folder that does not exist"),
        ("collectives --gpus 1", "--gpus 1: an all-reduce needs 2 processes"),
    ],
)
def test_what_cannot_be_measured_is_one_clear_line(
    words: str,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # what a failed command said is kept
    assert say(monkeypatch, *words.split()) == 2
    said = capfd.readouterr().err
    assert said.startswith(f"lockstep: {line}")
    assert "Traceback" not in said
    assert "\n  try: " in said
