"""Fused weights and convolutions in parameter groups: who describes them, how groups split, what is refused."""

import pytest
import torch
from expecttest import assert_expected_inline
from routing_models import build_model
from torch import nn

from dtensor_muon import FusedDim, Muon
from dtensor_muon.param_groups import ParamOverride, build_param_groups, describe_param_groups

QKV = FusedDim((4, 2, 2))  # of 8 and of 16 rows: one group and two
ROWS = (
    "layers.0.wqkv.weight 16,8 Linear",
    "layers.0.wo.weight 8,8 Linear",
    "layers.0.experts.mlp1 4,12,8 Experts",
    "layers.0.experts.mlp1_bias 4,12 Experts",
    "layers.1.wqkv.weight 8,8 Linear",
    "output.weight 16,8 Linear",
)


def model():
    return build_model(*ROWS)


def summary(groups):
    return [(group["optimizer"], group.get("fused"), group.get("flatten"), group["param_names"]) for group in groups]


def option(*sizes, num_groups=None, dim=0, heads=False):
    return {"sizes": sizes, "num_groups": num_groups, "dim": dim, "heads": heads}


# ---- descriptions ----------------------------------------------------------------------------------------------------


def test_groups_are_split_by_description_plain_matrices_first():
    fused = {
        "layers.0.wqkv.weight": QKV,
        "layers.0.experts.mlp1": FusedDim((1, 1)),
        "layers.1.wqkv.weight": FusedDim.from_option({"sizes": [4, 2, 2]}),
    }
    groups = build_param_groups(model(), fused=fused, lr=0.1)
    assert summary(groups) == [
        ("muon", None, None, ["layers.0.wo.weight"]),
        ("muon", option(4, 2, 2), None, ["layers.0.wqkv.weight", "layers.1.wqkv.weight"]),
        ("muon", option(1, 1), None, ["layers.0.experts.mlp1"]),
        ("adamw", None, None, ["layers.0.experts.mlp1_bias", "output.weight"]),
    ]
    assert [group["lr"] for group in groups] == [0.1] * 4
    # a plain group has no such key: its options are what they were before there were descriptions
    assert ["fused" in group for group in groups] == [False, True, True, False]


def test_own_description_of_an_override_wins_and_none_takes_one_away():
    overrides = [
        ParamOverride(r"^layers\.0\.wqkv", {"fused": {"sizes": [8, 4, 4], "heads": True}, "lr": 1.0}),
        ParamOverride(r"mlp1$", {"fused": None}),
    ]
    fused = {"layers.0.wqkv.weight": QKV, "layers.1.wqkv.weight": QKV, "layers.0.experts.mlp1": FusedDim((1, 1))}
    assert summary(build_param_groups(model(), overrides=overrides, fused=fused))[:4] == [
        ("muon", None, None, ["layers.0.wo.weight"]),
        ("muon", option(4, 2, 2), None, ["layers.1.wqkv.weight"]),
        ("muon", option(8, 4, 4, heads=True), None, ["layers.0.wqkv.weight"]),
        ("muon", None, None, ["layers.0.experts.mlp1"]),
    ]


def test_an_override_without_description_keeps_the_known_one():
    groups = build_param_groups(
        model(), overrides=[ParamOverride("wqkv", {"lr": 1.0})], fused={"layers.0.wqkv.weight": QKV}
    )
    assert [group for group in summary(groups) if "layers.0.wqkv.weight" in group[3]] == [
        ("muon", option(4, 2, 2), None, ["layers.0.wqkv.weight"])
    ]


def test_description_of_a_biased_layer_concerns_its_weight(recwarn):
    layer = build_model("layers.0.wqkv.weight 16,8 Linear", "layers.0.wqkv.bias 16 Linear")
    groups = build_param_groups(layer, overrides=[ParamOverride("wqkv", {"fused": QKV})])
    assert summary(groups) == [
        ("muon", option(4, 2, 2), None, ["layers.0.wqkv.weight"]),
        ("adamw", None, None, ["layers.0.wqkv.bias"]),
    ]
    assert not recwarn.list


def test_tied_weight_is_described_under_any_of_its_names():
    tied = model()
    tied.layers_again = nn.Module()
    tied.layers_again.wo = nn.Linear(8, 8, bias=False, device="meta")
    tied.layers_again.wo.weight = tied.get_parameter("layers.0.wo.weight")
    groups = build_param_groups(tied, fused={"layers_again.wo.weight": QKV})
    assert ("muon", option(4, 2, 2), None, ["layers.0.wo.weight"]) in summary(groups)


def test_all_names_admits_weights_of_other_pipeline_stages():
    names = [row.split()[0] for row in ROWS]
    stage = build_model(*ROWS[:2])
    groups = build_param_groups(stage, fused={"layers.1._orig_mod.wqkv.weight": QKV}, all_names=names)
    assert [fused for _, fused, _, _ in summary(groups)] == [None]


def test_equal_claims_of_two_overrides_are_no_conflict():
    overrides = [
        ParamOverride(r"layers\.0\.wqkv", {"fused": FusedDim((4, 2, 2), num_groups=2)}),
        ParamOverride("wqkv", {"fused": QKV}),
    ]
    groups = build_param_groups(model(), overrides=overrides)
    assert [fused for _, fused, _, _ in summary(groups)] == [
        None, option(4, 2, 2, num_groups=2), option(4, 2, 2), None,
    ]  # fmt: skip


def build(*overrides, rows=ROWS, **arguments):
    return lambda: build_param_groups(build_model(*rows), overrides=overrides, **arguments)


def override(match, name="", **options):
    return ParamOverride(match, options, name=name)


FIRST = override(r"0\.wqkv", "first", fused=QKV)
BAD_INPUT = {
    "two overrides disagree": (
        build(FIRST, override("wqkv", "second", fused=FusedDim((8, 4, 4)))),
        "parameter 'layers.0.wqkv.weight' (global shape (16, 8)): override 'first' says fused 2 x (4, 2, 2) and "
        "override 'second' says fused 1 x (8, 4, 4); let only one of them match it, or correct one",
    ),
    "an override takes a description away from a later one": (
        build(override("0.wqkv", "whole", fused=None), override("wqkv", "parts", fused=QKV)),
        "parameter 'layers.0.wqkv.weight' (global shape (16, 8)): override 'whole' says not fused and override "
        "'parts' says fused 2 x (4, 2, 2); let only one of them match it, or correct one",
    ),
    "rows that do not divide": (
        build(override("wqkv", fused=FusedDim((5, 2, 2)))),
        "override 'wqkv', parameter 'layers.0.wqkv.weight' (global shape (16, 8), fused sizes (5, 2, 2)): the 16 rows "
        "are not a multiple of the 9 of one group; correct the sizes",
    ),
    "known rows that do not divide": (
        build(fused={"layers.0.wqkv.weight": FusedDim((4, 2, 2), num_groups=3)}),
        "parameter 'layers.0.wqkv.weight' (global shape (16, 8), fused sizes (4, 2, 2)): the 16 rows are not 3 "
        "groups of 8; correct the sizes",
    ),
    "known rows of a parameter of AdamW": (
        build(fused={"output.weight": FusedDim((5,))}),
        "parameter 'output.weight' (global shape (16, 8), fused sizes (5,)): the 16 rows are not a multiple of the 5 "
        "of one group; correct the sizes",
    ),
    "a vector": (
        build(fused={"layers.0.scale": QKV}, rows=("layers.0.scale 8", *ROWS)),
        "parameter 'layers.0.scale' (global shape (8,), fused sizes (4, 2, 2)): a fused weight must be a matrix or a "
        "stack of them; remove its description",
    ),
    "a vector of an override": (
        build(override("scale", fused=QKV), rows=("layers.0.scale 8", *ROWS)),
        "override 'scale', parameter 'layers.0.scale' (global shape (8,), fused sizes (4, 2, 2)): a fused weight must "
        "be a matrix or a stack of them; remove its description",
    ),
    "no parameter": (
        build(fused={"layers.0.wqkv": QKV}),
        "fused names 'layers.0.wqkv', which is no trainable parameter; the names look like ['layers.0.wqkv.weight', "
        "'layers.0.wo.weight', 'layers.0.experts.mlp1'] (for one stage of a pipeline, give all_names of the whole "
        "model)",
    ),
    "one description for all": (
        build(fused=QKV),
        "fused is FusedDim(sizes=(4, 2, 2), num_groups=None, dim=0, heads=False); it must map parameter names to "
        "FusedDim",
    ),
    "no description": (
        lambda: override("wqkv", fused=(4, 2, 2)),
        "override 'wqkv': fused is (4, 2, 2); it must be a FusedDim, or a mapping with sizes and any of ('sizes', "
        "'num_groups', 'dim', 'heads')",
    ),
    "bad flatten": (
        build(flatten=1),
        "build_param_groups: flatten is 1; it must be True or False",
    ),
    "kernels one by one": (
        build(override("conv", optimizer="muon"), rows=("layers.0.conv.weight 8,8,3,3 Conv2d", *ROWS)),
        "override 'conv' sends the convolution weight 'layers.0.conv.weight' of shape [8, 8, 3, 3] to Muon, which "
        "would orthogonalize each of its kernels; add flatten=True, or leave it with optimizer='adamw'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input(case):
    attempt, message = BAD_INPUT[case]
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        attempt()
    assert str(caught.value) == message


WARNINGS = {
    "description behind another override": (
        build(override(r"^layers\.0", lr=1.0), override("wqkv", fused=QKV)),
        "override 'wqkv': fused is ignored for 'layers.0.wqkv.weight', which override '^layers\\\\.0' claims first; "
        "move it forward, or give fused to both",
    ),
    "description of what AdamW gets": (
        build(override("output", fused=QKV)),
        "override 'output': fused is ignored, because everything it matches goes to adamw (first: 'output.weight')",
    ),
    "flatten without convolution": (
        build(override("wqkv", flatten=True)),
        "override 'wqkv': flatten is ignored, because nothing it matches is a convolution (first: "
        "'layers.0.wqkv.weight')",
    ),
}


@pytest.mark.parametrize("case", WARNINGS)
def test_warnings(case):
    attempt, message = WARNINGS[case]
    with pytest.warns(UserWarning) as caught:  # noqa: PT030
        attempt()
    assert [str(warning.message) for warning in caught] == [message]
    assert caught[0].filename == __file__


# ---- convolutions ----------------------------------------------------------------------------------------------------


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(3, 8, 3)
        self.patch_embed = nn.Conv2d(8, 8, 2)
        block = {
            "conv": nn.Conv2d(8, 16, 3),
            "grouped": nn.Conv2d(16, 8, 3, groups=4),
            "depthwise": nn.Conv1d(8, 8, 5, groups=8),
            "up": nn.ConvTranspose2d(8, 6, 2),
            "grouped_up": nn.ConvTranspose2d(8, 6, 2, groups=2),
            "proj": nn.Linear(8, 8, bias=False),
        }
        self.layers = nn.ModuleList([nn.ModuleDict(block)])
        self.layers[0].register_parameter("kernels", nn.Parameter(torch.empty(4, 8, 3)))
        self.conv_out = nn.Conv2d(8, 8, 1)


def conv_net():
    with torch.device("meta"):
        return ConvNet()


def muon_part(groups):
    return [(fused, flatten, names) for optimizer, fused, flatten, names in summary(groups) if optimizer == "muon"]


def weights(*names):
    return [f"layers.0.{name}.weight" for name in names]


FLATTENED = [
    (None, None, weights("proj")),
    (None, True, weights("conv", "up")),
    (option(2, num_groups=4, heads=True), True, weights("grouped")),
    (option(1, num_groups=8, heads=True), True, weights("depthwise")),
    (option(4, num_groups=2, heads=True), True, weights("grouped_up")),
]


def test_flatten_sends_convolutions_between_hidden_activations_to_muon():
    assert muon_part(build_param_groups(conv_net())) == [(None, None, weights("proj"))]
    assert muon_part(build_param_groups(conv_net(), flatten=True)) == FLATTENED


def test_flatten_of_an_override(recwarn):
    only = ParamOverride(r"\.conv\.|conv_in\.weight", {"flatten": True})
    assert muon_part(build_param_groups(conv_net(), overrides=[only])) == [FLATTENED[0], (None, True, weights("conv"))]
    all_but = ParamOverride("grouped|depthwise|up", {"flatten": False})
    groups = build_param_groups(conv_net(), flatten=True, overrides=[all_but])
    assert muon_part(groups) == [FLATTENED[0], (None, True, weights("conv"))]
    assert not recwarn.list


def test_override_sends_an_outer_convolution_and_kernels_without_module_to_muon():
    chosen = ParamOverride(r"^conv_in\.weight|kernels", {"flatten": True, "optimizer": "muon"})
    groups = build_param_groups(conv_net(), overrides=[chosen])
    assert muon_part(groups)[1:] == [(None, True, ["conv_in.weight", "layers.0.kernels"])]


def test_expert_stacks_are_not_flattened():
    overrides = [ParamOverride(r"layers\.0", {"flatten": True, "optimizer": "muon"})]
    rows = ("layers.0.experts.w1 4,12,8 Experts", "layers.0.conv.weight 8,8,3,3 Conv2d")
    groups = build_param_groups(build_model(*rows), overrides=overrides)
    assert muon_part(groups) == [
        (None, None, ["layers.0.experts.w1"]),
        (None, True, ["layers.0.conv.weight"]),
    ]


def test_own_description_of_a_grouped_convolution():
    whole = ParamOverride("grouped", {"fused": None})
    groups = build_param_groups(conv_net(), flatten=True, overrides=[whole])
    assert muon_part(groups)[-1] == (None, True, weights("grouped", "grouped_up"))


def polar_factor(matrix):
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    return u @ vh


def test_updates_of_convolutions_are_those_of_their_matrices():
    """Also of a transposed one: its matrix is that of the convolution which it is the transpose of."""
    torch.manual_seed(0)
    net = ConvNet()
    options = {"coefficient_type": "polar_express", "num_ns_steps": 12, "fp32_matmul_prec": "highest"}
    groups = build_param_groups(net, flatten=True, lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0, **options)
    before = {name: param.detach().clone() for name, param in net.named_parameters()}
    for param in net.parameters():
        param.grad = torch.randn_like(param)
    Muon(groups).step()

    def update(name):
        weight = net.get_parameter(f"layers.0.{name}.weight")
        return before[f"layers.0.{name}.weight"] - weight.detach(), weight.grad

    for name, num_groups in {"conv": 1, "up": 1, "grouped": 4, "depthwise": 8, "grouped_up": 2}.items():
        change, grad = update(name)
        for moved, gradient in zip(change.chunk(num_groups), grad.chunk(num_groups), strict=True):
            matrix = gradient.flatten(1)
            expected = max(matrix.shape) ** 0.5 * polar_factor(matrix)
            torch.testing.assert_close(moved.flatten(1), expected, rtol=0.02, atol=0.02)


# ---- describing ------------------------------------------------------------------------------------------------------


def test_describe_shows_what_is_fused():
    shown = model()
    shown.get_parameter("layers.0.wo.weight").fused_dim = FusedDim((4,), dim=1, heads=True)
    fused = {"layers.0.wqkv.weight": QKV, "layers.1.wqkv.weight": QKV, "layers.0.experts.mlp1": FusedDim((1, 1))}
    groups = build_param_groups(shown, fused=fused, lr=0.02)
    text = """\
muon lr=0.02
  layers.0.wo.weight          [8, 8]      x1  fused 2 x (4) columns, as heads
muon lr=0.02
  layers.0.wqkv.weight        [16, 8]     x1  fused 2 x (4, 2, 2)
  layers.1.wqkv.weight        [8, 8]      x1  fused 1 x (4, 2, 2)
muon lr=0.02
  layers.0.experts.mlp1       [4, 12, 8]  x1  fused 6 x (1, 1)
adamw lr=0.02
  layers.0.experts.mlp1_bias  [4, 12]     x1
  output.weight               [16, 8]     x1
muon: 4 parameters, 640 elements
adamw: 2 parameters, 176 elements"""
    assert describe_param_groups(groups) == text
    rows = [line for line in text.splitlines() if line.startswith("  ")]
    assert [line for line in describe_param_groups(Muon(groups).param_groups).splitlines() if line in rows] == rows


def test_describe_shows_qkv_weights_and_convolutions():
    groups = build_param_groups(
        model(), split_qkv=True, qkv_split_shapes=(4, 2, 2), is_qkv_fn=lambda param: param.shape[0] == 16
    )
    assert "layers.0.wqkv.weight        [16, 8]     x1  fused 2 x (4, 2, 2)\n" in describe_param_groups(groups)
    assert_expected_inline(
        describe_param_groups(build_param_groups(conv_net(), flatten=True)[2:4]),
        """\
muon flatten=True
  layers.0.grouped.weight    [8, 4, 3, 3]  x1  fused 4 x (2), as heads
muon flatten=True
  layers.0.depthwise.weight  [8, 1, 5]     x1  fused 8 x (1), as heads
muon: 2 parameters, 328 elements""",
    )
