"""Kernels of a step, by kind, and the share of it in which the GPU had any."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lockstep.bench.kernels import TRACE_STEPS, Trace
from lockstep.bench.limits import copy_limit, matmul_limit
from lockstep.bench.operations import Operations

pytestmark = pytest.mark.gpu


def traced(step: Callable[[], object]) -> dict[str, Any]:
    trace = Trace(torch.device("cuda"), torch.cuda.synchronize)
    for number in range(TRACE_STEPS):
        trace.start_step(number)
        step()
    trace.start_step(TRACE_STEPS)
    return trace.to_json()


def test_a_gpu_that_multiplies_is_busy_and_one_that_is_left_alone_is_not() -> None:
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def multiply(pause_s: float = 0.0) -> None:
        for _ in range(50):
            torch.mm(a, a)
        torch.cuda.synchronize()
        time.sleep(pause_s)

    found = traced(multiply)
    assert 0.7 < found["busy_s"] / found["traced_step_s"] <= 1
    assert next(iter(found["kinds_s"])) == "matmul"
    step_s = float(found["traced_step_s"])
    alone = traced(lambda: multiply(3 * step_s))
    assert alone["busy_s"] / alone["traced_step_s"] < 0.5


def test_attention_on_a_gpu_is_counted_in_full() -> None:
    query = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    found = Operations()
    with found.counting():
        torch.nn.functional.scaled_dot_product_attention(query, query, query).sum().backward()
    assert found.steps == [(2 + 5) * 2 * 2 * 4 * 128 * 128 * 64]
    assert found.kinds.keys() == {"attention"}


def test_bf16_is_faster_than_float64_and_memory_than_a_bus() -> None:
    device, synchronize = torch.device("cuda"), torch.cuda.synchronize
    half, _ = matmul_limit(device, torch.bfloat16, synchronize)
    full, _ = matmul_limit(device, torch.float64, synchronize)
    assert half > 2 * full
    assert copy_limit(device, synchronize) > 50e9
