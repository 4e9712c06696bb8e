"""Which parameter goes to Muon and which to AdamW.

Muon is for matrices that map hidden activations to hidden activations, and for stacks of such matrices. Everything else
(embeddings, output heads, norms, biases, routers, learned positions) goes to AdamW. The decision is made from module
types, names and **global** shapes only, so it is the same on meta, on one device and on every rank of every layout.
"""

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from dtensor_muon.options import ADAMW, ADAMW_ONLY_OPTIONS, ADAMW_OPTIONS, MUON
from dtensor_muon.routing import CONVOLUTION, Site, canonical_name, find_parameters, why_adamw

__all__ = ["ParamOverride", "build_param_groups", "describe_param_groups"]

ParamPredicate = Callable[[str, nn.Parameter], bool]

_OPTIMIZER_ALIASES = {MUON: MUON, ADAMW: ADAMW, "adam": ADAMW}
_ADAMW_PREFIX = "adamw_"


@dataclass(frozen=True, slots=True)
class ParamOverride:
    """Group options for the parameters that `match` selects; the first override that matches a parameter wins.

    Attributes:
        match: A regular expression, searched in the parameter's name (`re.search`), or a predicate
            `(name, parameter) -> bool`.
        options: Group options: any Muon argument, `lr`, `weight_decay`, or `optimizer` ("muon" or "adamw"). Without
            `optimizer` the parameter stays where the default rules put it.
        name: What error messages call this override; the pattern by default.

    Raises:
        ValueError: `match` is neither a valid regular expression nor callable, or `options` names no known optimizer.
    """

    match: str | re.Pattern[str] | ParamPredicate
    options: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""

    def __post_init__(self) -> None:
        match = self.match
        if isinstance(match, str):
            try:
                match = re.compile(match)
            except re.error as error:
                raise ValueError(
                    f"override {self.name or match!r}: {match!r} is not a regular expression ({error}); "
                    "escape the character or give a predicate (name, parameter) -> bool"
                ) from None
        elif not isinstance(match, re.Pattern) and not callable(match):
            raise ValueError(
                f"override {self.name!r}: match is {match!r}; "
                "give a regular expression or a predicate (name, parameter) -> bool"
            )
        if isinstance(match, re.Pattern):
            label = self.name or match.pattern
        else:
            label = self.name or getattr(match, "__name__", repr(match))
        object.__setattr__(self, "match", match)
        object.__setattr__(self, "name", label)
        if "params" in self.options or "param_names" in self.options:
            raise ValueError(f"override {label!r}: 'params' and 'param_names' are chosen by `match`; remove them")
        if "optimizer" in self.options:
            _check_optimizer(self.options["optimizer"], f"override {label!r}: optimizer")

    def selects(self, names: Iterable[str], param: nn.Parameter) -> bool:
        """Whether the override matches a parameter known by these names (several when it is tied)."""
        if isinstance(self.match, re.Pattern):
            return any(self.match.search(name) for name in names)
        if isinstance(self.match, str):
            raise AssertionError("patterns are compiled at construction")
        return any(bool(self.match(name, param)) for name in names)


def build_param_groups(
    model: nn.Module,
    *,
    overrides: Sequence[ParamOverride] = (),
    router_optimizer: str = "adamw",
    all_names: Iterable[str] | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Splits a model's trainable parameters into Muon and AdamW groups.

    Every trainable parameter is claimed exactly once (tied weights once, under their first name), in the order of
    `model.named_parameters()`. Groups come in a fixed order, Muon before AdamW, in each the default group and then one
    per override, and no group is empty.

    Args:
        model: On meta, plain or sharded; global shapes decide.
        overrides: Options for selected parameters; the first that matches wins.
        router_optimizer: Where the weights of MoE routers go, "adamw" or "muon".
        all_names: Parameter names of the whole model when `model` is only a part of it (a pipeline stage), so that a
            pattern for another stage is not taken for a mistake. Predicates are not checked then.
        **options: Group options. Muon groups get `<argument>`; AdamW groups get `adamw_<argument>` first, then
            `<argument>`, for lr, weight_decay, betas and eps.

    Returns:
        Group dicts with "params", "param_names" (canonical), "optimizer" and the options, for `Muon(groups)`.

    Raises:
        ValueError: An override matches nothing or sends a vector to Muon, or an option has no meaning for AdamW.
        NotImplementedError: An override sends a convolution weight to Muon.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    _check_optimizer(router_optimizer, "router_optimizer")
    if "optimizer" in options:
        raise ValueError("build_param_groups: 'optimizer' is chosen per parameter; use an override")
    _check_options(options, "build_param_groups")
    for override in overrides:
        _check_options(override.options, f"override {override.name!r}")

    router_to_muon = _OPTIMIZER_ALIASES[router_optimizer] == MUON
    routed = [_route(sites, param, overrides, router_to_muon) for sites, param in find_parameters(model)]
    whole_names = None if all_names is None else [canonical_name(name) for name in all_names]
    for index, override in enumerate(overrides):
        _check_override(index, override, routed, whole_names)
    if whole_names is None and not any(route.optimizer == MUON for route in routed):
        _warn_no_matrix(routed)

    groups = []
    for optimizer in (MUON, ADAMW):
        for index in range(-1, len(overrides)):
            members = [route for route in routed if route.optimizer == optimizer and route.override == index]
            if members:
                special = overrides[index].options if index >= 0 else {}
                groups.append(_make_group(optimizer, members, options, special))
    return groups


def describe_param_groups(groups: Iterable[Mapping[str, Any]]) -> str:
    """Formats parameter groups for reading: one line per name pattern and global shape.

    Args:
        groups: Group dicts as `build_param_groups` returns them, or an optimizer's `param_groups`.

    Returns:
        A table; `*` stands for the block numbers that a line puts together.
    """
    blocks = []
    totals: dict[str, tuple[int, int]] = {}
    for group in groups:
        optimizer = str(group.get("optimizer", MUON))
        params: list[Tensor] = list(group["params"])
        names = group.get("param_names") or ["(unnamed)"] * len(params)
        shown = {key: value for key, value in group.items() if key not in ("params", "param_names", "optimizer")}
        header = " ".join([optimizer, *(f"{key}={value}" for key, value in shown.items())])
        blocks.append((header, _pattern_rows(zip(names, params, strict=True))))
        count, elements = totals.get(optimizer, (0, 0))
        totals[optimizer] = (count + len(params), elements + sum(param.numel() for param in params))
    width = max((len(row[0]) for _, rows in blocks for row in rows), default=0)
    shape_width = max((len(row[1]) for _, rows in blocks for row in rows), default=0)
    lines = []
    for header, rows in blocks:
        lines.append(header)
        lines += [f"  {pattern:<{width}}  {shape:<{shape_width}}  x{count}" for pattern, shape, count in rows]
    lines += [f"{name}: {count} parameters, {elements:,} elements" for name, (count, elements) in totals.items()]
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Route:
    """Where one parameter goes: `override` is the index of the override that claimed it (-1: none), `matches` are all
    that match it, `reason` says why the default rules keep it from Muon ("" when they do not)."""

    name: str
    param: nn.Parameter
    optimizer: str
    override: int
    matches: tuple[int, ...]
    reason: str


def _route(
    sites: Sequence[Site], param: nn.Parameter, overrides: Sequence[ParamOverride], router_to_muon: bool
) -> _Route:
    """Routes one parameter by the first override that matches it, else by the default rules."""
    reason = why_adamw(sites, param, router_to_muon)
    names = [site.name for site in sites]
    matches = tuple(index for index, override in enumerate(overrides) if override.selects(names, param))
    claimed_by = matches[0] if matches else -1
    optimizer = ADAMW if reason else MUON
    if matches:
        override = overrides[claimed_by]
        optimizer = _OPTIMIZER_ALIASES[override.options.get("optimizer", optimizer)]
        if optimizer == MUON and param.ndim < 2:
            raise ValueError(
                f"override {override.name!r} sends parameter {names[0]!r} of shape {list(param.shape)} to Muon, which "
                "needs at least two dims; narrow its match or set optimizer='adamw'"
            )
        if optimizer == MUON and reason == CONVOLUTION:
            raise NotImplementedError(
                f"override {override.name!r} sends the convolution weight {names[0]!r} of shape {list(param.shape)} to "
                "Muon, which would orthogonalize each of its kernels; leave it with optimizer='adamw'"
            )
        if optimizer == ADAMW and not reason:
            reason = f"override {override.name!r}"
    return _Route(names[0], param, optimizer, claimed_by, matches, reason)


def _check_override(
    index: int, override: ParamOverride, routed: Sequence[_Route], all_names: Sequence[str] | None
) -> None:
    """Raises when an override matches nothing; warns when it, or an option in it, has no effect."""
    claimed = [route for route in routed if route.override == index]
    if claimed:
        optimizers = {route.optimizer for route in claimed}
        ignored = sorted(key for key in override.options if not any(_option_for(name, key) for name in optimizers))
        if ignored:
            warnings.warn(
                f"override {override.name!r}: {', '.join(ignored)} is ignored, because everything it matches goes to "
                f"{' and '.join(sorted(optimizers))} (first: {claimed[0].name!r})",
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


def _option_for(optimizer: str, key: str) -> str:
    """The name under which an option reaches groups of this optimizer; "" when it does not."""
    if key == "optimizer":
        return key
    if optimizer == MUON:
        return "" if key.startswith(_ADAMW_PREFIX) or key in ADAMW_ONLY_OPTIONS else key
    key = key.removeprefix(_ADAMW_PREFIX)
    return key if key in ADAMW_OPTIONS else ""


def _options_for(optimizer: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options for one optimizer, the `adamw_` form of a name winning over the plain one."""
    plain_first = sorted(options, key=lambda key: key.startswith(_ADAMW_PREFIX))
    return {name: options[key] for key in plain_first if (name := _option_for(optimizer, key))}


def _make_group(
    optimizer: str, members: Sequence[_Route], options: Mapping[str, Any], special: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        **_options_for(optimizer, options),
        **_options_for(optimizer, special),
        "params": [route.param for route in members],
        "param_names": [route.name for route in members],
        "optimizer": optimizer,
    }


def _check_optimizer(value: object, where: str) -> None:
    if value not in _OPTIMIZER_ALIASES:
        raise ValueError(f"{where} is {value!r}; allowed: {', '.join(map(repr, _OPTIMIZER_ALIASES))}")


def _check_options(options: Mapping[str, Any], where: str) -> None:
    for key in options:
        if key.startswith(_ADAMW_PREFIX) and key.removeprefix(_ADAMW_PREFIX) not in ADAMW_OPTIONS:
            raise ValueError(
                f"{where}: {key!r} is no option of the AdamW groups; allowed: "
                + ", ".join(_ADAMW_PREFIX + name for name in sorted(ADAMW_OPTIONS))
            )


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


def _pattern_rows(named_params: Iterable[tuple[str, Tensor]]) -> list[tuple[str, str, int]]:
    """`(name pattern, shape, count)` in order of first appearance."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name, param in named_params:
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        rows.setdefault((pattern, str(list(param.shape))), []).append(name)
    return [(pattern if len(names) > 1 else names[0], shape, len(names)) for (pattern, shape), names in rows.items()]
