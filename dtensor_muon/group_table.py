"""Parameter groups as a table for reading."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from dtensor_muon.fused import FusedDim
from dtensor_muon.members import description_of, is_qkv_weight
from dtensor_muon.options import MUON
from dtensor_muon.overrides import FLATTEN, FUSED

_NOT_IN_HEADER = ("params", "param_names", "optimizer", FUSED)
_DEFAULTS = {"optimizer": MUON, "split_qkv": False, "qkv_split_shapes": None, FUSED: None, FLATTEN: False}


def describe_param_groups(groups: Iterable[Mapping[str, Any]]) -> str:
    """Formats parameter groups for reading: one line per name pattern, global shape and fused description.

    Args:
        groups: Group dicts as `build_param_groups` returns them, or an optimizer's `param_groups`.

    Returns:
        A table; `*` stands for the block numbers that a line puts together. `fused 2 x (8, 4, 4)` means two groups of
        rows, in each three parts of so many rows.
    """
    blocks = []
    totals: dict[str, tuple[int, int]] = {}
    for group in groups:
        optimizer = str(group.get("optimizer", MUON))
        params: list[Tensor] = list(group["params"])
        shown = {key: value for key, value in group.items() if key not in _NOT_IN_HEADER}
        header = " ".join([optimizer, *(f"{key}={value}" for key, value in shown.items())])
        blocks.append((header, _pattern_rows(group, optimizer)))
        count, elements = totals.get(optimizer, (0, 0))
        totals[optimizer] = (count + len(params), elements + sum(param.numel() for param in params))
    width = max((len(row[0]) for _, rows in blocks for row in rows), default=0)
    shape_width = max((len(row[1]) for _, rows in blocks for row in rows), default=0)
    lines = []
    for header, rows in blocks:
        lines.append(header)
        lines += [
            f"  {pattern:<{width}}  {shape:<{shape_width}}  x{count}  {fused}".rstrip()
            for pattern, shape, count, fused in rows
        ]
    lines += [f"{name}: {count} parameters, {elements:,} elements" for name, (count, elements) in totals.items()]
    return "\n".join(lines)


def fused_text(fused: FusedDim | None) -> str:
    """A resolved description in words, "" for none: `fused 2 x (8, 4, 4)`, `fused 4 x (8) columns, as heads`."""
    if fused is None:
        return ""
    sizes = ", ".join(map(str, fused.sizes))
    return (
        f"fused {fused.num_groups} x ({sizes})"
        + (" columns" if fused.dim == 1 else "")
        + (", as heads" if fused.heads else "")
    )


def matrix_shape(shape: Sequence[int], flatten: bool) -> tuple[int, ...]:
    """The global shape that a fused description speaks of: `[out, in * kernel]` of a flattened convolution."""
    return (shape[0], math.prod(shape[1:])) if flatten else tuple(shape)


def _pattern_rows(group: Mapping[str, Any], optimizer: str) -> list[tuple[str, str, int, str]]:
    """`(name pattern, shape, count, fused description)` in order of first appearance."""
    params: list[Tensor] = list(group["params"])
    names = group.get("param_names") or ["(unnamed)"] * len(params)
    rows: dict[tuple[str, str, str], list[str]] = {}
    for name, param in zip(names, params, strict=True):
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        fused = _fused(group, param, name) if optimizer == MUON else None
        rows.setdefault((pattern, str(list(param.shape)), fused_text(fused)), []).append(name)
    return [
        (pattern if len(names) > 1 else names[0], shape, len(names), fused)
        for (pattern, shape, fused), names in rows.items()
    ]


def _fused(group: Mapping[str, Any], param: Tensor, name: str) -> FusedDim | None:
    full = {**_DEFAULTS, **group}
    fused = description_of(full, name, param, is_qkv=is_qkv_weight(full, param))
    return fused and fused.resolve(matrix_shape(param.shape, bool(full[FLATTEN])), name)
