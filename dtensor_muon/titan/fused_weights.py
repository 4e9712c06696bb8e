"""The fused weights of torchtitan's models, and their parts from the model's arguments."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from dtensor_muon.fused import FusedDim
from dtensor_muon.registry import qkv_split_shapes_from_config
from dtensor_muon.routing import find_parameters, why_adamw

_MAX_SHOWN = 10


@dataclass(frozen=True, slots=True)
class _Rule:
    """One kind of fused weight.

    Attributes:
        pattern: Of the parameter's name.
        known_as: In messages.
        describe: Model arguments -> description.
    """

    pattern: re.Pattern[str]
    known_as: str
    describe: Callable[[Any], FusedDim]


def _number(args: Any, key: str) -> Any:
    value = getattr(args, key, None)
    if value is None:
        raise ValueError(f"the model's arguments ({type(args).__name__}) have no {key}, which says how large a part is")
    return value


def _thirds(args: Any) -> FusedDim:
    width = _number(args, "hidden_size")
    return FusedDim((width, width, width), num_groups=1)


def _thirds_and_mlp(args: Any) -> FusedDim:
    width = _number(args, "hidden_size")
    return FusedDim((width, width, width, int(width * _number(args, "mlp_ratio"))), num_groups=1)


def _latent_and_rope(args: Any) -> FusedDim:
    return FusedDim((_number(args, "kv_lora_rank"), _number(args, "qk_rope_head_dim")), num_groups=1)


def _keys_and_values(args: Any) -> FusedDim:
    return FusedDim(
        (_number(args, "qk_nope_head_dim"), _number(args, "v_head_dim")), num_groups=_number(args, "n_heads")
    )


def _gate_and_up_rows(args: Any) -> FusedDim:
    return FusedDim((1, 1))


def _queries_keys_values(args: Any) -> FusedDim:
    return FusedDim(qkv_split_shapes_from_config(args))


_QKV_PER_GROUP = re.compile(r"(?:^|\.)(?:wqkv|linear_qkv)\.weight$")
_RULES = (
    _Rule(_QKV_PER_GROUP, "wqkv, linear_qkv (q, k, v of each KV group)", _queries_keys_values),
    _Rule(re.compile(r"_attn\.qkv\.weight$"), "flux qkv", _thirds),
    _Rule(re.compile(r"(?:^|\.)single_blocks\.\d+\.linear1\.weight$"), "flux linear1", _thirds_and_mlp),
    _Rule(re.compile(r"(?:^|\.)experts\.mlp1_weight$"), "gpt_oss mlp1_weight", _gate_and_up_rows),
    _Rule(re.compile(r"(?:^|\.)wkv_a\.weight$"), "MLA wkv_a", _latent_and_rope),
    _Rule(re.compile(r"(?:^|\.)wkv_b\.weight$"), "MLA wkv_b", _keys_and_values),
)


def find_fused_weights(model: nn.Module, qkv_sizes: Sequence[int] | None = None) -> dict[str, FusedDim]:
    """Describes every fused weight of a whole model, by canonical parameter name.

    Args:
        model: One of torchtitan's, with its arguments as `model_args`; also on meta.
        qkv_sizes: Rows of the parts of a weight with Q, K and V per KV group; None reads them from the arguments.

    Raises:
        ValueError: The model has no fused weight, or its arguments lack the size of a part.
    """
    args = arguments_of(model)
    found: dict[str, FusedDim] = {}
    matrices: dict[str, None] = {}
    for sites, param in find_parameters(model):
        name = sites[0].name
        rule = next((rule for rule in _RULES if rule.pattern.search(name)), None)
        if rule is None:
            if not why_adamw(sites, param, router_to_muon=False):
                matrices[f"{re.sub(r'(?<=[.])[0-9]+(?=[.])', '*', name)} {list(param.shape)}"] = None
            continue
        try:
            given = qkv_sizes is not None and rule.pattern is _QKV_PER_GROUP
            found[name] = FusedDim(tuple(qkv_sizes or ())) if given else rule.describe(args)
        except ValueError as error:
            raise ValueError(f"[optimizer] muon_split_qkv = true: {name} {list(param.shape)}: {error}") from None
    if not found:
        shown = ", ".join(list(matrices)[:_MAX_SHOWN]) + (", ..." if len(matrices) > _MAX_SHOWN else "")
        raise ValueError(
            f"[optimizer] muon_split_qkv = true: {_class_name(model)} has no fused weight that is known here "
            f"({'; '.join(rule.known_as for rule in _RULES)}); its matrices are {shown}. Set it to false, or describe "
            "the weight by fused = {sizes = [...]} in [[optimizer.muon_overrides]]"
        )
    return found


def arguments_of(model: nn.Module) -> Any:
    """The arguments that a model was built from, which torchtitan's models keep.

    Raises:
        ValueError: This one does not.
    """
    args = getattr(model, "model_args", None)
    if args is None:
        raise ValueError(
            f"{_class_name(model)} has no attribute model_args, from which muon_split_qkv and muon_overrides read what "
            "the whole model is; keep the arguments there, as torchtitan's models do"
        )
    return args


def _class_name(model: nn.Module) -> str:
    return type(model).__name__.removeprefix("FSDP")
