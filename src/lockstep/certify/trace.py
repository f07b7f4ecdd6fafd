"""What a step leaves behind, as hashes: one line of JSON per rank and step.

Owns: what is written down of a batch, of the model's inputs and outputs, of the loss and of
all that a run carries from step to step. Does not own: when it is written, or what it means
that two traces differ.

Bits count: numbers are written with `float.hex`, tensors as a hash of dtype, shape and bytes.
"""

import hashlib
import json
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.certify.cut import Cut
from lockstep.data.batch import MicroBatch, StepBatch
from lockstep.data.fingerprint import take_print
from lockstep.dist.ddp import unwrap
from lockstep.dist.fsdp import gathered
from lockstep.run.run import Run
from lockstep.step.report import StepReport
from lockstep.torch_compat.private import BATCH_NORMS, is_compiled

Hashes = dict[str, str]
GENERATOR = "generator "
"""Marks the hash of an attribute that draws random numbers."""
MOST_ITEMS, MOST_NUMBERS = 1000, 10_000_000
"""Of an attribute that is a list or a dict, or a tensor: what is larger is data, not state."""


class Tracer:
    """Writes down the steps of one rank, in one life of the run."""

    def __init__(self, run: Run, folder: Path, steps: int, is_joint: bool) -> None:
        self.run = run
        self.folder = folder
        self.steps = steps
        self.is_joint = is_joint
        self.inputs: list[str] = []
        self.outputs: list[str] = []
        self.contents: list[Any] = []
        self.gradients: Hashes = {}
        folder.mkdir(parents=True, exist_ok=True)
        self.model = unwrap(run.model)
        if not is_compiled(self.model):  # hashing inside a graph would break it up
            self.model.register_forward_pre_hook(self._take_inputs, with_kwargs=True)
            self.model.register_forward_hook(self._take_outputs)
        run.optimizer.register_step_pre_hook(self._take_gradients)

    def begin(self) -> None:
        """Write down what the run starts from."""
        run = self.run
        plan: dict[str, Any] = {"joint": self.is_joint, "reduced": run.autocast is not None}
        plan["rounded"] = run.config.gradients.dtype is not None
        names = ("num_samples", "batch_size", "global_batch", "leaves_per_step", "steps_per_epoch")
        for name in names:
            plan[name] = getattr(run.contract.plan, name)
        said = {"event": "start", "step": run.progress.step, "plan": plan, "data": self._data()}
        self._write(said)
        self._keep_values(run.progress.step)

    def _data(self) -> dict[str, Any]:
        """Return what the data set holds, on the first rank, and whether reading it repeats."""
        run = self.run
        if not run.world.is_first:
            return {}
        held = run.prints.get("training", {})
        again = take_print(run.loader.dataset, run.config.seed, held)
        return {"holds": hash_of(held), "repeats": bool(held) and held == again}

    def write_cut(self, cut: Cut) -> None:
        """Write down what came of cutting micro-batches in another way."""
        self._write({"event": "cut", "step": self.run.progress.step, "cut": cut.to_json()})

    def receive(self, batch: StepBatch) -> None:
        """Look at a batch before the step can change it."""
        self.inputs, self.outputs, self.gradients = [], [], {}
        self.contents = [
            hash_rows(micro.data, len(micro.ids)) if self.is_joint else hash_of(micro.data)
            for micro in batch.micro_batches
        ]

    def step(self, report: StepReport, batch: StepBatch) -> None:
        """Write down a step that was taken."""
        run, pairs = self.run, {"": (report.loss_sum, report.weight), **report.parts}
        said = {
            "event": "step",
            "step": run.progress.step,
            "leaves": list(self._leaves(report, batch.micro_batches)),
            "loss": {name: [float(n).hex() for n in pair] for name, pair in pairs.items()},
            "grad_norm": float(report.grad_norm).hex(),
            "gradients": self.gradients,
            "rates": [float(group["lr"]).hex() for group in run.optimizer.param_groups],
        }
        self._write(said)
        if run.progress.step == self.steps:
            self._keep_values(run.progress.step)

    def _leaves(
        self, report: StepReport, micro_batches: list[MicroBatch]
    ) -> Iterator[dict[str, Any]]:
        """Return what is known of each micro-batch that counts."""
        rows = [row.tolist() for row in report.local_rows]
        inputs = _shared_out(self.inputs, len(micro_batches))
        outputs = _shared_out(self.outputs, len(micro_batches))
        for index, micro in enumerate(micro_batches):
            if micro.counts:
                yield {
                    "place": micro.leaf.place,
                    "ids": micro.ids.tolist(),
                    "content": self.contents[index],
                    "inputs": inputs[index],
                    "outputs": outputs[index],
                    "loss": [n.hex() for n in rows[index]],
                }

    def _write(self, said: dict[str, Any]) -> None:
        world = self.run.world
        said |= {"rank": world.rank, "size": world.size, "state": state_of(self.run)}
        with (self.folder / f"rank_{world.rank}.jsonl").open("a") as file:
            file.write(json.dumps(said) + "\n")

    def _keep_values(self, step: int) -> None:
        """Keep the weights themselves, for what is equal only to rounding. Collective."""
        named = [*self.model.named_parameters(), *_statistics(self.model).items()]
        kept = {name: gathered(value).detach().cpu() for name, value in named}
        if self.run.world.is_first:
            torch.save(kept, self.folder / f"values_{step}.pt")

    def _take_inputs(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            self.inputs.append(hash_of((args, kwargs)))

    def _take_gradients(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.gradients:  # an optimizer whose step calls that of its parent is hooked twice
            return
        grads = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        self.gradients = _hashes(grads)

    def _take_outputs(self, model: nn.Module, args: Any, result: Any) -> None:
        if torch.is_grad_enabled():
            self.outputs.append(hash_of(result))


def state_of(run: Run) -> dict[str, Hashes]:
    """Return the hashes of all that a run carries from one step to the next."""
    model, statistics = unwrap(run.model), _statistics(unwrap(run.model))
    names = {id(p): name for name, p in model.named_parameters()}
    saved = set(model.state_dict())
    buffers = {name: b for name, b in model.named_buffers() if name not in statistics}
    groups = run.optimizer.param_groups
    optimizer = {
        f"{names.get(id(p), 'a tensor')}.{key}": hash_of(value)
        for p, state in run.optimizer.state.items()
        for key, value in state.items()
    }
    for number, group in enumerate(groups):
        settings = {k: v for k, v in group.items() if k not in ("params", "lr", "initial_lr")}
        optimizer[f"settings of group {number}"] = hash_of(settings)
    return {
        "parameters": _hashes(dict(model.named_parameters())),
        "statistics": _hashes(statistics),
        "buffers": _hashes({name: b for name, b in buffers.items() if name in saved}),
        "volatile": _hashes({name: b for name, b in buffers.items() if name not in saved}),
        "optimizer": optimizer,
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
    _feed(digest, tree)
    return digest.hexdigest()


def hash_rows(tree: Any, num: int) -> list[str]:
    """Return a hash per sample of a batch whose tensors and lists hold one row for each."""
    rows: dict[int, list[Any]] = defaultdict(list)

    def visit(node: Any) -> None:
        if isinstance(node, Mapping):
            for value in node.values():
                visit(value)
        elif isinstance(node, Tensor) and node.ndim and len(node) == num:
            for index, row in enumerate(node):
                rows[index].append(row)
        elif isinstance(node, list | tuple):
            for value in node:
                visit(value)

    visit(tree)
    return [hash_of(rows[index]) for index in range(num)]


def _feed(digest: Any, node: Any) -> None:
    if isinstance(node, Tensor):
        flat = gathered(node).detach().cpu().contiguous().reshape(-1)
        digest.update(f"{node.dtype}{tuple(node.shape)}".encode())
        digest.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    elif isinstance(node, np.ndarray) and node.dtype != object:
        digest.update(f"{node.dtype}{node.shape}".encode() + np.ascontiguousarray(node).tobytes())
    elif isinstance(node, Mapping):
        for key, value in node.items():
            digest.update(f"{key}:".encode())
            _feed(digest, value)
    elif isinstance(node, list | tuple):
        digest.update(f"{len(node)}[".encode())
        for value in node:
            _feed(digest, value)
    elif node is None or isinstance(node, bool | int | float | str | bytes | np.generic):
        digest.update(f"{type(node).__name__}{node!r};".encode())
    elif isinstance(node, set | frozenset):
        _feed(digest, sorted(hash_of(value) for value in node))
    elif hasattr(node, "__dict__"):
        _feed(digest, vars(node))
    elif is_dataclass(node):  # with slots
        _feed(digest, {field.name: getattr(node, field.name) for field in fields(node)})
    else:
        digest.update(type(node).__name__.encode())


def _hashes(values: Mapping[str, Any]) -> Hashes:
    return {name: hash_of(value) for name, value in values.items()}


def _shared_out(calls: list[str], num: int) -> list[str]:
    """Return the hashes of the model's calls by micro-batch, if each made as many."""
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
    """Return what the task and the modules keep as plain attributes: nothing saves those."""
    owners: list[tuple[str, object]] = [("task", run.task)]
    owners += [(f"model.{n}" if n else "model", m) for n, m in unwrap(run.model).named_modules()]
    own = vars(nn.Module())
    return {
        f"{owner}.{name}": _kind(value) + hash_of(state)
        for owner, thing in owners
        for name, value in vars(thing).items()
        if name not in own and (state := _plain_state(value)) is not None
    }


def _task_state(run: Run) -> Hashes:
    """Return what the task saves, and the weights of further networks that it holds."""
    found = {f"state.{name}": hash_of(value) for name, value in _leaves_of(run.task.state())}
    own = {id(tensor) for tensor in unwrap(run.model).state_dict(keep_vars=True).values()}
    for attribute, module in vars(run.task).items():
        if isinstance(module, nn.Module):
            for name, tensor in module.state_dict(keep_vars=True).items():
                if id(tensor) not in own:
                    found[f"{attribute}.{name}"] = hash_of(tensor)
    return found


def _leaves_of(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what is in nested mappings and lists, by dotted names."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves_of(value, f"{name}.{key}" if name else str(key))
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from _leaves_of(value, f"{name}.{number}" if name else str(number))
    else:
        yield name, tree


def _kind(value: Any) -> str:
    kinds = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    return GENERATOR if isinstance(value, kinds) else ""


def _plain_state(value: Any) -> Any:
    """Return the part of an attribute that may move with the steps, or None."""
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
