"""Routing: where every parameter of every supported model goes, and what each rule and override changes."""

import re
from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from routing_models import build_flux, build_model, build_titan_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtensor_muon import Muon, routing
from dtensor_muon.param_groups import ParamOverride, build_param_groups, describe_param_groups
from dtensor_muon.routing import RULES, canonical_name, find_parameters, why_adamw


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


# ---- torchtitan's own module code ------------------------------------------------------------------------------------

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


# ---- Hugging Face: look-alikes with the classes, names and shapes of transformers 5, hidden size 8 -----------------

_HF_ATTENTION = (
    "model.layers.0.self_attn.q_proj.weight 8,8 Linear LlamaAttention",
    "model.layers.0.self_attn.k_proj.weight 4,8 Linear",
    "model.layers.0.self_attn.v_proj.weight 4,8 Linear",
    "model.layers.0.self_attn.o_proj.weight 8,8 Linear",
)
_HF_DENSE = (
    "model.layers.0.mlp.gate_proj.weight 16,8 Linear LlamaMLP",
    "model.layers.0.mlp.up_proj.weight 16,8 Linear",
    "model.layers.0.mlp.down_proj.weight 8,16 Linear",
)
_HF_EXPERTS = (
    "model.layers.0.mlp.experts.gate_up_proj 4,16,8 MixtralExperts",
    "model.layers.0.mlp.experts.down_proj 4,8,8 MixtralExperts",
)
_HF_REST = (
    "model.embed_tokens.weight 32,8 Embedding",
    "model.layers.0.input_layernorm.weight 8 LlamaRMSNorm",
    "model.norm.weight 8 LlamaRMSNorm",
    "lm_head.weight 32,8 Linear",
)
_QWEN2_BIASES = tuple(f"model.layers.0.self_attn.{name}_proj.bias 8 Linear" for name in "qkv")
_QWEN3_NORMS = tuple(f"model.layers.0.self_attn.{name}_norm.weight 4 Qwen3RMSNorm" for name in "qk")

LOOK_ALIKES = {
    "llama": (_HF_ATTENTION + _HF_DENSE, _HF_REST),
    "qwen2": (_HF_ATTENTION + _HF_DENSE, _HF_REST + _QWEN2_BIASES),
    "qwen3": (_HF_ATTENTION + _HF_DENSE, _HF_REST + _QWEN3_NORMS),
    "qwen3_moe": (
        _HF_ATTENTION + _HF_EXPERTS,
        (*_HF_REST, *_QWEN3_NORMS, "model.layers.0.mlp.gate.weight 4,8 Qwen3MoeTopKRouter"),
    ),
    "qwen2_moe": (
        (*_HF_ATTENTION, *_HF_EXPERTS, "model.layers.0.mlp.shared_expert.up_proj.weight 16,8 Linear"),
        (*_HF_REST, "model.layers.0.mlp.shared_expert_gate.weight 1,8 Linear"),
    ),
    "mixtral": (_HF_ATTENTION + _HF_EXPERTS, (*_HF_REST, "model.layers.0.mlp.gate.weight 4,8 MixtralTopKRouter")),
    # up to transformers 4: a list of experts beside a plain linear gate
    "mixtral_v4": (
        (*_HF_ATTENTION, "model.layers.0.block_sparse_moe.experts.0.w1.weight 16,8 Linear"),
        (*_HF_REST, "model.layers.0.block_sparse_moe.gate.weight 4,8 Linear"),
    ),
    "gpt2": (
        (
            "transformer.h.0.attn.c_attn.weight 8,24 Conv1D",
            "transformer.h.0.attn.c_proj.weight 8,8 Conv1D",
            "transformer.h.0.mlp.c_fc.weight 8,32 Conv1D",
            "transformer.h.0.mlp.c_proj.weight 32,8 Conv1D",
        ),
        (
            "transformer.wte.weight 32,8 Embedding",
            "transformer.wpe.weight 16,8 Embedding",
            "transformer.h.0.ln_1.weight 8 LayerNorm",
            "transformer.h.0.attn.c_attn.bias 24 Conv1D",
            "transformer.ln_f.weight 8 LayerNorm",
            "lm_head.weight 32,8 Linear",
        ),
    ),
    "vit": (
        (
            "vit.layers.0.attention.q_proj.weight 8,8 Linear",
            "vit.layers.0.attention.o_proj.weight 8,8 Linear",
            "vit.layers.0.mlp.fc1.weight 16,8 Linear",
            "vit.layers.0.mlp.fc2.weight 8,16 Linear",
        ),
        (
            "vit.embeddings.cls_token 1,1,8 ViTEmbeddings",
            "vit.embeddings.mask_token 1,1,8 ViTEmbeddings",
            "vit.embeddings.position_embeddings 1,5,8 ViTEmbeddings",
            "vit.embeddings.patch_embeddings.projection.weight 8,3,4,4 Conv2d ViTPatchEmbeddings",
            "vit.layers.0.layernorm_before.weight 8 LayerNorm",
            "vit.layernorm.weight 8 LayerNorm",
            "classifier.weight 10,8 Linear",
            "decoder.0.weight 48,8,1,1 Conv2d",
        ),
    ),
    # peft: factors of a hidden projection are matrices, those of an embedding or a head follow what they adapt
    "lora": (
        (
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight 2,8 Linear",
            "base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight 8,2 Linear",
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
def test_hugging_face_look_alikes(name):
    muon, adamw = LOOK_ALIKES[name]
    expected = (" ".join(re.sub(r"\b\d+\b", "*", row.split()[0]) for row in rows) for rows in (muon, adamw))
    assert_routing(build_model(*muon, *adamw), *expected)


def test_transformers_own_code():
    transformers = pytest.importorskip("transformers", reason="compares the look-alikes with the real classes")
    config = transformers.MixtralConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=32, num_local_experts=4,
    )  # fmt: skip
    with torch.device("meta"):
        groups = build_param_groups(transformers.MixtralForCausalLM(config))
    muon, adamw = LOOK_ALIKES["mixtral"]
    star = lambda rows: {re.sub(r"\b\d+\b", "*", row.split()[0]) for row in rows}
    assert patterns(groups, "muon") == star(muon)
    assert patterns(groups, "adamw") == star(adamw) | {"model.layers.*.post_attention_layernorm.weight"}


# ---- one case per rule ---------------------------------------------------------------------------------------------


def marked(**attributes: object) -> nn.Module:
    model = build_model("layers.0.proj.weight 8,8 Linear")
    for name, value in attributes.items():
        setattr(model.get_parameter("layers.0.proj.weight"), name, value)
    return model


class Gain(nn.RMSNorm):
    pass


def gain_derived_from_a_norm() -> nn.Module:
    model = nn.Module()
    model.gain = Gain((4, 8), device="meta")
    return model


# reason -> models of one parameter that only this rule keeps from Muon
RULE_CASES = {
    "use_muon=False": [marked(use_muon=False)],
    "is_embedding_or_output_parameter": [marked(is_embedding_or_output_parameter=True)],
    "fewer than two dims": [build_model("layers.0.scale 8"), build_model("layers.0.temperature 1")],
    "norm": [
        build_model("layers.0.norm.weight 4,8 LayerNorm"),
        build_model("layers.0.q_norm.weight 4,8 CohereRMSNorm"),
        build_model("layers.0.bn.weight 4,8 FancyBatchNorm2d"),
        gain_derived_from_a_norm(),
    ],
    "bias": [
        build_model("layers.0.mlp.mlp1_bias 4,8"),
        build_model("layers.0.mlp.b1 4,8"),
        build_model("layers.0.attn.rel_bias_table 4,8"),
    ],
    "one vector per expert": [],  # needs a stack beside it: test_vectors_per_expert
    "embedding": [
        build_model("layers.0.table.weight 8,8 Embedding"),
        build_model("layers.0.table.weight 8,8 EmbeddingBag"),
        build_model("layers.0.words.weight 8,8 VocabParallelEmbedding"),
        build_model("transformer.wte.weight 8,8 Linear"),
        build_model("transformer.wpe.weight 8,8 Linear"),
        build_model("front.proj.weight 8,8 Linear BertEmbeddings"),
        build_model("emb.weight 8,8 Linear"),
        build_model("x_embedder.weight 8,8 Linear"),
        build_model("embed_out.weight 8,8 Linear"),
        build_model("mtp.0.embed_tokens.weight 8,8 Linear"),
        build_model("patch_embed.proj.weight 8,48 Linear"),
        build_model("time_in.in_layer.weight 8,8 Linear MLPEmbedder"),
    ],
    "learned position or token": [
        build_model(f"encoder.{leaf} 16,8")
        for leaf in ("pos_emb", "query_embed", "position_table", "register_tokens", "cls_token")
    ],
    "input projection": [build_model("img_in.weight 8,8 Linear"), build_model("txt_in.weight 8,8 Linear")],
    "output head": [
        build_model("output.weight 8,8 Linear"),
        *[
            build_model(f"{name}.weight 8,8 Linear")
            for name in ("output_layer", "unembed", "head", "score", "qa_outputs", "proj_out", "lm_heads.0")
        ],
        build_model("model.lm_head.weight 8,8 Linear"),
        build_model("layers.3.shared_head.head.weight 8,8 Linear"),
        build_model("heads.head.weight 8,8 Linear"),
        build_model("classifier.2.weight 8,8 Linear"),
        build_model("final_layer.linear.weight 8,8 Linear"),
    ],
    "router": [
        build_model("layers.0.moe.router.gate.weight 4,8 Linear"),
        build_model("layers.0.mlp.gating.weight 4,8 Top2Router"),
        build_model("layers.0.mlp.shared_expert_gate.weight 1,8 Linear"),
    ],
    "convolution": [build_model("layers.0.conv.weight 8,4,1,1 Conv2d")],
    "neither a matrix nor a stack of experts": [build_model("layers.0.core 4,8,8"), build_model("layers.0.k 2,2,8,8")],
}
# a convolution is no matrix either; the earlier reason only says it better
_ALSO_CAUGHT_LATER = {"convolution"}


def test_every_rule_has_a_case():
    assert list(RULE_CASES) == [reason for reason, _ in RULES]


@pytest.mark.parametrize(
    ("reason", "model"), [(reason, model) for reason, models in RULE_CASES.items() for model in models]
)
def test_rule(monkeypatch, reason, model):
    ((sites, param),) = find_parameters(model)
    assert why_adamw(sites, param, router_to_muon=False) == reason
    monkeypatch.setattr(routing, "RULES", tuple(rule for rule in RULES if rule[0] != reason))
    later = why_adamw(sites, param, router_to_muon=False)
    assert later == ("neither a matrix nor a stack of experts" if reason in _ALSO_CAUGHT_LATER else "")


def test_vectors_per_expert(monkeypatch):
    rows = ("layers.0.experts.w 4,8,8 Experts", "layers.0.experts.scales 4,8 Experts", "layers.0.experts.shared 8,8")
    (_, matrices), (sites, vectors), (shared_sites, shared) = find_parameters(build_model(*rows))
    assert why_adamw(shared_sites, shared, router_to_muon=False) == ""
    assert why_adamw(sites, vectors, router_to_muon=False) == "one vector per expert"
    assert matrices.ndim == 3
    monkeypatch.setattr(routing, "RULES", tuple(rule for rule in RULES if rule[0] != "one vector per expert"))
    assert why_adamw(sites, vectors, router_to_muon=False) == ""


@pytest.mark.parametrize(
    "row",
    [
        "layers.0.attention.output.weight 8,8 Linear",  # words of heads inside a block
        "layers.0.attn.heads.0.weight 8,8 Linear",
        "encoder.layer.0.output.dense.weight 8,8 Linear",
        "head.layers.0.wq.weight 8,8 Linear",
        "layers.0.mlp.gate.weight 8,8 Linear",  # a gate without experts beside it
        "layers.0.mlp.gate_proj.weight 8,8 Linear",
        "embeddings.layers.0.mlp.weight 8,8 Linear",  # blocks of a model named after embeddings
        "text.layers.0.wq.weight 8,8 Linear TextEmbedder",
        "layers.0.adaLN_modulation.1.weight 16,8 Linear",
        "layers.0.attn.in_proj_weight 24,8",
        "layers.0.mlp.experts.0.w1.weight 8,8 Linear",
        "layers.0.experts.w1 4,8,8 GroupedExperts",
        "layers.0.one_row.weight 1,8 Linear",
    ],
)
def test_stays_with_muon(row):
    ((sites, param),) = find_parameters(build_model(row))
    assert why_adamw(sites, param, router_to_muon=False) == ""


# ---- claiming and naming -------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.wq = nn.Linear(dim, dim, bias=True)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.norm = nn.RMSNorm(dim)


class Toy(nn.Module):
    def __init__(self, dim: int = 8, blocks: int = 2) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(3 * dim, dim)
        self.layers = nn.ModuleDict({str(i): Block(dim) for i in range(blocks)})
        self.output = nn.Linear(dim, 3 * dim, bias=False)


def toy(**sizes: int) -> Toy:
    with torch.device("meta"):
        return Toy(**sizes)


def test_groups_of_a_small_model():
    groups = build_param_groups(toy(), lr=0.02, adamw_lr=3e-4, weight_decay=0.0, momentum=0.9, betas=(0.8, 0.9))
    muon, adamw = ({key: value for key, value in group.items() if key != "params"} for group in groups)
    assert muon == {
        "lr": 0.02,
        "weight_decay": 0.0,
        "momentum": 0.9,
        "param_names": [f"layers.{i}.{name}.weight" for i in range(2) for name in ("wq", "wo")],
        "optimizer": "muon",
    }
    assert adamw == {
        "lr": 3e-4,
        "weight_decay": 0.0,
        "betas": (0.8, 0.9),
        "param_names": [
            "tok_embeddings.weight",
            *[f"layers.{i}.{name}" for i in range(2) for name in ("wq.bias", "norm.weight")],
            "output.weight",
        ],
        "optimizer": "adamw",
    }


def test_tied_weight_is_claimed_once_under_its_first_name():
    model = build_model("layers.0.wq.weight 8,8 Linear", "layers.0.proj.weight 8,8 Linear", "output.weight 8,8 Linear")
    # the first name alone would go to Muon: the output's place decides
    model.output.weight = model.get_submodule("layers.0.proj").weight
    groups = build_param_groups(model)
    assert [group["param_names"] for group in groups] == [["layers.0.wq.weight"], ["layers.0.proj.weight"]]
    claimed_by_alias = build_param_groups(model, overrides=[ParamOverride(r"^output\.", {"lr": 1.0})])
    assert claimed_by_alias[1]["lr"] == 1.0


def test_frozen_parameters_are_left_out():
    model = toy()
    model.tok_embeddings.weight.requires_grad_(False)
    model.get_parameter("layers.0.wq.weight").requires_grad_(False)
    names = [name for group in build_param_groups(model) for name in group["param_names"]]
    assert "tok_embeddings.weight" not in names
    assert "layers.0.wq.weight" not in names
    assert "layers.1.wq.weight" in names


def test_wrappers_leave_no_trace():
    plain = build_param_groups(toy())
    wrapped = toy()
    for key, block in wrapped.layers.items():
        compiled = nn.Module()
        compiled._orig_mod = block
        wrapped.layers[key] = CheckpointWrapper(compiled)
    assert any("_checkpoint_wrapped_module._orig_mod." in name for name, _ in wrapped.named_parameters())
    assert [group["param_names"] for group in build_param_groups(wrapped)] == [g["param_names"] for g in plain]
    assert canonical_name("_orig_mod.layers.0._fsdp_wrapped_module.wq.weight") == "layers.0.wq.weight"


@pytest.fixture
def fake_world(request):
    """A world of four without communication, seen from the rank that the test asks for."""
    dist.init_process_group("fake", rank=request.param, world_size=4, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize("fake_world", [0, 3], indirect=True)
def test_sharded_model_routes_like_the_plain_one(fake_world):
    plain, model = toy(dim=6), toy(dim=6)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    for block in model.layers.values():
        parallelize_module(block, mesh["tp"], {"wq": ColwiseParallel(), "wo": RowwiseParallel()})
        fully_shard(block, mesh=mesh["fsdp"])
    fully_shard(model, mesh=mesh["fsdp"])
    assert isinstance(model.get_parameter("layers.0.wq.weight"), DTensor)
    # a [6, 6] weight over 2 x 2 ranks has 1 or 2 local rows: local shapes would read differently
    assert describe_param_groups(build_param_groups(model)) == describe_param_groups(build_param_groups(plain))


@pytest.mark.parametrize("fake_world", [1], indirect=True)
def test_data_parallel_wrapper_is_looked_through(fake_world):
    model = nn.parallel.DistributedDataParallel(Toy())
    assert [g["param_names"] for g in build_param_groups(model)] == [
        g["param_names"] for g in build_param_groups(toy())
    ]


def test_groups_train():
    torch.manual_seed(0)
    model = Toy()
    optimizer = Muon(build_param_groups(model, lr=0.1, adamw_lr=0.01, weight_decay=0.0))
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    assert all(not torch.equal(param, before[name]) for name, param in model.named_parameters())
    assert [group["param_names"] for group in optimizer.param_groups] == [
        group["param_names"] for group in build_param_groups(model)
    ]


# ---- options and overrides -----------------------------------------------------------------------------------------


def test_router_option():
    model = build_model("layers.0.moe.router.gate.weight 4,8 Linear", "layers.0.wq.weight 8,8 Linear")
    assert len(build_param_groups(model)) == 2
    (group,) = build_param_groups(model, router_optimizer="muon")
    assert group["optimizer"] == "muon"


def test_first_matching_override_wins_and_groups_keep_their_order():
    overrides = [
        ParamOverride(r"layers\.1\.", {"lr": 1.0}, name="last block"),
        ParamOverride(r"wq\.weight$", {"optimizer": "adam", "weight_decay": 0.0}),
        ParamOverride(lambda name, param: param.ndim == 2 and "wo" in name, {"num_ns_steps": 3}),
    ]
    groups = build_param_groups(toy(), overrides=overrides, lr=0.1, adamw_lr=0.2)
    summary = [
        (g["optimizer"], g["lr"], g.get("weight_decay"), g.get("num_ns_steps"), g["param_names"]) for g in groups
    ]
    block = ["layers.1.wq.bias", "layers.1.norm.weight"]
    rest = ["tok_embeddings.weight", "layers.0.wq.bias", "layers.0.norm.weight", "output.weight"]
    assert summary == [
        ("muon", 1.0, None, None, ["layers.1.wq.weight", "layers.1.wo.weight"]),
        ("muon", 0.1, None, 3, ["layers.0.wo.weight"]),
        ("adamw", 0.2, None, None, rest),
        ("adamw", 1.0, None, None, block),
        ("adamw", 0.2, 0.0, None, ["layers.0.wq.weight"]),
    ]


def test_override_beats_rules_and_attributes():
    model = toy()
    model.get_parameter("layers.0.wq.weight").use_muon = False
    names = build_param_groups(model)[0]["param_names"]
    assert "layers.0.wq.weight" not in names
    override = ParamOverride(r"output|layers\.0\.wq\.weight", {"optimizer": "muon"})
    muon = build_param_groups(model, overrides=[override])[1]
    assert (muon["optimizer"], muon["param_names"]) == ("muon", ["layers.0.wq.weight", "output.weight"])


def test_convolution_is_not_sent_to_muon():
    model = build_model("layers.0.conv.weight 8,4,3,3 Conv2d", "layers.0.wq.weight 8,8 Linear")
    with pytest.raises(NotImplementedError) as caught:
        build_param_groups(model, overrides=[ParamOverride("conv", {"optimizer": "muon"})])
    assert str(caught.value) == (
        "override 'conv' sends the convolution weight 'layers.0.conv.weight' of shape [8, 4, 3, 3] to Muon, which "
        "would orthogonalize each of its kernels; leave it with optimizer='adamw'"
    )


def test_muon_options_reach_only_the_matrices_an_override_matches():
    groups = build_param_groups(toy(), overrides=[ParamOverride(r"layers\.1", {"momentum": 0.5, "betas": (0.1, 0.2)})])
    assert [(g["optimizer"], g.get("momentum"), g.get("betas")) for g in groups] == [
        ("muon", None, None),
        ("muon", 0.5, None),
        ("adamw", None, None),
        ("adamw", None, (0.1, 0.2)),
    ]


def test_all_names_admits_patterns_of_other_pipeline_stages():
    stage = toy(blocks=1)
    names = [name for name, _ in toy(blocks=4).named_parameters()]
    overrides = [ParamOverride(r"layers\.3\.", {"lr": 1.0})]
    groups = build_param_groups(stage, overrides=overrides, all_names=names)
    assert [group["optimizer"] for group in groups] == ["muon", "adamw"]
    with pytest.raises(ValueError, match="matches no trainable parameter"):
        build_param_groups(stage, overrides=overrides)
    with pytest.raises(ValueError, match=r"'layers\\\\.9\\\\.' matches no trainable parameter"):
        build_param_groups(stage, overrides=[ParamOverride(r"layers\.9\.", {"lr": 1.0})], all_names=names)


BAD_INPUT = {
    "not a module": (lambda: build_param_groups([]), "model: expected a torch.nn.Module, got list"),
    "router choice": (
        lambda: build_param_groups(toy(), router_optimizer="sgd"),
        "router_optimizer is 'sgd'; allowed: 'muon', 'adamw', 'adam'",
    ),
    "override's optimizer": (
        lambda: ParamOverride("wq", {"optimizer": "lion"}),
        "override 'wq': optimizer is 'lion'; allowed: 'muon', 'adamw', 'adam'",
    ),
    "bad pattern": (
        lambda: ParamOverride("wq(", {}),
        "override 'wq(': 'wq(' is not a regular expression (missing ), unterminated subpattern at position 2); escape "
        "the character or give a predicate (name, parameter) -> bool",
    ),
    "neither pattern nor predicate": (
        lambda: ParamOverride(3, {}, name="mine"),
        "override 'mine': match is 3; give a regular expression or a predicate (name, parameter) -> bool",
    ),
    "params in options": (
        lambda: ParamOverride("wq", {"params": []}),
        "override 'wq': 'params' and 'param_names' are chosen by `match`; remove them",
    ),
    "AdamW option": (
        lambda: build_param_groups(toy(), adamw_momentum=0.9),
        "build_param_groups: 'adamw_momentum' is no option of the AdamW groups; allowed: adamw_betas, adamw_eps, "
        "adamw_lr, adamw_weight_decay",
    ),
    "AdamW option of an override": (
        lambda: build_param_groups(toy(), overrides=[ParamOverride("wq", {"adamw_nesterov": True})]),
        "override 'wq': 'adamw_nesterov' is no option of the AdamW groups; allowed: adamw_betas, adamw_eps, adamw_lr, "
        "adamw_weight_decay",
    ),
    "optimizer for all": (
        lambda: build_param_groups(toy(), optimizer="adamw"),
        "build_param_groups: 'optimizer' is chosen per parameter; use an override",
    ),
    "vector to Muon": (
        lambda: build_param_groups(toy(), overrides=[ParamOverride(r"layers\.0", {"optimizer": "muon"})]),
        "override 'layers\\\\.0' sends parameter 'layers.0.wq.bias' of shape [8] to Muon, which needs at least two "
        "dims; narrow its match or set optimizer='adamw'",
    ),
    "nothing matched": (
        lambda: build_param_groups(toy(), overrides=[ParamOverride("w_q", {"lr": 1.0})]),
        "override 'w_q' matches no trainable parameter; the names look like ['tok_embeddings.weight', "
        "'layers.0.wq.weight', 'layers.0.wq.bias'] (for one stage of a pipeline, give all_names of the whole model)",
    ),
    "predicate without match": (
        lambda: build_param_groups(toy(), overrides=[ParamOverride(lambda name, param: False, {}, name="never")]),
        "override 'never' matches no trainable parameter; the names look like ['tok_embeddings.weight', "
        "'layers.0.wq.weight', 'layers.0.wq.bias'] (for one stage of a pipeline, give all_names of the whole model)",
    ),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input(case):
    build, message = BAD_INPUT[case]
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        build()
    assert str(caught.value) == message


WARNINGS = {
    "no matrix": (
        lambda: build_param_groups(toy(blocks=0)),
        "Muon selects no matrix: all 2 trainable parameters go to AdamW (embedding: 1, output head: 1)",
    ),
    "no matrix left by an override": (
        lambda: build_param_groups(nn.Linear(4, 4), overrides=[ParamOverride("weight", {"optimizer": "adamw"})]),
        "Muon selects no matrix: all 2 trainable parameters go to AdamW (override 'weight': 1, fewer than two dims: 1)",
    ),
    "nothing to train": (
        lambda: build_param_groups(toy().requires_grad_(False)),
        "Muon selects no matrix: the model has no trainable parameter",
    ),
    "ignored option": (
        lambda: build_param_groups(toy(), overrides=[ParamOverride("norm", {"lr": 1.0, "momentum": 0.5})]),
        "override 'norm': momentum is ignored, because everything it matches goes to adamw (first: "
        "'layers.0.norm.weight')",
    ),
    "shadowed override": (
        lambda: build_param_groups(
            toy(), overrides=[ParamOverride("w", {"lr": 1.0}), ParamOverride("wq", {"lr": 2.0})]
        ),
        "override 'wq' has no effect: earlier overrides claim everything it matches; move it forward",
    ),
}


@pytest.mark.parametrize("case", WARNINGS)
def test_warnings(case):
    build, message = WARNINGS[case]
    with pytest.warns(UserWarning) as caught:  # noqa: PT030
        build()
    assert [str(warning.message) for warning in caught] == [message]
    assert caught[0].filename == __file__


def test_part_without_matrices_is_legal_and_silent(recwarn):
    part = toy(blocks=0)
    (group,) = build_param_groups(part, all_names=[name for name, _ in toy().named_parameters()])
    assert group["optimizer"] == "adamw"
    assert not recwarn.list


# ---- describing ----------------------------------------------------------------------------------------------------


def test_describe():
    groups = build_param_groups(toy(), overrides=[ParamOverride(r"0\.wo", {"num_ns_steps": 3})], lr=0.02, adamw_lr=3e-4)
    assert_expected_inline(
        describe_param_groups(groups),
        """\
muon lr=0.02
  layers.*.wq.weight     [8, 8]   x2
  layers.1.wo.weight     [8, 8]   x1
muon lr=0.02 num_ns_steps=3
  layers.0.wo.weight     [8, 8]   x1
adamw lr=0.0003
  tok_embeddings.weight  [24, 8]  x1
  layers.*.wq.bias       [8]      x2
  layers.*.norm.weight   [8]      x2
  output.weight          [24, 8]  x1
muon: 4 parameters, 256 elements
adamw: 6 parameters, 416 elements""",
    )
    assert describe_param_groups([]) == ""


def test_describe_takes_groups_without_names():
    text = describe_param_groups([{"params": [torch.empty(2, 3), torch.empty(2, 3)]}])
    assert_expected_inline(
        text,
        """\
muon
  (unnamed)  [2, 3]  x2
muon: 2 parameters, 12 elements""",
    )
