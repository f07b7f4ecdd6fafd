"""How many floating-point operations a step computes.

Owns: counting them while a step is taken, by the shapes that its matrix products, convolutions
and attention have, forward and backward, as often as they are computed; and the names of what
was met and could not be counted. Does not own: which step, or what it takes.

An addition and a multiplication are two operations. Attention counts in full, also where a mask
leaves some of it out, and its backward pass with the scores that it computes again. What works
number by number (activations, norms, sums, the optimizer) is not counted.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

KINDS = {"conv": "convolution", "attention": "attention"}
"""By a part of an operator's name; what has none of them is a matrix product."""
OURS = {"aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "fsdp", "inductor"}
"""Torch's own families of operators; what is in another was written by somebody else."""
HEAVY = r"_?linalg_|_fft_|_cdist_|_grouped_mm|_int_mm|(mv|addmv|dot|vdot)$|.*_(rnn|lstm|gru)"
"""How operators of torch begin that multiply and that torch does not count."""
LIGHT = {"linalg_vector_norm", "linalg_cross"}
"""Of these, some that go number by number."""


def _attention_on_cpu(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _attention_on_cpu_backward(
    grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any
) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))  # type: ignore[no-untyped-call]


def _on_cpu() -> dict[Any, Any]:
    """Return what torch does not count by itself: its fused attention on a CPU."""
    name = "_scaled_dot_product_flash_attention_for_cpu"
    return {
        getattr(torch.ops.aten, name): _attention_on_cpu,
        getattr(torch.ops.aten, f"{name}_backward"): _attention_on_cpu_backward,
    }


class Operations:
    """What the steps that were counted computed, on this rank."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.kinds: Counter[str] = Counter()
        self.not_counted: set[str] = set()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count a step inside the block; what is compiled runs as it was written."""
        plain: Any = nullcontext()
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and importing it takes long
            plain = torch.compiler.set_stance("force_eager")
        counter = _Counter()
        with plain, counter:
            yield
        by_name = {str(name): num for name, num in counter.flop_counts["Global"].items()}
        for name, num in by_name.items():
            self.kinds[kind_of(name)] += num
        self.steps.append(sum(by_name.values()))
        self.not_counted |= counter.not_counted

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "operations": self.steps,
            "operations_by_kind": dict(self.kinds),
            "not_counted": sorted(self.not_counted),
        }


class _Counter(FlopCounterMode):
    """Counts, and notes what it has no rule for."""

    def __init__(self) -> None:
        super().__init__(display=False, custom_mapping=_on_cpu())
        self.not_counted: set[str] = set()

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        if func_packet not in self.flop_registry and is_missed(str(func_packet)):
            self.not_counted.add(str(func_packet))
        return super()._count_flops(func_packet, out, args, kwargs)  # type: ignore[no-untyped-call]


def kind_of(name: str) -> str:
    """Return the kind of an operator that is counted.

    >>> kind_of("aten.addmm"), kind_of("aten._flash_attention_forward")
    ('matmul', 'attention')
    """
    return next((kind for part, kind in KINDS.items() if part in name), "matmul")


def is_missed(name: str) -> bool:
    """Say whether an operator without a rule may compute more than number by number.

    >>> is_missed("aten.add"), is_missed("aten.mv"), is_missed("mine.kernel")
    (False, True, True)
    """
    family, _, own = name.partition(".")
    return family not in OURS or (own not in LIGHT and re.match(HEAVY, own) is not None)
