"""Torch's compiler, imported when something is compiled, and not by the first optimizer.

Building an optimizer, its steps and a replicated model import `torch._dynamo`: 1,000 files, and
40% of the time from a process's start to its first step. They ask three things of it, and
without a compiler the answers are known. Owns: these answers. Does not own: whether something is
compiled; where anyone imports the compiler, by whatever way, it answers for itself.
"""

import functools
import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lockstep.adam import step_at_once

COMPILER = "torch._dynamo"


class _Late(ModuleType):
    """What `torch._dynamo` is until it is imported, which any question but one does."""

    def __getattr__(self, name: str) -> Any:
        if name == "utils" and self.__name__ == COMPILER and COMPILER not in sys.modules:
            return _Late(f"{COMPILER}.utils")
        if name == "get_optimize_ddp_mode" and COMPILER not in sys.modules:
            return lambda: "ddp_optimizer"  # the default
        return getattr(importlib.import_module(self.__name__), name)


def defer_compiler() -> None:
    """Let eager training do without the compiler; nothing if that is there already."""
    if COMPILER in sys.modules:
        return
    torch._dynamo = _Late(COMPILER)
    methods: list[Any] = [
        Optimizer.add_param_group,
        Optimizer.load_state_dict,
        Optimizer.state_dict,
        Optimizer.zero_grad,
        getattr(DistributedDataParallel._inside_ddp_forward, "__wrapped__", None),
    ]
    for method in methods:
        function = getattr(method, "__wrapped__", None)
        if function is not None:  # torch keeps there how the compiler leaves a function alone
            vars(function)["__dynamo_disable"] = functools.partial(_call, method, function)


def _call(method: Callable[..., Any], function: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    """Call a function that the compiler is to leave alone; once there is one, as torch would."""
    if COMPILER not in sys.modules:
        return function(*args, **kw)
    vars(function).pop("__dynamo_disable", None)
    return method(*args, **kw)


def bare_step(optimizer: Optimizer) -> Callable[[Optimizer], Any] | None:
    """Return its step without what torch wraps around it.

    None if it is not torch's own, or somebody may look at the gradients before it does.
    """
    hooks = optimizer._optimizer_step_pre_hooks or _global_optimizer_pre_hooks
    if type(optimizer) not in (Adam, AdamW, SGD) or "step" in vars(optimizer) or hooks:
        return None
    layers, bare = [], cast(Any, type(optimizer).step)
    while hasattr(bare, "__wrapped__"):
        layers.append(bare.__code__.co_name)
        bare = bare.__wrapped__
    # Hooks and the profiler; whether gradients flow, and the import.
    return bare if layers == ["wrapper", "_use_grad"] else None


def step(optimizer: Optimizer, grads: list[Tensor]) -> None:
    """Do as `optimizer.step()`, which imports the compiler to tell it that a graph ends here."""
    bare, name = bare_step(optimizer), type(optimizer).__name__
    told = optimizer._optimizer_step_post_hooks or _global_optimizer_post_hooks
    if bare is None or told:
        optimizer.step()
        return
    named = torch.autograd.profiler.record_function(f"Optimizer.step#{name}.step")
    with named, torch.set_grad_enabled(optimizer.defaults["differentiable"]):
        if not step_at_once(optimizer, grads):
            bare(optimizer)


def drop_gradients(optimizer: Optimizer, parameters: list[Tensor]) -> None:
    """Do as `optimizer.zero_grad()`, in a third of the time where that is torch's own."""
    if type(optimizer).zero_grad is not Optimizer.zero_grad or "zero_grad" in vars(optimizer):
        optimizer.zero_grad(set_to_none=True)
    for parameter in parameters:
        parameter.grad = None
