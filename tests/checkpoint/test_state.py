"""Trees come back as they were, and a snapshot stands still."""

import json
import math
import random
import struct
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lockstep.checkpoint.state import (
    flatten,
    load_model_state,
    load_optimizer,
    snapshot,
    unflatten,
)
from lockstep.checkpoint.store import CheckpointStore
from lockstep.errors import CheckpointError

torch.set_num_threads(1)

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e8m0fnu,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.bool,
]


def random_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor of every kind of number, NaN payloads and denormals included."""
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (*shape, dtype.itemsize), dtype=torch.uint8)
    return raw.view(dtype).squeeze(-1)


def as_bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().unsqueeze(-1).view(torch.uint8).numpy().tobytes()


def same(left: Any, right: Any) -> bool:
    """Compare two trees by type and bit, not by ==."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        alike = left.dtype == right.dtype and left.shape == right.shape
        return alike and as_bytes(left) == as_bytes(right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):
        return struct.pack("d", left) == struct.pack("d", right)
    return bool(left == right)


def through_disk(folder: Path, tree: Any) -> Any:
    store = CheckpointStore(folder)
    store.save(0, {"part": tree}, {})
    checkpoint, _ = store.latest()
    assert checkpoint is not None
    return checkpoint.load("part")


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_every_dtype_comes_back_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    tree = {
        str(shape): random_bits(dtype, shape) for shape in [(), (1,), (0, 3), (3, 5), (2, 1, 4)]
    }
    assert same(through_disk(tmp_path, tree), tree)


def test_comparing_would_notice_one_changed_bit() -> None:
    left = random_bits(torch.float32, (3,))
    right = left.clone()
    right.view(torch.uint8)[5] ^= 1
    assert same(left, left.clone())
    assert not same(left, right)
    assert not same({"a": 1}, {"a": 1.0})
    assert not same((1,), [1])
    assert not same(0.0, -0.0)


def test_plain_values_come_back_with_their_types(tmp_path: Path) -> None:
    tree: Any = {
        "none": None,
        "flags": [True, False],
        "ints": (0, -1, 2**80),
        "floats": [0.1, -0.0, 1e-320, math.inf, -math.inf, math.nan, 1.0],
        "text": 'quotes " and \n and é and \ud800',
        3: {"three": 3},
        "3": "not the number",
        "nested": [({}, []), ()],
        "": {"": torch.ones(1)},
    }
    assert same(through_disk(tmp_path, tree), tree)


def test_an_optimizer_comes_back_whole(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), betas=(0.8, 0.9))
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    assert same(through_disk(tmp_path, state), state)


@pytest.mark.parametrize("tree", [torch.ones(2), None, 3, [torch.ones(1)], {}], ids=repr)
def test_a_tree_may_be_as_small_as_one_value(tree: Any, tmp_path: Path) -> None:
    assert same(through_disk(tmp_path, tree), tree)


def test_two_paths_with_one_dotted_name_stay_apart(tmp_path: Path) -> None:
    tree = {
        "a": {"b": torch.tensor(1)},
        "a.b": torch.tensor(2),
        0: torch.tensor(3),
        "0": torch.tensor(4),
        "__metadata__": torch.tensor(5),
    }
    assert same(through_disk(tmp_path, tree), tree)


def test_views_and_transposes_come_back_by_value(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tree = {"t": base.t(), "row": base[1], "wide": base[:, :1].expand(3, 4), "all": base}
    conjugate = {"c": torch.tensor([1 + 2j]).conj(), "n": torch.tensor([1 + 2j]).conj().imag}
    assert same(through_disk(tmp_path, tree), tree)
    loaded = through_disk(tmp_path / "complex", conjugate)
    assert loaded["c"].tolist() == [1 - 2j]
    assert loaded["n"].tolist() == [-2.0]


def test_tied_weights_are_tied_when_they_come_back(tmp_path: Path) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    state = dict(model.state_dict())
    for loaded in (through_disk(tmp_path, state), snapshot(state)):
        assert same(loaded, state)
        loaded["embed.weight"][0, 0] = 7.0
        assert loaded["head.weight"][0, 0] == 7.0
    double = {"a": torch.ones(2, dtype=torch.complex128)}
    double["b"] = double["a"]
    copied = snapshot(double)
    assert copied["a"].data_ptr() == copied["b"].data_ptr() != double["a"].data_ptr()


def test_tied_weights_are_all_named_in_the_plain_file() -> None:
    tied = torch.ones(2)
    tensors, _ = flatten({"a": tied, "b": tied, "c": tied.clone()})
    assert list(tensors) == ["a", "b", "c"]


def test_the_skeleton_survives_json() -> None:
    tensors, skeleton = flatten({1: [torch.ones(1), math.inf], "x": (None,)})
    again = json.loads(json.dumps(skeleton, allow_nan=False))
    assert same(unflatten(again, tensors), unflatten(skeleton, tensors))


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"groups": [{"lr": np.float64(0.1)}]}, ["groups.0.lr", "numpy.float64"]),
        ({"a": {"b": object()}}, ["a.b", "object"]),
        ({"a": {1.5: 1}}, ["'a'", "1.5"]),
        ({"a": {True: 1}}, ["'a'", "bool"]),
        ({"a": {1, 2}}, ["'a'", "set"]),
        ({"a": Pair(1, 2)}, ["'a'", "Pair"]),
        ({"a": b"raw"}, ["'a'", "bytes"]),
        ({"a": np.ones(2)}, ["'a'", "numpy.ndarray"]),
        ({"a": torch.ones(2).to_sparse()}, ["'a'", "sparse"]),
        ({"a": torch.ones(2, device="meta")}, ["'a'", "meta"]),
        ({"\ud800": torch.ones(2)}, ["cannot be stored"]),
        (object(), ["'this'"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "tree",
)
def test_what_cannot_be_kept_is_refused_by_its_path(tree: Any, words: list[str]) -> None:
    for refuse in (flatten, snapshot):
        with pytest.raises(CheckpointError) as caught:
            refuse(tree)
        assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_tensor_that_only_looks_like_one_is_refused() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    with pytest.raises(CheckpointError, match="not a plain tensor"):
        flatten({"sharded": TwoTensor(torch.ones(2), torch.ones(2))})  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    "skeleton",
    [
        {"tensor": "missing"},
        {"tensor": 3},
        {"tensor": "a", "tied_to": "missing"},
        {"tensor": "a", "dtype": "nothing"},
        {"tensor": "a", "dtype": "load"},
        {"tensor": "a", "dtype": "complex128"},
        {"dict": [["a"]]},
        {"dict": [[[], 1]]},
        {"dict": {}},
        {"list": 3},
        {"float": "0x1"},
        {"set": []},
        [],
        {},
    ],
    ids=str,
)
def test_a_skeleton_that_is_none_is_refused(skeleton: Any) -> None:
    with pytest.raises(CheckpointError):
        unflatten(skeleton, {"a": torch.ones(1, 3, dtype=torch.uint8)})


def test_a_snapshot_does_not_see_later_changes() -> None:
    parameter = nn.Parameter(torch.ones(3))
    live: dict[str, Any] = OrderedDict(
        w=parameter, nested={"list": [torch.zeros(2), 1]}, t=torch.ones(2, 3).t()
    )
    copy = snapshot(live)
    with torch.no_grad():
        parameter.add_(1)
    live["nested"]["list"][0].fill_(9)
    live["nested"]["list"].append(2)
    live["t"].zero_()
    assert copy["w"].tolist() == [1, 1, 1]
    assert not copy["w"].requires_grad
    assert same(copy["nested"], {"list": [torch.zeros(2), 1]})
    assert copy["t"].is_contiguous()
    assert copy["t"].sum() == 6


def test_without_the_copy_a_snapshot_would_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.checkpoint.state._host_copy", lambda tensor: tensor)
    with pytest.raises(AssertionError):
        test_a_snapshot_does_not_see_later_changes()


def test_fitting_weights_are_loaded() -> None:
    source, target = nn.Linear(3, 2), nn.Linear(3, 2)
    load_model_state(target, snapshot(source.state_dict()))
    assert same(dict(target.state_dict()), dict(source.state_dict()))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda s: s.pop("bias"), "missing     bias"),
        (lambda s: s.update(extra=torch.ones(1)), "unexpected  extra"),
        (lambda s: s.update(bias=torch.ones(3)), "bias: the model has [2] float32, the file [3] f"),
        (lambda s: s.update(bias=s["bias"].half()), "has [2] float32, the file [2] float16"),
        (lambda s: s.update(bias=1), "the file int"),
        (lambda s: s.update(bais=s.pop("bias")), "unexpected  bais"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(change: Any, line: str) -> None:
    model = nn.Linear(3, 2)
    before = snapshot(model.state_dict())
    state = {name: tensor + 1 for name, tensor in before.items()}
    change(state)
    with pytest.raises(CheckpointError) as caught:
        load_model_state(model, state)
    assert line in str(caught.value)
    assert same(snapshot(model.state_dict()), before)


class Remembering(nn.Module):
    """Keeps inputs in a buffer that grows."""

    def __init__(self, num_kept: int = 0) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 1)
        self.register_buffer("memory", torch.ones(num_kept, 4))


def test_a_buffer_gets_the_saved_shape_and_a_parameter_does_not() -> None:
    target = nn.Sequential(Remembering())
    load_model_state(target, snapshot(nn.Sequential(Remembering(8)).state_dict()))
    assert torch.equal(dict(target.named_buffers())["0.memory"], torch.ones(8, 4))
    state = snapshot(nn.Sequential(Remembering(9)).state_dict())
    with pytest.raises(CheckpointError, match="different   0.inner.bias") as caught:
        load_model_state(target, {**state, "0.inner.bias": torch.ones(2)})
    assert "memory" not in caught.value.problem
    assert len(dict(target.named_buffers())["0.memory"]) == 8
    with pytest.raises(CheckpointError, match="different   0.memory"):
        load_model_state(target, {**state, "0.memory": torch.ones(9, 4).half()})


Mutation = Callable[[dict[str, Any], str, random.Random], object]
MUTATIONS: dict[str, Mutation] = {
    "missing": lambda state, name, rng: state.pop(name),
    "unexpected": lambda state, name, rng: state.update({f"{name}.more": torch.ones(1)}),
    "renamed": lambda state, name, rng: state.update({f"module.{name}": state.pop(name)}),
    "other shape": lambda state, name, rng: state.update({name: state[name].unsqueeze(0)}),
    "one row less": lambda state, name, rng: state.update({name: state[name].reshape(-1)[1:]}),
    "other dtype": lambda state, name, rng: state.update(
        {name: state[name].to(rng.choice([torch.float16, torch.bfloat16, torch.int32]))}
    ),
    "no tensor": lambda state, name, rng: state.update({name: rng.choice([None, 1.0, "x", []])}),
    "two alike": lambda state, name, rng: state.update({name: state, f"{name}'": state}),
}


def test_each_of_500_mutations_is_refused_by_name_and_changes_nothing() -> None:
    rng = random.Random(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Conv1d(2, 3, 1), nn.Linear(2, 2))
    before = snapshot(model.state_dict())
    for turn in range(500):
        state = {name: tensor + 1 for name, tensor in before.items()}
        name = rng.choice(sorted(state))
        kind = rng.choice(sorted(MUTATIONS))
        MUTATIONS[kind](state, name, rng)
        with pytest.raises(CheckpointError) as caught:
            load_model_state(model, state)
        lines = caught.value.problem.splitlines()[1:]
        assert lines, kind
        assert any(name in line for line in lines), (turn, kind, name)
        assert len(lines) <= 2, "one line a difference"
    assert same(snapshot(model.state_dict()), before)


def test_torch_alone_would_cast_a_wrong_dtype() -> None:
    """Torch rounds a float32 weight to half without a word; the same state is refused here."""
    finer_than_half = torch.full((2, 3), 1.0001)
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(finer_than_half)
    state = {name: tensor.half() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load_model_state(model, state)
    assert [name for name in state if name not in caught.value.problem] == []
    assert torch.equal(model.weight, finer_than_half)
    model.load_state_dict(state)
    assert model.weight.dtype == torch.float32
    assert torch.equal(model.weight, torch.ones(2, 3)), "rounded"


def test_a_long_list_of_differences_is_cut() -> None:
    with pytest.raises(CheckpointError, match="and 72 more"):
        load_model_state(nn.Linear(1, 1), {f"extra{n}": torch.ones(1) for n in range(100)})


def test_a_snapshot_written_over_an_old_one_holds_the_new_values_in_the_old_memory() -> None:
    state = {"w": torch.zeros(3), "n": torch.zeros(2), "tied": torch.zeros(1)}
    state["again"] = state["tied"]
    spare: dict[str, torch.Tensor] = {}
    first = snapshot(state, spare=spare)
    tied = torch.ones(1)
    state = {"w": torch.ones(3), "n": torch.ones(2, dtype=torch.int64), "again": tied, "tied": tied}
    second = snapshot(state, spare=spare)
    state["w"].zero_()
    assert second["w"].tolist() == [1, 1, 1]
    assert second["w"].data_ptr() == first["w"].data_ptr()
    assert second["n"].dtype == torch.int64  # what does not fit is new
    assert first["n"].tolist() == [0, 0]
    assert second["tied"] is second["again"]
    assert set(spare) == set(state)
    assert snapshot(state, is_wanted=False, spare=spare) == {}


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_keeps_its_kernels_whoever_saved_its_state(kind: Any) -> None:
    """A run saved on a CPU goes on on a GPU, where its optimizer is fused."""
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    plain, fused = kind([weight], 0.1), kind([weight], 0.1, fused=True)
    plain.step()
    load_optimizer(fused, plain.state_dict())
    assert fused.param_groups[0]["fused"]
    fused.found_inf, fused.grad_scale = torch.zeros(()), torch.ones(())
    fused.step()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        load_optimizer(
            kind([{"params": [weight]}, {"params": [nn.Parameter(torch.ones(1))]}]),
            plain.state_dict(),
        )


def test_a_snapshot_written_over_an_old_one_keeps_apart_what_was_tied_then() -> None:
    spare: dict[str, torch.Tensor] = {}
    best = torch.ones(2)
    snapshot({"best": best, "now": best}, spare=spare)
    copy = snapshot({"best": best, "now": torch.full((2,), 7.0)}, spare=spare)
    assert (copy["best"].tolist(), copy["now"].tolist()) == ([1, 1], [7, 7])


def test_an_optimizer_s_state_keeps_its_dtype_whatever_its_parameter_has(tmp_path: Path) -> None:
    """Torch alone would round the float32 master copy of a bfloat16 weight to bfloat16."""
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    first, second = (torch.optim.SGD([weight], 0.1) for _ in range(2))
    kept = {"master": torch.tensor([1.0001, 2.0002]), "codes": torch.arange(3, dtype=torch.uint8)}
    first.state[weight] = kept
    load_optimizer(second, through_disk(tmp_path, first.state_dict()))
    assert same(dict(second.state[weight]), kept)
