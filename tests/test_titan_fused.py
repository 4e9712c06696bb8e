"""The fused weights that `muon_split_qkv` finds in torchtitan's models."""

import copy
import dataclasses
import functools
import types

import pytest
import torch
import torch.distributed as dist
from routing_models import build_flux, build_model, build_titan_model
from torch import nn
from torch.distributed.fsdp import fully_shard

titan = pytest.importorskip("dtensor_muon.titan", reason="torchtitan is not installed")

from titan_groups import build, sizes  # noqa: E402

from dtensor_muon import FusedDim  # noqa: E402
from dtensor_muon.titan.fused_weights import find_fused_weights  # noqa: E402


def per_layer(count, fused, prefix="layers"):
    return {f"{prefix}.{layer}.{name}.weight": each for layer in range(count) for name, each in fused.items()}


MODELS = {
    "deepseek_v3": per_layer(
        4, {"attention.wkv_a": FusedDim((512, 64), 1), "attention.wkv_b": FusedDim((128, 128), 16)}
    ),
    "gpt_oss": {f"layers.{layer}.moe.experts.mlp1_weight": FusedDim((1, 1)) for layer in range(4)},
    "flux": {
        **per_layer(
            2, {f"{stream}_attn.qkv": FusedDim((16, 16, 16), 1) for stream in ("img", "txt")}, "double_blocks"
        ),
        **per_layer(2, {"linear1": FusedDim((16, 16, 16, 64), 1)}, "single_blocks"),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_fused_weights_of_a_model(name):
    model = build_flux() if name == "flux" else build_titan_model(name)
    assert find_fused_weights(model) == MODELS[name]
    expected = {name: (fused.sizes, False) for name, fused in MODELS[name].items()}
    assert sizes(build(model, "muon_split_qkv = true")) == expected
    assert sizes(build(model, "muon_split_qkv = false")) == {}


class Megatron(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.model_args = args
        rows = ("0.attention.wqkv.weight 32,16 Linear", "1.linear_qkv.weight 32,16 Linear", "1.wo.weight 16,16 Linear")
        self.layers = build_model(*rows)


GROUPED_QUERIES = types.SimpleNamespace(n_heads=4, n_kv_heads=2, dim=16)


def test_queries_keys_and_values_of_each_kv_group():
    names = ["layers.0.attention.wqkv.weight", "layers.1.linear_qkv.weight"]
    model = Megatron(GROUPED_QUERIES)
    assert find_fused_weights(model) == dict.fromkeys(names, FusedDim((8, 4, 4)))
    given = build(model, "split_qkv = true\nqkv_split_shapes = [8, 8, 8, 8]")
    assert sizes(given) == dict.fromkeys(names, ((8, 8, 8, 8), False))


def test_own_function_finds_the_weights_and_the_arguments_say_their_sizes():
    toml = 'split_qkv = true\nis_qkv_fn = "test_titan_fused:is_tall"'
    (muon, *_) = build(Megatron(GROUPED_QUERIES), toml)
    assert (muon["split_qkv"], muon["qkv_split_shapes"], muon["fused"]) == (True, (8, 4, 4), None)


def is_tall(param):
    return param.shape[0] == 32


def test_table_has_the_last_word_on_a_fused_weight():
    toml = """
        muon_split_qkv = true
        [[optimizer.muon_overrides]]
        match = 'wkv_a'
        fused = false
        [[optimizer.muon_overrides]]
        match = 'wkv_b'
        fused = { sizes = [128, 128], heads = true }
        """
    found = sizes(build(build_titan_model("deepseek_v3"), toml))
    assert found == {f"layers.{layer}.attention.wkv_b.weight": ((128, 128), True) for layer in range(4)}


def test_model_without_fused_weight_is_refused():
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the whole message is compared
        build(build_titan_model("llama3"), "muon_split_qkv = true")
    assert str(error.value) == (
        "[optimizer] muon_split_qkv = true: Transformer has no fused weight that is known here (wqkv, linear_qkv (q, "
        "k, v of each KV group); flux qkv; flux linear1; gpt_oss mlp1_weight; MLA wkv_a; MLA wkv_b); its matrices are "
        "layers.*.attention.wq.weight [256, 256], layers.*.attention.wk.weight [256, 256], "
        "layers.*.attention.wv.weight [256, 256], layers.*.attention.wo.weight [256, 256], "
        "layers.*.feed_forward.w1.weight [768, 256], layers.*.feed_forward.w2.weight [256, 768], "
        "layers.*.feed_forward.w3.weight [768, 256]. Set it to false, or describe the weight by fused = {sizes = "
        "[...]} in [[optimizer.muon_overrides]]"
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (types.SimpleNamespace(n_heads=4, n_kv_heads=3, dim=16), "4 attention heads .* do not divide into 3"),
        (types.SimpleNamespace(n_heads=4, n_kv_heads=1, dim=20), r"fused sizes \(20, 5, 5\)\): the 32 rows are not"),
        (types.SimpleNamespace(dim=16), r"layers\.0\.attention\.wqkv\.weight \[32, 16\]: .* has none of n_heads"),
        (None, "Megatron has no attribute model_args"),
    ],
)
def test_arguments_that_do_not_fit(args, message):
    with pytest.raises(ValueError, match=message):
        build(Megatron(args), "muon_split_qkv = true")


@pytest.mark.parametrize("sharded", [False, True])
def test_pipeline_stages_share_tables_and_fused_weights(sharded):
    toml = 'muon_split_qkv = true\n[[optimizer.muon_overrides]]\nmatch = "tok_embeddings|layers.0.*wq"\nlr = 0.5'
    whole = build_titan_model("deepseek_v3")
    first, last, empty = (copy.deepcopy(whole) for _ in range(3))
    del first.layers["2"], first.layers["3"], last.layers["0"], last.layers["1"]
    first.norm = first.output = last.tok_embeddings = empty.tok_embeddings = None
    empty.layers = nn.ModuleDict()
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        for stage in (first, last, empty) if sharded else ():
            fully_shard(stage)
        stages = [build(stage, toml, pipeline=True) for stage in (first, last, empty)]
        with pytest.raises(ValueError, match=r"has no fused weight|matches no trainable parameter"):
            build(empty, toml)
        with pytest.raises(ValueError, match=r"muon_overrides\[0\] layers.4' matches no trainable parameter"):
            build(first, '[[optimizer.muon_overrides]]\nmatch = "layers.4"\nlr = 1.0', pipeline=True)
    finally:
        dist.destroy_process_group()
    every = {name: (fused.sizes, False) for name, fused in MODELS["deepseek_v3"].items()}
    assert [sizes(groups) for groups in stages] == [
        {name: fused for name, fused in every.items() if name.split(".")[1] in layers} for layers in ("01", "23", "")
    ]


# ---- what the parts are ----------------------------------------------------------------------------------------------


def rows_of(fused, part, length):
    """Row numbers of a part, written down without the package's views."""
    start = sum(fused.sizes[:part])
    total = sum(fused.sizes)
    return [row for row in range(length) if start <= row % total < start + fused.sizes[part]]


def latent_attention():
    from torchtitan.models.deepseek_v3.model.model import Attention, precompute_freqs_cis

    args = dataclasses.replace(titan.TRAIN_SPECS["deepseek_v3"].model_args["tiny"], max_seq_len=8)
    attention = Attention(args)
    return attention, args, lambda x: attention(x, precompute_freqs_cis(args), None)


def gated_experts():
    from torchtitan.models.gpt_oss.model.moe import GptOssGroupedExperts

    experts = GptOssGroupedExperts(dim=64, hidden_dim=16, num_experts=2, swiglu_limit=7.0, use_grouped_mm=False)
    return experts, "no argument says it", lambda x: experts(x[0], torch.tensor([5, 3]))


def flux_attention():
    flux = build_flux()
    attention = flux.double_blocks[0].img_attn.to_empty(device="cpu")
    pe = flux.pe_embedder(torch.arange(8.0).reshape(1, 8, 1).expand(1, 8, 3))
    return attention, flux.model_args, lambda x: attention(x[..., :16], pe)


def flux_block(half):
    flux = build_flux()
    block = flux.single_blocks[0].to_empty(device="cpu")
    pe = flux.pe_embedder(torch.arange(8.0).reshape(1, 8, 1).expand(1, 8, 3))

    def forward(x):
        seen = []
        handle = block.linear2.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        block(x[..., :16], x[:, 0, :16], pe)
        handle.remove()
        return seen[0][..., half]

    return block, flux.model_args, forward


flux_attention_half = functools.partial(flux_block, slice(16))
flux_mlp_half = functools.partial(flux_block, slice(16, None))

# layer, where the model has it, its fused weight, the part to set to zero, whether nothing comes out then
PARTS = [
    (latent_attention, "attention", "wkv_a.weight", 0, True),  # the latent, hence the values
    (latent_attention, "attention", "wkv_a.weight", 1, False),  # the rotary part of the keys
    (latent_attention, "attention", "wkv_b.weight", 0, False),  # the keys
    (latent_attention, "attention", "wkv_b.weight", 1, True),  # the values
    (gated_experts, "experts", "mlp1_weight", 0, True),  # the gate
    (gated_experts, "experts", "mlp1_weight", 1, False),  # the layer adds one to what the up rows give
    (flux_attention, "img_attn", "qkv.weight", 0, False),
    (flux_attention, "img_attn", "qkv.weight", 1, False),
    (flux_attention, "img_attn", "qkv.weight", 2, True),
    (flux_attention_half, "single_blocks.0", "linear1.weight", 1, False),
    (flux_attention_half, "single_blocks.0", "linear1.weight", 2, True),
    (flux_attention_half, "single_blocks.0", "linear1.weight", 3, False),
    (flux_mlp_half, "single_blocks.0", "linear1.weight", 2, False),
    (flux_mlp_half, "single_blocks.0", "linear1.weight", 3, True),
]


@pytest.mark.parametrize(("build_layer", "place", "name", "part", "silences"), PARTS)
def test_parts_are_what_the_models_code_takes_them_for(build_layer, place, name, part, silences):
    torch.manual_seed(0)
    layer, args, forward = build_layer()
    model = nn.Module()
    model.model_args = args
    model.add_module(place.split(".")[0], nn.ModuleList([layer]) if "." in place else layer)
    fused = find_fused_weights(model)[f"{place}.{name}"]
    with torch.no_grad():
        for key, param in layer.named_parameters():
            param.zero_() if "bias" in key else param.fill_(1) if "norm" in key else param.normal_()
        x = torch.randn(1, 8, 64)
        assert forward(x).abs().max() > 0.1
        weight = layer.get_parameter(name)
        weight[..., rows_of(fused, part, weight.shape[-2]), :] = 0
        assert (forward(x).abs().max() == 0) == silences
