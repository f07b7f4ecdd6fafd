"""What a step's time is made of on the device: kernels by kind, and the time with none.

Owns: tracing a few steps, sorting what ran in them by its name, and the share of time in which
the GPU had something to do. On a CPU operators stand in for kernels, and nothing is said of
busy. Does not own: which steps, or what is made of it.
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

TRACED_STEPS = 2
TRACE_STEPS = 1 + TRACED_STEPS
"""The first lets the tracer settle."""

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
"""What kernels of a kind have in their names; the first that fits."""


def kind_of(name: str) -> str:
    """Return the kind of a kernel or operator.

    >>> kind_of("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT"), kind_of("aten::mul")
    ('matmul', 'pointwise/reduction')
    """
    low = name.lower()
    return next((kind for kind, pattern in NAMES if re.search(pattern, low)), "other")


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return how much of a line some spans cover, where they overlap once.

    >>> covered([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


class Trace:
    """Follows a few steps of one rank."""

    def __init__(self, device: torch.device, settle: Callable[[], None]) -> None:
        self.on_gpu = device.type == "cuda"
        self.settle = settle
        self.wall_s = 0.0
        self.began = 0.0
        activity = ProfilerActivity.CUDA if self.on_gpu else ProfilerActivity.CPU
        steps = schedule(wait=0, warmup=1, active=TRACED_STEPS, repeat=1)
        self.profile = profile(activities=[activity], schedule=steps, acc_events=True)

    def next_step(self, number: int) -> None:
        """Note that step `number` begins, of TRACE_STEPS; then, that the last is over."""
        if number == 0:
            self.profile.start()
            return
        if number in (1, TRACE_STEPS):
            self.settle()
        if number == TRACE_STEPS:
            self.wall_s = (time.perf_counter() - self.began) / TRACED_STEPS
            self.profile.stop()
            return
        self.profile.step()
        if number == 1:
            self.began = time.perf_counter()

    def to_json(self) -> dict[str, Any]:
        """Return seconds of a step by kind and by name, the longest first."""
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
            on_device = event.device_type == DeviceType.CUDA
            if not on_device or is_remark(event):
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


def is_remark(event: Any) -> bool:
    """Say whether an event on the device's line is only a name that somebody gave to a span."""
    named = event.name.startswith(
        ("ProfilerStep", "Optimizer.", "DistributedDataParallel", "nccl:")
    )
    return named or bool(getattr(event, "is_user_annotation", False))
