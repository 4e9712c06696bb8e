"""The registry, and what is read from config objects."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from dtensor_muon import registry
from dtensor_muon.optimizer import Muon
from dtensor_muon.param_groups import ParamOverride
from dtensor_muon.registry import (
    OptimizerSpec,
    get_optimizer,
    options_from_config,
    qkv_split_shapes_from_config,
    register_optimizer,
)


def do_nothing(optimizer: torch.optim.Optimizer) -> None:
    pass


def no_options(config: object) -> dict:
    return {}


@pytest.fixture(autouse=True)
def private_registry(monkeypatch):
    monkeypatch.setattr(registry, "_SPECS", dict(registry._SPECS))


def test_muon_is_registered():
    spec = get_optimizer("muon")
    assert spec is get_optimizer("Muon")
    assert spec.cls is Muon
    assert spec.default_overrides == ()
    assert spec.config_to_options({"muon_momentum": 0.5, "lr": 0.0}) == {"lr": 0.0, "momentum": 0.5}


def test_muon_state_exists_after_init_state():
    matrix = torch.nn.Parameter(torch.ones(2, 3))
    vector = torch.nn.Parameter(torch.ones(3))
    optimizer = Muon([{"params": [matrix]}, {"params": [vector], "optimizer": "adamw"}])
    get_optimizer("muon").init_state(optimizer)
    assert set(optimizer.state[matrix]) == {"momentum_buffer"}
    assert set(optimizer.state[vector]) == {"step", "exp_avg", "exp_avg_sq"}
    buffer = optimizer.state[matrix]["momentum_buffer"]
    buffer.fill_(7.0)
    get_optimizer("muon").init_state(optimizer)
    assert optimizer.state[matrix]["momentum_buffer"] is buffer
    assert torch.equal(buffer, torch.full((2, 3), 7.0))
    assert torch.equal(matrix, torch.ones(2, 3))


def test_muon_state_of_materialized_parameters():
    param = torch.nn.Parameter(torch.empty(2, 3, device="meta"))
    optimizer = Muon([param])
    get_optimizer("muon").init_state(optimizer)
    assert not optimizer.state[param]
    torch.utils.swap_tensors(param, torch.nn.Parameter(torch.ones(2, 3)))
    get_optimizer("muon").init_state(optimizer)
    assert torch.equal(optimizer.state[param]["momentum_buffer"], torch.zeros(2, 3))


def test_muon_state_of_another_optimizer():
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match=r"^optimizer is SGD; this creates the state of a Muon$"):
        get_optimizer("muon").init_state(other)


def test_another_package_registers_an_optimizer():
    spec = OptimizerSpec(
        cls=torch.optim.SGD,
        init_state=do_nothing,
        config_to_options=lambda config: options_from_config(torch.optim.SGD, config, prefix="sgd_"),
        default_overrides=(ParamOverride("embed", {"lr": 0.1}),),
    )
    register_optimizer("Plain-SGD", spec)
    assert get_optimizer("plain-sgd") is spec
    assert spec.config_to_options({"sgd_momentum": 0.9, "muon_lr": 1.0, "lr": 0.5}) == {"lr": 0.5, "momentum": 0.9}


def test_a_name_is_registered_once():
    spec = OptimizerSpec(torch.optim.SGD, do_nothing, no_options)
    register_optimizer("sgd", spec)
    register_optimizer("SGD", OptimizerSpec(torch.optim.SGD, do_nothing, no_options))  # the same again
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        register_optimizer("sgd", OptimizerSpec(torch.optim.Adagrad, do_nothing, no_options))
    assert str(caught.value) == (
        "optimizer name 'sgd' is already registered for torch.optim.sgd.SGD; choose another name"
    )
    assert get_optimizer("sgd") is spec


@pytest.mark.parametrize("name", ["", "  ", None, 3])
def test_bad_name(name):
    with pytest.raises(ValueError, match=r"^optimizer name is .*; give a non-empty string$"):
        register_optimizer(name, OptimizerSpec(torch.optim.SGD, do_nothing, no_options))


@pytest.mark.parametrize("name", ["mouon", None])
def test_unknown_name_lists_the_known_ones(name):
    register_optimizer("sgd", OptimizerSpec(torch.optim.SGD, do_nothing, no_options))
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        get_optimizer(name)
    assert str(caught.value) == (
        f"unknown optimizer name {name!r}; known: 'muon', 'sgd'. "
        "Another package's optimizer is known once register_optimizer was called for it"
    )


# ---- options from a config -------------------------------------------------------------------------------------------


@dataclass
class OptimizerConfig:
    """Like a trainer's: plain names with defaults for every optimizer, prefixed ones that are None until given."""

    name: str = "Muon"
    lr: float = 8e-4
    weight_decay: float = 0.1
    eps: float = 1e-8
    implementation: str = "fused"
    muon_lr: float | None = None
    muon_momentum: float | None = None
    muon_nesterov: bool | None = None
    muon_weight_decay: float | None = None
    muon_qkv_split_shapes: list[int] | None = field(default_factory=lambda: [2, 1, 1])
    muon_params: list[str] | None = field(default_factory=lambda: ["never an option"])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"muon_lr": 0.02}, {"lr": 0.02}),  # the prefixed name wins
        ({"muon_lr": None, "lr": 0.5}, {"lr": 0.5}),  # None is not given
        ({"muon_lr": 0.0, "lr": 0.5}, {"lr": 0.0}),  # zero is
        ({"muon_weight_decay": 0.0, "muon_momentum": 0.0}, {"weight_decay": 0.0, "momentum": 0.0}),
        ({"weight_decay": 0.0}, {"weight_decay": 0.0}),
        ({"muon_nesterov": False}, {"nesterov": False}),
        ({"muon_qkv_split_shapes": None}, {"qkv_split_shapes": None}),
    ],
)
def test_options_from_a_dataclass(given, expected):
    full = {"lr": 8e-4, "weight_decay": 0.1, "qkv_split_shapes": [2, 1, 1], "eps": 1e-8} | expected
    assert options_from_config(Muon, OptimizerConfig(**given)) == {k: v for k, v in full.items() if v is not None}


@pytest.mark.parametrize("make", [dict, SimpleNamespace])
def test_options_from_other_configs(make):
    config = make(muon_tp_mode="owner", momentum_dtype=torch.float32, unknown=1, tp_mode="duplicated")
    assert options_from_config(Muon, config) == {"tp_mode": "owner", "momentum_dtype": torch.float32}


def test_options_come_in_the_order_of_the_constructor():
    assert list(options_from_config(Muon, {"eps": 1e-6, "tp_mode": "auto", "lr": 1.0})) == ["lr", "tp_mode", "eps"]


def test_variadic_arguments_are_no_options():
    class Loose(torch.optim.SGD):
        def __init__(self, params, lr=0.1, *args, **kwargs):
            super().__init__(params, lr, *args, **kwargs)

    assert options_from_config(Loose, {"lr": 1.0, "args": 1, "kwargs": 2, "params": []}) == {"lr": 1.0}


# ---- sizes of QKV parts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"n_heads": 32, "n_kv_heads": 8, "dim": 4096}, (512, 128, 128)),  # torchtitan llama3 8B
        ({"n_heads": 16, "n_kv_heads": None, "dim": 256}, (16, 16, 16)),  # every head its own
        ({"n_heads": 16, "n_kv_heads": 8, "head_dim": 128, "dim": 1024}, (256, 128, 128)),  # qwen3: dim / heads is 64
        ({"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}, (512, 128, 128)),
        ({"num_attention_heads": 12, "hidden_size": 768, "head_dim": None}, (64, 64, 64)),
    ],
)
@pytest.mark.parametrize("make", [dict, SimpleNamespace])
def test_qkv_split_shapes(make, config, expected):
    assert qkv_split_shapes_from_config(make(**config)) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"dim": 8},
            "the model config (dict) has none of n_heads, num_attention_heads; add one, or give qkv_split_shapes "
            "yourself",
        ),
        (
            {"n_heads": 8},
            "the model config (dict) has none of head_dim, dim, hidden_size; add one, or give qkv_split_shapes "
            "yourself",
        ),
        (
            {"n_heads": 8, "n_kv_heads": 3, "dim": 64},
            "8 attention heads (n_heads / num_attention_heads) do not divide into 3 key-value heads (n_kv_heads / "
            "num_key_value_heads); the first must be a multiple of the second",
        ),
        (
            {"n_heads": 8, "dim": 60},
            "width 60 (dim / hidden_size) does not divide by 8 attention heads; set head_dim",
        ),
        ({"n_heads": 0, "dim": 8}, "n_heads is 0; the sizes of QKV parts need a positive integer"),
        ({"n_heads": 8, "n_kv_heads": 0, "dim": 8}, "n_kv_heads is 0; the sizes of QKV parts need a positive integer"),
        ({"n_heads": 8.0, "dim": 8}, "n_heads is 8.0; the sizes of QKV parts need a positive integer"),
        ({"n_heads": True, "dim": 8}, "n_heads is True; the sizes of QKV parts need a positive integer"),
        ({"n_heads": 8, "head_dim": "64"}, "head_dim is '64'; the sizes of QKV parts need a positive integer"),
    ],
)
def test_qkv_split_shapes_bad_input(config, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        qkv_split_shapes_from_config(config)
    assert str(caught.value) == message
