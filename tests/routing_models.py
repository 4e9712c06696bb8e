"""Small models on the meta device: torchtitan's own module code, and look-alikes built from tables of names."""

import copy
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn


class _Conv1D(nn.Module):
    """Like transformers' layer of this name: a weight stored as [in, out]."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape))


_FACTORIES = {
    "Linear": lambda rows, columns: nn.Linear(columns, rows, bias=False),
    "Embedding": lambda rows, columns: nn.Embedding(rows, columns),
    "EmbeddingBag": lambda rows, columns: nn.EmbeddingBag(rows, columns),
    "LayerNorm": lambda *shape: nn.LayerNorm(shape, bias=False),
    "Conv2d": lambda out, channels, *kernel: nn.Conv2d(channels, out, kernel, bias=False),
    "Conv1D": _Conv1D,
}


def build_model(*rows: str) -> nn.Module:
    """Builds a model from rows "name shape class [class of the parent]", for example "wq.weight 8,8 Linear".

    A class without a factory becomes an empty class of that name which gets the parameter directly.
    """
    root = nn.Module()
    with torch.device("meta"):
        for row in rows:
            name, shape_text, *classes = row.split()
            shape = tuple(int(size) for size in shape_text.split(","))
            *path, owner_name, leaf = name.split(".") if "." in name else ("", name)
            parent = root
            for component in path:
                if component:
                    parent = _child(parent, component, (classes[1:] or ["Module"])[0])
            if classes and classes[0] in _FACTORIES and not hasattr(parent, owner_name):
                parent.add_module(owner_name, _FACTORIES[classes[0]](*shape))
            else:
                owner = _child(parent, owner_name, (classes or ["Module"])[0]) if owner_name else root
                owner.register_parameter(leaf, nn.Parameter(torch.empty(shape)))
    return root


def _child(parent: nn.Module, name: str, class_name: str) -> nn.Module:
    if not hasattr(parent, name):
        parent.add_module(name, type(class_name, (nn.Module,), {})())
    return getattr(parent, name)


def build_titan_model(name: str, flavor: str = "debugmodel") -> nn.Module:
    """Builds a debug flavor of a torchtitan model, its blocks cut to four, on meta."""
    titan = pytest.importorskip("dtensor_muon.titan", reason="torchtitan is not installed")
    spec = titan.TRAIN_SPECS[name]
    args = copy.copy(spec.model_args[flavor])  # the registered object serves other tests
    args.n_layers, args.vocab_size, args.moe_impl = 4, 64, "standard"
    with torch.device("meta"):
        return spec.model_cls(args)


def build_flux() -> nn.Module:
    """Builds a small flux from its own module code, without the packages that its data and encoders need."""
    pytest.importorskip("einops", reason="flux's layers need einops")
    package, args_module = "torchtitan.models.flux", "torchtitan.models.flux.model.args"
    stubs = {package: ModuleType(package), args_module: ModuleType(args_module)}
    stubs[package].__path__ = [str(_find("torchtitan") / "models" / "flux")]
    stubs[args_module].FluxModelArgs = SimpleNamespace
    sizes = {"vec_in_dim": 6, "context_in_dim": 10, "hidden_size": 16, "axes_dim": (2, 2, 4), "num_heads": 2}
    depths = {"in_channels": 4, "out_channels": 4, "depth": 2, "depth_single_blocks": 2}
    importlib.import_module("dtensor_muon.titan")  # makes torchtitan importable on any machine
    with mock.patch.dict(sys.modules, stubs), torch.device("meta"):
        from torchtitan.models.flux.model.model import FluxModel

        return FluxModel(SimpleNamespace(**sizes, **depths, mlp_ratio=4.0, theta=100, qkv_bias=True))


_HF_COMMON = {
    "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32,
    "num_key_value_heads": 1,
}  # fmt: skip
_HF_EXPERTS = {"moe_intermediate_size": 6, "num_experts": 4, "num_experts_per_tok": 2}
# beginning of the class -> what its configuration has beside or instead of the common numbers
_HF_CONFIGS = {
    "Llama": _HF_COMMON,
    "Qwen2Moe": {**_HF_COMMON, **_HF_EXPERTS, "shared_expert_intermediate_size": 6},
    "Qwen2": _HF_COMMON,
    "Qwen3Moe": {**_HF_COMMON, **_HF_EXPERTS, "head_dim": 4},
    "Qwen3": {**_HF_COMMON, "head_dim": 4},
    "Mixtral": {**_HF_COMMON, "num_local_experts": 4},
    "GptOss": {**_HF_COMMON, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 4},
    "GPT2": {"n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 32, "n_positions": 16},
    "ViT": {
        "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": 8, "patch_size": 4, "encoder_stride": 4,
    },
}  # fmt: skip


def build_hugging_face(name: str, **changes: object) -> nn.Module:
    """Builds a small model of a class in transformers, on meta."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    family = next(prefix for prefix in _HF_CONFIGS if name.startswith(prefix))
    config = getattr(transformers, f"{family}Config")(**_HF_CONFIGS[family], **changes)
    with torch.device("meta"):
        return getattr(transformers, name)(config)


def _find(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    return Path(spec.submodule_search_locations[0])
