"""Optimizers by name, and their arguments from a config object.

A trainer integration needs four things of an optimizer: its class, a way to create all its state before a checkpoint is
loaded, its constructor arguments from the trainer's config, and overrides that every run with it gets. An
`OptimizerSpec` holds the four; other packages add theirs with `register_optimizer`.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from dtensor_muon.optimizer import Muon
from dtensor_muon.param_groups import ParamOverride

__all__ = [
    "OptimizerSpec",
    "get_optimizer",
    "options_from_config",
    "qkv_split_shapes_from_config",
    "register_optimizer",
]

_HEADS = ("n_heads", "num_attention_heads")
_KV_HEADS = ("n_kv_heads", "num_key_value_heads")
_WIDTH = ("dim", "hidden_size")
_HEAD_DIM = ("head_dim",)


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """What a trainer integration needs to know about an optimizer.

    Attributes:
        cls: The optimizer class; its first argument is the parameter groups.
        init_state: Creates all state of an optimizer that has not stepped yet; leaves existing state alone.
        config_to_options: Constructor arguments from a config object (see `options_from_config`).
        default_overrides: Overrides for `build_param_groups` that come after the user's own.
    """

    cls: type[Optimizer]
    init_state: Callable[[Optimizer], None]
    config_to_options: Callable[[object], dict[str, Any]]
    default_overrides: tuple[ParamOverride, ...] = ()


_SPECS: dict[str, OptimizerSpec] = {}


def register_optimizer(name: str, spec: OptimizerSpec) -> None:
    """Makes an optimizer known by name, upper and lower case being the same.

    Registering the same spec again changes nothing, so a module may be imported twice.

    Raises:
        ValueError: The name is empty, or belongs to another spec.
    """
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"optimizer name is {name!r}; give a non-empty string")
    known = _SPECS.setdefault(name.lower(), spec)
    if known != spec:
        raise ValueError(
            f"optimizer name {name!r} is already registered for {known.cls.__module__}.{known.cls.__qualname__}; "
            "choose another name"
        )


def get_optimizer(name: str) -> OptimizerSpec:
    """The spec registered under a name.

    Raises:
        ValueError: Nothing is registered under it; the message lists the known names.
    """
    spec = _SPECS.get(name.lower()) if isinstance(name, str) else None
    if spec is None:
        raise ValueError(
            f"unknown optimizer name {name!r}; known: {', '.join(map(repr, sorted(_SPECS)))}. "
            "Another package's optimizer is known once register_optimizer was called for it"
        )
    return spec


def options_from_config(cls: type[Optimizer], config: object, prefix: str = "muon_") -> dict[str, Any]:
    """Fills an optimizer's constructor arguments from a config by name: first `<prefix><argument>`, then `<argument>`.

    A value of None, or no such name in the config, means "not given": the constructor's default stays. Zeros and
    False are values.

    Args:
        cls: The optimizer class; its first argument (the parameters) is left out.
        config: A dataclass instance, a namespace or a mapping.
        prefix: The prefix of names that win over plain ones.

    Returns:
        The given arguments, in the order of the constructor.
    """
    _, *arguments = inspect.signature(cls).parameters.values()
    options = {}
    for argument in arguments:
        if argument.kind in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD):
            continue
        for key in (prefix + argument.name, argument.name):
            value = _read(config, key)
            if value is not None:
                options[argument.name] = value
                break
    return options


def qkv_split_shapes_from_config(model_config: object) -> tuple[int, int, int]:
    """Rows of Q, K and V per query group: `(heads // kv_heads * head_dim, head_dim, head_dim)`.

    Args:
        model_config: A dataclass instance, a namespace or a mapping with torchtitan's names (`n_heads`, `n_kv_heads`,
            `dim`, `head_dim`) or Hugging Face's (`num_attention_heads`, `num_key_value_heads`, `hidden_size`,
            `head_dim`). Without key-value heads every head has its own; without `head_dim` it is width / heads.

    Raises:
        ValueError: A number is missing, is not a positive integer or does not divide.
    """
    heads = _positive_int(model_config, _HEADS)
    if heads is None:
        raise ValueError(_missing(_HEADS, model_config))
    kv_heads = _positive_int(model_config, _KV_HEADS) or heads
    if heads % kv_heads:
        raise ValueError(
            f"{heads} attention heads ({' / '.join(_HEADS)}) do not divide into {kv_heads} key-value heads "
            f"({' / '.join(_KV_HEADS)}); the first must be a multiple of the second"
        )
    head_dim = _positive_int(model_config, _HEAD_DIM)
    if head_dim is None:
        width = _positive_int(model_config, _WIDTH)
        if width is None:
            raise ValueError(_missing(_HEAD_DIM + _WIDTH, model_config))
        if width % heads:
            raise ValueError(
                f"width {width} ({' / '.join(_WIDTH)}) does not divide by {heads} attention heads; set head_dim"
            )
        head_dim = width // heads
    return heads // kv_heads * head_dim, head_dim, head_dim


def _read(config: object, key: str) -> Any:
    return config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)


def _positive_int(config: object, keys: tuple[str, ...]) -> int | None:
    for key in keys:
        value = _read(config, key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{key} is {value!r}; the sizes of QKV parts need a positive integer")
        return value
    return None


def _missing(keys: tuple[str, ...], config: object) -> str:
    return (
        f"the model config ({type(config).__name__}) has none of {', '.join(keys)}; "
        "add one, or give qkv_split_shapes yourself"
    )


def _init_muon_state(optimizer: Optimizer) -> None:
    """Creates what construction could not: the state of parameters that were on meta then."""
    if not isinstance(optimizer, Muon):
        raise ValueError(f"optimizer is {type(optimizer).__name__}; this creates the state of a Muon")
    for group in optimizer.param_groups:
        for param in group["params"]:
            optimizer._init_state(group, param)


def _muon_options(config: object) -> dict[str, Any]:
    return options_from_config(Muon, config)


register_optimizer("muon", OptimizerSpec(cls=Muon, init_state=_init_muon_state, config_to_options=_muon_options))
