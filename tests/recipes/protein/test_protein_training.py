"""Training: N ranks equal one, resuming equals never stopping, and it learns."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from stopping import NEVER, finish_on

from lockstep import Loader, RunConfig, fit, train_step
from lockstep.data.order import leaves_of
from lockstep.data.reader import LeafReader
from lockstep.plan import BatchConfig, plan_batches
from lockstep.task import Context
from lockstep.testing import FakeWorld, run_ranks
from lockstep_recipes.protein.residues import UNKNOWN
from lockstep_recipes.protein.sample_data import make_chains
from lockstep_recipes.protein.structure import Chain
from lockstep_recipes.protein.task import ProteinTask

EXACT = 1e-12
QUIET = {"sinks": {"curves": False}, "log_every": 1000}


def without_units(chain: Chain) -> Chain:
    """Return a chain that is there but has nothing to be scored."""
    nothing = np.zeros_like(chain.chi_mask)
    return replace(chain, aatype=np.full_like(chain.aatype, UNKNOWN), chi_mask=nothing)


class Doubled:
    """A task in float64 under plain SGD: what differs between ranks then shows."""

    def __init__(self, task: ProteinTask) -> None:
        self.task = task
        build_model, collate = task.build_model, task.collate
        task.build_model = lambda: build_model().double()  # type: ignore[method-assign]
        task.build_optimizer = lambda m, lr: torch.optim.SGD(m.parameters(), lr=lr)  # type: ignore[method-assign]
        task.collate = lambda samples: {  # type: ignore[method-assign]
            k: v.double() if v.is_floating_point() else v for k, v in collate(samples).items()
        }


def train(
    make: Callable[[], ProteinTask], folder: str, steps: int, **changes: Any
) -> dict[str, Any]:
    """Train on the rank this process is; return the weights and what was measured."""
    task = Doubled(make()).task
    values: dict[str, Any] = {
        "output_dir": folder,
        "epochs": 100,
        "max_steps": steps,
        "batch": {"batch_size": 1, "global_batch_size": 4},
        "rate": {"lr": 0.05},
        "evaluation": {"every_epochs": None, "batch_size": 2},
        "checkpoint": {"every_steps": 1000},
        "timeout_s": 50,
        **QUIET,
        **changes,
    }
    result = fit(task, RunConfig.parse(values))
    return {"step": result.step, "metrics": result.metrics}


@pytest.mark.parametrize(
    "changes",
    [{}, {"loss": "elbo", "vocab": "fragment"}, {"transition": "blosum", "loss": "elbo"}],
    ids=str,
)
def test_two_and_four_ranks_equal_one(make_task, chains, tmp_path, changes) -> None:
    def make() -> ProteinTask:
        # A step has four micro-batches of one chain; some of them weigh nothing.
        task = make_task(batch_size=1, num_diffusion_steps=20, dropout=0.1, **changes)
        task.chains = (
            [without_units(c) if i in (2, 5) else c for i, c in enumerate(task.chains[0])],
            (task.chains[1]),
        )
        return task

    trained, measured = {}, {}
    for ranks in (1, 2, 4):
        folder = tmp_path / f"ranks{ranks}"
        said = run_ranks(ranks, train, make, str(folder), 4)
        measured[ranks] = said[0]["metrics"]
        assert all(one["metrics"] == pytest.approx(measured[ranks], nan_ok=True) for one in said)
        trained[ranks] = load_file(folder / "checkpoints" / "step_00000004" / "model.safetensors")
    moved = max(
        float((w - make().build_model().state_dict()[n]).abs().max()) for n, w in trained[1].items()
    )
    assert moved > 1e-3, "the weights moved"
    for ranks in (2, 4):
        for name, weight in trained[1].items():
            assert float((trained[ranks][name] - weight).abs().max()) < EXACT, (ranks, name)
        assert measured[ranks] == pytest.approx(measured[1], rel=1e-9)


def test_a_step_of_the_test_above_has_a_rank_whose_micro_batch_weighs_nothing(make_task) -> None:
    task = make_task(batch_size=1)
    task.chains = [without_units(c) if i in (2, 5) else c for i, c in enumerate(task.chains[0])], []
    data = task.train_data()
    plan = plan_batches(BatchConfig(batch_size=1, global_batch_size=4), len(data), 4)
    reader = LeafReader(data, task.order(data, 0), 0, task.collate, "stop")
    counted = []
    for step, rank in ((s, r) for s in range(2) for r in range(4)):
        (leaf,) = leaves_of(plan, step, rank)
        context = Context(FakeWorld(rank, 4), seed=0, step=step, place=leaf.place)
        counted.append(int(task.weights(reader[leaf].data, context)["sequence"]))
    assert counted.count(0) >= 2
    assert max(counted) > 5


@pytest.mark.parametrize("loss", ["simple", "elbo"])
def test_a_step_averages_over_all_its_units_and_not_over_micro_batches(make_task, loss) -> None:
    task = make_task(batch_size=1, loss=loss, chi_weight=0.5)
    world = FakeWorld()
    plan = plan_batches(BatchConfig(batch_size=1, global_batch_size=8), 8, 1)
    loader = Loader(task.train_data(), world, plan=plan, max_steps=1, collate=task.collate)
    model = task.build_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    (batch,) = loader
    report = train_step(task.loss, model, optimizer, batch, world, weights=task.weights)
    sequence, chi = (report.parts[name] for name in ("sequence_nats", "chi_nats"))
    assert float(sequence[1]) > 20
    assert float(chi[1]) > 5
    expected = sequence[0] / sequence[1] + 0.5 * chi[0] / chi[1]
    assert float(report.loss) == pytest.approx(float(expected), rel=1e-6)


def resumable(make: Callable[[], ProteinTask], folder: str, steps: int) -> None:
    fit(
        make(),
        RunConfig.parse(
            {
                "output_dir": folder,
                "epochs": 100,
                "max_steps": steps,
                "batch": {"batch_size": 1, "global_batch_size": 2},
                "rate": {"lr": 1e-3},
                "averages": [0.9],
                "evaluation": {"every_steps": 5},
                "checkpoint": {"every_steps": 1000},
                **QUIET,
            }
        ),
    )


def test_resuming_in_mid_epoch_equals_never_stopping(make_task, tmp_path) -> None:
    def make() -> ProteinTask:
        return make_task(batch_size=1, dropout=0.2)

    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    run_ranks(2, resumable, make, str(straight), 7)
    run_ranks(2, resumable, make, str(stopped), 3)  # an epoch has four steps
    run_ranks(1, resumable, make, str(stopped), 5)
    run_ranks(2, resumable, make, str(stopped), 7)
    files = sorted((straight / "checkpoints" / "step_00000007").glob("*.safetensors"))
    assert {"model", "optimizer", "average_0.9"} <= {
        f.name.removesuffix(".safetensors") for f in files
    }
    for file in files:
        other = load_file(stopped / "checkpoints" / "step_00000007" / file.name)
        for name, tensor in load_file(file).items():
            close = (tensor - other[name]).abs().max() if tensor.numel() else torch.tensor(0.0)
            assert float(close) < 1e-6, (file.name, name)


def test_resuming_on_the_same_ranks_is_exact_to_the_bit(make_task, tmp_path) -> None:
    def make() -> ProteinTask:
        return make_task(batch_size=1, dropout=0.2)

    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    run_ranks(2, resumable, make, str(straight), 7)
    run_ranks(2, resumable, make, str(stopped), 3)
    run_ranks(2, resumable, make, str(stopped), 7)
    for file in sorted((straight / "checkpoints" / "step_00000007").glob("*.safetensors")):
        other = load_file(stopped / "checkpoints" / "step_00000007" / file.name)
        for name, tensor in load_file(file).items():
            assert torch.equal(tensor, other[name]), (file.name, name)


def test_a_checkpoint_of_another_network_is_refused(make_task, tmp_path) -> None:
    resumable(make_task, str(tmp_path), 1)
    from lockstep.errors import ConfigError

    with pytest.raises(ConfigError, match="transition absorbing -> uniform"):
        resumable(lambda: make_task(transition="uniform"), str(tmp_path), 2)


def overfit(make: Callable[[], ProteinTask], folder: str, steps: int) -> dict[str, float]:
    torch.manual_seed(0)
    return fit(
        make(),
        RunConfig.parse(
            {
                "output_dir": folder,
                "epochs": 10**6,
                "max_steps": steps,
                "batch": {"batch_size": 8},
                "rate": {"lr": 4e-3},
                "schedule": {"shape": "cosine", "warmup_steps": 10},
                "evaluation": {"every_epochs": None},
                "checkpoint": {"every_epochs": None},
                **QUIET,
            }
        ),
    ).metrics


@pytest.mark.parametrize("loss", ["elbo", "simple"])
def test_eight_chains_are_learned_by_heart(loss, make_task, tmp_path) -> None:
    eight = make_chains(8, 3, 12, 16)

    def make() -> ProteinTask:
        task = make_task(
            hidden_dim=64,
            num_neighbors=14,
            dropout=0.0,
            backbone_noise=0.0,
            loss=loss,
            chi_weight=0.1,
            sample_steps=10,
            num_designs=8,
        )
        task.chains = eight, eight
        return task

    metrics = overfit(make, str(tmp_path), 350)
    assert metrics["recovery"] > 0.95
    assert metrics["design_recovery_median"] > 0.9
    assert metrics["perplexity"] < 1.5
    assert metrics["chi1_mae"] < 0.5 * metrics["common_chi1_mae"]
    assert metrics["uniform_perplexity"] == 20
    assert 12 < metrics["unigram_perplexity"] < 30


def test_ranks_ask_equally_often_whether_to_stop_and_leave_together(make_task, tmp_path) -> None:
    task = make_task(num_designs=4)  # three ranks: the last round has a chain for one of them
    model = task.build_model()
    assert finish_on(3, task, model, tmp_path, NEVER) == [("finished", 2)] * 3
    assert finish_on(3, task, model, tmp_path, 1) == [("stopped", 2)] * 3


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab": "fragment"},
        {"transition": "uniform", "loss": "elbo"},
        {"use_discrete_diffusion": False, "mask_ratio": 1.0},
    ],
    ids=str,
)
def test_every_kind_of_training_learns(make_task, tmp_path, changes) -> None:
    def make() -> ProteinTask:
        task = make_task(hidden_dim=32, dropout=0.0, backbone_noise=0.0, **changes)
        task.chains = task.chains[0], task.chains[0]
        return task

    before = overfit(make, str(tmp_path / "before"), 1)
    after = overfit(make, str(tmp_path / "after"), 60)
    nats = "fragment_nats" if changes.get("vocab") == "fragment" else "loss"
    assert after[nats] < 0.85 * before[nats]
    assert after["elbo"] < before["elbo"]


def test_a_bound_is_reported_only_where_nothing_of_the_sequence_is_shown(
    make_task, tmp_path
) -> None:
    def make() -> ProteinTask:
        return make_task(use_discrete_diffusion=False, mask_ratio=0.15, num_designs=0)

    metrics = overfit(make, str(tmp_path), 1)
    assert metrics["perplexity"] > 10
    assert not [name for name in metrics if "elbo" in name], "15 % of the nats are no bound"


@pytest.mark.parametrize("transition", ["absorbing", "uniform", "blosum"])
def test_no_bound_is_below_the_entropy_of_the_data(make_task, transition) -> None:
    task = make_task(transition=transition, num_diffusion_steps=1)
    aatype = (torch.arange(20_000) % 20).reshape(1000, 20)  # ln 20 nats each
    nothing = torch.zeros(1000, 20, 4)
    batch = {"aatype": aatype, "coords": nothing[..., None], "segment": aatype, "chi": nothing}

    def best(coords, segment, x_t, level):  # p(x_0 | x_1): nobody guesses better in one step
        kept = getattr(task.process, "cumulative", torch.ones(2, 20, 21))[1]
        return kept.T.double().log()[x_t], torch.zeros(1000, 20, 4, 72)

    context = Context(FakeWorld(), 0, 0, 0, training=False)
    total, num = task.evaluate(best, batch | {"chi_mask": nothing.bool()}, context)["elbo"]
    assert float(total / num) == pytest.approx(np.log(20), rel=0.01)


def test_designs_of_an_evaluation_do_not_depend_on_the_ranks(make_task, tmp_path) -> None:
    texts = []
    for ranks in (1, 3):
        folder = tmp_path / f"ranks{ranks}"
        metrics = run_ranks(ranks, train, make_task, str(folder), 1)[0]["metrics"]
        (path,) = (folder / "samples").glob("*.fasta")
        entries = path.read_text().split(">")[1:]
        texts.append(sorted(entries))
        found = [float(entry.split("recovery=")[1].split()[0]) for entry in entries]
        assert metrics["design_recovery_median"] == pytest.approx(np.median(found), abs=1e-4)
    assert texts[0] == texts[1]
    assert len(texts[0]) == 2
