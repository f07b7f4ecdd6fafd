"""The number of floating-point operations of a step.

Owns: counting them, forward and backward, from the shapes of matrix products, convolutions and
attention; and the names of operators that could not be counted. Does not own: which steps are
counted, or their time.

An addition and a multiplication are two operations. Attention counts in full, even if a mask
excludes a part of it, and its backward pass includes the scores that it computes again. Pointwise
work (activations, norms, sums, the optimizer) is not counted.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from lockstep.torch_compat import COMPILER
from lockstep.torch_compat.private import (
    ATTENTION_ON_CPU,
    aten_operator,
    operation_counter,
)

KINDS = {"conv": "convolution", "attention": "attention"}
"""Kinds by a part of an operator's name; all others are matrix products."""
OURS = {"aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "fsdp", "inductor"}
"""Torch's own namespaces of operators; others belong to other packages."""
HEAVY = r"_?linalg_|_fft_|_cdist_|_grouped_mm|_int_mm|(mv|addmv|dot|vdot)$|.*_(rnn|lstm|gru)"
"""Names of torch's operators that multiply, and for which torch has no formula."""
LIGHT = {"linalg_vector_norm", "linalg_cross"}
"""Exceptions, which are pointwise."""


def _attention_on_cpu(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _attention_on_cpu_backward(
    grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any
) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))  # type: ignore[no-untyped-call]


def _cpu_formulas() -> dict[Any, Any]:
    """Return formulas that torch lacks: those of its fused attention on a CPU."""
    formulas = {
        ATTENTION_ON_CPU: _attention_on_cpu,
        f"{ATTENTION_ON_CPU}_backward": _attention_on_cpu_backward,
    }
    found = {aten_operator(name): formula for name, formula in formulas.items()}
    return {operator: formula for operator, formula in found.items() if operator is not None}


class Operations:
    """The operations of the counted steps on this rank."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.kinds: Counter[str] = Counter()
        self.not_counted: set[str] = set()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the step inside the block; compiled code runs uncompiled."""
        uncompiled: Any = nullcontext()
        if COMPILER in sys.modules:  # else nothing is compiled, and importing it takes long
            uncompiled = torch.compiler.set_stance("force_eager")
        counter = operation_counter(_cpu_formulas(), self._note_uncounted)
        with uncompiled, counter:
            yield
        by_name = {str(name): num for name, num in counter.flop_counts["Global"].items()}
        for name, num in by_name.items():
            self.kinds[kind_of(name)] += num
        self.steps.append(sum(by_name.values()))

    def _note_uncounted(self, name: str) -> None:
        if is_missed(name):
            self.not_counted.add(name)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "operations": self.steps,
            "operations_by_kind": dict(self.kinds),
            "not_counted": sorted(self.not_counted),
        }


def kind_of(name: str) -> str:
    """Return the kind of an operator that is counted.

    >>> kind_of("aten.addmm"), kind_of("aten._flash_attention_forward")
    ('matmul', 'attention')
    """
    return next((kind for part, kind in KINDS.items() if part in name), "matmul")


def is_missed(name: str) -> bool:
    """Return whether an operator without a formula may be more than pointwise work.

    >>> is_missed("aten.add"), is_missed("aten.mv"), is_missed("mine.kernel")
    (False, True, True)
    """
    family, _, own = name.partition(".")
    return family not in OURS or (own not in LIGHT and re.match(HEAVY, own) is not None)
