"""The network: what it must not see, what must not change it, what it is drawn into."""

import copy
from dataclasses import replace
from functools import partialmethod
from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep_recipes.protein.data import chains_of, collate
from lockstep_recipes.protein.model import ProteinNet, five_atoms
from lockstep_recipes.protein.sample import design, walk
from lockstep_recipes.protein.sample_data import make_chains
from lockstep_recipes.protein.structure import read_chains, write_pdb
from lockstep_recipes.protein.task import ProteinConfig, ProteinTask


def random_net(**changes: object) -> ProteinNet:
    """Return a network whose heads are no longer zero."""
    torch.manual_seed(0)
    settings = {"width": 32, "num_layers": 2, "num_neighbours": 8, "dropout": 0.0, **changes}
    net = ProteinNet(**settings)  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return net.eval().requires_grad_(False)


def inputs(batch: dict[str, torch.Tensor], net: ProteinNet) -> tuple[torch.Tensor, ...]:
    shape = (*batch["aatype"].shape, net.num_slots)
    tokens = torch.randint(0, net.num_states + 1, shape, generator=torch.Generator().manual_seed(1))
    return batch["coords"], batch["segment"], tokens, torch.linspace(0.1, 1, len(tokens))


def test_the_default_network_has_about_as_many_weights_as_proteinmpnn() -> None:
    num = sum(p.numel() for p in ProteinConfig().build_network().parameters())
    assert 1.6e6 < num < 1.9e6


def test_turning_and_moving_a_chain_changes_nothing(batch) -> None:
    net = random_net()
    coords, segment, tokens, level = inputs(batch, net)
    turn = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(2))).Q
    turn = turn * turn.det().sign()
    moved = coords @ turn.T + torch.tensor([11.0, -7.0, 23.0])
    for before, after in zip(
        net(coords, segment, tokens, level), net(moved, segment, tokens, level), strict=True
    ):
        exists = segment >= 0
        assert float((before - after)[exists].abs().max()) < 1e-4
    mirrored = coords * torch.tensor([-1.0, 1.0, 1.0])
    seen = net(mirrored, segment, tokens, level)[0] - net(coords, segment, tokens, level)[0]
    assert float(seen.abs().max()) > 1e-3, "a mirror image is another molecule"


def test_padding_changes_nothing() -> None:
    net = random_net()
    data = chains_of([*make_chains(1, 1, 5, 5), *make_chains(2, 1, 14, 20)])
    samples = [data[i] for i in range(3)]
    together, alone = collate(samples), [collate([sample]) for sample in samples]
    tokens = torch.zeros(*together["aatype"].shape, 1).long()
    level = torch.full((3,), 0.5)
    both = net(together["coords"], together["segment"], tokens, level)
    for row, single in enumerate(alone):
        length = single["aatype"].shape[1]
        one = net(single["coords"], single["segment"], tokens[:1, :length], level[:1])
        assert row or length < net.num_neighbours, "one chain has fewer residues than neighbours"
        for left, right in zip(both, one, strict=True):
            assert torch.allclose(left[row, :length], right[0], atol=1e-5)


def test_the_virtual_cb_is_a_bond_away_from_ca(batch) -> None:
    atoms = five_atoms(batch["coords"])[batch["segment"] >= 0]
    length = (atoms[:, 4] - atoms[:, 1]).norm(dim=-1)
    assert float((length - 1.53).abs().max()) < 0.05


def test_the_first_loss_is_the_log_of_the_number_of_choices(make_task, batch, context) -> None:
    task = make_task(chi_weight=0.0)
    loss = task.loss(task.build_model(), batch, context)
    assert float(loss.loss_sum.detach()) == pytest.approx(np.log(20), abs=1e-5)


def test_the_sequence_in_the_file_does_not_reach_the_encoder(tmp_path: Path) -> None:
    chain = make_chains(1, 3, 40, 48)[0]
    shuffled = replace(chain, aatype=np.random.default_rng(0).permutation(chain.aatype))
    net, seen = random_net(), []
    for name, version in (("true", chain), ("permuted", shuffled)):
        write_pdb(version, tmp_path / f"{name}.pdb")
        (read,) = read_chains(tmp_path / f"{name}.pdb")
        batch = collate([chains_of([read])[0]])
        backbone = net.encode(batch["coords"], batch["segment"])
        hidden = torch.full((*batch["aatype"].shape, 1), net.num_states)
        logits, chi = net.decode(backbone, hidden, torch.ones(1))
        seen.append((read.sequence, backbone.nodes, backbone.edges, logits, chi))
    assert seen[0][0] != seen[1][0]
    for true, permuted in zip(seen[0][1:], seen[1][1:], strict=True):
        assert torch.equal(true, permuted)


@pytest.mark.parametrize("changes", [{}, {"vocab": "fragment"}, {"transition": "uniform"}])
def test_what_is_hidden_does_not_reach_the_prediction(make_task, batch, context, changes) -> None:
    """Swap the truth of hidden residues: prediction and noisy input must stay as they were."""
    task = make_task(num_diffusion_steps=4, **changes)
    seen: list[torch.Tensor] = []

    class Spy(torch.nn.Module):
        def forward(self, coords, segment, tokens, level):
            seen.append(tokens)
            shape = (*tokens.shape, task.vocabulary.num_states)
            return torch.zeros(shape), torch.zeros(*tokens.shape[:2], 4, 72)

    task.loss(Spy(), batch, context)
    task.evaluate(Spy(), batch, context)
    if changes.get("transition") == "uniform":
        other = {**batch, "aatype": torch.where(batch["aatype"] == 20, 20, 3)}
        task.evaluate(Spy(), other, context)
        assert torch.equal(seen[1], seen[3]), "one-shot prediction starts from noise alone"
        return
    hidden = (seen[0] == task.vocabulary.mask).all(dim=-1)
    swapped = torch.where(
        hidden & (batch["aatype"] < 20), (batch["aatype"] + 7) % 20, batch["aatype"]
    )
    assert (swapped != batch["aatype"]).any()
    task.loss(Spy(), {**batch, "aatype": swapped}, context)
    assert torch.equal(seen[0], seen[3])
    assert (seen[1] == task.vocabulary.mask).all(), "one-shot prediction sees masks alone"


# --- Sampling -----------------------------------------------------------------------------------


def test_a_walk_goes_from_noise_to_data() -> None:
    assert walk(1000, 10)[0] == (1000, 900)
    assert walk(1, 10) == [(1, 0)]
    assert walk(3, 10)[-1][1] == 0


@pytest.mark.parametrize("sampler", ["plain", "adaptive"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"vocab": "fragment"},
        {"transition": "uniform"},
        {"transition": "blosum"},
        {"vocab": "fragment", "transition": "uniform"},
        {"use_discrete_diffusion": False},
    ],
    ids=str,
)
def test_sampling_repeats_for_a_seed_and_decides_every_residue(make_task, sampler, changes) -> None:
    task = make_task(num_diffusion_steps=50, **changes)
    slots = task.vocabulary.table.shape[1]
    net = random_net(num_states=task.vocabulary.num_states, num_slots=slots)
    chain = make_chains(1, 5, 30, 30)[0]
    first, again, other = (design(net, task.process, chain, 6, sampler, seed) for seed in (0, 0, 1))
    assert first.sequence == again.sequence
    assert np.array_equal(first.chi, again.chi)
    assert first.sequence != other.sequence
    assert len(first.sequence) == 30
    assert (first.chi != 0).all(), "every residue has been drawn at some step"


def test_revealed_residues_stay_and_the_easy_ones_come_first(make_task) -> None:
    process = make_task().process
    logits = torch.zeros(1, 8, 1, 20)
    logits[0, :, 0, 3] = torch.tensor([9.0, 1, 8, 2, 7, 3, 6, 4])
    generator = torch.Generator().manual_seed(0)
    x = process.noise(torch.zeros(1, 8, 1).long(), generator)
    shown = []
    for t, s in walk(1000, 4):
        after = process.step_back(x, logits, t, s, generator, adaptive=True)
        revealed = (x == 20) & (after != 20)
        assert torch.equal(after[x != 20], x[x != 20])
        shown.append(revealed.flatten().nonzero().flatten().tolist())
        x = after
    assert sorted(sum(shown, [])) == list(range(8))
    margins = logits[0, :, 0, 3]
    for earlier, later in zip(shown[:-1], shown[1:], strict=True):
        if earlier and later:
            assert margins[earlier].min() > margins[later].max()


def test_compiled_layers_take_chains_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled as far as what is traced: making kernels of it takes a minute."""
    trace = partialmethod(torch.nn.Module.compile, backend="eager", fullgraph=True)
    monkeypatch.setattr(torch.nn.Module, "compile", trace)
    torch._dynamo.reset()
    plain = random_net(num_layers=3)
    net = copy.deepcopy(plain)
    ProteinTask.compile(ProteinTask(ProteinConfig()), net)
    graphs = torch._dynamo.utils.counters["stats"]
    before, counts = graphs["unique_graphs"], []
    for length in (40, 57, 33):
        some = chains_of(make_chains(3, min_length=length, max_length=length))
        batch = collate([some[index] for index in range(3)])
        for one, other in zip(net(*inputs(batch, net)), plain(*inputs(batch, net)), strict=True):
            assert torch.equal(one, other)
        counts.append(graphs["unique_graphs"] - before)
    assert counts == [counts[0]] * 3, "another length is no other graph"
    assert counts[0] <= 3, "the first layer, the encoder's others, the decoder's"
