"""A robot policy as a task: the action of a frame from images and an instruction.

Owns: the network's inputs, the loss, the metrics and pictures of an evaluation, the state in
a checkpoint. Does not own: the network, the files, the loop.

L = mean over frames of  pose_weight x mean over columns of SmoothL1(pose, target)
                       + gripper_weight x |sigmoid(gripper) - target|

Poses are standardised with the statistics of the training split. The gripper's target is mapped
to [0, 1], because a sigmoid cannot reach a recorded -1.
"""

import warnings
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from lockstep.errors import ConfigError, DataError
from lockstep.plan import Contract
from lockstep.run.evaluation import evaluating
from lockstep.task import Context, PartialLoss, Task
from lockstep.world import World
from lockstep_recipes.atlas.data import (
    DataConfig,
    Episode,
    Frames,
    Statistics,
    measure,
    open_split,
    read_statistics,
)
from lockstep_recipes.atlas.evaluate import draw_actions, measure_grippers, measure_poses
from lockstep_recipes.atlas.model import (
    AtlasNet,
    ModelConfig,
    build_geometry,
    build_language,
    build_tokenizer,
)
from lockstep_recipes.atlas.section import Section
from lockstep_recipes.atlas.vggt import num_parameters
from lockstep_recipes.tables import beside

Batch = Mapping[str, Tensor]


class LossConfig(Section):
    """The `training.loss` section."""

    pose_weight: float = Field(default=1.0, ge=0)
    gripper_weight: float = Field(default=0.5, ge=0)
    pose_loss_type: Literal["smooth_l1", "l1", "l2"] = "smooth_l1"
    gripper_loss_type: Literal["l1", "bce"] = "l1"


class AtlasConfig(Section):
    """All settings of the task."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    loss: LossConfig = Field(default_factory=LossConfig)
    weight_decay: float = Field(default=0.01, ge=0)
    notes: tuple[str, ...] = ()
    """More lines for the banner."""


POSE_LOSSES = {"smooth_l1": F.smooth_l1_loss, "l1": F.l1_loss, "l2": F.mse_loss}


class AtlasTask(Task):
    """Train a policy, with or without its backbones."""

    name = "atlas"
    may_change = (
        "data.data_dir",
        "data.action_stats_path",
        "data.cache_images",
        "notes",
        "model.vggt_checkpoint",
        "model.lang_encoder_name",
    )

    def __init__(self, config: AtlasConfig) -> None:
        self.config = config
        self.notes: list[str] = []
        self.num_geometry = 0
        if config.model.predict_residual and not config.data.use_last_action:
            raise ConfigError(
                "model.predict_residual adds to the previous action, which is not an input",
                "set data.use_last_action: true",
            )

    def settings(self) -> dict[str, Any]:
        """Return every setting."""
        return self.config.model_dump(mode="json")

    # --- data ---------------------------------------------------------------------------------

    @cached_property
    def episodes(self) -> list[Episode]:
        """The training episodes."""
        config = self.config
        return open_split(config.data, config.data.train_split, config.model.action_dim)

    @cached_property
    def statistics(self) -> Statistics:
        """Statistics of the actions and states of the training split."""
        measured = measure(self.episodes)
        path = self.config.data.action_stats_path
        return measured if path is None else read_statistics(path, measured)

    def train_data(self) -> Frames:
        """Return the training frames."""
        frames = self._frames(self.episodes, is_training=True)
        _ = self.statistics  # read now, so that a bad statistics file is found before training
        return frames

    @cached_property
    def held_out(self) -> Frames | None:
        """The frames of the held-out episodes."""
        config = self.config
        if config.data.val_split is None:
            return None
        episodes = open_split(config.data, config.data.val_split, config.model.action_dim)
        return self._frames(episodes, is_training=False)

    def eval_data(self) -> Frames | None:
        """Return the held-out frames."""
        return self.held_out

    def _frames(self, episodes: list[Episode], *, is_training: bool) -> Frames:
        tokenizer = build_tokenizer(self.config.model)
        frames = Frames(episodes, self.config.data, tokenizer, is_training=is_training)
        widths = {e.states.shape[1] for e in [*self.episodes, *episodes] if e.states is not None}
        if len(widths) > 1:
            problem = f"the episodes have states of different widths: {sorted(widths)}"
            raise DataError(problem, "train on episodes of one robot")
        return frames

    # --- model --------------------------------------------------------------------------------

    @property
    def num_own(self) -> int:
        """Number of values of the robot per sample."""
        data = self.config.data
        states = self.episodes[0].states
        per_time = (0 if states is None else states.shape[1]) + (
            self.config.model.action_dim if data.use_last_action else 0
        )
        return per_time * data.num_temporal_frames

    def build_model(self) -> AtlasNet:
        """Return the network; its backbones are loaded from local files if there are any."""
        self.notes = []
        config = self.config.model
        geometry = build_geometry(config, self.notes)
        language = build_language(config, self.notes)
        self.num_geometry = num_parameters(geometry)
        data = self.config.data
        num_images = len(data.cameras) * data.num_temporal_frames
        return AtlasNet(config, geometry, language, num_images, self.num_own)

    def build_optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        """Return AdamW over the trained parameters."""
        trained = [p for p in model.parameters() if p.requires_grad]
        fused = all(p.is_cuda for p in trained)
        return AdamW(trained, lr=lr, weight_decay=self.config.weight_decay, fused=fused)

    def banner(self, world: World, contract: Contract) -> list[str]:
        """Return the original script's start-up lines, then which parts are frozen or random."""
        config = self.config.model
        data = self.config.data
        held_out = self.held_out
        factor = contract.effective_lr / contract.base_lr
        frozen = [name for name in ("vggt", "lang_encoder") if getattr(config, f"freeze_{name}")]
        return [
            "Training setup:",
            f"  Distributed: {world.size > 1}",
            f"  World size: {world.size}",
            f"  Rank: {world.rank}, Local rank: {world.local_rank}",
            f"  Base LR: {contract.base_lr:g}, Effective LR (scaled by {factor:g}): "
            f"{contract.effective_lr:g}",
            f"Geometry: {config.vggt_preset}, {self.num_geometry / 1e6:.2f}M parameters; "
            f"frozen: {', '.join(frozen) or 'nothing'}",
            f"Episodes: {len(self.episodes)} to train on, "
            f"{len(held_out.episodes) if held_out else 0} held out; {config.action_dim} columns, "
            f"{len(data.cameras)} views x {data.num_temporal_frames} frames",
            *self.config.notes,
            *self.notes,
        ]

    # --- loss ---------------------------------------------------------------------------------

    def loss(self, model: nn.Module, batch: Batch, context: Context) -> PartialLoss:
        """Return the loss summed over frames."""
        return self._loss(self._predict(model, batch), batch)

    def _loss(self, predicted: Tensor, batch: Batch) -> PartialLoss:
        config = self.config
        shape = config.model
        target = self._standardised(batch["action"])
        num = shape.num_pose
        each = POSE_LOSSES[config.loss.pose_loss_type](
            predicted[:, :num], target[:, :num].to(predicted.dtype), reduction="none"
        )
        pose = each.mean(dim=1).sum()
        total = config.loss.pose_weight * pose
        parts = {"pose": (pose.detach(), float(len(each)))}
        if shape.has_gripper:
            logit = predicted[:, -1]
            wanted = target[:, -1].to(predicted.dtype)
            if config.loss.gripper_loss_type == "bce":
                gripper = F.binary_cross_entropy_with_logits(logit, wanted, reduction="sum")
            else:
                gripper = (logit.sigmoid() - wanted).abs().sum()
            total = total + config.loss.gripper_weight * gripper
            parts["gripper"] = (gripper.detach(), float(len(each)))
        return PartialLoss(total, float(len(each)), parts)

    def _predict(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return standardised actions (B, A) in float32; a gripper's column is a logit."""
        data = self.config.data
        num = self.config.model.num_pose
        last = self._last(batch)
        known = self.statistics
        own = [last.flatten(1)] if data.use_last_action else []
        if data.use_state:
            mean = beside(known.state_mean, last)
            std = beside(known.state_std, last)
            own.append(((batch["state"] - mean) / std).flatten(1))
        dtype = next(model.parameters()).dtype
        shown = torch.cat(own, dim=1).to(dtype) if own else None
        predicted: Tensor = model(batch["images"], batch["tokens"], batch["mask"], shown)
        predicted = predicted if dtype == torch.float64 else predicted.float()
        if not self.config.model.predict_residual:
            return predicted
        pose = predicted[:, :num] + last[:, 0, :num].to(predicted.dtype)
        return torch.cat((pose, predicted[:, num:]), dim=1)

    def _last(self, batch: Batch) -> Tensor:
        """Return the standardised actions before each visible frame (B, times, A)."""
        first = beside(self.statistics.first, batch["last"])
        last = torch.where(batch["has_last"][..., None], batch["last"], first)
        return self._standardised(last)

    def _standardised(self, actions: Tensor) -> Tensor:
        """Return poses in standard deviations, and grippers between 0 and 1."""
        num = self.config.model.num_pose
        known = self.statistics
        pose = actions[..., :num]
        if self.config.data.normalize_actions:
            pose = (pose - beside(known.mean, pose)[:num]) / beside(known.std, pose)[:num]
        low, high = beside(known.gripper, actions)
        gripper = (actions[..., num:] - low) / (high - low)
        return torch.cat((pose, gripper.clamp(0, 1)), dim=-1)

    def _recorded(self, predicted: Tensor) -> Tensor:
        """Return predictions in the units of the recorded actions."""
        num = self.config.model.num_pose
        known = self.statistics
        pose = predicted[:, :num]
        if self.config.data.normalize_actions:
            pose = pose * beside(known.std, pose)[:num] + beside(known.mean, pose)[:num]
        low, high = beside(known.gripper, predicted)
        return torch.cat((pose, low + predicted[:, num:].sigmoid() * (high - low)), dim=1)

    # --- evaluation ---------------------------------------------------------------------------

    def evaluate(
        self, model: nn.Module, batch: Batch, context: Context
    ) -> dict[str, tuple[Tensor, Tensor | float]]:
        """Sum the loss and the errors, and those of the two baselines on the same frames."""
        predicted = self._predict(model, batch)
        num = self.config.model.num_pose
        target = self._standardised(batch["action"])
        last = self._last(batch)[:, 0]
        mean = self._standardised(beside(self.statistics.mean, target)[None])
        summed = self._loss(predicted, batch)
        measured = {"loss": (summed.loss_sum, summed.weight), **summed.parts}
        measured = {name if name == "loss" else f"{name}_loss": v for name, v in measured.items()}
        # Errors are in standard deviations, even if the loss is not.
        scale = torch.ones_like(target[0, :num])
        if not self.config.data.normalize_actions:
            scale = scale / beside(self.statistics.std, target)[:num]
        measured |= measure_poses(*(v[:, :num] * scale for v in (predicted, target, last, mean)))
        if self.config.model.has_gripper:
            shown = predicted[:, -1].sigmoid()
            measured |= measure_grippers(shown, target[:, -1], last[:, -1], mean[:, -1])
        return measured

    def finish_evaluation(
        self, model: nn.Module, context: Context, folder: str
    ) -> Mapping[str, float | Path]:
        """Draw the predicted and recorded actions of one held-out episode, on the first rank."""
        name = f"samples/step_{context.step:08d}.png"
        drawn = False
        if context.world.is_first and self.held_out is not None:
            try:
                drawn = self._draw(model, context.world, self.held_out, folder, name)
            except (OSError, DataError) as error:  # a full disk must not end the run
                warnings.warn(f"the picture was not saved: {error}", stacklevel=2)
        return {"actions": Path(folder, name)} if any(context.world.all_max(int(drawn))) else {}

    def _draw(self, model: nn.Module, world: World, frames: Frames, folder: str, name: str) -> bool:
        index = [i for i, (episode, _) in enumerate(frames.places) if episode == 0]
        predicted = []
        with evaluating(model):
            for start in range(0, len(index), 16):
                batch = self.collate([frames[i] for i in index[start : start + 16]])
                batch = {name: value.to(world.device) for name, value in batch.items()}
                predicted.append(self._recorded(self._predict(model, batch)).float().cpu())
        episode = frames.episodes[0]
        recorded = torch.from_numpy(episode.actions[: len(index)])
        title = f"{episode.folder.name}: {episode.instruction}"
        return draw_actions(torch.cat(predicted), recorded, title, folder, name)

    # --- checkpoints ----------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the statistics, which give predictions their meaning."""
        return {"statistics": self.statistics.to_json(), "columns": self.config.model.action_dim}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the statistics that the network was trained with."""
        self.statistics = Statistics.from_json(state["statistics"])
