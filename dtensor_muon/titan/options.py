"""Muon's options as keys of torchtitan's ``[optimizer]`` section, and the check of every value.

torchtitan checks the names of TOML keys but not the types of their values, so a string arrives where a number is
expected. :func:`read_options` is the only reader of the section and raises before anything is built.
"""

import dataclasses
import difflib
import importlib
import math
import re
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch
import tyro

from dtensor_muon.coefficients import get_supported_coefficient_types
from dtensor_muon.cost import PROFILES
from dtensor_muon.fused import FusedDim
from dtensor_muon.param_groups import ParamOverride

MUON = "Muon"

# Keys of torchtitan's own Optimizer section that mean the same for Muon; the rest of its keys is AdamW's.
TORCHTITAN_KEYS = ("lr", "weight_decay", "eps")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclasses.dataclass(frozen=True)
class Option:
    """One argument of :class:`dtensor_muon.Muon` as a TOML value.

    Attributes:
        annotation: the type of the key in torchtitan's configuration.
        allowed: what a value must be, as it stands in error messages.
        parse: TOML value -> argument; raises ValueError, TypeError or ImportError for what is not allowed.
    """

    annotation: Any
    allowed: str
    parse: Callable[[Any], Any]


def _fail() -> Any:
    raise ValueError


def _number(accept: Callable[[float], bool]) -> Callable[[Any], float]:
    def parse(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            _fail()
        return float(value) if math.isfinite(value) and accept(value) else _fail()

    return parse


def _positive_int(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 1 else _fail()


def _choice(choices: Mapping[str, Any]) -> Option:
    allowed = "one of " + ", ".join(f'"{name}"' for name in choices)
    return Option(
        str, allowed, lambda value: choices[value] if isinstance(value, str) and value in choices else _fail()
    )


def _names(*names: str) -> dict[str, str]:
    return {name: name for name in names}


def _betas(value: Any) -> tuple[float, float]:
    first, second = (_MOMENTUM.parse(beta) for beta in value)
    return first, second


def _split_shapes(value: Any) -> tuple[int, ...]:
    return tuple(_positive_int(rows) for rows in value) if len(value) in (3, 4) else _fail()


def _triples(value: Any) -> tuple[tuple[float, float, float], ...]:
    triples = []
    for triple in value:
        a, b, c = (_ANY_NUMBER(number) for number in triple)
        triples.append((a, b, c))
    return tuple(triples) if triples else _fail()


def _function(value: Any) -> Callable[..., Any]:
    module, _, name = value.partition(":") if isinstance(value, str) else ("", "", "")
    function = getattr(importlib.import_module(module), name) if module and name else _fail()
    return function if callable(function) else _fail()  # type: ignore[no-any-return]


def _pattern(value: Any) -> str:
    return value if isinstance(value, str) and value and re.compile(value) else _fail()


def _fused(value: Any) -> FusedDim | None:
    return None if value is False else FusedDim.from_option(value)


_ANY_NUMBER = _number(lambda value: True)
_NOT_NEGATIVE = Option(float, "a finite number >= 0", _number(lambda value: value >= 0))
_MOMENTUM = Option(float, "a number in [0, 1)", _number(lambda value: 0 <= value < 1))
_BOOL = Option(bool, "true or false", lambda value: value if isinstance(value, bool) else _fail())

OPTIONS: dict[str, Option] = {
    "lr": _NOT_NEGATIVE,
    "momentum": _MOMENTUM,
    "nesterov": _BOOL,
    "weight_decay": _NOT_NEGATIVE,
    "use_decoupled_weight_decay": _BOOL,
    "split_qkv": _BOOL,
    "is_qkv_fn": Option(str, 'the name of a function that can be imported, as "package.module:function"', _function),
    "qkv_split_shapes": Option(list[int], "three or four whole numbers >= 1", _split_shapes),
    "fp32_matmul_prec": _choice(_names("medium", "high", "highest")),
    "coefficient_type": _choice(_names(*get_supported_coefficient_types())),
    "num_ns_steps": Option(int, "a whole number >= 1", _positive_int),
    "scale_mode": _choice(_names("spectral", "shape_scaling", "unit_rms_norm")),
    "extra_scale_factor": Option(float, "a finite number", _ANY_NUMBER),
    "tp_mode": _choice(_names("auto", "owner", "duplicated", "distributed", "blockwise")),
    "flatten": _BOOL,
    "block_period": Option(int, "a whole number >= 1", _positive_int),
    "block_lr_multiplier": _NOT_NEGATIVE,
    "full_lr_multiplier": _NOT_NEGATIVE,
    "custom_coefficient_sets": Option(
        list[tuple[float, float, float]], "a list of triples of finite numbers, as [[a, b, c], ...]", _triples
    ),
    "momentum_dtype": _choice(_DTYPES),
    "betas": Option(list[float], "two numbers in [0, 1)", _betas),
    "eps": _NOT_NEGATIVE,
    "device_profile": _choice(PROFILES),
    "max_bucket_bytes": Option(int, "a whole number >= 1", _positive_int),
    "compile": _BOOL,
    "nonfinite": _choice(_names("propagate", "skip", "raise")),
}

# Arguments of the whole optimizer; parameter groups take all others.
OPTIMIZER_WIDE = ("device_profile", "max_bucket_bytes", "compile", "nonfinite")

# Values for the AdamW groups that differ from the Muon groups'.
ADAMW_OPTIONS: dict[str, Option] = {f"adamw_{name}": OPTIONS[name] for name in ("lr", "weight_decay")}

# TOML key -> option, without the keys that torchtitan defines.
KEYS: dict[str, Option] = {
    **{f"muon_{name}": option for name, option in OPTIONS.items()},
    **{name: option for name, option in OPTIONS.items() if name not in TORCHTITAN_KEYS},
    **ADAMW_OPTIONS,
}

OVERRIDES = "muon_overrides"

# Keys of one table of the overrides.
OVERRIDE_KEYS: dict[str, Option] = {
    "match": Option(str, "a regular expression", _pattern),
    "optimizer": _choice(_names("muon", "adamw")),
    "fused": Option(
        dict[str, Any],
        "a table {sizes = [whole numbers >= 1], num_groups = a whole number >= 1, dim = 0 or 1, heads = true or false} "
        "of which only sizes must be there, or false for one matrix",
        _fused,
    ),
    **{name: option for name, option in OPTIONS.items() if name not in OPTIMIZER_WIDE},
    **ADAMW_OPTIONS,
}

OptimizerSection = dataclasses.make_dataclass(
    "OptimizerSection",
    [
        *((key, option.annotation | None, dataclasses.field(default=None)) for key, option in KEYS.items()),
        # tables cannot be given on the command line
        (OVERRIDES, Annotated[Any, tyro.conf.Fixed], dataclasses.field(default=None)),
    ],
)
OptimizerSection.__doc__ = "What this package adds to torchtitan's ``[optimizer]`` section. None means: not set."


def read_options(config: Any) -> types.SimpleNamespace:
    """Check every key of the ``[optimizer]`` section that concerns Muon.

    Args:
        config: torchtitan's optimizer section, merged with :data:`OptimizerSection`.

    Returns:
        The keys that are set, by the name they have in the TOML, as values Muon's constructor takes; ``betas`` stands
        for torchtitan's ``beta1`` and ``beta2`` unless it is set itself. ``muon_overrides`` is always there, as a tuple
        of overrides.

    Raises:
        ValueError: for a value that is not allowed, naming the key, the value and what is allowed; and for
            ``early_step_in_backward``.
    """
    if config.early_step_in_backward:
        raise ValueError(
            "[optimizer] early_step_in_backward = true: Muon orthogonalizes same-shape matrices together, after "
            "the whole backward; set it to false"
        )
    keys = {**KEYS, **{key: OPTIONS[key] for key in TORCHTITAN_KEYS}, "beta1": _MOMENTUM, "beta2": _MOMENTUM}
    values = {key: _parse(key, getattr(config, key), option) for key, option in keys.items()}
    values["betas"] = values["betas"] or (values.pop("beta1"), values.pop("beta2"))
    values[OVERRIDES] = _read_overrides(getattr(config, OVERRIDES))
    return types.SimpleNamespace(**{key: value for key, value in values.items() if value is not None})


def adamw_options(options: types.SimpleNamespace) -> dict[str, Any]:
    """The ``adamw_<argument>`` keys among the checked options."""
    return {key: value for key, value in vars(options).items() if key in ADAMW_OPTIONS}


def keys_without_effect(config: Any) -> tuple[str, ...]:
    """Keys this package adds that are set although the job's optimizer is not Muon."""
    return tuple(key for key in (*KEYS, OVERRIDES) if getattr(config, key, None) is not None)


def _read_overrides(tables: Any) -> tuple[ParamOverride, ...]:
    if tables is None:
        return ()
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ValueError(
            f"[optimizer] {OVERRIDES} = {tables!r} is not valid; allowed: an array of tables, each under "
            f"[[optimizer.{OVERRIDES}]]"
        )
    return tuple(_read_override(f"{OVERRIDES}[{index}]", table) for index, table in enumerate(tables))


def _read_override(where: str, table: Mapping[str, Any]) -> ParamOverride:
    for key in table:
        if key not in OVERRIDE_KEYS:
            similar = difflib.get_close_matches(key.removeprefix("muon_"), OVERRIDE_KEYS, n=1)
            hint = f"did you mean {similar[0]}?" if similar else f"known here: {', '.join(OVERRIDE_KEYS)}"
            raise ValueError(f"[optimizer] {where} has the unknown key {key}; {hint}")
    if "match" not in table:
        raise ValueError(f"[optimizer] {where} has no match; give a regular expression for the parameters' names")
    options = {key: _parse(f"{where}.{key}", value, OVERRIDE_KEYS[key]) for key, value in table.items()}
    match = options.pop("match")
    if not options:
        raise ValueError(f"[optimizer] {where} has match = {match!r} and no option; give one, or remove the table")
    return ParamOverride(match, options, name=f"{where} {match}")


def _parse(key: str, value: Any, option: Option) -> Any:
    if value is None:
        return None
    try:
        return option.parse(value)
    except (LookupError, ValueError, TypeError, ImportError, AttributeError, re.error) as error:
        raise ValueError(f"[optimizer] {key} = {value!r} is not valid; allowed: {option.allowed}") from error
