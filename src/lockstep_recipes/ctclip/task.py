"""CT-CLIP as a task: contrastive learning on pairs of a volume and its report.

Owns: the loss with negatives from all ranks, and the metrics of an evaluation. Does not
own: the network, the files, the loop.

softmax: mean over pairs i of half the cross-entropy of  exp(tau) t_i . I  to find i's volume
                         plus half the cross-entropy of  exp(tau) v_i . T  to find i's report
siglip:  mean over pairs i of the sum over j of          softplus(-y_ij z_ij)

I and T are the embeddings of the volumes and reports of all ranks. They are gathered with
their gradient, so a volume here also learns from reports on other ranks, and more GPUs mean
more negatives. A gather without gradient would give the same loss and a wrong step.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from lockstep.plan import Contract
from lockstep.randomness import derive_seed
from lockstep.task import Context, PartialLoss, Task
from lockstep.world import World
from lockstep_recipes.ctclip.config import CTClipConfig
from lockstep_recipes.ctclip.data import (
    Entry,
    Shape,
    VolumeData,
    findings_in,
    open_entries,
    spread,
)
from lockstep_recipes.ctclip.evaluate import (
    chosen,
    measure_findings,
    prompts,
    retrieval_at_1,
    zero_shot_scores,
)
from lockstep_recipes.ctclip.model import CTClip, CTViT, Layer, LocalTower, WordTower
from lockstep_recipes.ctclip.text import LocalTokenizer, Vocabulary

Batch = Mapping[str, Tensor]
BETAS = (0.9, 0.99)


class CTClipTask(Task):
    """Train two encoders so that volumes match their own reports and no others.

    Args:
        config: The settings.
        prepared_as: The shape of prepared volumes, if the model takes only a part of it.
    """

    name = "ctclip"
    may_change = (
        "experiment.name",
        "data.paths",
        "data.batch_size",
        "data.num_workers",
        "data.prefetch_factor",
        "data.on_bad_sample",
        "training",
        "validation",
        "checkpoint",
        "logging",
        "resume",
        "accept_changes",
        "lockstep",
    )
    """Settings that the run compares itself, or that do not affect training."""
    gathers = True

    def __init__(self, config: CTClipConfig, prepared_as: Shape | None = None) -> None:
        self.config = config
        self.prepared_as = prepared_as
        self.launch_lines: list[str] = []
        """Lines about the launch, for the banner."""
        self._seen: list[dict[str, Tensor]] = []

    def settings(self) -> dict[str, Any]:
        """Return every key of the settings file."""
        return self.config.model_dump(mode="json")

    def banner(self, world: World, contract: Contract) -> list[str]:
        """Return the launch, the number of pairs in the loss, and what cannot be measured."""
        plan = contract.plan
        exact = self.config.run_config().exact
        num_pairs = plan.global_batch if exact else plan.samples_at_once
        lines = [*self.launch_lines, f"Pairs compared in the loss: {num_pairs}"]
        if self.entries[1] and not self.findings:
            lines.append("warning: held-out volumes have no labels; only retrieval is measured")
        lacking = sum(not set(self.findings) <= e.findings.keys() for e in self.entries[1])
        if lacking:
            lines.append(
                f"warning: {lacking} of {len(self.entries[1])} held-out volumes lack labels, and "
                "are not counted for these"
            )
        return lines

    # --- data ---------------------------------------------------------------------------------

    @cached_property
    def entries(self) -> tuple[list[Entry], list[Entry]]:
        """The training volumes and the held-out volumes."""
        paths = self.config.data.paths
        wanted = self.config.validation.eval_samples
        train = open_entries(paths.train, paths.labels)
        held_out = open_entries(paths.validation, paths.labels) if paths.validation else []
        return train, [held_out[index] for index in spread(len(held_out), wanted)]

    @cached_property
    def findings(self) -> tuple[str, ...]:
        """The findings to classify in held-out volumes."""
        return findings_in(self.entries[1])

    def train_data(self) -> VolumeData:
        """Return the training pairs."""
        return self._volumes(self.entries[0])

    def eval_data(self) -> VolumeData:
        """Return the held-out pairs with their findings."""
        return self._volumes(self.entries[1])

    def _volumes(self, entries: Sequence[Entry]) -> VolumeData:
        shape = self.config.model.image_encoder.volume_shape
        spacing = self.config.data.spacing
        stored = self.prepared_as
        return VolumeData(entries, shape, spacing, self.findings, stored)

    @cached_property
    def tokenize(self) -> Vocabulary | LocalTokenizer:
        """The tokenizer; `load_state` replaces it by that of the checkpoint."""
        text = self.config.model.text_encoder
        if text.path is not None:
            return LocalTokenizer(text.path, text.max_length)
        reports = (entry.report for entry in self.entries[0])
        return Vocabulary.build(reports, text.max_words, text.max_length)

    def collate(self, samples: list[Any]) -> dict[str, Tensor]:
        """Stack volumes, tokenize reports, and number identical reports."""
        reports = [sample["report"] for sample in samples]
        return {
            "volume": torch.stack([sample["volume"] for sample in samples]),
            "labels": torch.stack([sample["labels"] for sample in samples]),
            "tokens": self.tokenize(reports),
            "report": torch.tensor([derive_seed(report) for report in reports]),
        }

    # --- model --------------------------------------------------------------------------------

    def build_model(self) -> CTClip:
        """Return both encoders."""
        model = self.config.model
        tokenize = self.tokenize
        text: WordTower | LocalTower
        if isinstance(tokenize, Vocabulary):
            text = WordTower(len(tokenize), model.text_encoder)
        else:
            assert model.text_encoder.path is not None
            text = LocalTower(model.text_encoder.path)
        return CTClip(CTViT(model.image_encoder), text, model.clip)

    def build_optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        """Return AdamW with weight decay for matrices, but not for biases, scales and norms."""
        trained = [p for p in model.parameters() if p.requires_grad]
        groups = [
            {
                "params": [p for p in trained if p.ndim > 1],
                "weight_decay": self.config.training.weight_decay,
            },
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
        ]
        return AdamW(groups, lr, BETAS, fused=all(p.is_cuda for p in trained))

    def blocks(self, model: nn.Module) -> Iterable[nn.Module]:
        """Return the modules to shard: those that are called, such as parts of an image layer."""
        for block in super().blocks(model):
            yield from block.children() if isinstance(block, Layer) else (block,)

    # --- loss ---------------------------------------------------------------------------------

    def loss(self, model: nn.Module, batch: Batch, context: Context) -> PartialLoss:
        """Return the loss summed over this rank's pairs, against the pairs of all ranks."""
        made = model(batch["volume"], batch["tokens"])
        image = made["image"]
        text = made["text"]
        with torch.autocast(image.device.type, enabled=False):
            all_pairs = self.gather(torch.cat([image, text], dim=1), context)
            all_image, all_text = all_pairs.chunk(2, dim=1)
            target = torch.arange(len(image), device=image.device) + context.gather_start(image)
            if not context.counts:  # padding: its pairs are not in the gather
                image = image[:0]
                text = text[:0]
                target = target[:0]
            logits = text @ all_image.T * made["scale"]
            if "shift" in made:
                is_pair = F.one_hot(target, len(all_pairs)).to(logits.dtype)
                total = F.softplus(-(2 * is_pair - 1) * (logits + made["shift"])).sum()
            else:
                back = image @ all_text.T * made["scale"]
                there, here = (F.cross_entropy(x, target, reduction="sum") for x in (logits, back))
                total = (there + here) / 2
            total = total + made["apart"][: len(image)].sum()
            right = (logits.argmax(dim=1) == target).sum()
        return PartialLoss(total, float(len(image)), {"accuracy": (right, float(len(image)))})

    def gather(self, local: Tensor, context: Context) -> Tensor:
        """Return the rows of all ranks, with their gradient. Collective."""
        return context.gather(local)

    # --- evaluation ---------------------------------------------------------------------------

    def metrics(self) -> dict[str, Any]:
        """Reset the collected samples; `finish_evaluation` computes the metrics of all ranks."""
        self._seen = []
        return {}

    def evaluate(
        self, model: nn.Module, batch: Batch, context: Context
    ) -> dict[str, tuple[Tensor, Tensor | float]]:
        """Collect the embeddings of held-out volumes and reports for `finish_evaluation`."""
        made = model(batch["volume"], batch["tokens"])
        kept = {name: made[name] for name in ("image", "text")}
        if context.counts:
            self._seen.append(kept | {name: batch[name] for name in ("labels", "report")})
        return {}

    def finish_evaluation(
        self, model: nn.Module, context: Context, folder: str
    ) -> dict[str, float]:
        """Gather the held-out samples of all ranks, each once, and compute metrics. Collective."""
        assert isinstance(model, CTClip)
        world = context.world
        latent = model.image_projection.out_features
        dtype = torch.float64 if model.tau.dtype == torch.float64 else torch.float32
        empty = {
            "image": torch.zeros(0, latent, dtype=dtype),
            "text": torch.zeros(0, latent, dtype=dtype),
            "labels": torch.zeros(0, len(self.findings)),
            "report": torch.zeros(0, dtype=torch.int64),
        }
        with torch.no_grad():
            whole = {
                name: world.all_gather(
                    torch.cat([none.to(world.device), *(seen[name] for seen in self._seen)])
                )
                for name, none in empty.items()
            }
            self._seen = []
            image = whole["image"]
            text = whole["text"]
            measured = {"retrieval_at_1": retrieval_at_1(image, text, whole["report"])}
            if self.findings:
                tokens = self.tokenize(prompts(self.findings)).to(world.device)
                model.eval()
                prompted = model.embed_text(tokens)
                model.train()
                scores = zero_shot_scores(image, prompted, model.tau.exp())
                threshold = self.config.validation.threshold
                measured |= measure_findings(scores, whole["labels"], threshold)
        return chosen(measured, self.config.validation.metrics)

    # --- checkpoints ----------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the vocabulary, which gives the rows of the embedding their meaning."""
        words = self.tokenize.words if isinstance(self.tokenize, Vocabulary) else None
        return {"words": words, "findings": list(self.findings)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the checkpoint's vocabulary: the reports may have new words by now."""
        if state["words"] is not None:
            length = self.config.model.text_encoder.max_length
            self.tokenize = Vocabulary(state["words"], length)
