"""Routing of whole models: where every parameter of every supported model goes, built by the models' own code."""

import re
from collections.abc import Iterable

import pytest
from routing_models import build_flux, build_hugging_face, build_model, build_titan_model
from torch import nn

from dtensor_muon import FusedDim
from dtensor_muon.param_groups import ParamOverride, build_param_groups, describe_param_groups


def patterns(groups: Iterable[dict], optimizer: str) -> set[str]:
    """Parameter names of one optimizer with block numbers replaced by `*`."""
    names = [name for group in groups if group["optimizer"] == optimizer for name in group["param_names"]]
    return {re.sub(r"\b\d+\b", "*", name) for name in names}


def assert_routing(model: nn.Module, muon: str, adamw: str) -> None:
    groups = build_param_groups(model)
    assert patterns(groups, "muon") == set(muon.split())
    assert patterns(groups, "adamw") == set(adamw.split())
    claimed = [id(param) for group in groups for param in group["params"]]
    assert sorted(claimed) == sorted(id(param) for param in model.parameters() if param.requires_grad)


# ---- torchtitan ------------------------------------------------------------------------------------------------------

_ATTENTION = " ".join(f"layers.*.attention.{name}.weight" for name in ("wq", "wk", "wv", "wo"))
_DENSE = " ".join(f"layers.*.feed_forward.{name}.weight" for name in ("w1", "w2", "w3"))
_EXPERTS = " ".join(f"layers.*.moe.experts.{name}" for name in ("w1", "w2", "w3"))
_SHARED = " ".join(f"layers.*.moe.shared_experts.{name}.weight" for name in ("w1", "w2", "w3"))
_NORMS = "layers.*.attention_norm.weight layers.*.ffn_norm.weight norm.weight"
_QK_NORMS = "layers.*.attention.q_norm.weight layers.*.attention.k_norm.weight"
_ENDS = "tok_embeddings.weight output.weight"
_GATE = "layers.*.moe.router.gate.weight"

TITAN = {
    ("llama3", "debugmodel"): (f"{_ATTENTION} {_DENSE}", f"{_ENDS} {_NORMS}"),
    ("llama4", "debugmodel"): (f"{_ATTENTION} {_DENSE} {_EXPERTS} {_SHARED}", f"{_ENDS} {_NORMS} {_GATE}"),
    # the debug flavor ties the output to the embedding
    ("qwen3", "debugmodel"): (f"{_ATTENTION} {_DENSE}", f"tok_embeddings.weight {_NORMS} {_QK_NORMS}"),
    ("qwen3", "debugmodel_moe"): (f"{_ATTENTION} {_EXPERTS}", f"{_ENDS} {_NORMS} {_QK_NORMS} {_GATE}"),
    ("deepseek_v3", "debugmodel"): (
        f"{_DENSE} {_EXPERTS} {_SHARED} "
        + " ".join(f"layers.*.attention.{name}.weight" for name in ("wq", "wkv_a", "wkv_b", "wo")),
        f"{_ENDS} {_NORMS} {_GATE} layers.*.attention.kv_norm.weight",
    ),
    # query low-rank factors exist from 236B on
    ("deepseek_v3", "671B"): (
        f"{_DENSE} {_EXPERTS} {_SHARED} "
        + " ".join(f"layers.*.attention.{name}.weight" for name in ("wq_a", "wq_b", "wkv_a", "wkv_b", "wo")),
        f"{_ENDS} {_NORMS} {_GATE} layers.*.attention.kv_norm.weight layers.*.attention.q_norm.weight",
    ),
    ("gpt_oss", "debugmodel"): (
        f"{_ATTENTION} layers.*.moe.experts.mlp1_weight layers.*.moe.experts.mlp2_weight",
        f"{_ENDS} {_NORMS} {_GATE} layers.*.moe.router.gate.bias layers.*.attention.sinks "
        "layers.*.moe.experts.mlp1_bias layers.*.moe.experts.mlp2_bias "
        + " ".join(f"layers.*.attention.{name}.bias" for name in ("wq", "wk", "wv", "wo")),
    ),
}


@pytest.mark.parametrize(("name", "flavor"), TITAN)
def test_torchtitan_models(name, flavor):
    assert_routing(build_titan_model(name, flavor), *TITAN[name, flavor])


def test_flux():
    double = [f"double_blocks.*.{stream}_{name}" for stream in ("img", "txt") for name in ("mod.lin", "attn.proj")]
    double += [f"double_blocks.*.{stream}_{name}" for stream in ("img", "txt") for name in ("attn.qkv", "mlp.*")]
    hidden = [*double, "single_blocks.*.linear1", "single_blocks.*.linear2", "single_blocks.*.modulation.lin"]
    hidden += ["final_layer.adaLN_modulation.*"]
    inputs = ["img_in", "txt_in", "time_in.in_layer", "time_in.out_layer", "vector_in.in_layer", "vector_in.out_layer"]
    norms = [
        f"double_blocks.*.{stream}_attn.norm.{name}_norm" for stream in ("img", "txt") for name in ("query", "key")
    ]
    norms += ["single_blocks.*.norm.query_norm", "single_blocks.*.norm.key_norm"]
    ends = [*inputs, "final_layer.linear"]
    assert_routing(
        build_flux(),
        " ".join(f"{name}.weight" for name in hidden),
        " ".join([f"{name}.bias" for name in hidden + ends] + [f"{name}.weight" for name in ends + norms]),
    )


# ---- Hugging Face ----------------------------------------------------------------------------------------------------


def _names(prefix: str, leaves: str, suffix: str = "") -> str:
    return " ".join(f"{prefix}{leaf}{suffix}" for leaf in leaves.split())


_BLOCK = "model.layers.*."
_HF_ATTENTION = _names(f"{_BLOCK}self_attn.", "q_proj k_proj v_proj o_proj", ".weight")
_HF_BIASES = _names(f"{_BLOCK}self_attn.", "q_proj k_proj v_proj", ".bias")
_HF_QK_NORMS = _names(f"{_BLOCK}self_attn.", "q_norm k_norm", ".weight")
_HF_DENSE = _names(f"{_BLOCK}mlp.", "gate_proj up_proj down_proj", ".weight")
_HF_EXPERTS = _names(f"{_BLOCK}mlp.experts.", "gate_up_proj down_proj")
_HF_SHARED = _names(f"{_BLOCK}mlp.shared_expert.", "gate_proj up_proj down_proj", ".weight")
_HF_GATE = f"{_BLOCK}mlp.gate.weight"
_HF_NORMS = _names(_BLOCK, "input_layernorm post_attention_layernorm", ".weight") + " model.norm.weight"
_HF_REST = f"model.embed_tokens.weight lm_head.weight {_HF_NORMS}"
_LAYER_NORM = ("weight", "bias")

_GPT2 = "transformer.h.*."
_GPT2_MATRICES = "attn.c_attn attn.c_proj mlp.c_fc mlp.c_proj"
_VIT = "vit.layers.*."
_VIT_MATRICES = "attention.q_proj attention.k_proj attention.v_proj attention.o_proj mlp.fc1 mlp.fc2"
_VIT_ADAMW = (
    "vit.embeddings.cls_token vit.embeddings.position_embeddings "
    + _names("vit.embeddings.patch_embeddings.projection.", "weight bias")
    + f" {_names(_VIT, _VIT_MATRICES, '.bias')} "
    + " ".join(_names(_VIT, "layernorm_before layernorm_after", f".{leaf}") for leaf in _LAYER_NORM)
    + " vit.layernorm.weight vit.layernorm.bias"
)

# class in transformers -> what Muon gets, what AdamW gets
HUGGING_FACE = {
    "LlamaForCausalLM": (f"{_HF_ATTENTION} {_HF_DENSE}", _HF_REST),
    "LlamaForSequenceClassification": (
        f"{_HF_ATTENTION} {_HF_DENSE}",
        f"model.embed_tokens.weight score.weight {_HF_NORMS}",
    ),
    "Qwen2ForCausalLM": (f"{_HF_ATTENTION} {_HF_DENSE}", f"{_HF_REST} {_HF_BIASES}"),
    "Qwen2MoeForCausalLM": (
        f"{_HF_ATTENTION} {_HF_EXPERTS} {_HF_SHARED}",
        f"{_HF_REST} {_HF_BIASES} {_HF_GATE} {_BLOCK}mlp.shared_expert_gate.weight",
    ),
    "Qwen3ForCausalLM": (f"{_HF_ATTENTION} {_HF_DENSE}", f"{_HF_REST} {_HF_QK_NORMS}"),
    "Qwen3MoeForCausalLM": (f"{_HF_ATTENTION} {_HF_EXPERTS}", f"{_HF_REST} {_HF_QK_NORMS} {_HF_GATE}"),
    "MixtralForCausalLM": (f"{_HF_ATTENTION} {_HF_EXPERTS}", f"{_HF_REST} {_HF_GATE}"),
    # its output is tied to the embedding
    "GPT2LMHeadModel": (
        _names(_GPT2, _GPT2_MATRICES, ".weight"),
        "transformer.wte.weight transformer.wpe.weight transformer.ln_f.weight transformer.ln_f.bias "
        + f"{_names(_GPT2, _GPT2_MATRICES, '.bias')} "
        + " ".join(_names(_GPT2, "ln_1 ln_2", f".{leaf}") for leaf in _LAYER_NORM),
    ),
    "ViTForImageClassification": (
        _names(_VIT, _VIT_MATRICES, ".weight"),
        f"{_VIT_ADAMW} classifier.weight classifier.bias",
    ),
    # a 1 x 1 convolution makes the pixels
    "ViTForMaskedImageModeling": (
        _names(_VIT, _VIT_MATRICES, ".weight"),
        f"{_VIT_ADAMW} vit.embeddings.mask_token decoder.*.weight decoder.*.bias",
    ),
}


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face_models(name):
    model = build_hugging_face(name)
    assert_routing(model, *HUGGING_FACE[name])
    if name.startswith("ViT"):  # neither convolution is between hidden activations
        assert patterns(build_param_groups(model, flatten=True), "muon") == set(HUGGING_FACE[name][0].split())


def test_tied_embedding_of_llama():
    muon, adamw = HUGGING_FACE["LlamaForCausalLM"]
    assert_routing(
        build_hugging_face("LlamaForCausalLM", tie_word_embeddings=True), muon, adamw.replace("lm_head.weight", "")
    )


@pytest.mark.parametrize(
    ("name", "match", "fused", "shown"),
    [
        ("GPT2LMHeadModel", r"c_attn\.weight", FusedDim((8, 8, 8), dim=1), "[8, 24] x2 fused 1 x (8, 8, 8) columns"),
        ("MixtralForCausalLM", "gate_up_proj", FusedDim((12, 12)), "[4, 24, 8] x2 fused 1 x (12, 12)"),
        ("GptOssForCausalLM", "gate_up_proj$", FusedDim((1, 1), dim=1), "[4, 8, 24] x2 fused 12 x (1, 1) columns"),
    ],
)
def test_fused_weights_of_hugging_face_models(name, match, fused, shown):
    groups = build_param_groups(build_hugging_face(name), overrides=[ParamOverride(match, {"fused": fused})])
    rows = [row.split() for row in describe_param_groups(groups).splitlines()]
    assert [" ".join(row[1:]) for row in rows if "fused" in row] == [shown]


# ---- look-alikes of what is not installed ----------------------------------------------------------------------------

LOOK_ALIKES = {
    # transformers up to 4: a list of experts beside a plain linear gate
    "mixtral_v4": (
        (
            "model.layers.0.self_attn.q_proj.weight 8,8 Linear LlamaAttention",
            "model.layers.0.block_sparse_moe.experts.0.w1.weight 16,8 Linear",
        ),
        ("model.layers.0.block_sparse_moe.gate.weight 4,8 Linear",),
    ),
    # peft 0.21: factors of a hidden projection are matrices, those of an embedding or a head follow what they adapt.
    # Names and classes as it makes them on a Llama (the router apart); it is not installed for the tests because it
    # brings accelerate and psutil along.
    "lora": (
        (
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight 2,8 Linear",
            "base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight 8,2 Linear",
            "base_model.model.model.layers.0.mlp.down_proj.lora_A.default.weight 2,12 Linear",
            "base_model.model.model.layers.0.mlp.down_proj.lora_B.default.weight 8,2 Linear",
        ),
        (
            "base_model.model.model.embed_tokens.lora_embedding_A.default 2,32 ParameterDict",
            "base_model.model.model.embed_tokens.lora_embedding_B.default 8,2 ParameterDict",
            "base_model.model.lm_head.lora_A.default.weight 2,8 Linear",
            "base_model.model.lm_head.lora_B.default.weight 32,2 Linear",
            "base_model.model.model.layers.0.mlp.router.lora_A.default.weight 2,8 Linear",
        ),
    ),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alikes(name):
    muon, adamw = LOOK_ALIKES[name]
    expected = (" ".join(re.sub(r"\b\d+\b", "*", row.split()[0]) for row in rows) for rows in (muon, adamw))
    assert_routing(build_model(*muon, *adamw), *expected)
