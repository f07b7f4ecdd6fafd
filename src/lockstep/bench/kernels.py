"""The device's time in a step: kernels by kind, and the time without any.

Owns: tracing a few steps, sorting kernels by name, and the share of time in which the GPU was
busy. On a CPU operators take the place of kernels, and there is no such share. Does not own: which
steps are traced, or how the figures are shown.
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from lockstep.torch_compat.private import ran_on_gpu

TRACED_STEPS = 2
TRACE_STEPS = 1 + TRACED_STEPS
"""The first one warms the tracer up."""

NAMES = (
    ("exchange", r"nccl|c10d|gloo"),
    ("attention", r"flash|fmha|attention|sdpa|scaled_dot|dot_do_o|convert_dq"),
    ("pointwise/reduction", r"norm|(^|::|_)bn_|triton_(poi|red|per)|softmax|glu|column_sum|^qk_"),
    ("copies", r"memcpy|memset|copy|nchwtonhwc|nhwctonchw|aten::(cat|stack|zero_|fill_)"),
    ("convolution", r"conv(?!ert)|wgrad|dgrad|fprop|cudnn|winograd"),
    ("matmul", r"gemm|gemv|cutlass|nvjet|cublas|splitk|xmma|wgmma|triton_(mm|bmm|tem)"),
    ("matmul", r"aten::(mm|addmm|bmm|baddbmm|mv|dot|linear|matmul)$"),
    ("pointwise/reduction", r"elementwise|reduce|vectorized|unrolled|multi_tensor|triton|aten::"),
    ("pointwise/reduction", r"index|gather|scatter|dropout|distribution|embedding|arange|scan"),
)
"""Patterns in the names of kernels, by kind; the first match counts."""


def kind_of(name: str) -> str:
    """Return the kind of a kernel or operator.

    >>> kind_of("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT"), kind_of("aten::mul")
    ('matmul', 'pointwise/reduction')
    """
    low = name.lower()
    return next((kind for kind, pattern in NAMES if re.search(pattern, low)), "other")


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length that some spans cover, overlaps counted once.

    >>> covered([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


class Trace:
    """The profiler's trace of a few steps of one rank."""

    def __init__(self, device: torch.device, synchronize: Callable[[], None]) -> None:
        self.on_gpu = device.type == "cuda"
        self.synchronize = synchronize
        self.wall_s = 0.0
        self.began = 0.0
        activity = ProfilerActivity.CUDA if self.on_gpu else ProfilerActivity.CPU
        steps = schedule(wait=0, warmup=1, active=TRACED_STEPS, repeat=1)
        self.profile = profile(activities=[activity], schedule=steps, acc_events=True)

    def start_step(self, number: int) -> None:
        """Begin step `number`; TRACE_STEPS ends the last one."""
        if number == 0:
            self.profile.start()
            return
        if number in (1, TRACE_STEPS):
            self.synchronize()
        if number == TRACE_STEPS:
            self.wall_s = (time.perf_counter() - self.began) / TRACED_STEPS
            self.profile.stop()
            return
        self.profile.step()
        if number == 1:
            self.began = time.perf_counter()

    def to_json(self) -> dict[str, Any]:
        """Return the seconds of a step by kind and by name, longest first."""
        seconds, calls, busy_s = self._kernels() if self.on_gpu else self._operators()
        kinds: Counter[str] = Counter()
        for name, spent_s in seconds.items():
            kinds[kind_of(name)] += spent_s
        names = [
            {"name": name, "kind": kind_of(name), "s": spent_s, "calls": calls[name] / TRACED_STEPS}
            for name, spent_s in seconds.most_common()
        ]
        return {
            "traced_step_s": self.wall_s,
            "busy_s": busy_s,
            "kinds_s": dict(kinds.most_common()),
            "names": names,
        }

    def _kernels(self) -> tuple[Counter[str], Counter[str], float | None]:
        seconds: Counter[str] = Counter()
        calls: Counter[str] = Counter()
        spans = []
        for event in self.profile.events() or ():  # type: ignore[no-untyped-call]
            if not ran_on_gpu(event) or is_annotation(event):
                continue
            span = event.time_range.start * 1e-6, event.time_range.end * 1e-6
            spans.append(span)
            seconds[event.name] += (span[1] - span[0]) / TRACED_STEPS
            calls[event.name] += 1
        return seconds, calls, covered(spans) / TRACED_STEPS if spans else None

    def _operators(self) -> tuple[Counter[str], Counter[str], float | None]:
        seconds: Counter[str] = Counter()
        calls: Counter[str] = Counter()
        for event in self.profile.key_averages():
            if not event.key.startswith("ProfilerStep"):
                own_s = event.self_cpu_time_total * 1e-6 / TRACED_STEPS
                seconds[event.key], calls[event.key] = own_s, event.count
        return seconds, calls, None


def is_annotation(event: Any) -> bool:
    """Return whether an event on the GPU's timeline only names a span and is not a kernel."""
    named = event.name.startswith(
        ("ProfilerStep", "Optimizer.", "DistributedDataParallel", "nccl:")
    )
    return named or bool(getattr(event, "is_user_annotation", False))
