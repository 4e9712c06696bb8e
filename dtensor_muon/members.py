"""From parameters to what the planner and the step see: fused descriptions, kinds of steps, plans and segments."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dtensor_muon.fused import FusedDim, parts_of
from dtensor_muon.layout import describe_tensor, infer_layout
from dtensor_muon.options import MUON, MatrixOptions, parameter_names
from dtensor_muon.plan import AssembledSplit, BucketPlan, MatrixEntry
from dtensor_muon.planner import PlanSettings, build
from dtensor_muon.schedule import Bucket, Member, Segment
from dtensor_muon.state import momentum_dtype


@dataclass(slots=True)
class Planned:
    """A plan, what it was made from, and by what to know that it is out of date.

    Attributes:
        signature: Equal as long as the plan is valid.
        plans: The buckets.
        entries: What they were built from.
        owners: The group and the member of each entry.
        waves: What the step runs; None until all ranks have agreed on the plan.
    """

    signature: object
    plans: tuple[BucketPlan, ...]
    entries: Sequence[MatrixEntry]
    owners: Sequence[tuple[dict[str, Any], Member]]
    waves: tuple[tuple[Bucket, ...], ...] | None = None


def is_qkv_weight(group: Mapping[str, Any], param: Tensor) -> bool:
    """Asks the group's `is_qkv_fn`, or else the attribute `is_qkv`, whether a parameter is a fused QKV weight."""
    is_qkv: Callable[[Tensor], bool] | None = group.get("is_qkv_fn")
    return bool(is_qkv(param) if is_qkv is not None else getattr(param, "is_qkv", False))


def description_of(group: Mapping[str, Any], name: str, param: Tensor, *, is_qkv: bool) -> FusedDim | None:
    """Returns the fused description of a parameter: of its attribute `fused_dim`, the QKV arguments, or the group.

    Args:
        group: With all options.
        name: Of the parameter, for messages.
        param: The parameter.
        is_qkv: Whether it is a QKV weight, which `split_qkv` splits.

    Raises:
        ValueError: A description that is not allowed, or a QKV weight without split sizes.
    """
    attribute = getattr(param, "fused_dim", None)
    try:
        if attribute is not None:
            return FusedDim.from_option(attribute)
        if group["optimizer"] != MUON:
            return None
        if group["split_qkv"] and is_qkv:
            sizes = getattr(param, "qkv_split_shapes", None) or group["qkv_split_shapes"]
            if sizes is None:
                raise ValueError(
                    "it is a QKV weight, but neither it nor the group has qkv_split_shapes, the rows of (q, k, v) or "
                    "(q, gate, k, v) per query group"
                )
            return FusedDim(sizes)
        return None if group["fused"] is None else FusedDim.from_option(group["fused"])
    except ValueError as error:
        raise ValueError(f"{describe_tensor(name, param)}: {error}") from None


def check_qkv_found(param_groups: Sequence[Mapping[str, Any]], qkv: Container[Tensor]) -> None:
    """Checks that groups with `split_qkv=True` have a parameter to split.

    Raises:
        ValueError: None of them has one; names them.
    """
    groups = [group for group in param_groups if group["optimizer"] == MUON and group["split_qkv"]]
    params = [param for group in groups for param in group["params"]]
    if params and not any(param in qkv or hasattr(param, "fused_dim") for param in params):
        sizes = groups[0]["qkv_split_shapes"]
        shown = [
            f"{name} {tuple(param.shape)}"
            for index, group in enumerate(param_groups)
            for name, param in zip(parameter_names(group, index), group["params"], strict=True)
            if group["optimizer"] == MUON and group["split_qkv"]
        ]
        more = f" and {len(shown) - 5} more" if len(shown) > 5 else ""
        raise ValueError(
            f"split_qkv=True (qkv_split_shapes {sizes}), but no parameter is a QKV weight: "
            f"{', '.join(shown[:5])}{more}; set is_qkv on the weights (after sharding them), give is_qkv_fn, or leave "
            "split_qkv out"
        )


def is_block_step(group: Mapping[str, Any], state: Mapping[Tensor, Mapping[str, Any]]) -> bool:
    """Whether the next step of a group with `block_period > 1` orthogonalizes tensor-parallel blocks apart."""
    if group["block_period"] == 1 or not group["params"]:
        return False
    # a checkpoint may lack the state of frozen parameters
    param = next((param for param in group["params"] if param.requires_grad), group["params"][0])
    return int(state[param]["step"]) % int(group["block_period"]) != 0


def count_steps(param_groups: Sequence[Mapping[str, Any]], state: Mapping[Tensor, Mapping[str, Any]]) -> None:
    """Advances the step counters of groups with `block_period > 1`."""
    for group in param_groups:
        if group["optimizer"] == MUON and group["block_period"] > 1 and group["params"]:
            torch._foreach_add_([state[param]["step"] for param in group["params"]], 1)


def signature_of(groups: Sequence[tuple[int, dict[str, Any]]], blockwise: Sequence[bool]) -> list[tuple[object, ...]]:
    """Returns what decides a plan: a group, an option, a parameter's dtype or device has changed when it differs."""
    return [
        (
            id(group),
            MatrixOptions.from_group(group, blockwise=block),
            group["scale_mode"],
            # the text, since a mapping may be changed in place
            repr(group["fused"]),
            (group["flatten"], group["split_qkv"], group["qkv_split_shapes"]),
            [(id(param), param.dtype, param.device, getattr(param, "fused_dim", None)) for param in group["params"]],
        )
        for (_, group), block in zip(groups, blockwise, strict=True)
    ]


def make_plan(
    groups: Sequence[tuple[int, dict[str, Any]]],
    blockwise: Sequence[bool],
    qkv: Container[Tensor],
    settings: PlanSettings,
) -> Planned:
    """Plans the Muon groups.

    Args:
        groups: With their places in the optimizer.
        blockwise: Per group, whether the step is one of blocks.
        qkv: The fused QKV weights among the parameters.
        settings: For the planner.

    Raises:
        ValueError: A fused description does not fit.
        NotImplementedError: A layout that cannot be computed exactly.
    """
    entries: list[MatrixEntry] = []
    owners: list[tuple[dict[str, Any], Member]] = []
    for (index, group), block in zip(groups, blockwise, strict=True):
        options = MatrixOptions.from_group(group, blockwise=block)
        for name, param in zip(parameter_names(group, index), group["params"], strict=True):
            dtype = options.compute_dtype(momentum_dtype(group, param))
            fused = description_of(group, name, param, is_qkv=param in qkv)
            for part in parts_of(infer_layout(param, name), name, fused, group["flatten"]):
                split = None if part.fused is None else AssembledSplit(part.fused, group["scale_mode"])
                entries.append(MatrixEntry(name + part.suffix, part.layout, param.device.type, dtype, options, split))
                owners.append((group, Member(param, part.view)))
    return Planned(signature_of(groups, blockwise), build(entries, settings), entries, owners)


def segments_of(members: Sequence[tuple[dict[str, Any], Member]]) -> tuple[Segment, ...]:
    """Splits the members of a bucket, which come group by group, at the borders of groups."""
    segments: list[tuple[dict[str, Any], list[Member]]] = []
    for group, member in members:
        if not segments or segments[-1][0] is not group:
            segments.append((group, []))
        segments[-1][1].append(member)
    return tuple(Segment(group, tuple(found)) for group, found in segments)
