"""What a user says about selected parameters: group options by regular expression or predicate."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from dtensor_muon.fused import FusedDim
from dtensor_muon.options import ADAMW, ADAMW_ONLY_OPTIONS, ADAMW_OPTIONS, MUON

OPTIMIZER_ALIASES = {MUON: MUON, ADAMW: ADAMW, "adam": ADAMW}
FUSED, FLATTEN = "fused", "flatten"
_ADAMW_PREFIX = "adamw_"

ParamPredicate = Callable[[str, nn.Parameter], bool]


@dataclass(frozen=True, slots=True)
class ParamOverride:
    """Group options for the parameters that `match` selects; the first override that matches a parameter wins.

    Attributes:
        match: A regular expression, searched in the parameter's name (`re.search`), or a predicate
            `(name, parameter) -> bool`.
        options: Group options: any Muon argument, `lr`, `weight_decay`, or `optimizer` ("muon" or "adamw"). Without
            `optimizer` the parameter stays where the default rules put it. `fused` is a `FusedDim`, a mapping of its
            attributes, or None for a weight that is one matrix after all; `flatten` is True for convolutions that Muon
            gets as matrices `[out, in * kernel]`.
        name: What error messages call this override; the pattern by default.

    Raises:
        ValueError: `match` is neither a valid regular expression nor callable, or an option has a bad value.
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
            check_optimizer(self.options["optimizer"], f"override {label!r}: optimizer")
        check_options(self.options, f"override {label!r}")

    def selects(self, names: Iterable[str], param: nn.Parameter) -> bool:
        """Whether the override matches a parameter known by these names (several when it is tied)."""
        if isinstance(self.match, re.Pattern):
            return any(self.match.search(name) for name in names)
        if isinstance(self.match, str):
            raise AssertionError("patterns are compiled at construction")
        return any(bool(self.match(name, param)) for name in names)

    @property
    def fused(self) -> FusedDim | None:
        """What the override says about a fused dim; None also when it says nothing, see `FUSED in options`."""
        value = self.options.get(FUSED)
        return None if value is None else FusedDim.from_option(value)


def option_for(optimizer: str, key: str) -> str:
    """The name under which an option reaches groups of this optimizer; "" when it does not."""
    if key == "optimizer":
        return key
    if optimizer == MUON:
        return "" if key.startswith(_ADAMW_PREFIX) or key in ADAMW_ONLY_OPTIONS else key
    key = key.removeprefix(_ADAMW_PREFIX)
    return key if key in ADAMW_OPTIONS else ""


def options_for(optimizer: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options for one optimizer, the `adamw_` form of a name winning over the plain one.

    `fused` and `flatten` are left out: they hold for some parameters of a group's only.
    """
    plain_first = sorted(options, key=lambda key: key.startswith(_ADAMW_PREFIX))
    return {
        name: options[key]
        for key in plain_first
        if (name := option_for(optimizer, key)) and key not in (FUSED, FLATTEN)
    }


def check_optimizer(value: object, where: str) -> None:
    """Raises when a value names no optimizer."""
    if value not in OPTIMIZER_ALIASES:
        raise ValueError(f"{where} is {value!r}; allowed: {', '.join(map(repr, OPTIMIZER_ALIASES))}")


def check_options(options: Mapping[str, Any], where: str) -> None:
    """Raises for options that have no meaning in any group, and for bad values of those that never reach a group."""
    for key in options:
        if key.startswith(_ADAMW_PREFIX) and key.removeprefix(_ADAMW_PREFIX) not in ADAMW_OPTIONS:
            raise ValueError(
                f"{where}: {key!r} is no option of the AdamW groups; allowed: "
                + ", ".join(_ADAMW_PREFIX + name for name in sorted(ADAMW_OPTIONS))
            )
    if not isinstance(options.get(FLATTEN, False), bool):
        raise ValueError(f"{where}: flatten is {options[FLATTEN]!r}; it must be True or False")
    if options.get(FUSED) is not None:
        try:
            FusedDim.from_option(options[FUSED])
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
