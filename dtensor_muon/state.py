"""What a loaded state dict must look like, what is filled in for it, and the conversion of heavy-ball momentum.

[Note: names and places]
A state dict of `Optimizer.state_dict()` knows parameters by their place, so another order of parameters would hand one
parameter's state to another: their names are compared. The functions of `torch.distributed.checkpoint.state_dict` know
parameters by name (`params` holds strings) and put them in this optimizer's order; the names that were saved
may then be those of one pipeline stage.
"""

import math
import warnings
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtensor_muon.layout import describe_tensor
from dtensor_muon.options import ADAMW, GROUP_OPTIONS, MUON, OTHER_KEYS, check_values, parameter_names

STATE_KEYS: Mapping[str, frozenset[str]] = {
    MUON: frozenset({"momentum_buffer"}),
    ADAMW: frozenset({"step", "exp_avg", "exp_avg_sq"}),
}


# what the parameters are, which the model says and no checkpoint
_DESCRIPTIONS = ("split_qkv", "qkv_split_shapes", "fused", "flatten")


def momentum_dtype(group: Mapping[str, Any], param: Tensor) -> torch.dtype:
    """Returns the dtype of a parameter's momentum buffer."""
    dtype: torch.dtype = group["momentum_dtype"] or param.dtype
    return dtype


def new_state(group: Mapping[str, Any], param: Tensor) -> dict[str, Tensor]:
    """Returns the state of a parameter before the first step."""
    if group["optimizer"] == MUON:
        buffer = torch.zeros_like(param, dtype=momentum_dtype(group, param), requires_grad=False)
        return {"momentum_buffer": buffer, **({"step": torch.zeros(())} if group["block_period"] > 1 else {})}
    return {
        "step": torch.zeros(()),
        "exp_avg": torch.zeros_like(param, requires_grad=False),
        "exp_avg_sq": torch.zeros_like(param, requires_grad=False),
    }


def accept_state_dict(param_groups: Sequence[dict[str, Any]], state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Checks a state dict before it is loaded, and fills in what an older version did not save.

    Warns once when options are missing (this optimizer's values stay) or unknown (they are dropped), and when fused
    weights are described otherwise (this optimizer's description stays). A state dict without any state is that of an
    optimizer without steps; a frozen parameter may be without state.

    Args:
        param_groups: Of the optimizer that loads; not modified.
        state_dict: What is loaded; not modified.

    Returns:
        The state dict to load.

    Raises:
        ValueError: It does not fit; names the parameter or the group.
    """
    saved_groups = state_dict["param_groups"]
    if len(saved_groups) != len(param_groups):
        raise ValueError(
            f"the checkpoint has {len(saved_groups)} parameter groups, this optimizer {len(param_groups)} (different "
            "number of parameter groups); build the optimizer with the groups that were saved"
        )
    missing: set[str] = set()
    unknown: set[str] = set()
    other: set[str] = set()
    groups = []
    for index, (group, saved) in enumerate(zip(param_groups, saved_groups, strict=True)):
        _check_names(group, saved, index)
        groups.append(_merge_options(group, saved, index, missing, unknown, other))
    state = _accept_state(param_groups, groups, state_dict["state"])
    if missing or unknown:
        warnings.warn(_option_warning(missing, unknown), stacklevel=5)
    if other:
        warnings.warn(
            f"the checkpoint describes fused weights otherwise ({', '.join(sorted(other))}): this optimizer's "
            "description stays",
            stacklevel=5,
        )
    return {**state_dict, "state": state, "param_groups": groups}


def convert_heavy_ball(
    state_dict: Mapping[str, Any], *, momentum: float | None = None, key: str = "momentum_buffer"
) -> dict[str, Any]:
    """Converts heavy-ball momentum (`b <- momentum * b + grad`) to the exponential average of this package.

    Both start at zero, so the average is `(1 - momentum) * b` at every step, if `momentum` never changed. The updates
    go on as they would have: an orthogonalized matrix does not depend on the scale of its input, with Nesterov or not.

    Args:
        state_dict: Of an optimizer with heavy-ball momentum; not modified.
        momentum: The coefficient it ran with; None reads each group's `momentum`.
        key: Under which it keeps the buffer of a parameter.

    Returns:
        A state dict whose `momentum_buffer` fits `Muon`. States without `key` (of AdamW) are taken as they are.

    Raises:
        ValueError: No momentum is given and a group has none, or it is not in [0, 1).
    """
    state = dict(state_dict["state"])
    for index, group in enumerate(state_dict["param_groups"]):
        for param in group["params"]:
            if key not in state.get(param, {}):
                continue
            value = group.get("momentum") if momentum is None else momentum
            if not isinstance(value, int | float) or not 0 <= value < 1:
                raise ValueError(
                    f"param_groups[{index}]: momentum is {value!r}; give the coefficient of the heavy-ball momentum, "
                    "a number in [0, 1), as `momentum`"
                )
            rest = {name: tensor for name, tensor in state[param].items() if name != key}
            state[param] = {**rest, "momentum_buffer": state[param][key] * (1 - value)}
    return {**state_dict, "state": state}


def saved_part(flat: Mapping[str, Any], saved_keys: Collection[str], *, prefix: str = "optimizer.") -> dict[str, Any]:
    """Returns a flat optimizer state dict without the options that a checkpoint of an older version lacks.

    Options only: torch still misses a parameter's state, its weight and its other options, and names the key.

    Args:
        flat: `get_optimizer_state_dict` with `flatten_optimizer_state_dict=True`; not modified.
        saved_keys: `FileSystemReader(path).read_metadata().state_dict_metadata`.
        prefix: Of the optimizer's keys in the checkpoint.
    """
    # torch takes a dict or a list apart: what is saved may be below the key
    known = {key[:end] for key in map("{}.".format, saved_keys) for end, mark in enumerate(key) if mark == "."}
    return {
        key: value
        for key, value in flat.items()
        if not key.startswith("param_groups.") or key.rpartition(".")[2] not in GROUP_OPTIONS or prefix + key in known
    }


def is_by_name(saved: Mapping[str, Any]) -> bool:
    """Whether a saved group knows its parameters by name; see [Note: names and places]."""
    return bool(saved["params"]) and all(isinstance(key, str) for key in saved["params"])


def _check_names(group: Mapping[str, Any], saved: Mapping[str, Any], index: int) -> None:
    names = parameter_names(group, index)
    if len(saved["params"]) != len(names):
        raise ValueError(
            f"param_groups[{index}] has {len(saved['params'])} parameters in the checkpoint, {len(names)} in this "
            f"optimizer (doesn't match the size of optimizer's group): {', '.join(names)}"
        )
    if "param_names" not in group or not saved.get("param_names") or is_by_name(saved):
        return
    for place, (mine, theirs) in enumerate(zip(names, saved["param_names"], strict=True)):
        if mine != theirs:
            raise ValueError(
                f"param_groups[{index}]['params'][{place}] is {theirs} in the checkpoint, {mine} in this optimizer; "
                "give the parameters in the order, and under the names, that were saved, or load by name with "
                "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
            )


def _merge_options(
    group: Mapping[str, Any],
    saved: Mapping[str, Any],
    index: int,
    missing: set[str],
    unknown: set[str],
    other: set[str],
) -> dict[str, Any]:
    own = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    known = {key: value for key, value in saved.items() if key in own or key in OTHER_KEYS}
    unknown |= set(saved) - set(known)
    missing |= set(own) - set(saved) - OTHER_KEYS
    kept = {key: own[key] for key in _DESCRIPTIONS if key in own}
    other |= {key for key, value in kept.items() if key in known and _plain(known[key]) != _plain(value)}
    merged = {**own, **known, **kept}
    if is_by_name(saved) and "param_names" in group:
        merged["param_names"] = list(group["param_names"])
    if merged["optimizer"] != group["optimizer"]:
        raise ValueError(
            f"param_groups[{index}] ({', '.join(parameter_names(group, index))}) is of optimizer="
            f"{merged['optimizer']!r} in the checkpoint, {group['optimizer']!r} here; build the groups that were saved"
        )
    check_values(merged, f"the checkpoint's param_groups[{index}]")
    return merged


def _plain(value: Any) -> Any:
    """Makes values equal that differ in a tuple having become a list."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _accept_state(
    param_groups: Sequence[Mapping[str, Any]],
    saved_groups: Sequence[Mapping[str, Any]],
    state: Mapping[Hashable, Mapping[str, Any]],
) -> dict[Hashable, dict[str, Any]]:
    accepted: dict[Hashable, dict[str, Any]] = {}
    known: set[Hashable] = set()
    for name, param, key, group in _members(param_groups, saved_groups):
        known.add(key)
        entry = state.get(key)
        if entry and param.device.type == "meta":
            raise ValueError(
                f"{describe_tensor(name, param)} is on the meta device, where loaded state would be lost; materialize "
                "the parameters, then load"
            )
        if entry:
            accepted[key] = _accept_entry(name, param, entry, group)
        elif any(state.values()) and param.requires_grad:
            raise ValueError(
                f"the checkpoint has no state for {describe_tensor(name, param)}, but for others; it is of another "
                "model, or was damaged"
            )
    extra = [key for key in state if key not in known]
    if extra:
        raise ValueError(f"the checkpoint has state for the parameter {extra[0]!r}, which is in none of its groups")
    return accepted


def _members(
    param_groups: Sequence[Mapping[str, Any]], saved_groups: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, Tensor, Hashable, Mapping[str, Any]]]:
    for index, (group, saved) in enumerate(zip(param_groups, saved_groups, strict=True)):
        names = parameter_names(group, index)
        for name, param, key in zip(names, group["params"], saved["params"], strict=True):
            yield name, param, key, saved


def _accept_entry(name: str, param: Tensor, entry: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    where = describe_tensor(name, param)
    expected = STATE_KEYS[group["optimizer"]]
    if group["optimizer"] == MUON:
        # whether there is a step counter depends on an option that may change between two runs
        step = {"step": entry.get("step", 0)} if group["block_period"] > 1 else {}
        entry = {**{key: value for key, value in entry.items() if key != "step"}, **step}
        expected |= set(step)
    if set(entry) != expected:
        raise ValueError(
            f"the state of {where} has the keys {sorted(entry)} in the checkpoint; "
            f"optimizer={group['optimizer']!r} has {sorted(expected)}"
        )
    accepted = dict(entry)
    for key, value in entry.items():
        if key == "step":
            accepted[key] = _accept_step(where, value)
            continue
        dtype = momentum_dtype(group, param) if key == "momentum_buffer" else param.dtype
        _check_tensor(where, key, param, value, dtype)
    return accepted


def _accept_step(where: str, value: object) -> Tensor:
    if isinstance(value, Tensor) and value.numel() == 1 and not isinstance(value, DTensor):
        return value
    if not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"the step of {where} is {value!r} in the checkpoint; it must be one number of at least 0")
    return torch.tensor(float(value))


def _check_tensor(where: str, key: str, param: Tensor, value: object, dtype: torch.dtype) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{key} of {where} is a {type(value).__name__} in the checkpoint; it must be a tensor")
    problem = None
    if isinstance(value, DTensor) != isinstance(param, DTensor):
        problem = "must be a DTensor exactly when the parameter is one; load it with torch.distributed.checkpoint"
    elif value.shape != param.shape:
        problem = "has another shape than the parameter"
    elif isinstance(value, DTensor) and isinstance(param, DTensor):
        if value.device_mesh != param.device_mesh:
            problem = "lives on another mesh; load it with torch.distributed.checkpoint"
        elif tuple(value.placements) != tuple(param.placements):
            problem = "has other placements; load it with torch.distributed.checkpoint"
    if problem is None and (not value.is_floating_point() or torch.promote_types(value.dtype, dtype) != dtype):
        problem = f"does not fit the dtype {dtype} without a loss; convert it, or set momentum_dtype"
    if problem is not None:
        raise ValueError(f"the checkpoint's {describe_tensor(key, value)} of {where} {problem}")


def _option_warning(missing: set[str], unknown: set[str]) -> str:
    parts = []
    if missing:
        parts.append(f"has no {', '.join(sorted(missing))}: this optimizer's values stay")
    if unknown:
        parts.append(f"has {', '.join(sorted(unknown))}, which this version does not know: ignored")
    return "the checkpoint was written by another version or optimizer; it " + "; it ".join(parts)
