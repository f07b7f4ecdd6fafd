"""Losses whose terms have units of their own, and batch normalisation, on ranks as on one."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lockstep import Loader, PartialLoss, RunConfig, World, fit, train_step
from lockstep.data.loader import plan_for
from lockstep.dist.batch_norm import refuse_changed_split, synchronise_batch_norm
from lockstep.errors import ConfigError
from lockstep.plan import BatchConfig, SplitChange, plan_batches
from lockstep.task import Context
from lockstep.testing import FakeWorld, TinyTask, run_ranks


class TwoTerms(TinyTask):
    """A mean over units plus half a mean over the samples that have none."""

    def weights(self, batch: dict[str, Tensor], context: Context) -> dict[str, Tensor]:
        return {"units": batch["units"].sum(), "idle": (batch["units"] == 0).sum()}

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        error = (model(batch["x"]) - batch["y"]).square().sum(dim=1)
        idle = (batch["units"] == 0).double()
        terms = {"units": (error * batch["units"]).sum(), "idle": (error * idle).sum()}
        weights = self.weights(batch, context)
        if not context.training:
            return PartialLoss(terms["units"], weights["units"])
        total = (
            terms["units"] / context.weights["units"]
            + 0.5 * terms["idle"] / context.weights["idle"]
        )
        return PartialLoss(total, 1.0, {n: (terms[n].detach(), weights[n]) for n in terms})


class OwnMeans(TwoTerms):
    """The same, each micro-batch dividing by its own counts: what the totals are for."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        counted = {name: value.clamp(min=1) for name, value in self.weights(batch, context).items()}
        own = Context(context.world, 0, context.step, 0, context.training, weights=counted)
        return super().loss(model, batch, own)


class Normalised(TinyTask):
    """A network with batch normalisation in it."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)
        ).double()

    def build_optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def train(folder: Path, task: TinyTask, **values: object) -> None:
    settings = {
        "output_dir": str(folder),
        "max_steps": 6,
        "epochs": 9,
        "rate": {"lr": 0.05},
        "sinks": {"curves": False},
        "max_grad_norm": None,
    }
    fit(task, RunConfig.parse(settings | values))


def farthest(folder: Path, reference: Path) -> float:
    a, b = (
        load_file(path / "checkpoints" / "step_00000006" / "model.safetensors")
        for path in (folder, reference)
    )
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def spread(tmp_path: Path, task: TinyTask, ranks: int) -> float:
    batch = {"batch_size": 3, "global_batch_size": 12}
    for count in (1, ranks):
        train_on(count, tmp_path / str(count), task, batch=batch)
    return farthest(tmp_path / str(ranks), tmp_path / "1")


def train_on(count: int, folder: Path, task: TinyTask, **values: object) -> None:
    def action() -> None:
        train(folder, task, **values)

    run_ranks(count, action)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_terms_with_units_of_their_own_are_ranks_as_one(tmp_path: Path, ranks: int) -> None:
    assert spread(tmp_path, TwoTerms(), ranks) < 1e-12


def test_without_the_steps_totals_accumulation_would_matter(tmp_path: Path) -> None:
    for task, name in ((TwoTerms(), "totals"), (OwnMeans(), "own")):
        for size in (3, 12):
            batch = {"batch_size": size, "global_batch_size": 12}
            train_on(1, tmp_path / f"{name}{size}", task, batch=batch)
    assert farthest(tmp_path / "totals3", tmp_path / "totals12") < 1e-12
    assert farthest(tmp_path / "own3", tmp_path / "own12") > 1e-3


@pytest.mark.parametrize("ranks", [2, 4])
def test_synchronised_batch_norm_on_ranks_equals_one_larger_batch(
    tmp_path: Path, ranks: int
) -> None:
    train_on(1, tmp_path / "one", Normalised(), batch={"batch_size": 12})
    for name, sync in (("sync", True), ("apart", False)):
        batch = {"batch_size": 12 // ranks}
        train_on(ranks, tmp_path / name, Normalised(), batch=batch, sync_batch_norm=sync)
    assert farthest(tmp_path / "sync", tmp_path / "one") < 1e-12
    assert farthest(tmp_path / "apart", tmp_path / "one") > 1e-3, "the comparison can fail"


class Frozen(Normalised):
    """Normalises with statistics that stay as they are."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model[1].eval()
        return model


def test_the_banner_says_that_statistics_are_the_first_ranks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = (
        "warning: the running statistics of batch normalisation are the first rank's, so metrics "
        "depend on the number of ranks; set sync_batch_norm=true, or exact=true"
    )
    cases: list[tuple[int, TinyTask, dict[str, object], bool]] = [
        (2, Normalised(), {}, True),
        (1, Normalised(), {}, False),
        (2, Frozen(), {}, False),
        (2, TinyTask(), {}, False),
        (2, Normalised(), {"sync_batch_norm": True}, False),
        (2, Normalised(), {"exact": True}, False),
    ]
    for number, (ranks, task, more, is_said) in enumerate(cases):
        train_on(ranks, tmp_path / str(number), task, batch={"batch_size": 6}, **more)
        assert capfd.readouterr().out.count(said) == is_said, number


class Grouped(Normalised):
    """Decays all weights but those of batch normalisation, as many scripts do."""

    def build_optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d)]
        free = [p for norm in norms for p in norm.parameters()]
        decayed = [p for p in model.parameters() if all(p is not one for one in free)]
        groups = [
            {"params": decayed, "weight_decay": 0.5},
            {"params": free, "weight_decay": 0.0},
        ]
        return torch.optim.SGD([group for group in groups if group["params"]], lr=lr)


class Shared(Normalised):
    """One layer at two places, and once more where modules do not look; it has a hook."""

    def build_model(self) -> nn.Module:
        norm = nn.BatchNorm1d(8).double()
        norm.register_forward_hook(lambda layer, inputs, output: output * 1.5)
        return TwoPlaces(norm)


class TwoPlaces(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(5, 8), norm, nn.Tanh()).double()
        self.tail = nn.Sequential(nn.Linear(8, 8), norm, nn.Linear(8, 8)).double()
        self.out = nn.Linear(8, 3).double()
        self.again = [norm]

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(self.again[0](self.tail(self.head(x))))
        return result


class Quiet(nn.BatchNorm1d):
    """A subclass that computes nothing of its own."""

    def __init__(self, num: int) -> None:
        super().__init__(num, eps=1e-2)


class Named(Normalised):
    """Normalises with a subclass of torch's layer."""

    layer: type[nn.Module] = Quiet

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model[1] = self.layer(8).double()
        return model


@pytest.mark.parametrize("task", [Grouped, Shared, Named])
def test_synchronised_layers_stay_what_they_were(task: type[TinyTask], tmp_path: Path) -> None:
    """Their class, their places, their hooks: all that a model or an optimizer may rely on."""
    for folder, count in (("one", 1), ("ranks", 2)):
        batch = {"batch_size": 12 // count}
        train_on(count, tmp_path / folder, task(), batch=batch, sync_batch_norm=True)
    assert farthest(tmp_path / "ranks", tmp_path / "one") < 1e-12


class Louder(nn.BatchNorm1d):
    """Computes more than batch normalisation."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Louds(Named):
    layer = Louder


class Lazy(Named):
    layer = nn.LazyBatchNorm1d

    def build_model(self) -> nn.Module:
        model = Normalised.build_model(self)
        model[1] = nn.LazyBatchNorm1d(dtype=torch.float64)
        return model


@pytest.mark.parametrize("task", [Louds, Lazy])
def test_a_layer_that_computes_in_its_own_way_is_refused_by_name(
    task: type[TinyTask], tmp_path: Path
) -> None:
    def action() -> str:
        try:
            train(tmp_path, task(), batch={"batch_size": 6}, sync_batch_norm=True)
        except ConfigError as error:
            return str(error)
        return "trained"

    name = "Louder" if task is Louds else "LazyBatchNorm1d"
    for said in run_ranks(2, action):
        assert said.startswith(f"sync_batch_norm cannot synchronise 1, a {name}: ")
        assert "try: use nn.BatchNorm1d" in said


class Wide(Normalised):
    """Each channel has four values for a sample: a single sample has statistics, too."""

    def build_model(self) -> nn.Module:
        folded = nn.Sequential(nn.Linear(5, 8), nn.Unflatten(1, (2, 4)), nn.BatchNorm1d(2))
        return nn.Sequential(folded, nn.Flatten(), nn.Tanh(), nn.Linear(8, 3)).double()


@pytest.mark.parametrize(
    ("task", "ranks", "last"),
    [(Normalised, 2, 4), (Normalised, 3, 4), (Normalised, 4, 4), (Wide, 4, 4), (Wide, 4, 1)],
)
def test_padding_counts_for_nothing_in_synchronised_batch_norm(
    task: type[TinyTask], ranks: int, last: int, tmp_path: Path
) -> None:
    """The last step of an epoch has fewer micro-batches than there are ranks."""

    def build() -> TinyTask:
        built = task()
        built.num_samples = 24 + last
        return built

    settings = {"sync_batch_norm": True, "evaluation": {"every_epochs": 9}}
    for folder, count in (("one", 1), ("ranks", ranks)):
        batch = {"batch_size": 12 // count, "drop_last": False}
        train_on(count, tmp_path / folder, build(), batch=batch, **settings)
    assert farthest(tmp_path / "ranks", tmp_path / "one") <= 1e-12


def test_a_last_step_of_one_value_for_each_channel_is_refused_on_all_ranks(tmp_path: Path) -> None:
    def action() -> str:
        task = Normalised(num_samples=25)
        try:
            train(tmp_path, task, batch={"batch_size": 6, "drop_last": False}, sync_batch_norm=True)
        except ConfigError as error:
            return error.problem
        return "trained on"

    said = "batch normalisation has 1 value for each of 8 channels on all ranks together"
    assert [text.startswith(said) for text in run_ranks(2, action)] == [True, True]


class Synchronised(Normalised):
    """Comes with torch's own layer."""

    def build_model(self) -> nn.Module:
        return nn.SyncBatchNorm.convert_sync_batchnorm(super().build_model())


def refusal(folder: Path, batch: dict[str, object], **values: object) -> list[str]:
    def action() -> str:
        try:
            train(folder, Synchronised(num_samples=28), batch=batch, **values)
        except ConfigError as error:
            return error.problem
        except ValueError as error:  # this layer runs on GPUs only
            return f"went on: {error}"
        return "trained"

    return run_ranks(2, action)


def test_padding_that_torchs_own_layer_would_count_is_refused(tmp_path: Path) -> None:
    padded = refusal(tmp_path / "padded", {"batch_size": 6, "drop_last": False})
    assert (
        padded
        == [
            "a step has 1 micro-batches for 2 ranks: nn.SyncBatchNorm would count 1 padding "
            "micro-batches in its statistics"
        ]
        * 2
    )
    uneven = refusal(tmp_path / "uneven", {"batch_size": 4, "global_batch_size": 12})
    assert [text.partition(":")[0] for text in uneven] == [
        "a step has 3 micro-batches for 2 ranks"
    ] * 2
    full = refusal(tmp_path / "full", {"batch_size": 6})
    never = refusal(tmp_path / "never", {"batch_size": 6, "drop_last": False}, max_steps=2)
    assert all(text.startswith("went on: SyncBatchNorm") for text in full + never), full + never


def test_a_custom_loop_refuses_padding_for_torchs_own_layer_too() -> None:
    def action() -> str:
        task = Synchronised(num_samples=28)
        with World.enter("cpu", timeout_s=20) as world:
            model = task.build_model()  # DDP takes this layer on GPUs only
            data = task.train_data()
            plan = plan_for(data, BatchConfig(batch_size=6, drop_last=False), world.size)
            loader = Loader(data, world, plan=plan, epochs=1)
            loader.seek(2, 24)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            try:
                for batch in loader:
                    train_step(task.loss, model, optimizer, batch, world)
            except ConfigError as error:
                return error.problem
        return "trained"

    assert [text.partition(":")[0] for text in run_ranks(2, action)] == [
        "a step has 1 micro-batches for 2 ranks"
    ] * 2


def test_running_statistics_do_not_hold_on_to_earlier_steps() -> None:
    norm = nn.BatchNorm1d(8)
    model = nn.Sequential(nn.Linear(5, 8), norm)
    synchronise_batch_norm(model, FakeWorld())
    lengths = []
    for _ in range(3):
        model(torch.rand(4, 5)).sum().backward()
        lengths.append([chain_length(norm.running_mean), chain_length(norm.running_var)])
    assert lengths == [[0, 0]] * 3


def chain_length(tensor: Tensor | None) -> int:
    """Count the operations that autograd would go back through from `tensor`."""
    assert tensor is not None
    found, new = set(), {tensor.grad_fn} - {None}
    while new:
        found |= new
        new = {above for node in new for above, _ in node.next_functions} - {None} - found
    return len(found)


def test_a_custom_loop_refuses_synchronised_statistics_of_other_samples() -> None:
    was = plan_batches(BatchConfig(batch_size=4), 48, 2)
    model = nn.Sequential(nn.Linear(5, 8), nn.SyncBatchNorm(8))
    with pytest.raises(ConfigError, match="would see 4 samples at a time on 1 rank; .* with 8 on"):
        refuse_changed_split(model, SplitChange(was, was.on_ranks(1)))
    one = plan_batches(BatchConfig(batch_size=8), 48, 1)
    refuse_changed_split(model, SplitChange(was, one))
