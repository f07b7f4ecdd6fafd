"""Protein diffusion as a task: hide residues, predict them and their chi angles.

Owns: which tokens are hidden, the losses and their weights, and the metrics of an
evaluation. Does not own: the network, the noise, files, the loop.

The sequence term is averaged over masked residues (or all, for the ELBO), the chi term
over masked chi angles. Both counts differ a lot between chains, so `weights` counts them
over the whole step first, from the same noise that the loss then draws again.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from lockstep.data.feed import to_device
from lockstep.data.grouped import Grouped
from lockstep.data.order import Order
from lockstep.errors import ConfigError
from lockstep.plan import Contract
from lockstep.randomness import seed_all, untouched
from lockstep.run.evaluation import evaluating
from lockstep.run_files import replace_text
from lockstep.task import Context, PartialLoss, Task
from lockstep.world import World
from lockstep_recipes.protein import evaluate
from lockstep_recipes.protein.data import Chains, Split, collate, open_split
from lockstep_recipes.protein.diffusion import (
    CE_SHARE,
    Absorbing,
    Kernel,
    Transition,
    build_process,
    cross_entropy,
    spread,
)
from lockstep_recipes.protein.model import ProteinNet
from lockstep_recipes.protein.residues import UNKNOWN, build_vocabulary
from lockstep_recipes.protein.sample import design, fasta
from lockstep_recipes.protein.structure import Filter

Batch = Mapping[str, Tensor]
NETWORK_FIELDS = {
    "hidden_dim", "num_layers", "num_neighbors", "vocab", "transition", "num_diffusion_steps",
    "use_discrete_diffusion", "schedule", "mask_ratio",
}  # fmt: skip
"""Settings that a checkpoint must agree on, and that sampling from it needs."""
BASELINES = ("unigram_", "common_")
"""Prefix of the metrics that were measured without the network."""


class ProteinConfig(BaseModel):
    """All settings of the task."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    pdb_path: Path = Path("data/cache")
    cache_dir: Path | None = None
    use_predefined_split: bool = False
    val_split: float = Field(default=0.1, ge=0, lt=1)
    min_length: int = Field(default=40, ge=1)
    max_length: int = Field(default=2048, ge=1)
    max_resolution: float = Field(default=2.5, gt=0)
    on_bad_sample: Literal["stop", "skip"] = "stop"
    group_by_length: bool = True
    batch_size: int = Field(default=4, ge=1)
    """Chains in a micro-batch: what `group_by_length` groups."""

    use_discrete_diffusion: bool = False
    """If off: plain masked training in one step, with `mask_ratio` of the residues hidden."""
    num_diffusion_steps: int = Field(default=1000, ge=1)
    transition: Transition = "absorbing"
    schedule: Literal["cosine", "linear"] = "cosine"
    mask_ratio: float = Field(default=0.15, gt=0, le=1)
    vocab: Literal["residue", "fragment"] = "residue"
    loss: Literal["simple", "elbo"] = "simple"
    elbo_clip: float = Field(default=5.0, gt=0)
    chi_weight: float | Literal["auto"] = "auto"
    """1, and 0.5 for fragments."""

    hidden_dim: int = Field(default=128, ge=2)
    num_layers: int = Field(default=3, ge=1)
    num_neighbors: int = Field(default=30, ge=1)
    dropout: float = Field(default=0.1, ge=0, lt=1)
    backbone_noise: float = Field(default=0.1, ge=0)
    """Noise added to every coordinate in training, in angstrom."""
    weight_decay: float = Field(default=1e-5, ge=0)

    sample_steps: int = Field(default=10, ge=1)
    sampler: Literal["plain", "adaptive"] = "adaptive"
    num_designs: int = Field(default=16, ge=0)
    """Held-out chains to design at each evaluation; 0: none."""
    seed: int = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.transition == "blosum" and self.vocab == "fragment":
            raise ConfigError("BLOSUM scores residues, not fragments", "pass --transition uniform")
        if self.transition != "absorbing" and not self.use_discrete_diffusion:
            raise ConfigError(
                f"transition={self.transition} needs diffusion, which is off",
                "pass --use_discrete_diffusion",
            )
        return self

    @property
    def process(self) -> Absorbing | Kernel:
        """The forward process, from data to noise."""
        vocabulary = build_vocabulary(self.vocab)
        if not self.use_discrete_diffusion:
            left = torch.tensor([1.0, 1.0 - self.mask_ratio], dtype=torch.float64)
            return Absorbing(vocabulary, left)
        return build_process(vocabulary, self.transition, self.num_diffusion_steps, self.schedule)

    def build_network(self) -> ProteinNet:
        """Return the network with freshly initialised weights."""
        vocabulary = build_vocabulary(self.vocab)
        return ProteinNet(
            vocabulary.num_states,
            vocabulary.table.shape[1],
            self.hidden_dim,
            self.num_layers,
            self.num_neighbors,
            self.dropout,
        )


@dataclass(frozen=True, slots=True)
class Hidden:
    """The tokens and chi angles hidden from the network in a micro-batch."""

    t: Tensor
    """Each chain's time (B)."""
    x0: Tensor
    x_t: Tensor
    """Tokens (B, L, S), as they are and as they are shown."""
    scored: Tensor
    """Which tokens to predict (B, L, S)."""
    chis: Tensor
    """Which chi angles to predict (B, L, 4)."""
    counted: dict[str, Tensor]
    """The number of residues and of chi angles that the loss averages over."""


def count(mask: Tensor) -> Tensor:
    """Return the number of true elements in float64, the dtype of the step's sums."""
    return mask.sum(dtype=torch.float64)


class ProteinTask(Task):
    """Train a network that designs side chains on a fixed backbone."""

    name = "protein"
    may_change = (
        "pdb_path",
        "cache_dir",
        "on_bad_sample",
        "num_designs",
        "sampler",
        "sample_steps",
    )

    def __init__(self, config: ProteinConfig) -> None:
        self.config = config
        self.process = config.process
        self.vocabulary = self.process.vocabulary
        auto = 0.5 if config.vocab == "fragment" else 1.0
        self.chi_weight = auto if config.chi_weight == "auto" else config.chi_weight
        # There is no bound if part of the sequence is never hidden: its nats are not counted.
        self.has_bound = config.use_discrete_diffusion or config.mask_ratio == 1
        self.baselines: dict[str, float] = {}

    def settings(self) -> dict[str, Any]:
        """Return every setting."""
        return self.config.model_dump(mode="json")

    # --- data ---------------------------------------------------------------------------------

    @cached_property
    def split(self) -> Split:
        """The training chains and the held-out chains.

        Raises:
            DataError: naming the file, and the line where there is one.
        """
        config = self.config
        return open_split(
            config.pdb_path,
            config.cache_dir,
            predefined=config.use_predefined_split,
            val_split=config.val_split,
            wanted=Filter(config.min_length, config.max_length, config.max_resolution),
            skip_bad=config.on_bad_sample == "skip",
            seed=config.seed,
        )

    def train_data(self) -> Chains:
        """Return the chains to train on."""
        return self.split.train

    def eval_data(self) -> Chains | None:
        """Return the held-out chains, shortest first, so that batches need less padding."""
        return self.split.held_out if len(self.split.held_out) else None

    def order(self, data: Any, seed: int) -> Order | None:
        """Visit chains of similar length together."""
        if not self.config.group_by_length or not isinstance(data, Chains):
            return None
        return Grouped(data.lengths, self.config.batch_size, seed)

    def collate(self, samples: list[Any]) -> dict[str, Tensor]:
        """Pad chains to the longest."""
        return collate(samples)

    def banner(self, world: World, contract: Contract) -> list[str]:
        """Return the original script's start-up lines, and the source of the chains."""
        config = self.config
        plan = contract.plan
        split = self.split
        lines = [f"设备: {world.device}"]
        if world.size > 1:
            lines += [f"DDP 模式: 启用 (world_size={world.size})"]
            lines += [f"模型已包装为 DDP (device_id={world.local_rank})"]
        lines += [f"批次大小: {plan.leaf_size} (每GPU)"]
        lines += [f"总批次大小: {plan.samples_at_once} (所有GPU)"]
        if config.use_discrete_diffusion:
            lines += [f"扩散模型: 启用 (时间步数: {config.num_diffusion_steps})"]
        else:
            lines += [f"扩散模型: 未启用 (mask_ratio={config.mask_ratio:g})"]
        if split.is_predefined:
            lines += ["✅ 使用预定义的数据集划分"]
        lines += [f"{split.folder}: {len(split.train)} chains, {len(split.held_out)} held out"]
        if split.skipped:
            lines += [f"skipped {len(split.skipped)}, the first because {split.skipped[0]}"]
        return lines

    # --- model --------------------------------------------------------------------------------

    def build_model(self) -> nn.Module:
        """Return the network; its weights depend only on the seed."""
        with untouched():
            seed_all(self.config.seed, "weights")
            return self.config.build_network()

    def build_optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        """Return AdamW."""
        trained = [p for p in model.parameters() if p.requires_grad]
        fused = all(p.is_cuda for p in trained)
        return AdamW(trained, lr=lr, weight_decay=self.config.weight_decay, fused=fused)

    def state(self) -> dict[str, Any]:
        """Return the settings that sampling from a checkpoint needs."""
        return {"config": self.config.model_dump(mode="json", include=NETWORK_FIELDS)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a checkpoint of another network.

        Raises:
            ConfigError: with each changed setting, old and new.
        """
        now = self.state()["config"]
        before = state["config"]
        changed = [f"{k} {before[k]} -> {now[k]}" for k in sorted(now) if now[k] != before[k]]
        if changed:
            raise ConfigError(
                f"the checkpoint was trained with another network: {', '.join(changed)}",
                "restore the old settings, or use another --save_dir",
            )

    def compile(self, model: nn.Module) -> None:
        """Compile the layers for chains of any length; all layers share two compiled kinds."""
        assert isinstance(model, ProteinNet)
        for layer in (*model.encoder, *model.decoder):
            layer.compile(dynamic=True)

    # --- loss ---------------------------------------------------------------------------------

    def _hide(self, batch: Batch, context: Context) -> Hidden:
        """Hide part of the sequence; the same part each time for the same micro-batch and step."""
        x0 = self.vocabulary.tokens(batch["aatype"])
        u = spread(len(x0), context.place, context.seed, "t", context.step)
        t = to_device(self.process.times(u), x0.device)
        x_t = self.process.corrupt(x0, t, context.generator("mask"))
        known = (batch["aatype"] != UNKNOWN)[..., None]
        scored = self.process.is_scored(x_t) & known
        chis = batch["chi_mask"] & scored.any(dim=-1, keepdim=True)
        residues = known if self.config.loss == "elbo" else scored
        counted = {"sequence": count(residues), "chi": count(chis)}
        return Hidden(t, x0, x_t, scored, chis, counted)

    def weights(self, batch: Batch, context: Context) -> Mapping[str, Tensor | float]:
        """Count the residues and the chi angles that the step averages over."""
        return self._hide(batch, context).counted

    def loss(self, model: nn.Module, batch: Batch, context: Context) -> PartialLoss:
        """Return the mean over hidden residues plus the mean over their chi angles."""
        hidden = self._hide(batch, context)
        t = hidden.t
        x0 = hidden.x0
        x_t = hidden.x_t
        counted = hidden.counted
        coords = batch["coords"]
        if self.config.backbone_noise:
            generator = context.generator("backbone")
            noise = torch.randn(coords.shape, generator=generator, device=coords.device)
            coords = coords + self.config.backbone_noise * noise
        logits, chi_logits = model(coords, batch["segment"], x_t, t / self.process.num_steps)

        if self.config.loss == "elbo":
            nats = self.process.bound(logits, x0, x_t, t, self.config.elbo_clip)
            if isinstance(self.process, Kernel):
                nats = nats + CE_SHARE * cross_entropy(logits, x0)
        else:
            nats = cross_entropy(logits, x0)
        chi_nats = evaluate.chi_nats(chi_logits, batch["chi"], batch["aatype"])
        sequence = (nats * hidden.scored).sum(dtype=torch.float64)
        chi = (chi_nats * hidden.chis).sum(dtype=torch.float64)

        total = context.weights or {name: num.clamp(min=1) for name, num in counted.items()}
        loss = sequence / total["sequence"] + self.chi_weight * chi / total["chi"]
        parts = {
            "sequence_nats": (sequence.detach(), counted["sequence"]),
            "chi_nats": (chi.detach(), counted["chi"]),
        }
        return PartialLoss(loss, 1.0, parts)

    # --- evaluation ---------------------------------------------------------------------------

    def evaluate(
        self, model: nn.Module, batch: Batch, context: Context
    ) -> Mapping[str, tuple[Tensor, Tensor | float]]:
        """Predict all residues at once from pure noise, then estimate the loss and the ELBO."""
        aatype = batch["aatype"]
        coords = batch["coords"]
        segment = batch["segment"]
        known = (aatype != UNKNOWN)[..., None]
        x0 = self.vocabulary.tokens(aatype)
        x_T = self.process.noise(x0, context.generator("noise"))
        logits, chi_logits = model(coords, segment, x_T, torch.ones(len(x0), device=x0.device))
        measured = evaluate.measure_sequence(self.vocabulary.residues(logits), aatype)
        chi = evaluate.bin_centres(chi_logits.argmax(dim=-1))
        measured |= evaluate.measure_chis(chi, batch["chi"], batch["chi_mask"], aatype)
        measured |= evaluate.measure_baselines(batch)
        if self.config.vocab == "fragment":
            fragment = known & (x0 >= 2)
            hits = (logits.argmax(dim=-1) == x0) & fragment
            nats = cross_entropy(logits, x0) * fragment
            measured["fragment_nats"] = (nats.sum(), fragment.sum())
            measured["fragment_accuracy"] = (hits.sum(), fragment.sum())

        u = spread(len(x0), context.place, context.seed, "t", "evaluation")
        t, factor = to_device(self.process.bound_times(u), x0.device)
        x_t = self.process.corrupt(x0, t, context.generator("mask"))
        logits, _ = model(coords, segment, x_t, t / self.process.num_steps)
        bound = self.process.bound(logits, x0, x_t, t)
        bound = bound * factor.to(bound.dtype)[:, None, None] + self.process.end_nats(x0)
        scored = self.process.is_scored(x_t) & known
        if self.has_bound:
            measured["elbo"] = ((bound * known).sum(), known.sum())
        measured["loss"] = ((cross_entropy(logits, x0) * scored).sum(), scored.sum())
        return measured

    def derive(self, means: Mapping[str, Tensor]) -> Mapping[str, float]:
        """Add perplexities; move the baselines, which do not depend on the weights, to the end."""
        found = dict(super().derive(means))
        nats = {
            "perplexity": found.pop("nats", math.nan),
            "unigram_perplexity": found.pop("unigram_nats", math.nan),
        }
        if self.has_bound:
            nats["elbo_perplexity"] = found.get("elbo", math.nan)
        found |= {name: math.exp(min(mean, 700.0)) for name, mean in nats.items()}
        own = {name: value for name, value in found.items() if not name.startswith(BASELINES)}
        self.baselines = {name: value for name, value in found.items() if name not in own}
        return own

    def finish_evaluation(
        self, model: nn.Module, context: Context, folder: str
    ) -> Mapping[str, float | Path]:
        """Design some held-out chains step by step and write them as FASTA. Collective.

        Each rank designs its share. A design depends on its chain, the seed and the
        weights, not on the number of ranks.
        """
        world = context.world
        config = self.config
        chains = self.split.held_out
        baselines = {"uniform_perplexity": float(UNKNOWN), **self.baselines}
        num = min(config.num_designs, len(chains))
        if not num:
            return baselines
        assert isinstance(model, ProteinNet)
        rows = []
        texts = []
        with evaluating(model):
            for first in range(0, num, world.size):
                context.raise_if_stopping()
                index = first + world.rank
                if index >= num:  # the last round has fewer chains than ranks
                    continue
                chain = chains.chain(index * len(chains) // num)
                made = design(
                    model, self.process, chain, config.sample_steps, config.sampler, context.seed
                )
                rows.append([made.recovery])
                texts.append(fasta(chain, made))
        own = torch.tensor(rows, dtype=torch.float64).reshape(-1, 1)
        recoveries = world.all_gather(own.to(world.device)).flatten().cpu()
        entries = world.all_texts("".join(texts))
        if world.is_first:
            replace_text(folder, f"samples/step_{context.step:08d}.fasta", "".join(entries))
        known = recoveries[recoveries.isfinite()]
        median = float(known.quantile(0.5)) if len(known) else math.nan
        return {**baselines, "design_recovery_median": median}
