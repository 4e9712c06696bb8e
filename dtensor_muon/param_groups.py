"""Which parameter goes to Muon and which to AdamW.

Muon is for matrices that map hidden activations to hidden activations, and for stacks of such matrices. Everything else
(embeddings, output heads, norms, biases, routers, learned positions) goes to AdamW. The decision is made from module
types, names and **global** shapes only, so it is the same on meta, on one device and on every rank of every layout.
"""

import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from dtensor_muon.fused import FusedDim
from dtensor_muon.group_table import describe_param_groups, fused_text, matrix_shape
from dtensor_muon.options import ADAMW, MUON
from dtensor_muon.overrides import (
    FLATTEN,
    FUSED,
    OPTIMIZER_ALIASES,
    ParamOverride,
    check_optimizer,
    check_options,
    option_for,
    options_for,
)
from dtensor_muon.routing import (
    OTHER_STACK,
    Site,
    canonical_name,
    convolution_groups,
    find_parameters,
    why_adamw,
)

__all__ = ["ParamOverride", "build_param_groups", "describe_param_groups"]


def build_param_groups(
    model: nn.Module,
    *,
    overrides: Sequence[ParamOverride] = (),
    router_optimizer: str = "adamw",
    all_names: Iterable[str] | None = None,
    fused: Mapping[str, FusedDim] | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Splits a model's trainable parameters into Muon and AdamW groups.

    Every trainable parameter is claimed exactly once (tied weights once, under their first name), in the order of
    `model.named_parameters()`. Groups come in a fixed order, Muon before AdamW, in each the default group and then one
    per override; each of them in turn is split by fused description and flattening, plain matrices first. No group is
    empty.

    Args:
        model: On meta, plain or sharded; global shapes decide.
        overrides: Options for selected parameters; the first that matches wins.
        router_optimizer: Where the weights of MoE routers go, "adamw" or "muon".
        all_names: Parameter names of the whole model when `model` is only a part of it (a pipeline stage), so that a
            pattern for another stage is not taken for a mistake. Predicates are not checked then.
        fused: What is known of fused weights, by parameter name; an override's own `fused` wins.
        **options: Group options. Muon groups get `<argument>`; AdamW groups get `adamw_<argument>` first, then
            `<argument>`, for lr, weight_decay, betas and eps. `flatten=True` sends the convolutions between hidden
            activations to Muon.

    Returns:
        Group dicts with "params", "param_names" (canonical), "optimizer" and the options, for `Muon(groups)`.

    Raises:
        ValueError: An override matches nothing, or sends a vector or an unflattened convolution to Muon; a fused
            description is for no parameter, does not fit its shape or contradicts another; or an option has no meaning.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    check_optimizer(router_optimizer, "router_optimizer")
    if "optimizer" in options:
        raise ValueError("build_param_groups: 'optimizer' is chosen per parameter; use an override")
    check_options(options, "build_param_groups")

    parameters = find_parameters(model)
    whole_names = None if all_names is None else [canonical_name(name) for name in all_names]
    defaults = _Defaults(
        router_to_muon=OPTIMIZER_ALIASES[router_optimizer] == MUON,
        flatten=options.get(FLATTEN, False),
        fused=_known_fused(fused, parameters, whole_names),
    )
    routed = [_route(sites, param, overrides, defaults) for sites, param in parameters]
    for index, override in enumerate(overrides):
        if override.fused is not None:
            _check_description(index, overrides, routed)
        _check_override(index, override, routed, whole_names)
    if whole_names is None and not any(route.optimizer == MUON for route in routed):
        _warn_no_matrix(routed)

    groups = []
    for optimizer in (MUON, ADAMW):
        for index in range(-1, len(overrides)):
            special = overrides[index].options if index >= 0 else {}
            members = [route for route in routed if route.optimizer == optimizer and route.override == index]
            kinds = dict.fromkeys([(None, False), *((route.fused, route.flatten) for route in members)])
            for kind in kinds:
                same = [route for route in members if (route.fused, route.flatten) == kind]
                if same:
                    groups.append(_make_group(optimizer, same, options, special))
    return groups


@dataclass(frozen=True, slots=True)
class _Defaults:
    """What holds for parameters of which no override says otherwise."""

    router_to_muon: bool
    flatten: bool
    fused: Mapping[str, FusedDim]


@dataclass(frozen=True, slots=True)
class _Route:
    """Where one parameter goes: `override` is the index of the override that claimed it (-1: none), `matches` are all
    that match it, `reason` says why the default rules keep it from Muon ("" when they do not). `fused` and `flatten`
    say which matrices Muon sees in it."""

    name: str
    param: nn.Parameter
    optimizer: str
    override: int
    matches: tuple[int, ...]
    reason: str
    fused: FusedDim | None = None
    flatten: bool = False


def _route(
    sites: Sequence[Site], param: nn.Parameter, overrides: Sequence[ParamOverride], defaults: _Defaults
) -> _Route:
    """Routes one parameter by the first override that matches it, else by the default rules."""
    names = [site.name for site in sites]
    matches = tuple(index for index, override in enumerate(overrides) if override.selects(names, param))
    matching = [overrides[index] for index in matches]
    special = matching[0].options if matching else {}
    flatten = special.get(FLATTEN, defaults.flatten)
    reason = why_adamw(sites, param, defaults.router_to_muon, flatten)
    optimizer = OPTIMIZER_ALIASES[special.get("optimizer", ADAMW if reason else MUON)]
    conv_groups = convolution_groups(sites, param)
    if matching and optimizer == MUON:
        _check_sent_to_muon(matching[0], names[0], param, is_stack_of_kernels=conv_groups is not None and not flatten)
    elif matching and not reason:
        reason = f"override {matching[0].name!r}"
    # of weights whose module is no convolution, only an override can say that they are kernels
    flatten &= conv_groups is not None or (FLATTEN in special and reason == OTHER_STACK)
    fused = _choose_fused(names, matrix_shape(param.shape, flatten), optimizer, matching, defaults.fused)
    if fused is None and flatten and conv_groups not in (None, 1) and FUSED not in special:
        fused = FusedDim((param.shape[0] // conv_groups,), conv_groups, heads=True)
    kind = (fused, flatten) if optimizer == MUON else (None, False)
    return _Route(names[0], param, optimizer, matches[0] if matches else -1, matches, reason, *kind)


def _check_sent_to_muon(override: ParamOverride, name: str, param: nn.Parameter, *, is_stack_of_kernels: bool) -> None:
    if param.ndim < 2:
        raise ValueError(
            f"override {override.name!r} sends parameter {name!r} of shape {list(param.shape)} to Muon, which "
            "needs at least two dims; narrow its match or set optimizer='adamw'"
        )
    if is_stack_of_kernels:
        raise ValueError(
            f"override {override.name!r} sends the convolution weight {name!r} of shape {list(param.shape)} to "
            "Muon, which would orthogonalize each of its kernels; add flatten=True, or leave it with optimizer='adamw'"
        )


def _choose_fused(
    names: Sequence[str],
    shape: tuple[int, ...],
    optimizer: str,
    matching: Sequence[ParamOverride],
    known: Mapping[str, FusedDim],
) -> FusedDim | None:
    """The description that holds for a parameter: that of the override that claims it, else the known one."""
    found = next((known[name] for name in names if name in known), None)
    if found is not None:
        found.resolve(shape, f"parameter {names[0]!r}")
    if optimizer == ADAMW:
        return None
    claims = []
    for override in matching:
        if FUSED in override.options:
            where = f"override {override.name!r}, parameter {names[0]!r}"
            claims.append((override, override.fused and override.fused.resolve(shape, where)))
    if len({fused for _, fused in claims}) > 1:
        said = " and ".join(f"override {each.name!r} says {fused_text(fused) or 'not fused'}" for each, fused in claims)
        raise ValueError(
            f"parameter {names[0]!r} (global shape {shape}): {said}; let only one of them match it, or correct one"
        )
    if matching and FUSED in matching[0].options:
        return matching[0].fused
    return found


def _known_fused(
    fused: Mapping[str, FusedDim] | None,
    parameters: Sequence[tuple[Sequence[Site], nn.Parameter]],
    all_names: Sequence[str] | None,
) -> dict[str, FusedDim]:
    """Checks what the caller knows of fused weights; by canonical name."""
    if fused is None:
        return {}
    if not isinstance(fused, Mapping):
        raise ValueError(f"fused is {fused!r}; it must map parameter names to FusedDim")
    names = [site.name for sites, _ in parameters for site in sites]
    for name in map(canonical_name, fused):
        if name not in names and name not in (all_names or ()):
            raise ValueError(
                f"fused names {name!r}, which is no trainable parameter; the names look like {names[:3]}"
                " (for one stage of a pipeline, give all_names of the whole model)"
            )
    return {canonical_name(name): FusedDim.from_option(value) for name, value in fused.items()}


def _check_override(
    index: int, override: ParamOverride, routed: Sequence[_Route], all_names: Sequence[str] | None
) -> None:
    """Raises when an override matches nothing; warns when it, or an option in it, has no effect."""
    claimed = [route for route in routed if route.override == index]
    if claimed:
        optimizers = {route.optimizer for route in claimed}
        ignored = sorted(key for key in override.options if not any(option_for(name, key) for name in optimizers))
        why = f"everything it matches goes to {' and '.join(sorted(optimizers))}"
        if override.options.get(FLATTEN) is False:
            ignored = [key for key in ignored if key != FLATTEN]
        elif not ignored and FLATTEN in override.options and not any(route.flatten for route in claimed):
            ignored, why = [FLATTEN], "nothing it matches is a convolution"
        if ignored:
            warnings.warn(
                f"override {override.name!r}: {', '.join(ignored)} is ignored, because {why} "
                f"(first: {claimed[0].name!r})",
                stacklevel=3,
            )
    elif any(index in route.matches for route in routed):
        warnings.warn(
            f"override {override.name!r} has no effect: earlier overrides claim everything it matches; move it forward",
            stacklevel=3,
        )
    elif all_names is None or (
        isinstance(override.match, re.Pattern) and not any(override.match.search(name) for name in all_names)
    ):
        names = [route.name for route in routed] if all_names is None else all_names
        raise ValueError(
            f"override {override.name!r} matches no trainable parameter; the names look like {list(names[:3])}"
            " (for one stage of a pipeline, give all_names of the whole model)"
        )


def _check_description(index: int, overrides: Sequence[ParamOverride], routed: Sequence[_Route]) -> None:
    """Raises when an override describes vectors only; warns when it describes what an earlier one claims."""
    override = overrides[index]
    claimed = [route for route in routed if route.override == index]
    if override.fused and claimed and all(route.param.ndim < 2 for route in claimed):
        where = f"override {override.name!r}, parameter {claimed[0].name!r}"
        override.fused.resolve(claimed[0].param.shape, where)
    for route in routed:
        first = overrides[route.override]
        undescribed = route.optimizer == MUON and route.fused is None and FUSED not in first.options
        if index in route.matches and undescribed:
            warnings.warn(
                f"override {override.name!r}: fused is ignored for {route.name!r}, which override {first.name!r} "
                "claims first; move it forward, or give fused to both",
                stacklevel=3,
            )
            return


def _make_group(
    optimizer: str, members: Sequence[_Route], options: Mapping[str, Any], special: Mapping[str, Any]
) -> dict[str, Any]:
    group = {**options_for(optimizer, options), **options_for(optimizer, special)}
    if members[0].fused is not None:
        group[FUSED] = members[0].fused.to_option()
    if members[0].flatten:
        group[FLATTEN] = True
    return {
        **group,
        "params": [route.param for route in members],
        "param_names": [route.name for route in members],
        "optimizer": optimizer,
    }


def _warn_no_matrix(routed: Sequence[_Route]) -> None:
    if routed:
        counts = Counter(route.reason for route in routed)
        why = (
            f"all {len(routed)} trainable parameters go to AdamW ("
            + ", ".join(f"{reason}: {count}" for reason, count in counts.most_common())
            + ")"
        )
    else:
        why = "the model has no trainable parameter"
    warnings.warn(f"Muon selects no matrix: {why}", stacklevel=3)
