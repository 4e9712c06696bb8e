"""Parameter groups of a model under a torchtitan `[optimizer]` section, without a job around them."""

import dataclasses
import functools
import tomllib
import types

from torchtitan.config import ConfigManager
from torchtitan.protocols.train_spec import get_train_spec


@functools.cache
def defaults():
    return (
        ConfigManager().parse_args(["--job.custom-config-module=dtensor_muon.titan", "--optimizer.name=Muon"]).optimizer
    )


def section(toml):
    """As torchtitan's parser, which is slow, hands TOML values over."""
    return dataclasses.replace(defaults(), **tomllib.loads(f"[optimizer]\n{toml}")["optimizer"])


def build(model, toml, pipeline=False):
    """The parameter groups of a model under an optimizer section, as the model's builder makes them."""
    dims = types.SimpleNamespace(pp_enabled=pipeline)
    (muon,) = get_train_spec("llama3").build_optimizers_fn([model], section(toml), dims)
    return muon.param_groups


def sizes(groups):
    """Sizes of the parts and heads, by parameter name, of what is fused."""
    return {
        name: (group["fused"]["sizes"], group["fused"]["heads"])
        for group in groups
        if group["fused"]
        for name in group["param_names"]
    }
