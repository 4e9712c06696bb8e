"""How a fused dim is described, and every way in which a description can be wrong."""

import copy
import pickle

import pytest
import torch
from parity import EXACT, full_tensors

from dtensor_muon import FusedDim, Muon

SIZES = (4, 1, 1)
FULL, GRAD = full_tensors([(12, 8), (12, 8)], 0)


def updated(group=None, attributes=None, grad=GRAD, shape=None, **options):
    """A parameter after one step."""
    weight = torch.nn.Parameter((FULL if shape is None else torch.ones(shape)).clone())
    for name, value in (attributes or {}).items():
        setattr(weight, name, value)
    weight.grad = grad.clone() if shape is None else torch.ones(shape)
    Muon([{"params": [("wqkv", weight)], **(group or {})}], **EXACT | options).step()
    return weight.detach()


@pytest.fixture(scope="module")
def separate():
    """Separate parameters for the rows of each part."""
    result = torch.empty_like(FULL)
    for rows in ([0, 1, 2, 3, 6, 7, 8, 9], [4, 10], [5, 11]):
        weight = torch.nn.Parameter(FULL[rows].clone())
        weight.grad = GRAD[rows].clone()
        Muon([weight], **EXACT).step()
        result[rows] = weight.detach()
    return result


WAYS = {
    "attribute fused_dim": {"attributes": {"fused_dim": FusedDim(SIZES)}},
    "attribute as a mapping": {"attributes": {"fused_dim": {"sizes": [4, 1, 1], "num_groups": 2}}},
    "group option": {"group": {"fused": FusedDim(SIZES)}},
    "group option as a mapping": {"group": {"fused": {"sizes": list(SIZES)}}},
    "constructor": {"fused": FusedDim(SIZES, num_groups=2)},
    "attribute is_qkv": {"attributes": {"is_qkv": True}, "split_qkv": True, "qkv_split_shapes": SIZES},
    "is_qkv_fn": {"split_qkv": True, "is_qkv_fn": lambda _: True, "qkv_split_shapes": list(SIZES)},
    "is_qkv_fn of a group": {
        "group": {"split_qkv": True, "is_qkv_fn": lambda _: True, "qkv_split_shapes": SIZES},
    },
    "attribute qkv_split_shapes wins": {
        "attributes": {"is_qkv": True, "qkv_split_shapes": SIZES}, "split_qkv": True, "qkv_split_shapes": (2, 2, 2),
    },
    "attribute fused_dim wins over QKV arguments": {
        "attributes": {"is_qkv": True, "fused_dim": FusedDim(SIZES)}, "split_qkv": True, "qkv_split_shapes": (2, 2, 2),
    },
    "QKV arguments win over the group": {
        "attributes": {"is_qkv": True}, "split_qkv": True, "qkv_split_shapes": SIZES,
        "group": {"fused": FusedDim((1, 5))},
    },
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_describe_it(way, separate):
    torch.testing.assert_close(updated(**WAYS[way]), separate, rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"attributes": {"is_qkv": True}}], ids=["plain", "split_qkv is off"])
def test_without_a_description_it_is_one_matrix(options, separate):
    assert (updated(**options) - separate).abs().max() > 1e-3


def test_four_parts(separate):
    """`(q, gate, k, v)`: a gate of its own differs from rows of q."""
    gated = updated(split_qkv=True, is_qkv_fn=lambda _: True, qkv_split_shapes=(2, 2, 1, 1))
    torch.testing.assert_close(gated[[4, 5, 10, 11]], separate[[4, 5, 10, 11]], rtol=0, atol=1e-6)
    assert (gated - separate).abs().max() > 1e-3


BAD = {
    "rows that do not divide": (
        {"fused": FusedDim((4, 2, 1))},
        r"wqkv \(global shape \(12, 8\), fused sizes \(4, 2, 1\)\): the 12 rows are not a multiple of the 7 of one",
    ),
    "columns that do not divide": (
        {"fused": FusedDim((3, 2), dim=1)},
        r"wqkv \(global shape \(12, 8\), fused sizes \(3, 2\)\): the 8 columns are not a multiple of the 5 of one",
    ),
    "heads that do not divide": ({"fused": FusedDim((5,), heads=True)}, "the 12 rows are not a multiple of the 5"),
    "another number of groups": (
        {"fused": FusedDim(SIZES, num_groups=3)},
        "the 12 rows are not 3 groups of 6; correct the sizes",
    ),
    "a group larger than the weight": ({"fused": FusedDim((16,))}, "the 12 rows are not a multiple of the 16"),
    "qkv rows that do not divide": (
        {"attributes": {"is_qkv": True}, "split_qkv": True, "qkv_split_shapes": (5, 1, 1)},
        r"wqkv \(global shape \(12, 8\), fused sizes \(5, 1, 1\)\)",
    ),
    "qkv without sizes": (
        {"attributes": {"is_qkv": True}, "split_qkv": True},
        r"wqkv \(shape \(12, 8\), torch.float32\): it is a QKV weight, but neither it nor the group has qkv",
    ),
    "two sizes for qkv": (
        {"split_qkv": True, "qkv_split_shapes": (2, 4)},
        r"qkv_split_shapes is \(2, 4\); it must be the rows of \(q, k, v\) or \(q, gate, k, v\) per query group",
    ),
    "sizes that are no numbers": ({"split_qkv": True, "qkv_split_shapes": ("q", "k", "v")}, "qkv_split_shapes is"),
    "no qkv weight": (
        {"split_qkv": True, "qkv_split_shapes": SIZES},
        r"split_qkv=True \(qkv_split_shapes \(4, 1, 1\)\), but no parameter is a QKV weight: wqkv \(12, 8\); set",
    ),
    "no function": ({"split_qkv": True, "is_qkv_fn": "wqkv"}, "is_qkv_fn is 'wqkv'; it must be a function"),
    "no description": ({"fused": 6}, "fused is 6; it must be a FusedDim, or a mapping"),
    "an unknown key": ({"fused": {"sizes": [6], "group": 2}}, "fused is .*'group': 2.*; it must be a FusedDim"),
    "an attribute with a bad value": (
        {"attributes": {"fused_dim": {"sizes": []}}},
        r"wqkv \(shape \(12, 8\), torch.float32\): FusedDim: sizes is \[\]; it must be a tuple of whole numbers",
    ),
    "not a convolution": ({"flatten": True}, r"wqkv \(shape \(12, 8\).*flatten=True is for convolution weights"),
    "columns of a convolution": (
        {"flatten": True, "fused": FusedDim((1,), dim=1), "shape": (4, 2, 3, 3)},
        r"wqkv \(global shape \(4, 18\)\): flatten=True goes with a fused dim of rows only",
    ),
    "flatten is no bool": ({"flatten": 1, "shape": (4, 2, 3, 3)}, "flatten is 1; it must be one of True, False"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_descriptions(name):
    options, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        updated(**options)


def test_a_vector_with_a_description():
    bias = torch.nn.Parameter(torch.ones(6))
    message = r"bias \(global shape \(6,\), fused sizes \(3,\)\): a fused weight must be a matrix or a stack of them"
    with pytest.raises(ValueError, match=message):
        Muon([("bias", bias)], fused=FusedDim((3,)))
    bias.fused_dim = FusedDim((3,))
    for optimizer in ("muon", "adamw"):
        with pytest.raises(ValueError, match=message):
            Muon([{"params": [("bias", bias)], "optimizer": optimizer}])


def test_no_qkv_weight_in_several_groups():
    groups = [{"params": [(name, torch.nn.Parameter(torch.ones(12, 8)))]} for name in "abcdefg"]
    with pytest.raises(ValueError, match=r"no parameter is a QKV weight: a \(12, 8\), .*, e \(12, 8\) and 2 more; set"):
        Muon(groups, split_qkv=True, qkv_split_shapes=SIZES)


def test_split_qkv_is_no_matter_of_biases():
    bias, weight = torch.nn.Parameter(torch.ones(12)), torch.nn.Parameter(torch.ones(12, 8))
    groups = [{"params": [weight]}, {"params": [bias], "optimizer": "adamw"}]
    Muon(groups, split_qkv=True, is_qkv_fn=lambda _: True, qkv_split_shapes=SIZES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sizes": (3, 0)}, r"sizes is \(3, 0\); it must be a tuple of whole numbers of at least 1"),
        ({"sizes": ()}, r"sizes is \(\)"),
        ({"sizes": 3}, "sizes is 3"),
        ({"sizes": (True,)}, "sizes is"),
        ({"sizes": (3,), "num_groups": 0}, "num_groups is 0; it must be at least 1, or None"),
        ({"sizes": (3,), "dim": 2}, r"dim is 2; it must be 0 \(rows\) or 1 \(columns\)"),
        ({"sizes": (3,), "heads": 1}, "heads is 1; it must be True or False"),
    ],
)
def test_bad_attributes(arguments, message):
    with pytest.raises(ValueError, match=f"FusedDim: {message}"):
        FusedDim(**arguments)


def test_qkv_arguments_without_split_qkv_warn():
    with pytest.warns(UserWarning, match=r"qkv_split_shapes=\(4, 1, 1\) is ignored without split_qkv=True"):
        updated(qkv_split_shapes=SIZES)


def test_a_group_with_a_bad_description_changes_nothing():
    first, second = (torch.nn.Parameter(torch.ones(12, 8)) for _ in range(2))
    optimizer = Muon([first])
    with pytest.raises(ValueError, match="the 12 rows are not a multiple of the 5"):
        optimizer.add_param_group({"params": [second], "fused": FusedDim((5,))})
    assert [group["params"] for group in optimizer.param_groups] == [[first]]


def make_fused():
    weight = torch.nn.Parameter(FULL.clone())
    weight.is_qkv = True
    return weight, Muon(
        [weight], **EXACT, split_qkv=True, is_qkv_fn=lambda _: True, qkv_split_shapes=SIZES, fused=FusedDim((1, 5))
    )


def test_a_checkpoint_holds_plain_data(separate):
    _, optimizer = make_fused()
    saved = optimizer.state_dict()["param_groups"][0]
    assert saved["is_qkv_fn"] is None
    assert saved["fused"] == {"sizes": (1, 5), "num_groups": None, "dim": 0, "heads": False}
    weight, resumed = make_fused()
    resumed.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    weight.grad = GRAD.clone()
    resumed.step()
    torch.testing.assert_close(weight.detach(), separate, rtol=0, atol=1e-6)


def test_a_copy_keeps_the_descriptions(separate):
    weight, optimizer = make_fused()
    model, copied = copy.deepcopy((weight, optimizer))
    model.grad = GRAD.clone()
    copied.step()
    torch.testing.assert_close(model.detach(), separate, rtol=0, atol=1e-6)


@pytest.mark.parametrize("change", ["fused_dim", "split_qkv", "fused", "fused in place"])
def test_a_description_given_later_counts(change, separate):
    weight = torch.nn.Parameter(FULL.clone())
    optimizer = Muon(
        [weight], **EXACT, is_qkv_fn=lambda _: True, qkv_split_shapes=SIZES, fused=FusedDim((1, 5)), split_qkv=True
    )
    (group,) = optimizer.param_groups
    group["split_qkv"] = False
    weight.grad = torch.zeros(12, 8)
    optimizer.step()  # with a plan of its own
    if change == "fused_dim":
        weight.fused_dim = FusedDim(SIZES)
    elif change == "split_qkv":
        group["split_qkv"] = True
    elif change == "fused":
        group["fused"] = FusedDim(SIZES)
    else:
        group["fused"]["sizes"] = SIZES
    weight.grad = GRAD.clone()
    optimizer.state[weight]["momentum_buffer"].zero_()
    optimizer.step()
    torch.testing.assert_close(weight.detach(), separate, rtol=0, atol=1e-6)
    assert not isinstance(optimizer.state_dict()["param_groups"][0]["fused"], FusedDim)
    # a rank that saves alone must not change what the ranks compare
    assert isinstance(group["fused"], FusedDim) == (change == "fused")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("fused", None),
        ("fused", {"sizes": (5, 2), "num_groups": None, "dim": 0, "heads": False}),
        ("qkv_split_shapes", (2, 2, 2)),
        ("split_qkv", False),
        ("flatten", True),
    ],
)
def test_a_checkpoint_that_describes_the_weights_otherwise(key, value, separate):
    """Descriptions are the model's: what is in the checkpoint is named and left there."""
    _, optimizer = make_fused()
    saved = optimizer.state_dict()
    saved["param_groups"][0][key] = value
    weight, resumed = make_fused()
    with pytest.warns(UserWarning, match=rf"describes fused weights otherwise \({key}\): this optimizer's descr"):
        resumed.load_state_dict(saved)
    weight.grad = GRAD.clone()
    resumed.step()
    torch.testing.assert_close(weight.detach(), separate, rtol=0, atol=1e-6)
