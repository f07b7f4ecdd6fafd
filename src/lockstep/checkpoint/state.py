"""The state of a run: trees of plain values and tensors.

Owns: splitting such a tree into named tensors and a JSON skeleton, dividing these among ranks,
rebuilding the tree, copying it to host memory, and refusing one that does not fit the model. Does
not own: files, or the choice of trees that a run saves. Loading a tree never executes code from a
checkpoint.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.dist.buffer_places import buffer_places
from lockstep.dist.fsdp import gathered, is_dtensor, rows_of, shard_like
from lockstep.errors import CheckpointError

FILE_DTYPES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""The dtypes of safetensors files; a tensor of another dtype is stored as bytes."""

RESERVED_NAME: Final = "__metadata__"
KERNELS: Final = ("fused", "foreach", "capturable", "differentiable")
"""Settings of an optimizer that choose a kernel, not the result."""
MAX_DIFFERENCES_SHOWN: Final = 30


def flatten(tree: Any) -> tuple[dict[str, Tensor], Any]:
    """Split a tree into its tensors, by dotted name, and a skeleton of JSON values.

    A flat dict of tensors keeps its names. Tied tensors, which share memory, all get a name, and
    the skeleton records that they are tied. No tensor is copied.

    >>> flatten({"lr": 0.1, "state": {0: torch.zeros(2)}})[1]
    {'dict': [['lr', 0.1], ['state', {'dict': [[0, {'tensor': 'state.0'}]]}]]}

    Raises:
        CheckpointError: something in the tree is neither a plain value nor a dense tensor.
    """
    tensors: dict[str, Tensor] = {}
    first_names: dict[object, str] = {}

    def visit(node: Any, path: tuple[str, ...]) -> Any:
        if node is None or type(node) in (bool, int, str):
            return node
        if type(node) is float:
            return node if math.isfinite(node) else {"float": repr(node)}
        if isinstance(node, Tensor):
            return visit_tensor(node, path)
        if type(node) in (list, tuple):
            items = [visit(item, (*path, str(index))) for index, item in enumerate(node)]
            return {type(node).__name__: items}
        if isinstance(node, dict):
            for key in node:
                if type(key) not in (str, int):
                    raise _unsupported(path, f"has a key of type {_type_name(key)}: {key!r}")
            return {"dict": [[key, visit(item, (*path, str(key)))] for key, item in node.items()]}
        raise _unsupported(path, f"is a {_type_name(node)}")

    def visit_tensor(tensor: Tensor, path: tuple[str, ...]) -> dict[str, str]:
        stored, dtype = _storable(tensor, path)
        name = ".".join(path)
        while name in tensors or name == RESERVED_NAME:  # {"a": {"b": t}, "a.b": t}
            name += "'"
        node = {"tensor": name}
        if dtype:
            node["dtype"] = dtype
        # A rank may have no row of a sharded tensor, but ranks must write the same skeleton.
        where = name if is_dtensor(tensor) else tensor.data_ptr()
        memory = (tensor.device, where, tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and (first := first_names.setdefault(memory, name)) != name:
            node["tied_to"] = first
            stored = tensors[first]
        tensors[name] = stored
        return node

    return tensors, visit(tree, ())


def unflatten(skeleton: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Rebuild the tree that `flatten` has split; tied tensors become one tensor.

    Raises:
        CheckpointError: the skeleton is invalid, or a tensor is missing.
    """

    def visit(node: Any) -> Any:
        match node:
            case None | bool() | int() | float() | str():
                return node
            case {"float": "inf" | "-inf" | "nan" as text}:
                return float(text)
            case {"list": list(items)}:
                return [visit(item) for item in items]
            case {"tuple": list(items)}:
                return tuple(visit(item) for item in items)
            case {"dict": list(items)} if all(_is_item(item) for item in items):
                return {key: visit(item) for key, item in items}
            case {"tensor": str(name)} if (stored := node.get("tied_to", name)) in tensors:
                return _restored(tensors[stored], node.get("dtype"))
        raise CheckpointError(
            f"unknown entry in a skeleton: {node!r:.200}", "use an older checkpoint"
        )

    return visit(skeleton)


class Share(NamedTuple):
    """The part of a run's state that one rank of `size` writes. With `size` 1 it is everything."""

    tensors: dict[str, dict[str, Tensor]]
    """Tensors by part and name; of a divided tensor, some consecutive rows."""
    cuts: dict[str, dict[str, tuple[int, int]]]
    """For each divided tensor, the first row, and the number of rows of the whole."""
    skeletons: dict[str, Any]
    rank: int = 0
    size: int = 1

    @property
    def num_bytes(self) -> int:
        """The number of bytes to write."""
        return sum(num_bytes(tensors.values()) for tensors in self.tensors.values())


def share_of(parts: Mapping[str, Any], rank: int = 0, size: int = 1) -> Share:
    """Return the share of a rank.

    If every rank has the whole state, the tensors are lined up, and each rank takes the rows that
    begin in its part of the bytes: all shares have the same size, up to one row. If the state is
    sharded, each rank takes its own rows, and the first rank everything else. No tensor is copied.
    """
    flat = {part: flatten(tree) for part, tree in parts.items()}
    if any(is_dtensor(tensor) for tensors, _ in flat.values() for tensor in tensors.values()):
        if size == 1:
            problem = "a sharded state cannot be saved from one rank: it holds only its own rows"
            raise CheckpointError(problem, "call CheckpointStore.save_from on every rank")
        return _share_of_rows(flat, rank, size)
    total = num_bytes(t for tensors, _ in flat.values() for t in tensors.values())
    begin = total * rank // size
    end = total * (rank + 1) // size
    if rank + 1 == size:
        end += 1  # empty tensors may begin at the very end of the bytes
    share = Share({}, {}, {part: skeleton for part, (_, skeleton) in flat.items()}, rank, size)
    position = 0
    for part, (tensors, _) in flat.items():
        pieces: dict[str, Tensor] = share.tensors.setdefault(part, {})
        for name, tensor in tensors.items():
            num_rows = len(tensor) if tensor.dim() and tensor.numel() else 1
            row_bytes = num_bytes([tensor]) // num_rows or 1
            first, stop = (
                min(max(-((position - edge) // row_bytes), 0), num_rows) for edge in (begin, end)
            )
            if (first, stop) == (0, num_rows):
                pieces[name] = tensor
            elif first < stop:
                pieces[name] = tensor[first:stop]
                share.cuts.setdefault(part, {})[name] = (first, num_rows)
            position += num_bytes([tensor])
    return share


def _share_of_rows(
    flat: Mapping[str, tuple[dict[str, Tensor], Any]], rank: int, size: int
) -> Share:
    share = Share({}, {}, {part: skeleton for part, (_, skeleton) in flat.items()}, rank, size)
    for part, (tensors, _) in flat.items():
        pieces: dict[str, Tensor] = share.tensors.setdefault(part, {})
        for name, tensor in tensors.items():
            rows, first = rows_of(tensor) if is_dtensor(tensor) else (tensor, 0)
            if is_dtensor(tensor) and len(rows):
                pieces[name] = rows
                share.cuts.setdefault(part, {})[name] = (first, len(tensor))
            elif rank == 0:  # unsharded, or without any row
                pieces[name] = rows
    return share


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the size of tensors in a file."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def snapshot(tree: Any, is_wanted: bool = True, spare: dict[str, Tensor] | None = None) -> Any:
    """Return a copy in host memory that no later step can change; {} if it is not wanted.

    Tied tensors stay tied. Tensors are contiguous, detached and on the CPU. Sharded tensors are
    gathered one after another; with any of them the call is collective. `spare` may hold the
    tensors of an old snapshot, whose memory is reused because allocating takes longer than the
    copy. Afterwards it holds the tensors of this one.
    """
    tensors, skeleton = flatten(tree)
    used = {} if spare is None else spare
    copies: dict[int, Tensor] = {}
    for name, tensor in tensors.items():
        whole = gathered(tensor)
        if is_wanted and id(tensor) not in copies:
            fits = name in used and _describe(used[name]) == _describe(whole)
            used[name] = used[name].copy_(whole) if fits else _host_copy(whole)
            copies[id(tensor)] = used[name]  # one name per memory: tied tensors may be untied later
    if not is_wanted:
        return {}
    return unflatten(skeleton, {name: copies[id(tensor)] for name, tensor in tensors.items()})


def load_model_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load weights into a model that has exactly those names, shapes and dtypes.

    Only a buffer, other than a running statistic, may have another shape: a forward pass may have
    replaced it, so the model gets one of the saved shape. torch would cast another dtype silently.
    If anything does not fit, nothing is changed.

    Raises:
        CheckpointError: with one line per difference.
    """
    expected: dict[str, Any] = model.state_dict()
    places = {name: p for name, p in buffer_places(model).items() if not p.is_statistic}
    saved = state if isinstance(state, Mapping) else {}
    reshaped = {
        name: expected[name].new_empty(saved[name].shape)
        for name in places.keys() & expected.keys() & saved.keys()
        if getattr(saved[name], "shape", expected[name].shape) != expected[name].shape
    }
    expected.update(reshaped)
    check_weights(state, expected)
    for name, buffer in reshaped.items():
        places[name].assign(buffer)
    model.load_state_dict({name: shard_like(state[name], expected[name]) for name in expected})


def check_weights(state: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Refuse saved weights whose names, shapes or dtypes are not the expected ones.

    Raises:
        CheckpointError: with one line per difference.
    """
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"the saved weights are a {_type_name(state)}, not tensors by name",
            "use an older checkpoint, or copy this one again",
        )
    differences = [f"missing     {name}" for name in expected if name not in state]
    differences += [f"unexpected  {name}" for name in state if name not in expected]
    for name in (name for name in expected if name in state):
        wanted = _describe(expected[name])
        found = _describe(state[name])
        if wanted != found:
            differences.append(f"different   {name}: the model has {wanted}, the file {found}")
    if differences:
        shown = differences[:MAX_DIFFERENCES_SHOWN]
        if len(differences) > len(shown):
            shown.append(f"and {len(differences) - len(shown)} more")
        raise CheckpointError(
            "the saved weights do not fit this model:\n    " + "\n    ".join(shown),
            "build the model with the settings stored in the checkpoint",
        )


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load an optimizer's state; for sharded parameters, this rank's rows.

    The settings in `KERNELS` are not loaded, because the file may come from another device.

    Raises:
        ValueError: `state` has other parameter groups, or is not the state of an optimizer.
    """
    _check_optimizer_state(state, optimizer)
    # Shard tensors before torch moves them to the device, where whole ones may not fit.
    own = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    placed = {
        index: {name: _placed(value, own[index]) for name, value in kept.items()}
        for index, kept in state["state"].items()
        if index in own
    }
    groups = [dict(saved) for saved in state["param_groups"]]
    for saved, built in zip(groups, optimizer.param_groups, strict=False):
        saved.update((name, built[name]) for name in KERNELS if name in built)
    merged = {"state": {**state["state"], **placed}, "param_groups": groups}
    optimizer.load_state_dict({**state, **merged})
    for index, saved in placed.items():
        parameter = own[index]
        kept = optimizer.state.get(parameter, {})
        # torch has cast the state to the parameter's dtype. Restore the saved dtype, in the layout
        # that a fused optimizer needs. torch places step counts itself.
        for name, now in kept.items():
            was = saved.get(name)
            if isinstance(was, Tensor) and was.shape == getattr(now, "shape", 0) and name != "step":
                like = parameter if was.shape == parameter.shape else now
                kept[name] = torch.empty_like(like, dtype=was.dtype).copy_(was)


def fit_groups(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's saved state with as many parameter groups as `optimizer` has.

    Groups added since the save keep their settings and have no state. Saved groups that
    `optimizer` does not have yet are dropped.

    Raises:
        ValueError: `state` is not the state of an optimizer.
    """
    _check_optimizer_structure(state)
    saved = state["param_groups"]
    now = optimizer.state_dict()["param_groups"]
    groups = [*saved[: len(now)], *now[len(saved) :]]
    kept = {index for group in saved[: len(now)] for index in group["params"]}
    by_index = {index: values for index, values in state["state"].items() if index in kept}
    return {**state, "state": by_index, "param_groups": groups}


def load_scaler(scaler: torch.amp.GradScaler, state: Any) -> None:
    """Load the state of a loss scaler.

    Raises:
        CheckpointError: `state` is not the state of a loss scaler.
    """
    expected = scaler.state_dict()
    is_right = isinstance(state, Mapping) and state.keys() == expected.keys()
    if not is_right or not all(type(value) in (int, float) for value in state.values()):
        raise CheckpointError(
            "the saved state of the loss scaler (skeletons.scaler) does not hold "
            f"{', '.join(expected)} as numbers",
            "use an older checkpoint, or copy this one again",
        )
    scaler.load_state_dict(dict(state))


SCALARS: Final = frozenset({"step", "mu_product", "eta", "mu"})
"""State of torch's optimizers that is one number per parameter."""
LIKE_PARAMETER: Final = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg"}
    | {"grad_avg", "acc_delta", "sum", "ax", "prev", "step_size"}
)
"""State of torch's optimizers that has the shape of the parameter."""
OTHER_SHAPES: Final = ("Adafactor", "LBFGS")
"""torch's optimizers whose state has other shapes."""


def _check_optimizer_structure(state: Any) -> None:
    """Refuse a value that does not have the structure of an optimizer's `state_dict`.

    Raises:
        ValueError: names the entry.
    """
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        raise ValueError("skeletons.optimizer.state is not a dict")
    groups = state.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        raise ValueError("skeletons.optimizer.param_groups is not a list of dicts")
    for number, group in enumerate(groups):
        if not isinstance(group.get("params"), list):
            raise ValueError(f"skeletons.optimizer.param_groups.{number}.params is not a list")
    order = [index for group in groups for index in group["params"]]
    if order != list(range(len(order))):
        raise ValueError("skeletons.optimizer.param_groups does not count the parameters up")
    for index, kept in state["state"].items():
        if index not in range(len(order)) or not isinstance(kept, Mapping):
            raise ValueError(f"skeletons.optimizer.state.{index} is not that of a parameter")


def _check_optimizer_state(state: Any, optimizer: Optimizer) -> None:
    """Refuse a state that `load_state_dict` would accept but the next step could not use.

    Raises:
        ValueError: names the entry.
    """
    _check_optimizer_structure(state)
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim") and kind.__name__ not in OTHER_SHAPES:
        for saved, built in zip(state["param_groups"], optimizer.param_groups, strict=False):
            if saved.keys() >= built.keys():  # otherwise the user has changed the optimizer
                _check_state_of_group(state["state"], saved["params"], built["params"])


def _check_state_of_group(
    state: Mapping[int, Mapping[str, Any]], indices: list[int], parameters: list[Tensor]
) -> None:
    """Compare the state of a torch optimizer for each parameter with the parameter."""
    names = None
    for index, parameter in zip(indices, parameters, strict=False):
        kept = state.get(index)
        if kept is None:  # a parameter that has had no gradient yet
            continue
        where = f"skeletons.optimizer.state.{index}"
        names = kept.keys() if names is None else names
        if kept.keys() != names:
            raise ValueError(f"{where} holds {', '.join(map(str, kept))}, others differ")
        for name, value in kept.items():
            shape = torch.Size() if name in SCALARS else parameter.shape
            if name not in SCALARS | LIKE_PARAMETER:
                is_right = True  # added by the user
            elif isinstance(value, Tensor):
                is_right = value.shape == shape and value.dtype != torch.bool
            else:
                is_right = value is None or (name in SCALARS and type(value) in (int, float))
            if not is_right:
                raise ValueError(
                    f"{where}.{name} is {_describe(value)}, the parameter {_describe(parameter)}"
                )


def _placed(value: Any, parameter: Tensor) -> Any:
    same_shape = isinstance(value, Tensor) and value.shape == parameter.shape
    return shard_like(value, parameter) if same_shape else value


def _storable(tensor: Any, path: tuple[str, ...]) -> tuple[Tensor, str | None]:
    """Return the tensor to store, and its dtype if it is stored as bytes."""
    if is_dtensor(tensor) and tensor.placements[0].is_shard(0) and tensor.dtype in FILE_DTYPES:
        return tensor.detach(), None
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise _unsupported(path, f"is a {_type_name(tensor)}, not a plain tensor")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout)
        raise _unsupported(path, f"is not a dense tensor ({kind} on {tensor.device})")
    try:
        ".".join(path).encode()
        dense = tensor.detach().resolve_conj().resolve_neg()
        if dense.dtype in FILE_DTYPES:
            return dense, None
        as_bytes = dense.unsqueeze(-1).view(torch.uint8)
    except (RuntimeError, UnicodeEncodeError) as error:
        raise _unsupported(path, f"cannot be stored as {tensor.dtype}: {error}") from error
    return as_bytes, str(dense.dtype).removeprefix("torch.")


def _restored(stored: Tensor, dtype_name: object) -> Tensor:
    if dtype_name is None:
        return stored
    dtype = getattr(torch, str(dtype_name), None)
    try:
        if isinstance(dtype, torch.dtype):
            return stored.view(dtype).squeeze(-1)
    except RuntimeError:
        pass
    raise CheckpointError(
        f"cannot read {tuple(stored.shape)} {stored.dtype} as {dtype_name!r}",
        "load it with the version of torch that saved it",
    )


def _host_copy(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor.to("cpu").contiguous()


def _is_item(item: Any) -> bool:
    return isinstance(item, list) and len(item) == 2 and type(item[0]) in (str, int)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {value.dtype}".replace("torch.", "")
    return _type_name(value)


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _unsupported(path: tuple[str, ...], what: str) -> CheckpointError:
    return CheckpointError(
        f"cannot save {'.'.join(path) or 'this'!r}: it {what}".encode("utf-8", "replace").decode(),
        "keep dicts, lists, tuples, numbers, strings, None and dense tensors; convert the rest",
    )
