"""The trace of a run: hashes of what each step computed, one line of JSON per rank and step.

Owns: what is recorded of a batch, of the model's inputs and outputs, of the loss, and of everything
that a run carries from step to step. Does not own: when it is recorded (`callback.py`), or what a
difference between two traces means (`verdict.py`).

Every bit counts: numbers are written with `float.hex`, tensors as a hash of dtype, shape and bytes.
"""

import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.certify.cut import Cut
from lockstep.data.batch import StepBatch
from lockstep.data.fingerprint import take_fingerprint
from lockstep.dist.ddp import unwrap
from lockstep.dist.fsdp import gathered
from lockstep.nested import tensors_in
from lockstep.run.run import Run
from lockstep.step.report import StepReport
from lockstep.torch_compat.private import BATCH_NORMS, is_compiled

Hashes = dict[str, str]
GENERATOR = "generator "
"""Prefix of the hash of an attribute that is a random number generator."""
MOST_ITEMS = 1000
"""A list or dict attribute with more items is taken for data, and not recorded."""
MOST_NUMBERS = 10_000_000
"""The same for the elements of a tensor or an array."""
PLAN = ("num_samples", "batch_size", "global_batch", "leaves_per_step", "steps_per_epoch")
"""What is recorded of the batch plan."""


class Tracer:
    """Writes the trace of one rank.

    Args:
        run: Restored, and before its first step.
        folder: Gets `rank_N.jsonl`; a run that resumes appends to it.
        steps: The last step, after which the weights are saved, too.
        combines_ranks: Whether samples of several ranks are combined before the gradient is.
    """

    def __init__(self, run: Run, folder: Path, steps: int, combines_ranks: bool) -> None:
        self.run = run
        self.folder = folder
        self.steps = steps
        self.combines_ranks = combines_ranks
        self.inputs: list[str] = []
        """Hashes of what the model was called with in this step."""
        self.outputs: list[str] = []
        self.contents: list[Any] = []
        """Hashes of the micro-batches of this step, or of their samples."""
        self.gradients: Hashes = {}
        folder.mkdir(parents=True, exist_ok=True)
        self.model = unwrap(run.model)
        if not is_compiled(self.model):  # hashing would break up the graph
            self.model.register_forward_pre_hook(self._record_inputs, with_kwargs=True)
            self.model.register_forward_hook(self._record_outputs)
        run.optimizer.register_step_pre_hook(self._record_gradients)

    def write_start(self) -> None:
        """Write what the run starts from. Collective."""
        run = self.run
        plan = {
            "joint": self.combines_ranks,
            "reduced": run.autocast is not None,
            "rounded": run.config.gradients.dtype is not None,
            **{name: getattr(run.contract.plan, name) for name in PLAN},
        }
        self._write("start", {"plan": plan, "data": self._data()})
        self._save_weights()

    def _data(self) -> dict[str, Any]:
        """Return a hash of the data set, on the first rank, and whether reading it twice agrees."""
        run = self.run
        if not run.world.is_first:
            return {}
        held = run.fingerprints.get("training", {})
        again = take_fingerprint(run.loader.dataset, run.config.seed, held)
        return {"holds": hash_of(held), "repeats": bool(held) and held == again}

    def write_cut(self, cut: Cut) -> None:
        """Write the loss of samples in other micro-batches."""
        self._write("cut", {"cut": asdict(cut)})

    def receive(self, batch: StepBatch) -> None:
        """Hash a batch before the step can change it."""
        self.inputs = []
        self.outputs = []
        self.gradients = {}
        self.contents = [
            hashes_of_samples(micro.data, len(micro.ids))
            if self.combines_ranks
            else hash_of(micro.data)
            for micro in batch.micro_batches
        ]

    def write_step(self, report: StepReport, batch: StepBatch) -> None:
        """Write down a step. Collective after the last one."""
        run = self.run
        pairs = {"": (report.loss_sum, report.weight), **report.parts}
        record = {
            "leaves": list(self._leaves(report, batch)),
            "loss": {name: [float(n).hex() for n in pair] for name, pair in pairs.items()},
            "grad_norm": float(report.grad_norm).hex(),
            "gradients": self.gradients,
            "rates": [float(group["lr"]).hex() for group in run.optimizer.param_groups],
        }
        self._write("step", record)
        if run.step == self.steps:
            self._save_weights()

    def _leaves(self, report: StepReport, batch: StepBatch) -> Iterator[dict[str, Any]]:
        """Yield what is recorded of each micro-batch that counts."""
        rows = [row.tolist() for row in report.local_rows]
        num = len(batch.micro_batches)
        inputs = by_micro_batch(self.inputs, num)
        outputs = by_micro_batch(self.outputs, num)
        for index, micro in enumerate(batch.micro_batches):
            if micro.counts:
                yield {
                    "place": micro.leaf.place,
                    "ids": micro.ids.tolist(),
                    "content": self.contents[index],
                    "inputs": inputs[index],
                    "outputs": outputs[index],
                    "loss": [n.hex() for n in rows[index]],
                }

    def _write(self, event: str, values: Mapping[str, Any]) -> None:
        world = self.run.world
        own = {"rank": world.rank, "size": world.size, "state": state_of(self.run)}
        record = {"event": event, "step": self.run.step, **values, **own}
        with (self.folder / f"rank_{world.rank}.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def _save_weights(self) -> None:
        """Save the weights, which `distance` compares where they are equal only to rounding.

        Collective.
        """
        named = [*self.model.named_parameters(), *_statistics(self.model).items()]
        weights = {name: gathered(value).detach().cpu() for name, value in named}
        if self.run.world.is_first:
            torch.save(weights, self.folder / f"values_{self.run.step}.pt")

    def _record_inputs(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            self.inputs.append(hash_of((args, kwargs)))

    def _record_outputs(self, model: nn.Module, args: Any, result: Any) -> None:
        if torch.is_grad_enabled():
            self.outputs.append(hash_of(result))

    def _record_gradients(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.gradients:  # an optimizer whose step calls that of its parent is hooked twice
            return
        grads = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        self.gradients = _hashes(grads)


def state_of(run: Run) -> dict[str, Hashes]:
    """Return hashes of everything that a run carries from one step to the next, by kind."""
    model = unwrap(run.model)
    statistics = _statistics(model)
    saved = model.state_dict().keys()
    buffers = {name: b for name, b in model.named_buffers() if name not in statistics}
    return {
        "parameters": _hashes(dict(model.named_parameters())),
        "statistics": _hashes(statistics),
        "buffers": _hashes({name: b for name, b in buffers.items() if name in saved}),
        "volatile": _hashes({name: b for name, b in buffers.items() if name not in saved}),
        "optimizer": _optimizer_state(run),
        "averages": {
            f"{name} at {decay}": hash_of(value)
            for decay in run.config.averages
            for name, value in run.averages.state(decay).items()
        },
        "scaler": _hashes(run.scaler.state_dict()) if run.scaler else {},
        "random": _random_states(run),
        "attributes": _attributes(run),
        "task": _task_state(run),
    }


def hash_of(tree: Any) -> str:
    """Return a hash of a tree of tensors and plain values.

    >>> hash_of({"a": [1, 2.0]}) == hash_of({"a": [1, 2.0]}) != hash_of({"a": [2.0, 1]})
    True
    """
    digest = hashlib.blake2b(digest_size=8)
    _update(digest, tree)
    return digest.hexdigest()


def hashes_of_samples(data: Any, num: int) -> list[str]:
    """Return a hash per sample of a micro-batch: of its row of each tensor that has `num` rows."""
    tensors = [tensor for tensor in tensors_in(data) if tensor.ndim and len(tensor) == num]
    return [hash_of([tensor[index] for tensor in tensors]) for index in range(num)]


def _update(digest: Any, node: Any) -> None:
    """Add a node and everything below it to a digest; of an unknown object, only its type."""
    if isinstance(node, Tensor):
        flat = gathered(node).detach().cpu().contiguous().reshape(-1)
        digest.update(f"{node.dtype}{tuple(node.shape)}".encode())
        digest.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    elif isinstance(node, np.ndarray) and node.dtype != object:
        digest.update(f"{node.dtype}{node.shape}".encode() + np.ascontiguousarray(node).tobytes())
    elif isinstance(node, Mapping):
        for key, value in node.items():
            digest.update(f"{key}:".encode())
            _update(digest, value)
    elif isinstance(node, list | tuple):
        digest.update(f"{len(node)}[".encode())
        for value in node:
            _update(digest, value)
    elif node is None or isinstance(node, bool | int | float | str | bytes | np.generic):
        digest.update(f"{type(node).__name__}{node!r};".encode())
    elif isinstance(node, set | frozenset):
        _update(digest, sorted(hash_of(value) for value in node))
    elif hasattr(node, "__dict__"):
        _update(digest, vars(node))
    elif is_dataclass(node):  # with slots
        _update(digest, {field.name: getattr(node, field.name) for field in fields(node)})
    else:
        digest.update(type(node).__name__.encode())


def _hashes(values: Mapping[str, Any]) -> Hashes:
    return {name: hash_of(value) for name, value in values.items()}


def by_micro_batch(calls: list[str], num: int) -> list[str]:
    """Assign the hashes of the model's calls to `num` micro-batches.

    If they cannot have made equally many, which call belongs to which is unknown: "".
    """
    each, rest = divmod(len(calls), num)
    if rest or not each:
        return [""] * num
    return [" ".join(calls[n * each : (n + 1) * each]) for n in range(num)]


def _statistics(model: nn.Module) -> dict[str, Tensor]:
    """Return the running statistics of batch normalisation."""
    return {
        f"{name}.{key}" if name else key: buffer
        for name, part in model.named_modules()
        if isinstance(part, BATCH_NORMS)
        for key, buffer in part.named_buffers(recurse=False)
    }


def _optimizer_state(run: Run) -> Hashes:
    """Return hashes of the optimizer's state and of its settings, but for the rates."""
    names = {id(p): name for name, p in unwrap(run.model).named_parameters()}
    found = {
        f"{names.get(id(p), 'a tensor')}.{key}": hash_of(value)
        for p, state in run.optimizer.state.items()
        for key, value in state.items()
    }
    for number, group in enumerate(run.optimizer.param_groups):
        settings = {k: v for k, v in group.items() if k not in ("params", "lr", "initial_lr")}
        found[f"settings of group {number}"] = hash_of(settings)
    return found


def _random_states(run: Run) -> Hashes:
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "NumPy": np.random.get_state(legacy=False),
        "Python": random.getstate(),
    }
    if run.world.device.type == "cuda":
        states["CUDA"] = torch.cuda.get_rng_state(run.world.device)
    return _hashes(states)


def _attributes(run: Run) -> Hashes:
    """Return hashes of plain attributes of the task and of modules, which no checkpoint holds."""
    owners: list[tuple[str, object]] = [("task", run.task)]
    owners += [(f"model.{n}" if n else "model", m) for n, m in unwrap(run.model).named_modules()]
    own = vars(nn.Module())
    return {
        f"{owner}.{name}": (GENERATOR if _is_generator(value) else "") + hash_of(state)
        for owner, thing in owners
        for name, value in vars(thing).items()
        if name not in own and (state := _plain_state(value)) is not None
    }


def _task_state(run: Run) -> Hashes:
    """Return hashes of what the task saves, and of the weights of other networks it holds."""
    found = {name: hash_of(value) for name, value in _named_values(run.task.state(), "state")}
    own = {id(tensor) for tensor in unwrap(run.model).state_dict(keep_vars=True).values()}
    for attribute, module in vars(run.task).items():
        if isinstance(module, nn.Module):
            for name, tensor in module.state_dict(keep_vars=True).items():
                if id(tensor) not in own:
                    found[f"{attribute}.{name}"] = hash_of(tensor)
    return found


def _named_values(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the values in nested mappings, with dotted names."""
    if not isinstance(tree, Mapping):
        yield name, tree
        return
    for key, value in tree.items():
        yield from _named_values(value, f"{name}.{key}")


def _is_generator(value: Any) -> bool:
    kinds = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    return isinstance(value, kinds)


def _plain_state(value: Any) -> Any:
    """Return the part of an attribute that steps may change, or None if it is none of these."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, Tensor | np.ndarray):
        return value if np.prod(value.shape) <= MOST_NUMBERS else None
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, dict | list | tuple) and len(value) <= MOST_ITEMS:
        items = list(value.values()) if isinstance(value, dict) else list(value)
        kept = [_plain_state(item) for item in items]
        return kept if kept and all(item is not None for item in kept) else None
    return None
