"""Parameter groups: claiming, naming, options, overrides, and how groups are described."""

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from routing_models import build_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtensor_muon import Muon
from dtensor_muon.param_groups import ParamOverride, build_param_groups, describe_param_groups
from dtensor_muon.routing import canonical_name


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
