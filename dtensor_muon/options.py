"""Checks of constructor arguments and group options, and the part of them that decides how a bucket is computed."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtensor_muon.coefficients import CoefficientTriple, get_coefficients
from dtensor_muon.functional import get_muon_scale_factor
from dtensor_muon.fused import FusedDim
from dtensor_muon.layout import describe_tensor

MUON, ADAMW = "muon", "adamw"
TP_MODES = ("auto", "owner", "duplicated", "distributed", "blockwise")
MATMUL_PRECISIONS = ("medium", "high", "highest")

# arguments of the constructor that a parameter group may carry
GROUP_OPTIONS = (
    "lr", "momentum", "nesterov", "weight_decay", "use_decoupled_weight_decay", "split_qkv", "is_qkv_fn",
    "qkv_split_shapes", "fp32_matmul_prec", "coefficient_type", "num_ns_steps", "scale_mode", "extra_scale_factor",
    "tp_mode", "fused", "flatten", "block_period", "block_lr_multiplier", "full_lr_multiplier",
    "custom_coefficient_sets", "momentum_dtype", "betas", "eps",
)  # fmt: skip
ADAMW_OPTIONS = frozenset({"lr", "weight_decay", "betas", "eps"})
ADAMW_ONLY_OPTIONS = frozenset({"betas", "eps"})
# keys that are no options: torch's own, and those that learning rate schedulers leave in a group
OTHER_KEYS = {
    "params",
    "param_names",
    "optimizer",
    "initial_lr",
    "max_lr",
    "min_lr",
    "max_momentum",
    "base_momentum",
    "swa_lr",
}


@dataclass(frozen=True, slots=True)
class MatrixOptions:
    """What decides how a matrix is orthogonalized; matrices of one bucket share it.

    Attributes:
        coefficients: One triple per Newton-Schulz step.
        fp32_matmul_prec: `"medium"`, `"high"` or `"highest"`.
        tp_mode: The mode that the user asked for.
    """

    coefficients: tuple[CoefficientTriple, ...]
    fp32_matmul_prec: str
    tp_mode: str

    @classmethod
    def from_group(cls, group: Mapping[str, Any], *, blockwise: bool = False) -> "MatrixOptions":
        """Reads the options of a parameter group.

        Args:
            group: With all options.
            blockwise: Whether to put `tp_mode="blockwise"` in the place of the group's mode.

        Raises:
            ValueError: The coefficient options do not fit each other.
        """
        custom = group["custom_coefficient_sets"] if group["coefficient_type"] == "custom" else None
        coefficients = get_coefficients(group["coefficient_type"], group["num_ns_steps"], custom)
        return cls(coefficients, group["fp32_matmul_prec"], "blockwise" if blockwise else group["tp_mode"])

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype in which a matrix whose momentum has `dtype` travels and is multiplied."""
        return torch.bfloat16 if self.fp32_matmul_prec == "medium" else torch.promote_types(dtype, torch.float32)


def normalize_group(group: Mapping[str, Any], defaults: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Returns a checked copy of a parameter group, with every option filled in.

    Args:
        group: As given by the user; `params` may hold `(name, tensor)` pairs.
        defaults: The constructor's arguments.
        index: The group's place, for error messages.

    Raises:
        ValueError: A bad option or parameter; names the group, the key and what is allowed.
    """
    where = f"param_groups[{index}]"
    unknown = sorted(set(group) - set(defaults) - OTHER_KEYS)
    if unknown:
        known = ", ".join(sorted(set(defaults) | {"optimizer"}))
        raise ValueError(f"{where} has the unknown option {unknown[0]!r}; the options are {known}")
    full: dict[str, Any] = {**defaults, **group}
    params = full["params"]
    full["params"] = [params] if isinstance(params, torch.Tensor) else list(params)
    if full["optimizer"] == "adam":
        full["optimizer"] = ADAMW
    check_values(full, where)
    if full["fused"] is not None:
        full["fused"] = FusedDim.from_option(full["fused"]).to_option()
    _warn_about_ignored(group, defaults, full["optimizer"], where)
    return full


def parameter_names(group: Mapping[str, Any], index: int) -> list[str]:
    """Returns a name per parameter of a group: the user's, or its place."""
    return list(group.get("param_names") or _places(group["params"], index))


def check_matrix(name: str, param: torch.Tensor) -> None:
    """Checks that Muon can work on a parameter.

    Raises:
        ValueError: It has fewer than two dims, or its dtype is not real floating point.
    """
    if param.ndim < 2:
        raise ValueError(
            f"{describe_tensor(name, param)}: Muon works on matrices [m, n] or stacks of them [..., m, n]; "
            'put this parameter into a group with optimizer="adamw"'
        )
    check_dtype(name, param)


def check_dtype(name: str, param: torch.Tensor) -> None:
    """Checks that a parameter is dense and real floating point.

    Raises:
        ValueError: It is sparse, complex or integer.
    """
    if param.layout != torch.strided:
        raise ValueError(f"{describe_tensor(name, param)}: the layout {param.layout} is not supported; make it dense")
    if not param.is_floating_point():
        raise ValueError(
            f"{describe_tensor(name, param)}: the dtype must be real floating point; "
            "leave this parameter out, or convert it"
        )


def _places(params: Sequence[object], index: int) -> list[str]:
    return [f"param_groups[{index}]['params'][{place}]" for place in range(len(params))]


def check_values(group: Mapping[str, Any], where: str) -> None:
    """Checks the option values of a complete group.

    Raises:
        ValueError: A bad value; names `where`, the key and what is allowed.
    """
    _choice(group, "optimizer", (MUON, ADAMW, "adam"), where)
    _number(group, "lr", where, at_least=0.0)
    _number(group, "weight_decay", where, at_least=0.0)
    if group["optimizer"] == MUON:
        _check_muon_values(group, where)
        return
    _number(group, "eps", where, at_least=0.0)
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ValueError(f"{where}: betas is {betas!r}; it must be a pair of numbers in [0, 1)")
    for position, beta in enumerate(betas):
        _number({f"betas[{position}]": beta}, f"betas[{position}]", where, at_least=0.0, below=1.0)


def _check_muon_values(group: Mapping[str, Any], where: str) -> None:
    _number(group, "momentum", where, at_least=0.0, below=1.0)
    _number(group, "extra_scale_factor", where, at_least=0.0)
    _number(group, "block_lr_multiplier", where, at_least=0.0)
    _number(group, "full_lr_multiplier", where, at_least=0.0)
    for key in ("nesterov", "use_decoupled_weight_decay", "split_qkv", "flatten"):
        _choice(group, key, (True, False), where)
    _choice(group, "fp32_matmul_prec", MATMUL_PRECISIONS, where)
    _choice(group, "tp_mode", TP_MODES, where)
    dtype = group["momentum_dtype"]
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"{where}: momentum_dtype is {dtype!r}; it must be a floating point torch.dtype or None")
    try:
        get_muon_scale_factor(1, 1, group["scale_mode"])
        MatrixOptions.from_group(group)
        if group["fused"] is not None:
            FusedDim.from_option(group["fused"])
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    _check_qkv_arguments(group, where)
    period = group["block_period"]
    if not isinstance(period, int) or isinstance(period, bool) or period < 1:
        raise ValueError(f"{where}: block_period is {period!r}; it must be a whole number of at least 1")
    if period > 1 and group["tp_mode"] == "blockwise":
        raise ValueError(
            f"{where}: block_period={period} alternates between blocks and whole matrices, but "
            'tp_mode="blockwise" never works on whole ones; choose another tp_mode'
        )


def _check_qkv_arguments(group: Mapping[str, Any], where: str) -> None:
    sizes = group["qkv_split_shapes"]
    is_sequence = isinstance(sizes, tuple | list) and len(sizes) in (3, 4)
    if sizes is not None and not (is_sequence and all(type(size) is int and size > 0 for size in sizes)):
        raise ValueError(
            f"{where}: qkv_split_shapes is {sizes!r}; it must be the rows of (q, k, v) or (q, gate, k, v) per query "
            "group, whole numbers of at least 1, or None"
        )
    if group["is_qkv_fn"] is not None and not callable(group["is_qkv_fn"]):
        raise ValueError(f"{where}: is_qkv_fn is {group['is_qkv_fn']!r}; it must be a function of a parameter, or None")


def _number(group: Mapping[str, Any], key: str, where: str, *, at_least: float, below: float = math.inf) -> None:
    value = group[key]
    allowed = f"a finite number of at least {at_least:g}" + ("" if below == math.inf else f" and below {below:g}")
    if isinstance(value, torch.Tensor):
        # reading an accelerator's value would synchronize with it
        if value.numel() != 1:
            raise ValueError(f"{where}: {key} is a tensor of shape {tuple(value.shape)}; it must be {allowed}")
        if value.device.type != "cpu":
            return
        value = value.item()
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (at_least <= value < below):
        raise ValueError(f"{where}: {key} is {value!r}; it must be {allowed}")


def _choice(group: Mapping[str, Any], key: str, choices: Sequence[object], where: str) -> None:
    value = group[key]
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
        allowed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{where}: {key} is {value!r}; it must be one of {allowed}")


def _warn_about_ignored(group: Mapping[str, Any], defaults: Mapping[str, Any], optimizer: str, where: str) -> None:
    full = {**defaults, **group}
    needs = {"is_qkv_fn": "split_qkv", "qkv_split_shapes": "split_qkv", "custom_coefficient_sets": "coefficient_type"}
    for key, other in needs.items():
        value = True if other == "split_qkv" else "custom"
        if optimizer == MUON and full[key] is not None and full[other] != value:
            warnings.warn(f"{where}: {key}={full[key]!r} is ignored without {other}={value!r}", stacklevel=5)
    for key in sorted(set(group) & set(defaults) - {"optimizer"}):
        ignored = key in ADAMW_ONLY_OPTIONS if optimizer == MUON else key not in ADAMW_OPTIONS
        if ignored and group[key] is not defaults[key] and group[key] != defaults[key]:
            warnings.warn(f"{where}: {key}={group[key]!r} is ignored by optimizer={optimizer!r}", stacklevel=5)
