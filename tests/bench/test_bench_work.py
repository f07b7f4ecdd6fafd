"""How near a step is to what the machine can do: counts against sums by hand, and the words."""

import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import flop_registry

from lockstep import Loader, PartialLoss, train_step
from lockstep.bench import limits
from lockstep.bench.kernels import TRACE_STEPS, Trace, kind_of
from lockstep.bench.limits import COPY_BYTES, copy_limit, fastest, matmul_limit, update_bytes
from lockstep.bench.measured import Measured
from lockstep.bench.operations import Operations
from lockstep.bench.report import step_lines
from lockstep.bench.work import Work
from lockstep.plan import BatchConfig, plan_batches
from lockstep.run.average import Averages
from lockstep.task import Context
from lockstep.testing import FakeWorld

CPU = torch.device("cpu")
WORLD = FakeWorld()
B, WIDTHS = 6, (8, 16, 32, 4)
"""Samples of a micro-batch, and the widths between the layers of a stack."""


def nothing() -> None:
    """Wait for nothing: on a CPU all that was asked for is done."""


class Stack(nn.Module):
    """Linear layers."""

    def __init__(self) -> None:
        super().__init__()
        pairs = zip(WIDTHS, WIDTHS[1:], strict=False)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairs)

    def forward(self, data: Tensor) -> Tensor:
        for layer in self.layers:
            data = layer(data)
        return data


def counted(model: nn.Module, data: Tensor, accumulate: int = 1) -> Operations:
    """Count a real step over micro-batches of B samples."""
    plan = plan_batches(BatchConfig(batch_size=B, accumulate=accumulate), len(data), 1)
    batch = next(iter(Loader(data, WORLD, plan=plan, epochs=1)))
    optimizer = torch.optim.AdamW(model.parameters())

    def loss(model: nn.Module, batch: Tensor, context: Context) -> PartialLoss:
        return PartialLoss(model(batch).square().sum(), len(batch))

    found = Operations()
    with found.counting():
        train_step(loss, model, optimizer, batch, WORLD)
    return found


def by_hand(num: int) -> int:
    """Return the operations of `num` samples: of data alone no gradient is needed."""
    pairs = list(zip(WIDTHS, WIDTHS[1:], strict=False))
    return 2 * num * (3 * sum(a * b for a, b in pairs) - WIDTHS[0] * WIDTHS[1])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_stack_of_linear_layers_has_the_operations_it_has(accumulate: int) -> None:
    found = counted(Stack(), torch.ones(12, WIDTHS[0]), accumulate)
    assert found.steps == [accumulate * by_hand(B)]
    assert found.kinds == {"matmul": accumulate * by_hand(B)}
    assert found.not_counted == set()


def test_a_miscount_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a rule that forgets the additions."""
    rule = flop_registry[torch.ops.aten.addmm]
    monkeypatch.setitem(
        flop_registry, torch.ops.aten.addmm, lambda *a, **named: rule(*a, **named) // 2
    )
    assert counted(Stack(), torch.ones(12, WIDTHS[0])).steps != [by_hand(B)]


def test_convolutions_count_by_their_outputs_and_their_windows() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 5, stride=2, padding=2))
    first, second = 2 * B * 16 * 16 * 8 * 3 * 9, 2 * B * 8 * 8 * 4 * 8 * 25
    found = counted(model, torch.ones(6, 3, 16, 16))
    assert found.kinds == {"convolution": 2 * first + 3 * second}


class Attention(nn.Module):
    """One head, whose queries, keys and values are parameters times the data."""

    def __init__(self, backend: SDPBackend) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, 1))
        self.backend = backend

    def forward(self, data: Tensor) -> Tensor:
        with sdpa_kernel(self.backend):
            return F.scaled_dot_product_attention(*(data[:, None] * s for s in self.scale))


@pytest.mark.parametrize(
    ("backend", "products", "kind"),
    [
        (SDPBackend.FLASH_ATTENTION, 2 + 5, "attention"),  # the scores are computed again
        (SDPBackend.MATH, 2 + 4, "matmul"),
    ],
)
def test_attention_counts_whatever_kernel_does_it(
    backend: SDPBackend, products: int, kind: str
) -> None:
    found = counted(Attention(backend), torch.ones(6, 24, 16))
    assert found.kinds == {kind: products * 2 * B * 24 * 24 * 16}


@torch.library.custom_op("planted::double", mutates_args=())
def planted_double(value: Tensor) -> Tensor:
    return value * 2


def test_what_has_no_rule_is_named() -> None:
    found = Operations()
    with found.counting():
        planted_double(torch.ones(3))
        torch.cdist(torch.ones(3, 2), torch.ones(3, 2))
        torch.ones(3, 3).mv(torch.ones(3)).exp().sum()
    assert found.not_counted == {"planted.double", "aten._cdist_forward", "aten.mv"}
    assert found.steps == [0]


def test_what_is_compiled_is_counted_as_it_was_written() -> None:
    calls = []

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        def compiled(*args: Any) -> Any:
            calls.append(1)
            return graph.forward(*args)

        return compiled

    model = Stack()
    model.compile(backend=backend)
    model(torch.ones(B, WIDTHS[0]))
    assert calls == [1]
    assert counted(model, torch.ones(6, WIDTHS[0])).steps == [by_hand(B)]
    # Torch by itself compiles nothing where a counter looks on; without one it would.
    with Operations().counting(), _disable_current_modes():
        model(torch.ones(B, WIDTHS[0]))
    assert calls == [1]
    model(torch.ones(B, WIDTHS[0]))
    assert calls == [1, 1]


# --- What the machine can do ---


def test_a_product_of_another_size_is_near_the_limit() -> None:
    """In this thread's own CPU time: others may use the cores, too."""
    limit, _ = matmul_limit(CPU, torch.float32, nothing, time.thread_time)
    a = torch.randn(640, 640)
    other = 2 * 640**3 / fastest(partial(torch.mm, a, a), nothing, time.thread_time)
    assert 0.3 < other / limit < 3


def test_the_limit_is_the_best_of_sizes_until_one_takes_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([1e-3, 4e-3, 1.0])
    monkeypatch.setattr(limits, "fastest", lambda action, synchronize, clock: next(times))
    assert matmul_limit(CPU, torch.float32, nothing) == (2 * 1024**3 / 4e-3, 1024)


def test_an_update_moves_weights_states_and_averages() -> None:
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, WIDTHS[0])).sum().backward()
    optimizer.step()
    run: Any = SimpleNamespace(optimizer=optimizer, averages=Averages(model, (0.9, 0.99)))
    num = sum(p.numel() for p in model.parameters())
    # Gradient 1, weight 2, two moments 2 each, two averages 2 each and the weight once more.
    assert update_bytes(run) == 4 * num * (1 + 2 + 2 * 2 + 2 * 2 + 1)


def test_a_copy_is_counted_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "fastest", lambda action, synchronize: 0.5)
    assert copy_limit(CPU, nothing) == 4 * COPY_BYTES


# --- Kernels ---


KERNELS = {
    "matmul": [
        "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_64x2_nn>",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>",
        "triton_tem_fused_mm_2",
        "aten::addmm",
    ],
    "attention": [
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80",
    ],
    "convolution": [
        "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc",
        "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816dgrad_optimized>",
        "void at::native::(anonymous namespace)::conv_depthwise3d_cuda_kernel<float>",
        "aten::convolution_backward",
    ],
    "copies": [
        "void cudnn::ops::nchwToNhwcKernel<__nv_bfloat16>",
        "Memcpy HtoD (Pinned -> Device)",
        "Memset (Device)",
        "void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda>",
    ],
    "pointwise/reduction": [
        "void at::native::vectorized_elementwise_kernel<4, GeluCUDAKernelImpl>",
        "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>",
        "void at::native::batch_norm_collect_statistics_channels_last_kernel",
        "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float>",
        "triton_per_fused_add_native_layer_norm_backward_3",
        "triton_poi_fused_mul_silu_7",
        "aten::add_",
    ],
    "exchange": ["ncclDevKernel_AllReduce_Sum_f32_RING_LL"],
    "other": ["something_of_somebody"],
}


def test_kernels_are_known_by_their_names() -> None:
    found = {kind: [kind_of(name) for name in names] for kind, names in KERNELS.items()}
    assert found == {kind: [kind] * len(names) for kind, names in KERNELS.items()}


def test_operators_stand_in_for_kernels_on_a_cpu() -> None:
    trace, model = Trace(CPU, nothing), nn.Linear(256, 256)
    for number in range(TRACE_STEPS):
        trace.start_step(number)
        for _ in range(number + 1):
            model(torch.ones(256, 256))
    trace.start_step(TRACE_STEPS)
    model(torch.ones(256, 256))
    found = trace.to_json()
    (product,) = [each for each in found["names"] if each["name"] == "aten::addmm"]
    assert product["calls"] == 2.5  # two and three: neither the first step nor what comes after
    assert found["busy_s"] is None
    assert 0 < product["s"] <= found["kinds_s"]["matmul"] < found["traced_step_s"]


def on_gpu(name: str, start_us: float, end_us: float, **more: Any) -> SimpleNamespace:
    span = SimpleNamespace(start=start_us, end=end_us)
    return SimpleNamespace(name=name, device_type=DeviceType.CUDA, time_range=span, **more)


def test_a_gpu_is_busy_once_however_many_kernels_it_runs() -> None:
    trace: Any = Trace(CPU, nothing)
    trace.on_gpu, trace.profile = True, SimpleNamespace()
    trace.profile.events = lambda: [
        on_gpu("gemm", 0, 100),
        on_gpu("ncclDevKernel_AllReduce", 50, 250),
        on_gpu("gemm", 400, 500),
        on_gpu("ProfilerStep#1", 0, 900),
        on_gpu("a name for a span", 0, 900, is_user_annotation=True),
        SimpleNamespace(name="cudaLaunchKernel", device_type=DeviceType.CPU),
    ]
    found = trace.to_json()  # of two steps
    assert found["busy_s"] == pytest.approx(350e-6 / 2)
    assert found["kinds_s"] == pytest.approx({"matmul": 100e-6, "exchange": 100e-6})
    assert {each["name"]: each["calls"] for each in found["names"]}["gemm"] == 1


# --- In words ---

RANK: dict[str, Any] = {
    "operations": [2 * 10**12, 4 * 10**12],
    "operations_by_kind": {"matmul": 3 * 10**12, "attention": 10**12},
    "not_counted": ["mine.kernel"],
    "dtype": "bf16",
    "limit_per_s": 100e12,
    "limit_side": 8192,
    "bytes_per_s": 4e12,
    "update_bytes": 8 * 10**9,
    "peak_bytes": 40 * 10**9,
    "memory_bytes": 140 * 10**9,
    "busy_s": 0.06,
    "traced_step_s": 0.1,
    "kinds_s": {"matmul": 0.04, "copies": 0.02},
    "names": [],
}
FOUND = Measured(
    facts={"global_batch": 8, "num_workers": 2, "device": "a GPU", "compile": False},
    ranks=1,
    whole_s=[0.1] * 5,
    local_s=[0.1] * 5,
    wait_s=0.001,
    local_wait_s=0.001,
    forward_s=0.03,
    backward_s=0.06,
    after_s=0.01,
    backward_end_s=0.09,
    buckets=[],
    exchange_s=0.0,
    sizes=[],
    sums_per_step=2.0,
    input_samples_per_s=8000.0,
    work=Work.of([RANK], 0.1),
)


def said(found: Measured) -> str:
    return re.sub(" +", " ", "\n".join(step_lines(found)))


def test_a_step_says_how_near_it_is() -> None:
    words = said(FOUND)
    assert (
        "\n operations 3 TFLOP per step and rank, 2 to 4: matmul 75 %, attention 25 %; "
        "not counted: pointwise work, mine.kernel\n" in words
    )
    assert "\n rate 30 TFLOP/s 30 % of the 100 TFLOP/s that a bf16 matrix product" in words
    assert (
        "\n update 2.0 ms at least: optimizer and averages move 8 GB, a copy reaches 4e+03 GB"
        in words
    )
    assert "\n peak memory 40.00 GB of 140 GB" in words
    assert "\n GPU busy 60 % kernels: matmul 67 %, copies 33 %\n" in words
    assert words.endswith("the host is the limit: try compile: true or larger micro-batches")


@pytest.mark.parametrize(
    ("found", "ending"),
    [
        (replace(FOUND, wait_s=0.03), "copies 33 %"),  # the data are the limit
        (replace(FOUND, work=Work.of([RANK | {"busy_s": 0.09}], 0.1)), "copies 33 %"),
        (replace(FOUND, work=Work.of([RANK | {"busy_s": None}], 0.1)), "copies 33 %"),
        (
            replace(FOUND, facts=FOUND.facts | {"compile": True}),
            "the host is the limit: try compile: graphs or larger micro-batches",
        ),
        (
            replace(FOUND, facts=FOUND.facts | {"compile": "graphs"}),
            "the host is the limit: try larger micro-batches",
        ),
    ],
)
def test_the_host_is_blamed_only_for_a_gpu_that_waits_for_it(found: Measured, ending: str) -> None:
    assert said(found).endswith(ending)


def test_ranks_are_averaged_and_kept() -> None:
    other = RANK | {"operations": [6 * 10**12], "limit_per_s": 300e12, "peak_bytes": 50 * 10**9}
    work = Work.of([RANK, other], 0.1)
    assert work.operations == 4.5e12
    assert work.mfu == pytest.approx(45e12 / 200e12)
    assert work.peak_bytes == 50 * 10**9
    assert json.loads(json.dumps(asdict(work)))["operations_each"] == [
        RANK["operations"],
        other["operations"],
    ]
