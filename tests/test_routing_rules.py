"""The default rules of routing, one by one."""

import pytest
from routing_models import build_model
from torch import nn

from dtensor_muon import routing
from dtensor_muon.routing import RULES, find_parameters, why_adamw


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
    "input or output convolution": [
        build_model("stage.7.conv.weight 8,3,3,3 Conv2d"),
        build_model("features.0.weight 2,8,1,1 Conv2d"),
        *[
            build_model(f"{name}.weight 8,8,3,3 Conv2d")
            for name in (
                "conv_in",
                "encoder.conv1",
                "model.decoder.conv_out",
                "stem.conv",
                "backbone.stem.0",
                "decoder.0",
            )
        ],
    ],
    "convolution": [
        build_model(f"{name}.weight 8,8,1,1 Conv2d")
        for name in ("layers.0.conv", "layer1.0.conv1", "down.block_1.conv1", "blocks.0.stem.conv", "decoder.mid.conv")
    ],
    "neither a matrix nor a stack of experts": [build_model("layers.0.core 4,8,8"), build_model("layers.0.k 2,2,8,8")],
}
# the earlier reason of such a convolution holds when others are flattened, too
_ALSO_CAUGHT_LATER = {"input or output convolution": "convolution"}


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
    assert later == _ALSO_CAUGHT_LATER.get(reason, "")
    if reason == "convolution":
        monkeypatch.undo()
        assert why_adamw(sites, param, router_to_muon=False, flatten=True) == ""


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
